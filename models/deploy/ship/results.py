"""`conclude` reads the files that the steps of ship have left, and writes ship.json and the page."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from models.deploy.ship.plan import FLOAT, Plan
from models.deploy.ship.steps import Runner
from models.deploy.ship.verdict import Outcome, against_int8, sentence, would_change
from utils.qat.benchmark.baseline import int8_gains
from utils.qat.benchmark.report import disturbance
from utils.qat.benchmark.tables import Column, figures_table, with_shown
from utils.qat.config.qat import FileEvalConfig
from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER, RESULT, finish
from utils.qat.core.page import fold, write_page
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import code, escaped, image
from utils.qat.evaluation.interval import EXPLAINED, UNKNOWN, boxes_and_masks
from utils.qat.evaluation.metrics import from_json
from utils.qat.evaluation.score_tables import interval_table, plot_classes
from utils.qat.untrusted.json_schema import read_json

SPEED = ('ms', 'latency.median', '{:.2f}'), ('images/s', 'images_per_s', '{:.0f}'), ('MB', 'megabytes', '{:.1f}')


class Results:
    """The scores, speeds and decisions in the files of a run of `quantize` and of the steps behind it."""

    def __init__(self, plan: Plan, run: str) -> None:
        """Read the results. run: name of the run."""
        files = f'{run}/report.json', f'{run}-outputs/compare.json', f'{run}-speed/benchmark.json'
        self.report, compared, speed = (read_json(plan.folder / file) for file in files)
        in_pytorch, self.in_file = compared['comparisons']
        self.plan, self.run, self.machine, self.rows = plan, run, speed['machine'], speed['results']
        scores = self.in_file['reference'], in_pytorch['other'], self.in_file['other']
        self.float, self.int8, self.in_engine = filter(None, map(from_json, scores))
        gain = next(int8_gains(self.rows), None)
        if not gain:
            raise QatError(f'{plan.target.title}: not both files were measured: {"; ".join(speed["left_out"])}')
        by_precision = {row['precision']: row for row in self.rows}
        self.of_int8, self.of_float = by_precision['int8'], by_precision[gain.precision.lower()]
        against, (self.key, self.title) = self.in_file['against_reference'], self.float.choosing()
        worst = min(boxes_and_masks(against), key=lambda part: part['difference'])
        self.outcome = Outcome(gain, 'mask ' * (worst is not against) + self.title, worst)
        least = 0 if plan.target.integers else plan.config.min_speedup  # times are not those of a chip
        self.reasons = against_int8(self.outcome, plan.config.max_drop, least)
        self.disturbance = disturbance(self.rows)

    @property
    def taught(self) -> Path | None:
        """The float model with functions that this run has given it; None before a fine-tuning, whose teacher is the original."""
        adapted = self.report['adapted']
        return self.plan.folder / self.run / adapted['file'] if adapted and not self.plan.config.epochs else None

    def models(self) -> str:
        """Make the table of the models."""
        parts, size = {'': 'accuracy', 'mask ': 'accuracy.mask'}, self.plan.config.weights.stat().st_size
        scores = [
            (p + title, f'{at}.{key}', '{:.4f}') for p, at in parts.items() for key, title in self.float.columns.items()
        ]
        rows: list[Any] = [{'model': 'float, PyTorch', 'accuracy': self.float.to_json(), 'megabytes': size / 1e6}]
        rows += [{'model': 'INT8, PyTorch', 'accuracy': self.int8.to_json()}]
        for row in self.rows:
            accuracy = self.in_engine.to_json() if row is self.of_int8 else None
            rows += [{**with_shown(row), 'model': f'{row["types"]}, {row["backend"]}', 'accuracy': accuracy}]
        return figures_table([Column(*column) for column in (('model', 'model'), *scores, *SPEED)], rows)

    def decisions(self) -> list[str]:
        """Tell what was decided and why: the placement, and what the report of `quantize` says of it."""
        target, config = self.plan.target, self.plan.config
        whole = (self.plan.folder / self.run / 'report.md').read_text(encoding='utf-8')
        placed = f': {target.placement}' * bool(target.placement)
        said = f'Q/DQ as {target.title} wants them, docs/placement.md{placed}. Taken: '
        said += f'--activation {config.activation}, --epochs {config.epochs}'
        said += ', --reduce-range' * self.plan.reduce_range + '.'
        return [escaped(said), *whole[whole.index('## Calibration') :].partition('## Files')[0].strip().split('\n\n')]

    def seen(self) -> list[str]:
        """Tell on what the figures were measured."""
        config, machine, matched = self.plan.config, self.machine, self.in_file.get('matched')
        scored = f'{self.in_file["images"]} images of {config.data.name}, {self.plan.task.seen_as(config.imgsz, True)}'
        cpu = '' if machine['gpu'] else f', {machine["threads"]} thread(s): {machine["instructions"]}'
        times = f'times at batch {config.batch}, in turns, on {machine["device"]}{cpu}'
        alike = f'{matched or 0:.1%} of the best detections of float and INT8 have their match in the other.'
        notes = '; '.join(note for row in self.rows for note in row['notes'])
        return [*filter(None, (f'{scored}; {times}. {EXPLAINED}.', alike * bool(matched), notes))]


def ways(plan: Plan, file: Path, checkpoint: Path) -> dict[str, str]:
    """Tell how to run the file: program → command, or lines of its configuration."""
    task, (height, width) = plan.task, plan.config.imgsz
    told = {'Its AP again': command('val_trt.py', *plan.words(FileEvalConfig, 'data', 'names_from', weights=file))}
    if task.boxes:
        shown = command('scripts/infer_onnx.py', file, 'IMAGES', '--save')
        told['Its detections in Python; docs/client.md has a client of thirty lines'] = shown
        quoted = {'file': shlex.quote(str(file)), 'checkpoint': shlex.quote(str(checkpoint))}
        sides = {'height': height, 'width': width}
        told |= {program: line.format(**quoted, **sides) for program, line in plan.target.clients.items()}
    if task.boxes and not task.masks and plan.target.frigate:
        model = {'model_type': 'yolo-generic', 'input_tensor': 'nchw', 'input_dtype': 'float', 'width': width}
        model |= {'height': height, 'path': f'/config/model_cache/{file.name}'}
        lines = yaml.safe_dump({'detectors': {'own': {'type': plan.target.frigate}}, 'model': model}, sort_keys=False)
        told['Frigate, docs/other-programs.md; copy the file there, a .xml with its .bin'] = lines
    return told


def conclude(runs: Sequence[Results], runner: Runner, tried: list[str]) -> None:
    """Write ship.json and the page, and say the verdict on the last of the runs; --resume measures the disturbed ones again.

    tried: what else was measured, in words.
    """
    results, done = runs[-1], runner.done
    plan, outcome, reasons = results.plan, results.outcome, results.reasons
    config, folder, checkpoint = plan.config, plan.folder, plan.folder / results.run / DELIVERED
    file, row = plan.file(results.run), results.of_int8
    if reasons:
        file, row, checkpoint = plan.file(FLOAT), results.of_float, config.weights
    said = sentence(outcome, reasons, file, results.of_int8['size_bytes'], results.of_float['size_bytes'])
    amx = not results.machine['gpu'] and 'AMX' in results.machine['instructions']
    advice = would_change(reasons, config, plan.target.gains_by, amx)
    disturbed = {f'{each.run}-speed': each.disturbance for each in runs if each.disturbance}
    noises = [f'{noise[0].upper()}{noise[1:]}; --resume measures again.' for noise in dict.fromkeys(disturbed.values())]
    tried = [*noises, *tried]
    commands, models = [step.command for step in done], results.models()
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
        'disturbed': bool(disturbed),
        'tried': tried,
        'would_change': advice,
        'commands': commands,
        'seconds': {step.name: runner.taken[step.command] for step in done},
        'expected_seconds': {step.name: round(step.seconds, 1) for step in done},
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
        *[
            part
            for title, text in ways(plan, file, checkpoint).items()
            for part in (f'{title}:', code(*text.splitlines()))
        ],
        *fold('What was decided, and why', *results.decisions()),
        *fold('The commands that this run equals', code(*commands)),
    ]
    write_page(folder / 'ship', f'{config.weights.name} for {plan.target.title}', parts)
    LOGGER.log(RESULT, '\n\n'.join(['', models, said, *tried, *advice]) + '\n')
    for step in done:
        if step.name in disturbed:
            runner.note(step, 0)
    finish(file=file, page=folder / 'ship.html', json=folder / 'ship.json')
