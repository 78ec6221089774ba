"""Quantize a trained YOLOv9 detector, segmentation model or classifier to INT8 and evaluate the result.

    python qat.py ship --weights yolov9-c.pt --data data/coco.yaml
    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml --name yolov9_qat
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/yolov9_qat/weights/best.pt --data data/coco.yaml

`torchrun --nproc_per_node N qat.py ...` does the same on N GPUs. All processes compute; the first one writes and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.common import FolderConfig
from utils.qat.config.qat import EvalConfig, QuantizeConfig, SensitiveConfig
from utils.qat.config.settings import add_options, command_words, settings_of
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import BACKENDS, CHECKPOINTS, EXPORTED
from utils.qat.core.command import Parser, command, explain_out_of_memory, repeated, resumable, run_command
from utils.qat.core.distributed import from_first, leave, on_first
from utils.qat.core.errors import QatError
from utils.qat.core.files import is_network, require_source
from utils.qat.core.log import LOGGER, RESULT, bar, finish, quiet_upstream
from utils.qat.core.machine import describe
from utils.qat.core.run_folder import run_folder

if TYPE_CHECKING:
    from utils.qat.run.state import Calibration


def parse_args(argv: Sequence[str] | None) -> Sequence[QuantizeConfig | SensitiveConfig | EvalConfig | ShipConfig]:
    """Parse the command line into the settings of its verb; with --resume, into the settings of the interrupted run.

    `eval` has one for each file of --weights, the other verbs have one.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest='verb', required=True, parser_class=Parser)
    for name, (kind, text) in VERBS.items():
        lacking = ['weights'] if kind is QuantizeConfig else []  # --resume knows them
        add_options(verbs.add_parser(name, help=text, description=text, add_help=False), kind, lacking)
    args, unknown = parser.parse_known_args(argv)
    typed = vars(args)
    verb = typed.pop('verb')
    if unknown:  # reported by the parser that has the options
        verbs.choices[verb].error(f'unrecognized arguments: {" ".join(unknown)}')
    if verb == 'quantize' and 'resume' in typed:
        from utils.qat.run.resume import resumed

        return [resumed(typed.pop('resume'), typed)]
    if 'weights' not in typed:
        verbs.choices[verb].error('the following arguments are required: --weights')
    return settings_of(VERBS[verb][0], typed)


def dry_run(config: QuantizeConfig) -> None:
    """Print the plan of `quantize`. Computes one blank image and writes nothing."""
    if not is_network(config.weights):
        require_source(config.weights, '--weights', CHECKPOINTS)

    from tempfile import TemporaryDirectory

    from models.quantize import checkpoint
    from models.quantize.calibration.ptq import prepare
    from models.quantize.kept import kept_of
    from models.quantize.network import layers
    from models.quantize.plan import resolve
    from utils.qat.backends.pytorch import TorchModel
    from utils.qat.run.report import dry_run_tables
    from utils.qat.untrusted.torchvision_weights import fetch

    with quiet_upstream(), TemporaryDirectory() as scratch:
        file = checkpoint.CheckpointFile(fetch(config.weights, Path(scratch)))
        model = file.load_float()
    loaded = TorchModel(model)
    config = resolve(config.for_model(loaded), model, 'cuda')  # which allows every option: nothing is computed there
    named = {path: type(m).__name__ for path, m in layers(model).items()}
    blocks, functions = kept_of(model, config, file.sha256)
    if config.exchanges:
        LOGGER.log(
            RESULT,
            f'{len({*functions.exchanged} - {*functions.paths})} activation functions become {config.activation}',
        )
    conversion, groups = prepare(model, config, blocks.paths)
    tables, scales = dry_run_tables(named, conversion.swapped, conversion.kept_float, groups)
    LOGGER.log(RESULT, f'\n{tables}')
    LOGGER.debug(scales)
    LOGGER.log(RESULT, 'nothing was written')
    try:
        loaded.task.load_data(config.data, loaded, names_from=config.names_from)
    except QatError as e:
        if config.data.name != QuantizeConfig.data.name:
            LOGGER.warning(f'{e}; the run will need {loaded.task.takes}')
        config = replace(config, data=Path(loaded.task.placeholder))
    finish(command('qat.py', 'quantize', *command_words(vars(config), type(config))))


def quantize(config: QuantizeConfig, folder: Path | None) -> None:
    """Calibrate and fine-tune a float checkpoint, and score each stage. Results of finished stages stay on disk.

    folder: see run_folder.run_folder. With config.resume it has an interrupted run, which continues.
    """
    from models.quantize.run.duration import announce
    from models.quantize.run.run import Run, begin, open_inputs, open_work
    from models.quantize.run.stages import run_stages
    from utils.qat.core.run_folder import DELIVERED
    from utils.qat.run.report import conclusions, export_of_run, run_table
    from utils.qat.run.state import STATE
    from utils.qat.vendors.load import measured_by

    inputs = open_inputs(config)
    work = open_work(inputs)
    target = inputs.config.target
    folder = from_first(folder)  # the others have None
    begin(inputs, folder)
    if not inputs.config.reduce_range and target in BACKENDS and measured_by(target).overflows():
        LOGGER.warning(f'--target {target}: INT8 is right on this CPU only with --reduce-range')
    run = Run(inputs, work, folder)
    with resumable(folder / STATE, repeated('qat.py', 'quantize', '--resume', folder)):
        announce(run, inputs.config, work)
        run_stages(run, inputs.config, work)
    state, seen = run.state, f'images {run.task.seen_as(inputs.config.imgsz, False)}'
    LOGGER.log(RESULT, '\n'.join(('', seen, '', run_table(state, brief=True), '', *conclusions(state), '')))
    finish(export_of_run(folder, state), report=folder / 'report.md', weights=folder / DELIVERED)


