"""Quantize a trained YOLOv9 detector, segmentation model or classifier to INT8 and evaluate the result.

    python qat.py quantize --weights yolov9-c-converted.pt --data data/coco.yaml --name yolov9_qat
    python qat.py sensitive --weights yolov9-c-converted.pt --data data/coco.yaml
    python qat.py eval --weights runs/qat/yolov9_qat/weights/qat_best_yolov9-c-converted.pt --data data/coco.yaml

`torchrun --nproc_per_node N qat.py ...` does the same on N GPUs. All processes compute; the first one writes and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.qat.config.backends import CHECKPOINTS, EXPORTED
from utils.qat.config.common import seen_as, usual_size
from utils.qat.config.options import add_options, each
from utils.qat.config.qat import CalibrationConfig, EvalConfig, QuantizeConfig, SensitiveConfig
from utils.qat.config.settings import require_multiples
from utils.qat.config.targets import DEFAULT_TARGET
from utils.qat.core.command import (
    Parser,
    explain_out_of_memory,
    is_network,
    require_data,
    require_file,
    resumable,
    run_command,
)
from utils.qat.core.device import describe, select_device
from utils.qat.core.distributed import from_first, join, leave, on_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish, log_to, quiet_upstream
from utils.qat.core.next_command import DATA, FOLDER, command, typed_sides
from utils.qat.core.run_folder import run_folder
from utils.qat.run.resume import resumed

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

    from models.quantize.calibration.ptq import Choice
    from models.quantize.run import Run
    from utils.qat.data.dataset import Data
    from utils.qat.data.image_folders import ImageFolders
    from utils.qat.data.loaders import Images, TrainingImages


def parse_args(argv: Sequence[str] | None) -> Sequence[QuantizeConfig | SensitiveConfig | EvalConfig]:
    """Turn the command line into the settings of its verb; with --resume, into the settings of the interrupted run.

    `eval` has settings for each file of --weights, the other verbs have one.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest='verb', required=True, parser_class=Parser)
    for name, (kind, _, text) in VERBS.items():
        lacking = ['weights'] if kind is QuantizeConfig else []  # --resume knows them
        add_options(verbs.add_parser(name, help=text, description=text), kind, lacking)
    args, unknown = parser.parse_known_args(argv)
    typed = vars(args)
    verb = typed.pop('verb')
    if unknown:  # said by the parser that has the options
        verbs.choices[verb].error(f'unrecognized arguments: {" ".join(unknown)}')
    if 'resume' in typed:
        return [resumed(typed.pop('resume'), typed)]
    if 'weights' not in typed:
        verbs.choices[verb].error('the following arguments are required: --weights')
    return each(VERBS[verb][0], typed)


def with_precision(config: QuantizeConfig, device: torch.device) -> QuantizeConfig:
    """Resolve the defaults of --amp and, on a GPU, of --compile. Raise QatError for --compile and FP16 without CUDA."""
    cuda = device.type == 'cuda'
    config = replace(config, amp=config.precision(device.type))
    if cuda and config.compile is None:
        config = replace(config, compile=not config.task_loss)
    again = 'leave out' if not config.resume else 'start another run without'
    if not cuda and config.compile:
        raise QatError(f'--compile: records a CUDA graph, and the device is {device.type}; {again} --compile')
    if not cuda and config.amp == 'fp16':
        raise QatError(f'--amp fp16: only on a GPU, and the device is {device.type}; {again} --amp, or use bf16')
    return config


def dry_run(config: QuantizeConfig) -> None:
    """Print the plan of `quantize`. Computes one blank image and writes nothing."""
    require_file(config.weights, '--weights', CHECKPOINTS)

    from models.quantize import checkpoint
    from models.quantize.calibration.ptq import Choice, prepare
    from models.quantize.network import layers
    from utils.qat.config.defaults import options
    from utils.qat.prediction.pytorch import TorchModel
    from utils.qat.run.report import dry_run_tables

    with quiet_upstream():
        file = checkpoint.CheckpointFile(config.weights)
        model = file.load_float(reparameterized=config.reparameterize)
    loaded = TorchModel(model)
    config.check_model(loaded.segments, loaded.kind, loaded.classifies)
    named = {path: type(m).__name__ for path, m in layers(model).items()}
    conversion, groups = prepare(model, config, Choice.of(model, config, file.sha256).paths)
    tables, scales = dry_run_tables(named, conversion.swapped, conversion.kept_float, groups)
    LOGGER.log(RESULT, f'\n{tables}')
    LOGGER.debug(scales)
    LOGGER.log(RESULT, 'nothing was written')
    if not (config.data.is_dir() if loaded.classifies else config.data.is_file()):
        if config.data.name != QuantizeConfig.data.name:
            LOGGER.warning(
                f'--data {config.data}: no such {"folder" if loaded.classifies else "file"}; the run will need it'
            )
        config = replace(config, data=Path(FOLDER if loaded.classifies else DATA))
    finish(command('qat.py', 'quantize', *options(vars(config), type(config))))


