"""`conclude` reads the files that the steps of ship have left, and writes ship.json and the page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from models.deploy.ship.plan import Plan
from models.deploy.ship.steps import Runner
from models.deploy.ship.verdict import Outcome, sentence, would_change
from utils.qat.benchmark.baseline import int8_gains
from utils.qat.benchmark.report import disturbance
from utils.qat.config.qat import LEARNT
from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER, RESULT, finish
from utils.qat.core.page import fold, write_page
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import code, escaped, image, markdown_table
from utils.qat.evaluation.interval import EXPLAINED, UNKNOWN, boxes_and_masks
from utils.qat.evaluation.metrics import Metrics, from_json
from utils.qat.evaluation.score_tables import Columns, interval_table, plot_classes


def read(file: Path) -> Any:
    """Read a result of a step."""
    return json.loads(file.read_text(encoding='utf-8'))


def scores_of(values: dict[str, object]) -> Metrics:
    """Read the scores of a model. Raises QatError if the images have no labels."""
    if metrics := from_json(values):
        return metrics
    raise QatError('--data: no labels, so nothing tells whether INT8 is as good; give images with labels')


class Results:
    """The scores, speeds and decisions in the files of a run of `quantize` and of the steps behind it."""

    def __init__(self, plan: Plan, run: str) -> None:
        """Read the results. run: name of the run."""
        self.plan, self.run, speed = plan, run, read(plan.folder / f'{run}-speed/benchmark.json')
        self.report, self.learnt = read(plan.folder / run / 'report.json'), plan.config.activation in LEARNT
        self.activation = plan.config.activation if self.learnt else self.report['settings']['activation']
        in_pytorch, self.file = read(plan.folder / f'{run}-outputs/compare.json')['comparisons']
        scores = self.file['reference'], in_pytorch['other'], self.file['other']
        self.float, self.int8, self.in_engine = map(scores_of, scores)
        self.machine, self.rows = speed['machine'], speed['results']
        gain = next(int8_gains(self.rows), None)
        if not gain:
            raise QatError(f'{plan.target.title}: not both files were measured: {"; ".join(speed["left_out"])}')
        against, (self.key, self.title) = self.file['against_reference'], self.float.choosing()
        worst = min(boxes_and_masks(against), key=lambda part: part['difference'])
        metric = 'mask ' * (worst is not against) + self.title
        self.outcome = Outcome(gain, metric, worst)
        by_precision = {row['precision']: row for row in self.rows}
        self.of_int8, self.of_float = by_precision['int8'], by_precision[gain.precision.lower()]

    @property
    def taught(self) -> Path | None:
        """The float model with functions that this run has taught it; None before a fine-tuning, whose teacher is the original."""
        if not self.learnt or self.plan.config.epochs:
            return None
        return self.plan.folder / self.run / self.report['adapted']['file']

    def models(self) -> str:
        """Make the table of the models."""
        columns, size = Columns(self.float), self.plan.config.weights.stat().st_size
        rows = [['float, PyTorch', *columns.cells(self.float), '-', '-', f'{size / 1e6:.1f}']]
        rows += [['INT8, PyTorch', *columns.cells(self.int8), '-', '-', '-']]
        for row in self.rows:
            scores = columns.cells(self.in_engine if row is self.of_int8 else None)
            figures = f'{row["latency"]["median"]:.2f}', f'{row["images_per_s"]:.0f}', f'{row["size_bytes"] / 1e6:.1f}'
            rows.append([f'{row["types"]}, {row["backend"]}', *scores, *figures])
        titles = 'model', *columns.titles, 'ms', 'images/s', 'MB'
        shown = [column for column in zip(titles, *rows) if {*column[1:]} != {'-'}]
        header, *shown = zip(*shown)
        return markdown_table(header, shown)

    def decisions(self) -> str:
        """Tell what was decided and why: the placement, and what the report of `quantize` says of it."""
        target, whole = self.plan.target, (self.plan.folder / self.run / 'report.md').read_text(encoding='utf-8')
        taken = f'--activation {self.activation}, --epochs {self.report["settings"]["epochs"]}'
        placed = f': {target.placement}' * bool(target.placement)
        said = escaped(f'Q/DQ as {target.title} wants them, docs/placement.md{placed}. Taken: {taken}.')
        return f'{said}\n\n{whole[whole.index("## Calibration") :].partition("## Files")[0].strip()}'

    def seen(self) -> list[str]:
        """Tell on what the figures were measured."""
        config, machine, matched = self.plan.config, self.machine, self.file.get('matched')
        scored = f'{self.file["images"]} images of {config.data.name}, {self.plan.task.seen_as(config.imgsz, True)}'
        cpu = '' if machine['gpu'] else f', {machine["threads"]} thread(s): {machine["instructions"]}'
        times = f'times at batch {config.batch}, in turns, on {machine["device"]}{cpu}'
        alike = (
            f'{matched:.1%} of the best detections of float and INT8 have their match in the other.' if matched else ''
        )
        notes = '; '.join(note for row in self.rows for note in row['notes'])
        return [*filter(None, (f'{scored}; {times}. {EXPLAINED}.', alike, notes, disturbance(self.rows)))]

    def advice(self, reasons: dict[str, str]) -> list[str]:
        """Say what would change a verdict for float."""
        config = self.plan.config
        amx, size, epochs = (
            not self.machine['gpu'] and 'AMX' in self.machine['instructions'],
            max(config.imgsz),
            config.epochs or 0,
        )
        return would_change(reasons, self.plan.target.gains_by, self.activation, epochs, config.batch, size, amx)


def ways(plan: Plan, file: Path, checkpoint: Path) -> list[str]:
    """List the commands that run the file."""
    lines = ['# its AP again', command('val_trt.py', '--weights', file, '--data', plan.config.data)]
    if not plan.task.boxes:
        return lines
    lines += ['# the compilers of the chips, and Frigate: docs/edge.md'] * plan.target.integers
    lines += ['# its detections in Python; docs/client.md has a client of thirty lines']
    lines += [command('scripts/infer_onnx.py', file, 'IMAGES', '--save')]
    files = {'file': file, 'name': file.name, 'checkpoint': checkpoint}
    facts = {name: shlex.quote(str(text)) for name, text in files.items()} | dict(
        zip(('height', 'width'), plan.config.imgsz)
    )
    return [*lines, *(line.format(**facts) for line in plan.target.clients)]


def conclude(plan: Plan, runner: Runner, results: Results, reasons: dict[str, str], tried: list[str]) -> None:
    """Write ship.json and the page, and say the verdict. tried: what else was measured, in words."""
    config, folder, outcome, done = plan.config, plan.folder, results.outcome, runner.done
    file, row = (plan.float_file, results.of_float) if reasons else (plan.int8_file(results.run), results.of_int8)
    said = sentence(outcome, reasons, file, results.of_int8['size_bytes'], results.of_float['size_bytes'])
    advice, commands, models = results.advice(reasons), [step.command for step in done], results.models()
    difference, half_width = outcome.against_float['difference'], outcome.against_float['chance']
    about = {
        'verdict': 'float' if reasons else 'int8',
        'file': file,
        'bytes': row['size_bytes'],
        'engine': plan.target.name,
        'speedup': outcome.gain.times,
        'against': outcome.gain.precision,
        'ap': getattr(results.in_engine, results.key),
        'float_ap': getattr(results.float, results.key),
        'ap_difference': difference,
        'interval': None if half_width == UNKNOWN else (difference - half_width, difference + half_width),
        'reasons': [*reasons.values()],
        'tried': tried,
        'would_change': advice,
        'commands': commands,
        'seconds': {step.name: runner.seconds(step) for step in done},
        'expected_seconds': {step.name: round(step.whole(), 1) for step in done},
        'settings': config.plain(),
        'machine': results.machine,
        'versions': results.report['versions'],
    }
    write_json(folder / 'ship.json', about)
    scores = {'float': results.float, 'INT8': results.in_engine}
    plot_classes(folder / 'classes.png', scores)
    examples = sorted((folder / f'{results.run}-outputs').glob('example_*.png'))
    parts = [
        f'**{escaped(said)}**',
        *map(escaped, (*tried, *advice)),
        models,
        *map(escaped, results.seen()),
        f'## {results.title} of each class',
        interval_table(scores),
        image('The same as bars with their intervals', 'classes.png'),
        *[f'## The {len(examples)} images that differ most'] * bool(examples),
        *[image('float, INT8 in PyTorch and INT8 in the engine', each.relative_to(folder)) for each in examples],
        '## How to run it',
        code(*ways(plan, file, config.weights if reasons else folder / results.run / DELIVERED)),
        *fold('What was decided, and why', results.decisions()),
        *fold('The commands that this run equals', code(*commands)),
    ]
    write_page(folder / 'ship', f'{config.weights.name} for {plan.target.title}', parts)
    LOGGER.log(RESULT, '\n\n'.join(['', models, said, *tried, *advice]) + '\n')
    finish(file=file, page=folder / 'ship.html', json=folder / 'ship.json')