def sensitive(config: SensitiveConfig, folder: Path | None) -> None:
    """Measure the cost of INT8 in each unit, from one calibration: only this unit in INT8, and all units but this one."""
    import time

    start = time.perf_counter()
    from models.quantize.activations import exchangeable, exchanged
    from models.quantize.analysis.sensitivity import analyse
    from models.quantize.calibration.ptq import calibrated
    from models.quantize.network import require_known_head
    from models.quantize.run.run import begin, open_inputs
    from utils.qat.core.machine import versions
    from utils.qat.evaluation.interval import in_words
    from utils.qat.run.sensitivity_summary import (
        FILE,
        Summary,
        change_in,
        nothing_lost,
        options_for,
        summary_table,
        write_summary,
    )

    inputs = open_inputs(config)
    config = inputs.config
    require_known_head(inputs.model, 'sensitive', 'choose what stays in float with: python qat.py quantize --exclude')
    loader = inputs.images.scored(
        square=True, limit=config.num_image or None, need_labels=config.metric != 'distortion'
    )

    folder = from_first(folder)  # the others have None
    begin(inputs, folder)
    if config.exchanges:
        paths = exchangeable(inputs.model, config.activation)
        model = exchanged(inputs.model, config.activation, paths)
        calibration: Calibration = {'method': config.activation, 'biases': 'none', 'divergence': {}}
    else:
        model, calibration = calibrated(inputs.model, inputs.images.calibration(), config, bar)
    times = {'calibrate': time.perf_counter() - start}
    measured = analyse(
        model, inputs.model, loader, inputs.images.data.names, config, calibration['biases'] != 'none', bar, times
    )
    times['all'] = time.perf_counter() - start

    summary: Summary = {
        'weights': config.weights.name,
        'weights_sha256': inputs.sha256,
        'settings': config.plain(),
        'versions': versions(),
        'device': describe(inputs.device),
        'images': len(loader.dataset),
        'calibration': calibration,
        'times': times,
        **measured,
    }
    own = {f.name for f in fields(FolderConfig)}
    shared = {name: value for name, value in vars(config).items() if name not in own}
    options = [folder / FILE if word == FILE else word for word in options_for(summary)]
    following = command('qat.py', 'quantize', *command_words(shared, QuantizeConfig), *options)
    on_first(write_summary)(folder, summary, inputs.task, following)
    LOGGER.info('  '.join(f'{k} {v:.1f} s' for k, v in times.items()))
    if 'against_float' in measured['int8']:
        LOGGER.info(
            f'all {change_in(summary)} against float: {in_words(measured["int8"]["against_float"], inputs.task.metrics.choosing()[1])} on these {summary["images"]} images'
        )
    said = (
        f'{summary["images"]} images {inputs.task.seen_as(config.imgsz, True)}',
        summary_table(summary, inputs.task, 10),
    )
    LOGGER.log(RESULT, '\n' + '\n\n'.join(filter(None, (*said, nothing_lost(summary)))) + '\n')
    finish(following, summary=folder / FILE, report=folder / 'sensitivity.md')


def evaluate(configs: Sequence[EvalConfig]) -> None:
    """Evaluate checkpoints, quantized or float, and exported files."""
    config = configs[0]
    files = [file for each in configs for file in (each.weights, each.baseline) if file]
    if config.backend and not any(file.suffix.lower() in EXPORTED for file in files):
        raise QatError(
            f'--backend {config.backend}: only for exported files, and {config.weights} is a checkpoint; leave it out'
        )

    from models.deploy.load import load_model
    from utils.qat.evaluation.score_file import score_files

    score_files(configs, load_model)


VERBS: dict[str, tuple[type, str]] = {  # name → its settings, help
    'ship': (ShipConfig, 'from a trained checkpoint to the file to deploy, and a page that says why'),
    'quantize': (QuantizeConfig, 'calibrate (PTQ) and fine-tune (QAT) a float checkpoint'),
    'sensitive': (SensitiveConfig, 'what the INT8 of each layer, block or convolution costs'),
    'eval': (EvalConfig, 'evaluate a checkpoint or an exported file'),
}


def main(argv: Sequence[str] | None = None, only_task: str | None = None) -> None:
    """Run a verb.

    Args:
        argv: None = the words of this process.
        only_task: refuse a model of another task.
    """
    configs: list[Any] = [replace(c, only_task=only_task or c.only_task) for c in parse_args(argv)]
    config = configs[0]
    if isinstance(config, QuantizeConfig) and config.dry_run:
        return dry_run(config)
    if any(is_network(each.weights) for each in configs):
        from utils.qat.untrusted.torchvision_weights import fetch

        configs = [replace(each, weights=fetch(each.weights)) for each in configs]
        config = configs[0]
    for each in configs:
        each.require_files()
    if isinstance(config, EvalConfig):
        evaluate(configs)
    elif isinstance(config, ShipConfig):
        from models.deploy.ship.run import ship

        ship(config)
    else:
        run = quantize if isinstance(config, QuantizeConfig) else sensitive
        with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
            run(config, folder)
    leave()


if __name__ == '__main__':
    sys.exit(run_command(main))
