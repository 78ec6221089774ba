"""`qat.py ship`: run the plan, decide, and write ship.json and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.deploy.ship.look import Facts, look
from models.deploy.ship.page import Part, write_page
from models.deploy.ship.plan import LEARNT, LOADING, SCORED, Plan
from models.deploy.ship.steps import STAMPS, Failed, Runner, in_words
from models.deploy.ship.verdict import Outcome, against_int8, sentence, would_change
from utils.qat.benchmark.baseline import int8_gains
from utils.qat.config.common import FolderConfig
from utils.qat.config.settings import typed_words
from utils.qat.config.ship import ShipConfig
from utils.qat.core.command import command, resumable, typed_sides
from utils.qat.core.distributed import world_size
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER, RESULT, finish, log_to
from utils.qat.core.run_folder import DELIVERED, own_folder
from utils.qat.core.text import markdown_table
from utils.qat.evaluation.chance import EXPLAINED, UNKNOWN, boxes_and_masks
from utils.qat.evaluation.score_tables import (
    finds_nothing,
    merit_title,
    plot_classes,
    score_cells,
    score_keys,
    score_titles,
)

ALL, PARTLY = 'quantize', 'quantize-partly'  # runs of `quantize`: all blocks, and some given back to float


def read(file: Path) -> Any:
    """Read a result of a step."""
    return json.loads(file.read_text(encoding='utf-8'))


class Results:
    """What the steps of a run of `quantize` have left."""

    def __init__(self, plan: Plan, run: str) -> None:
        """Read the results. run: ALL or PARTLY."""
        self.plan, self.run, speed = plan, run, read(plan.folder / f'{run}-speed/benchmark.json')
        self.report = read(plan.folder / run / 'report.json')
        self.int8, self.file = read(plan.folder / f'{run}-outputs/compare.json')['comparisons']
        self.float, self.machine, self.rows = self.file['reference'], speed['machine'], speed['results']
        [gain] = int8_gains(self.rows)
        found = self.file['against_reference']
        worst = min(boxes_and_masks(found), key=lambda part: part['difference'])
        metric = 'mask ' * (worst is not found) + merit_title(self.float)
        self.outcome = Outcome(gain.backend, gain.precision, gain.times, metric, worst['difference'], worst['chance'])
        self.of_int8 = next(row for row in self.rows if row['precision'] == 'int8')
        self.of_float = next(row for row in self.rows if row['precision'] == gain.precision.lower())

    def models(self) -> Part:
        """Make the table of the models."""
        titles, masks = score_titles(self.float)
        rows = [
            (
                'float, PyTorch',
                *score_cells(self.float, masks),
                '-',
                '-',
                f'{self.plan.config.weights.stat().st_size / 1e6:.1f}',
            ),
            ('INT8, PyTorch', *score_cells(self.int8['other'], masks), '-', '-', '-'),
        ]
        for row in self.rows:
            metrics = self.file['other'] if row is self.of_int8 else None
            scores = score_cells(metrics, masks) if metrics else ['-'] * len(titles)
            figures = f'{row["latency"]["median"]:.2f}', f'{row["images_per_s"]:.0f}', f'{row["size_bytes"] / 1e6:.1f}'
            rows.append((f'{row["types"]}, {row["backend"]}', *scores, *figures))
        header = ('model', *titles, 'ms', 'images/s', 'MB')
        told = [i for i in range(len(header)) if any(row[i] != '-' for row in rows)]
        return 'table', [header[i] for i in told], [[row[i] for i in told] for row in rows]

    def classes(self) -> Part:
        """Make the table of the classes, each with its interval."""
        key, counted = score_keys(self.float)[0], 'instances' if 'instances' in self.float else 'images'
        after = {row['class']: row for row in self.file['other']['per_class']}

        def cell(row: dict[str, Any] | None) -> str:
            if not row:
                return '-'
            known = row['chance'] != UNKNOWN
            return f'{row[key]:.4f} ± ' + (f'{row["chance"]:.4f}' if known else '?')

        rows = [(r['name'], r[counted], cell(r), cell(after.get(r['class']))) for r in self.float['per_class']]
        return 'table', ('class', counted, f'{merit_title(self.float)}, float', 'INT8 in the engine'), rows

    def decisions(self) -> list[Part]:
        """Tell what was decided and why."""
        settings, target, calibration = (
            self.report['settings'],
            self.plan.target,
            self.report['calibration'] or {},
        )
        placed = f': {target.placement}' * bool(target.placement)
        taken = 'SiLU stays' if settings['activation'] == 'keep' else f'{settings["activation"]} in place of SiLU'
        floats = ', '.join(self.report['kept_float']) or 'none but the outputs that the engine wants in float'
        parts: list[Part] = [
            (
                'text',
                f'Q/DQ as {target.title} wants them{placed} (docs/placement.md). Activation: {taken}. Blocks in float: {floats}.',
            ),
            (
                'text',
                f'Ranges of activations by {calibration.get("method")}, biases: {calibration.get("biases")}. Epochs of fine-tuning: {settings["epochs"]}.',
            ),
        ]
        found = sorted(calibration.get('divergence', {}).items(), key=lambda pair: pair[1])
        if found:
            parts.append(
                (
                    'table',
                    ('calibration', 'divergence from float; the least is taken'),
                    [(n, f'{v:.5f}') for n, v in found],
                )
            )
        return parts


def ways(plan: Plan, file: Path, checkpoint: Path, task: Any) -> list[Part]:
    """Make the commands that run the file."""
    size = typed_sides(plan.config.imgsz)
    parts: list[Part] = [
        (
            'text',
            'Its AP again, and its detections in Python (docs/client.md has a client of thirty lines). An .xml needs its .bin beside it.',
        ),
        (
            'code',
            [command('val_trt.py', '--weights', file, '--data', plan.config.data)]
            + [command('scripts/infer_onnx.py', file, 'IMAGES', '--save')] * task.boxes,
        ),
    ]
    if not task.boxes:
        return parts
    programs = {'.xml': 'yolov9_openvino', '.engine': 'yolov9_tensorrt'}
    if file.suffix in programs:
        parts += [
            ('text', 'C++ (docs/cpp.md):'),
            ('code', [f'build/{programs[file.suffix]} --model {file} --input IMAGES']),
        ]
    if file.suffix in ('.xml', '.onnx') and not task.masks:
        detector = 'openvino' if file.suffix == '.xml' else 'onnx'
        about = (
            'model_type: yolo-generic',
            f'width: {size[-1]}',
            f'height: {size[0]}',
            'input_tensor: nchw',
            'input_dtype: float',
        )
        parts += [
            (
                'text',
                'Frigate (docs/other-programs.md): copy the file, and of an .xml its .bin, to /config/model_cache/.',
            ),
            (
                'code',
                [
                    'detectors:',
                    '  own:',
                    f'    type: {detector}',
                    'model:',
                    *(f'  {line}' for line in about),
                    f'  path: /config/model_cache/{file.name}',
                ],
            ),
        ]
    if plan.target.name == 'tensorrt':
        end2end = '--include', 'onnx_end2end', '--dynamic', '--batch-size', 8, '--simplify'
        parts += [
            ('text', 'DeepStream and Triton (docs/deploy.md):'),
            (
                'code',
                [
                    command('export_yoloV9.py', '-w', checkpoint, '-s', *size, '--dynamic'),
                    command('export_qat.py', '--weights', checkpoint, *end2end),
                ],
            ),
        ]
    return parts


def conclude(plan: Plan, runner: Runner, found: Results, reasons: dict[str, str], tried: list[str]) -> None:
    """Write ship.json and the page, and say the verdict. tried: what else was measured, in words."""
    config, folder, outcome = plan.config, plan.folder, found.outcome
    file = plan.float_file if reasons else plan.int8_file(found.run)
    said = sentence(outcome, reasons, file, found.of_int8['size_bytes'], found.of_float['size_bytes'])
    taken, amx = found.report['settings']['activation'], 'AMX' in found.machine['instructions']
    advice = would_change(
        reasons, plan.target.gains_by, taken, config.epochs or 0, config.batch, max(config.imgsz), amx
    )
    key, commands = score_keys(found.float)[0], [step.command for step in runner.done]
    write_json(
        folder / 'ship.json',
        {
            'verdict': 'float' if reasons else 'int8',
            'file': file,
            'speedup': outcome.speedup,
            'against': outcome.precision,
            'ap': found.file['other'][key],
            'float_ap': found.float[key],
            'ap_difference': outcome.difference,
            'interval': outcome.interval,
            'bytes': found.of_float['size_bytes'] if reasons else found.of_int8['size_bytes'],
            'engine': plan.target.name,
            'reasons': [*reasons.values()],
            'tried': tried,
            'would_change': advice,
            'commands': commands,
            'seconds': {step.name: runner.stamps[step.name]['seconds'] for step in runner.done},
            'expected_seconds': {step.name: round(LOADING + step.seconds, 1) for step in runner.done},
            'seconds_per_image': plan.facts.seconds,
            'settings': config.plain(),
            'machine': found.machine,
            'versions': found.report['versions'],
        },
    )
    plot_classes(folder / 'classes.png', {'float': found.float, 'INT8': found.file['other']})
    machine, notes = found.machine, [note for row in found.rows for note in row['notes']]
    examples = sorted((folder / f'{found.run}-outputs').glob('example_*.png'))
    weights = folder / found.run / DELIVERED
    matched = found.file.get('matched')
    alike = f' {matched:.1%} of the best detections of the float model are found by INT8 too.' if matched else ''
    parts: list[Part] = [
        ('strong', said),
        *[('text', line) for line in tried],
        *[('text', f'What would change that: {line}') for line in advice],
        found.models(),
        (
            'text',
            f'{found.file["images"]} images of {config.data.name}, {plan.facts.task.seen_as(config.imgsz, True)}; times at batch {config.batch}, in '
            f'turns, on {machine["device"]}, {machine["threads"]} thread{"s" * (machine["threads"] > 1)}: {machine["instructions"]}. {EXPLAINED}.{alike}',
        ),
        *[('text', '; '.join(notes))] * bool(notes),
        ('title', f'{merit_title(found.float)} of each class'),
        found.classes(),
        ('picture', 'The same as bars with their intervals', folder / 'classes.png'),
        *[('title', f'The {len(examples)} images that differ most')] * bool(examples),
        *[('picture', 'float, INT8 in PyTorch and INT8 in the engine, by rank', file) for file in examples],
        ('title', 'How to run it'),
        *ways(plan, file, config.weights if reasons else weights, plan.facts.task),
        ('fold', 'What was decided, and why', found.decisions()),
        ('fold', 'The commands that this run equals', [('code', commands)]),
    ]
    write_page(folder, f'{config.weights.name} for {plan.target.title}', parts)
    _, titles, rows = found.models()
    LOGGER.log(RESULT, '\n\n'.join(['', markdown_table(titles, rows), said, *tried, *advice]) + '\n')
    finish(file=file, page=folder / 'ship.html', json=folder / 'ship.json')


def work(plan: Plan, runner: Runner) -> None:
    """Run the steps, and conclude. Raises QatError for a model that finds nothing in the images."""
    config, runner.ahead = plan.config, [*plan.first(), *plan.quantized(ALL)]
    scored, *rest = runner.ahead
    LOGGER.info(
        f'{len(runner.ahead)} steps, which take about {runner.expect(runner.ahead)}{without_epochs(plan.facts)}'
    )
    runner.run([scored])
    if nothing := finds_nothing(read(scored.result)):
        raise QatError(f'--weights {config.weights}, --data {config.data}: the float model {nothing}')
    runner.run(rest)
    found = Results(plan, ALL)
    reasons = against_int8(found.outcome, config.max_drop, config.min_speedup)
    tried: list[str] = []
    if [*reasons] == ['accuracy']:
        whole = found.outcome
        tried = [
            f'With all blocks in INT8 it is {whole.speedup:.2f} times as fast as {whole.precision}, and AP changes by {whole.cost}.'
        ]
        LOGGER.info(f'{reasons["accuracy"]}: blocks return to float')
        sensitive = plan.sensitive()
        runner.ahead = [sensitive, *plan.quantized(PARTLY, sensitive=sensitive.result, max_drop=config.max_drop)]
        runner.run([*runner.ahead])
        found = Results(plan, PARTLY)
        reasons = against_int8(found.outcome, config.max_drop, config.min_speedup)
    conclude(plan, runner, found, reasons, tried)


def without_epochs(facts: Facts) -> str:
    """Say what fine-tuning would take where it is left out by default; else ''."""
    if 'epochs' not in facts.config.decided or facts.config.epochs:
        return ''
    steps = LEARNT * min(200 * facts.config.batch_size, facts.numbers['train']) + SCORED * facts.numbers['val']
    return f'. On a CPU nothing is fine-tuned: each epoch would take about {in_words(facts.seconds * steps)}'


def ship(config: ShipConfig) -> int:
    """Run `qat.py ship`. Returns the exit code: 0 for both verdicts, or that of the step that failed."""
    if world_size() > 1:
        raise QatError('qat.py ship: one process; start it without torchrun')
    facts = look(config)
    place = FolderConfig(project=config.project, name=config.name, exist_ok=config.exist_ok or config.resume)
    with own_folder(place) as folder:
        settings = vars(replace(facts.config, name=folder.name))
        again = command('qat.py', 'ship', *typed_words(settings, ShipConfig), '--resume')
        log_to(folder / 'log.txt')
        runner = Runner(folder, facts.digest, config.resume)
        with resumable(folder / STAMPS, again):
            try:
                work(Plan(facts, folder), runner)
            except Failed as e:
                [code] = e.args
                if code < 0:
                    raise QatError(
                        f'{runner.ahead[0].title}: ended by signal {-code}, which is 9 if memory ran out; go on with: {again}'
                    ) from e
                LOGGER.info(f'go on with: {again}')
                return code
    return 0