class Job(NamedTuple):
    """What `quantize` and `sensitive` start from."""

    config: Any  # QuantizeConfig or SensitiveConfig, its precision and image size resolved
    device: torch.device
    model: nn.Module  # float, on `device`
    sha256: str  # of the file of the model
    stride: int
    data: Data | ImageFolders
    shard: tuple[int, int]  # this process and the number of processes


def load(config: CalibrationConfig) -> Job:
    """Load the float model and its data, and resolve the settings that depend on them or on the device."""
    require_file(config.weights, '--weights', CHECKPOINTS)
    require_data(config.data)

    from models.quantize import checkpoint
    from utils.qat.data.dataset import load_any
    from utils.qat.prediction.pytorch import TorchModel

    device = select_device(config.device)
    if isinstance(config, QuantizeConfig):
        config = with_precision(config, device)
    join(device)
    with quiet_upstream():
        file = checkpoint.CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device, config.reparameterize))
    config.check_model(model.segments, model.kind, model.classifies)
    config = replace(config, imgsz=config.imgsz or usual_size(model.classifies))
    require_multiples(config.imgsz, model.stride)
    data = load_any(config.data, model)
    return Job(config, device, model.model, file.sha256, model.stride, data, (rank(), world_size()))


def open_folder(job: Job, folder: Path | None) -> Path:
    """Start the log in `folder`, and fix seeds and rounding: the last step before the work.

    Args:
        job: the settings and the device.
        folder: see run_folder.run_folder; None in all processes of a torchrun but the first.

    Returns:
        The folder, in every process.
    """
    import torch
    from utils.general import init_seeds

    from utils.qat.prediction.pytorch import classifies

    init_seeds(job.config.seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False  # its 10-bit mantissa is coarser than the INT8 grid it would simulate
    folder = from_first(folder)
    on_first(log_to)(folder / 'log.txt')
    square = isinstance(job.config, SensitiveConfig)
    LOGGER.info(
        f'device {describe(job.device)}, images scored {seen_as(job.config.imgsz, square, classifies(job.model))}, results in {folder}'
    )
    return folder


def calibrate_run(run: Run, config: QuantizeConfig, images: Images, choice: Choice) -> None:
    """Do the PTQ of a run: score the float model, calibrate a quantized copy on `images`, save the copy and score it.

    choice: blocks that stay in float, see ptq.Choice; more blocks do if config.max_drop asks for a budget.
    """
    import time

    from models.quantize.calibration.ptq import calibrated, within_budget
    from utils.qat.evaluation.chance import parts, points_lost

    if config.eval_origin or config.max_drop is not None:
        run.report['origin'] = run.score_float()
    start = time.perf_counter()

    budget = config.max_drop
    if budget is None:
        model, found = calibrated(run.model, images, config, bar, choice.paths)
    else:
        least = choice

        def attempt(choice: Choice) -> tuple[float, tuple[nn.Module, dict[str, Any]]]:
            model, found = calibrated(run.model, images, config, bar, choice.paths)
            against = run.score_now(model, 'trial')['against_float']
            chance = 100 * max(part['chance'] for part in parts(against))
            if chance > budget and choice is least:
                LOGGER.warning(
                    f'--max-drop {budget}: less than chance, which is {chance:.2f} points on these '
                    f'{run.report["images"][run.chosen_on]} images: no layer is left in float for a loss within chance; to keep '
                    'so small a budget use more images (val in --data)'
                )
            LOGGER.info(f'{points_lost(against):.2f} points lost beyond chance, at most {budget} allowed')
            return points_lost(against), (model, found)

        choice, (model, found) = within_budget(choice, budget, attempt)
    run.report['calibration'], run.report['kept_float'] = found, choice.paths
    LOGGER.info(f'calibration took {run.timed("calibrate", start):.1f} s')
    run.calibrated(model, config.eval_ptq)


def finetune_run(run: Run, images: TrainingImages, config: QuantizeConfig) -> None:
    """Do the QAT of a run: fine-tune the calibrated model from its last finished epoch on; save and score it after each."""
    from copy import deepcopy

    from models.quantize.finetuning.loop import finetune

    def progress(batches: Iterable, epoch: int, steps: int) -> Iterable:
        return bar(batches, f'epoch {epoch}/{config.epochs}', steps)

    with resumable(command('qat.py', 'quantize', '--resume', run.folder)):
        student, last = run.load_calibrated(), run.last_epoch()
        images.epoch = last.number if last else 0
        for epoch in finetune(student, deepcopy(run.model), images, config, progress, last):
            run.learned(student, epoch)
        run.finish()


def quantize(config: QuantizeConfig, folder: Path | None) -> None:
    """Calibrate and fine-tune a float checkpoint, and score each stage. Everything finished stays on disk.

    folder: see run_folder.run_folder. With config.resume it has an interrupted run, and only the rest is done.
    """
    if config.hyp:
        require_file(config.hyp, '--hyp', ('.yaml', '.yml'))
    job = load(config)
    config = job.config

    from models.quantize.calibration.ptq import Choice
    from models.quantize.run import Run
    from utils.qat.data.dataset import load_hyp
    from utils.qat.data.loaders import calibration_images, training_images, val_loader
    from utils.qat.prediction.pytorch import classifies
    from utils.qat.run.report import delivered, export_command, run_table, verdicts

    if config.hyp and classifies(job.model):
        raise QatError(f'--hyp {config.hyp}: for detectors; images of a classifier are not augmented, leave it out')
    choice = None if config.resume else Choice.of(job.model, config, job.sha256)
    data = replace(job.data, val_split=config.val_split)
    of_data = data, config, job.stride
    hyp = load_hyp(config.hyp) if config.hyp else None
    scored = bool(config.epochs or config.eval_origin or config.eval_ptq or config.max_drop is not None)
    loaders = {'val': val_loader(*of_data, shard=job.shard, scored=scored)}
    if config.val_split:
        loaders['held out'] = val_loader(*of_data, split='held out', shard=job.shard)
    # a resumed run was calibrated before
    ptq = (calibration_images(*of_data, job.device, job.shard), choice) if choice else None
    training = training_images(*of_data, job.device, hyp, job.shard) if config.epochs else None
    if training:
        loaders['train'] = training.loader

    folder = open_folder(job, folder)
    run = Run(folder, config, job.model, job.sha256, data, loaders, LOGGER.info, bar)
    if ptq:
        calibrate_run(run, config, *ptq)
        ptq = None  # ends the processes that load its images
    if training:
        finetune_run(run, training, config)

    seen = f'images {seen_as(config.imgsz, False, classifies(job.model))}'
    LOGGER.log(RESULT, '\n'.join(('', seen, '', run_table(run.report), '', *verdicts(run.report), '')))
    following = export_command(folder, run.report)
    finish(following, report=folder / 'report.md', weights=delivered(folder, run.report))


def sensitive(config: SensitiveConfig, folder: Path | None) -> None:
    """Measure the cost of INT8 in each unit: the unit alone in INT8, and all units but this one, from one calibration."""
    import time

    start = time.perf_counter()
    job = load(config)
    config = job.config

    from models.quantize.analysis.sensitivity import analyse
    from models.quantize.calibration.ptq import calibrated
    from models.quantize.head_outputs import require_known_head
    from utils.qat.core.files import write_json
    from utils.qat.core.machine import versions
    from utils.qat.data.loaders import calibration_images, val_loader
    from utils.qat.evaluation.chance import in_words
    from utils.qat.evaluation.figures import title_of
    from utils.qat.run.plots import plot_sensitivity
    from utils.qat.run.sensitivity_summary import FILE, KIND, VERSION, summary_table, write_markdown

    require_known_head(job.model, 'sensitive', 'choose what stays in float with: python qat.py quantize --exclude')
    images = calibration_images(job.data, config, job.stride, job.device, job.shard)
    loader = val_loader(
        job.data,
        config,
        job.stride,
        square=True,
        limit=config.num_image or None,
        shard=job.shard,
        scored=config.metric != 'distortion',
    )

    folder = open_folder(job, folder)
    model, calibration = calibrated(job.model, images, config, bar)
    times = {'calibrate': time.perf_counter() - start}
    found = analyse(model, job.model, loader, job.data.names, config, calibration['biases'] != 'none', bar, times)
    times['all'] = time.perf_counter() - start

    summary = {
        'kind': KIND,
        'version': VERSION,
        'weights': config.weights.name,
        'weights_sha256': job.sha256,
        'settings': config.plain(),
        'versions': versions(),
        'device': describe(job.device),
        'images': len(loader.dataset),
        'calibration': calibration,
        'times': times,
        **found,
    }
    on_first(write_json)(folder / FILE, summary)
    following = command(
        *('qat.py', 'quantize', '--weights', config.weights, '--data', config.data),
        *('--imgsz', *typed_sides(config.imgsz), '--sensitive', folder / FILE, '--max-drop', 0.2),
        *(('--target', config.target) if config.target != DEFAULT_TARGET else ()),
    )
    on_first(plot_sensitivity)(folder / 'sensitivity.png', summary)
    on_first(write_markdown)(folder / 'sensitivity.md', summary, following)
    LOGGER.info('  '.join(f'{k} {v:.1f} s' for k, v in times.items()))
    if 'against_float' in found['int8']:
        LOGGER.info(
            f'all in INT8 against float: {in_words(found["int8"]["against_float"], title_of(found["int8"]))} on these {summary["images"]} images'
        )
    LOGGER.log(
        RESULT,
        f'\n{summary["images"]} images {seen_as(config.imgsz, True, title_of(found["int8"]) != "AP")}\n\n{summary_table(summary, 10)}\n',
    )
    finish(following, summary=folder / FILE, report=folder / 'sensitivity.md')


def eval_(configs: Sequence[EvalConfig]) -> None:
    """Evaluate checkpoints, quantized or float, and exported files."""
    for config in configs:
        require_file(config.weights, '--weights', CHECKPOINTS + EXPORTED)
        require_data(config.data)
        if config.baseline:
            require_file(config.baseline, '--baseline', CHECKPOINTS + EXPORTED)
        if config.backend and config.weights.suffix.lower() not in EXPORTED:
            raise QatError(
                f'--backend {config.backend}: only for exported files, and {config.weights} is a checkpoint; leave it out'
            )

    import torch

    from models.deploy.load import load_model
    from utils.qat.evaluation.score_file import score_files

    torch.backends.cudnn.allow_tf32 = False  # see open_folder
    score_files(configs, load_model, load_model)


VERBS: dict[str, tuple[type, Callable, str]] = {
    'quantize': (QuantizeConfig, quantize, 'calibrate (PTQ) and fine-tune (QAT) a float checkpoint'),
    'sensitive': (SensitiveConfig, sensitive, 'what the INT8 of each layer, block or convolution costs'),
    'eval': (EvalConfig, eval_, 'evaluate a checkpoint or an exported file'),
}


def main(argv: Sequence[str] | None = None, **needs: Any) -> None:
    """Run a verb.

    Args:
        argv: None = the words of this process.
        **needs: needs_masks, needs_classes: refuse a model that is no segmentation model, or no classifier.
    """
    configs = [replace(config, **needs, data=config.data_file) for config in parse_args(argv)]
    if is_network(configs[0].weights) and len(configs) == 1:
        from models.deploy.pretrained import checkpoint_of

        configs = [replace(config, weights=checkpoint_of(config.weights)) for config in configs]
    config = configs[0]
    [verb] = (verb for kind, verb, _ in VERBS.values() if kind is type(config))
    if isinstance(config, QuantizeConfig) and config.dry_run:
        return dry_run(config)
    if isinstance(config, EvalConfig):
        verb(configs)
    else:
        with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
            verb(config, folder)
    leave()


if __name__ == '__main__':
    sys.exit(run_command(main))
