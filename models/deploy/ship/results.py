"""`conclude` reads the files that the steps of ship have left, and writes ship.json and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.deploy.ship.page import Part, write_page
from models.deploy.ship.plan import LOADING, Plan
from models.deploy.ship.steps import Runner
from models.deploy.ship.verdict import Outcome, sentence, would_change
from utils.qat.benchmark.baseline import int8_gains
from utils.qat.benchmark.report import disturbance
from utils.qat.core.command import command, typed_sides
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER, RESULT, finish
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import markdown_table
from utils.qat.evaluation.chance import EXPLAINED, UNKNOWN, boxes_and_masks
from utils.qat.evaluation.metrics import Metrics, from_json
from utils.qat.evaluation.score_tables import Columns, plot_classes


def read(file: Path) -> Any:
    """Read a result of a step."""
    return json.loads(file.read_text(encoding='utf-8'))


def scores_of(values: dict[str, Any]) -> Metrics:
    """Read the scores of a model. Raises QatError if the images have no labels."""
    if metrics := from_json(values):
        return metrics
    raise QatError('--data: no labels, so nothing tells whether INT8 is as good; give images with labels')


def mb(size: float) -> str:
    """Format a number of bytes."""
    return f'{size / 1e6:.1f}'


class Results:
    """The scores, speeds and decisions in the files of a run of `quantize` and of the steps behind it."""

    def __init__(self, plan: Plan, run: str) -> None:
        """Read the results. run: name of the run."""
        self.plan, self.run, speed = plan, run, read(plan.folder / f'{run}-speed/benchmark.json')
        self.report = read(plan.folder / run / 'report.json')
        in_pytorch, self.file = read(plan.folder / f'{run}-outputs/compare.json')['comparisons']
        scores = self.file['reference'], in_pytorch['other'], self.file['other']
        self.float, self.int8, self.in_engine = map(scores_of, scores)
        self.machine, self.rows, self.columns = speed['machine'], speed['results'], Columns(self.float)
        [gain] = int8_gains(self.rows)
        found, (self.key, self.title) = self.file['against_reference'], self.float.choosing()
        worst = min(boxes_and_masks(found), key=lambda part: part['difference'])
        metric = 'mask ' * (worst is not found) + self.title
        self.outcome = Outcome(gain.backend, gain.precision, gain.times, metric, worst['difference'], worst['chance'])
        sizes = {row['precision']: row for row in self.rows}
        self.of_int8, self.of_float = sizes['int8'], sizes[gain.precision.lower()]

    def models(self) -> Part:
        """Make the table of the models."""
        cells, size = self.columns.cells, mb(self.plan.config.weights.stat().st_size)
        rows = [
            ['float, PyTorch', *cells(self.float), '-', '-', size],
            ['INT8, PyTorch', *cells(self.int8), *['-'] * 3],
        ]
        for row in self.rows:
            scores = cells(self.in_engine if row is self.of_int8 else None)
            figures = f'{row["latency"]["median"]:.2f}', f'{row["images_per_s"]:.0f}', mb(row['size_bytes'])
            rows.append([f'{row["types"]}, {row["backend"]}', *scores, *figures])
        columns = zip(('model', *self.columns.titles, 'ms', 'images/s', 'MB'), *rows)
        header, *rows = map(list, zip(*(column for column in columns if {*column[1:]} != {'-'})))
        return 'table', header, rows

    def classes(self) -> Part:
        """Make the table of the classes, each with its interval."""
        key, counted = self.key, self.float.counted
        after = {row['class']: row for row in self.in_engine.per_class}

        def cell(row: dict[str, Any] | None) -> str:
            chance = row and row['chance']
            return f'{row[key]:.4f} ± {"?" if chance == UNKNOWN else f"{chance:.4f}"}' if row else '-'

        rows = [(r['name'], r[counted], cell(r), cell(after.get(r['class']))) for r in self.float.per_class]
        return 'table', ('class', counted, f'{self.title}, float', 'INT8 in the engine'), rows

    def decisions(self) -> list[Part]:
        """Tell what was decided and why."""
        settings, target, made = self.report['settings'], self.plan.target, self.report['calibration'] or {}
        taken = 'SiLU stays' if settings['activation'] == 'keep' else f'{settings["activation"]} in place of SiLU'
        floats = ', '.join(self.report['kept_float']) or 'none but the outputs that the engine wants in float'
        said = [
            f'Q/DQ as {target.title} wants them (docs/placement.md){f": {target.placement}" * bool(target.placement)}.',
            f'Activation: {taken}. Blocks in float: {floats}. Epochs of fine-tuning: {settings["epochs"]}.',
            f'Ranges of activations by {made.get("method")}, biases: {made.get("biases")}.',
        ]
        rows = [(k, f'{v:.5f}') for k, v in sorted(made.get('divergence', {}).items(), key=lambda pair: pair[1])]
        table = 'table', ('calibration', 'divergence from float; the least is taken'), rows
        return [('text', ' '.join(said)), *[table] * bool(rows)]

    def seen(self) -> str:
        """Tell on what the figures were measured."""
        config, machine, matched = self.plan.config, self.machine, self.file.get('matched')
        seen, threads = self.plan.facts.task.seen_as(config.imgsz, True), machine['threads']
        alike = (
            f' {matched:.1%} of the best detections of float and INT8 have their match in the other.' if matched else ''
        )
        return (
            f'{self.file["images"]} images of {config.data.name}, {seen}; times at batch {config.batch}, in turns, on {machine["device"]}, '
            f'{threads} thread{"s" * (threads > 1)}: {machine["instructions"]}. {EXPLAINED}.{alike}'
        )

    def advice(self, reasons: dict[str, str]) -> list[str]:
        """Say what would change a verdict for float."""
        config, taken = self.plan.config, self.report['settings']['activation']
        amx, size, epochs = 'AMX' in self.machine['instructions'], max(config.imgsz), config.epochs or 0
        return would_change(reasons, self.plan.target.gains_by, taken, epochs, config.batch, size, amx)


def ways(plan: Plan, file: Path, checkpoint: Path) -> list[str]:
    """List the commands that run the file."""
    task, size, kind = plan.facts.task, typed_sides(plan.config.imgsz), file.suffix
    lines = ['# its AP again', command('val_trt.py', '--weights', file, '--data', plan.config.data)]
    if not task.boxes:
        return lines
    python = '# its detections in Python; docs/client.md has a client of thirty lines'
    lines += [python, command('scripts/infer_onnx.py', file, 'IMAGES', '--save')]
    if program := {'.xml': 'yolov9_openvino', '.engine': 'yolov9_tensorrt'}.get(kind):
        lines += ['# C++: docs/cpp.md', f'build/{program} --model {file} --input IMAGES']
    if detector := {'.xml': 'openvino', '.onnx': 'onnx'}.get(kind if not task.masks else ''):
        about = f'width: {size[-1]}, height: {size[0]}, path: /config/model_cache/{file.name}'
        lines += ['# Frigate: copy the file there, and of an .xml its .bin; docs/other-programs.md']
        lines += [f'detectors: {{own: {{type: {detector}}}}}']
        lines += [f'model: {{model_type: yolo-generic, input_tensor: nchw, input_dtype: float, {about}}}']
    if plan.target.integers:
        lines += ['# the compilers of the chips, and Frigate: docs/edge.md']
    if plan.target.name == 'tensorrt':
        lines += ['# DeepStream; for Triton and NMS inside: docs/deploy.md']
        lines += [command('export_yoloV9.py', '-w', checkpoint, '-s', *size, '--dynamic')]
    return lines


def conclude(plan: Plan, runner: Runner, found: Results, reasons: dict[str, str], tried: list[str]) -> None:
    """Write ship.json and the page, and say the verdict. tried: what else was measured, in words."""
    config, folder, outcome = plan.config, plan.folder, found.outcome
    file, row = (plan.float_file, found.of_float) if reasons else (plan.int8_file(found.run), found.of_int8)
    said = sentence(outcome, reasons, file, found.of_int8['size_bytes'], found.of_float['size_bytes'])
    advice, done, commands = found.advice(reasons), runner.done, [step.command for step in runner.done]
    about = {
        'verdict': 'float' if reasons else 'int8',
        'file': file,
        'bytes': row['size_bytes'],
        'engine': plan.target.name,
    }
    about |= {'speedup': outcome.speedup, 'against': outcome.precision, 'ap': getattr(found.in_engine, found.key)}
    about |= {
        'float_ap': getattr(found.float, found.key),
        'ap_difference': outcome.difference,
        'interval': outcome.interval,
    }
    about |= {'reasons': [*reasons.values()], 'tried': tried, 'would_change': advice, 'commands': commands}
    about |= {'seconds': {step.name: runner.stamps[step.name]['seconds'] for step in done}}
    about |= {'expected_seconds': {step.name: round(LOADING + step.seconds, 1) for step in done}}
    about |= {'seconds_per_image': plan.facts.seconds, 'settings': config.plain(), 'machine': found.machine}
    write_json(folder / 'ship.json', {**about, 'versions': found.report['versions']})
    plot_classes(folder / 'classes.png', {'float': found.float, 'INT8': found.in_engine})
    examples = sorted((folder / f'{found.run}-outputs').glob('example_*.png'))
    notes = '; '.join(note for row in found.rows for note in row['notes'])
    checkpoint = config.weights if reasons else folder / found.run / DELIVERED
    models = found.models()
    parts: list[Part] = [
        ('strong', said),
        *[('text', line) for line in (*tried, *advice)],
        models,
        *[('text', line) for line in (found.seen(), notes, disturbance(found.rows)) if line],
        ('title', f'{found.title} of each class'),
        found.classes(),
        ('picture', 'The same as bars with their intervals', folder / 'classes.png'),
        *[('title', f'The {len(examples)} images that differ most')] * bool(examples),
        *[('picture', 'float, INT8 in PyTorch and INT8 in the engine, by rank', each) for each in examples],
        ('title', 'How to run it'),
        ('code', ways(plan, file, checkpoint)),
        ('fold', 'What was decided, and why', found.decisions()),
        ('fold', 'The commands that this run equals', [('code', commands)]),
    ]
    write_page(folder, f'{config.weights.name} for {plan.target.title}', parts)
    LOGGER.log(RESULT, '\n\n'.join(['', markdown_table(*models[1:]), said, *tried, *advice]) + '\n')
    finish(file=file, page=folder / 'ship.html', json=folder / 'ship.json')
