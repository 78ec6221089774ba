"""The steps of ship: command lines as a user could type them, the file that each leaves, and the time that it will take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from models.deploy.ship.look import Facts
from utils.qat.config.export import ExportConfig
from utils.qat.config.settings import flag_of, typed_words
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import FORMATS, TARGETS
from utils.qat.core.command import command, typed_sides
from utils.qat.core.run_folder import DELIVERED
from utils.qat.vendors.vendor import Target

SHOWN = 10  # images side by side
DURATION = 3  # seconds of a measurement
# Expected times. In passes of the float model by PyTorch, for each image:
SCORED, COMPARED, CALIBRATED, LEARNT, OF_UNITS = 1.3, 4.5, 4.5, 5, 8
TRIALS = 10  # calibrations of `quantize --max-drop`
LOADING, EXPORTED, BUILT = 5, 8, 200  # seconds: until a command has its libraries and model; an export, an engine


class Step(NamedTuple):
    """A command."""

    name: str
    title: str
    result: Path  # is there when the command has ended well
    seconds: float  # expected, without LOADING
    command: str
    again: str = ''  # goes on with it where STATE is beside the result; '' = it starts over


def flags(**values: Any) -> list[object]:
    """Return options as words: a list as several words, True as a flag alone."""
    several = {k: v if isinstance(v, list) else [] if v is True else [v] for k, v in values.items()}
    return [word for name, words in several.items() for word in (flag_of(name), *words)]


class Plan:
    """The steps for a model, in a folder.

    Attributes:
        target: the engine.
        shown: the target whose files of the float model it takes, and whose backend takes the time; see Target.stand_in.
    """

    def __init__(self, facts: Facts, folder: Path) -> None:
        self.facts, self.folder, self.config = facts, folder, facts.config
        self.target = TARGETS[facts.config.for_ or '']
        self.shown = TARGETS[self.target.stand_in or self.target.name]
        self.size = flags(imgsz=typed_sides(self.config.imgsz))
        self.read = self.typed('names_from', 'device', 'batch_size', 'workers')
        self.model = [*flags(weights=self.config.weights, data=self.config.data), *self.size, *self.read]

    def typed(self, *names: str) -> list[str]:
        """Return the words of settings that are not the defaults."""
        return typed_words({name: getattr(self.config, name) for name in names}, ShipConfig)

    def run(self, name: str) -> list[object]:
        """Return the words that name the folder of a step."""
        return flags(project=self.folder, name=name, exist_ok=True)

    def deployed(self, checkpoint: Path, target: Target) -> Path:
        """Return the file that an engine runs, of a checkpoint in its folder."""
        suffix = '.engine' if target.name == 'tensorrt' else FORMATS[target.include].suffix
        return checkpoint.with_name(f'{checkpoint.stem}{suffix}')

    @property
    def float_file(self) -> Path:
        """The float file that the engine runs."""
        return self.deployed(self.folder / 'float' / self.config.weights.name, self.shown)

    def int8_file(self, run: str) -> Path:
        """Return the INT8 file of a run of `quantize` that the engine runs."""
        return self.deployed(self.folder / run / DELIVERED, self.target)

    def first(self) -> Iterator[Step]:
        """Yield the steps of the float model."""
        seconds = SCORED * self.facts.numbers['val'] * self.facts.seconds
        words = *self.model, '--square', *self.run('float')
        yield Step(
            'float', 'float model', self.folder / 'float/metrics.json', seconds, command('qat.py', 'eval', *words)
        )
        yield from self.files('float', self.config.weights, self.float_file, project=self.folder / 'float')

    def files(self, name: str, checkpoint: Path, made: Path, **folder: Path) -> Iterator[Step]:
        """Yield the steps from a checkpoint to the file of the engine."""
        include, batch, trt = (
            (self.shown if name == 'float' else self.target).include,
            self.config.batch,
            self.facts.trt,
        )
        own = {'dynamic': True, 'simplify': True} if include == 'onnx' else {'batch_size': batch} if batch > 1 else {}
        if trt != ExportConfig.trt:
            own |= {'trt': trt, **({'half': True} if trt > ExportConfig.trt and name == 'float' else {})}
        words = *flags(weights=checkpoint, include=include, **own, **folder), *self.size
        file = made.with_name(f'{checkpoint.stem}{FORMATS[include].suffix}')
        kind = 'float' if name == 'float' else 'INT8'
        yield Step(f'{name}-export', f'export, {kind}', file, EXPORTED, command('export_qat.py', *words))
        if made != file:
            line = command('scripts/build_engine.py', file, *flags(batch=batch))
            yield Step(f'{name}-engine', f'engine, {kind}', made, BUILT, line)

    def quantized(self, run: str, **options: Any) -> Iterator[Step]:
        """Yield the steps from the float model to an INT8 file, its AP and its speed. options: further ones of `quantize`."""
        config, numbers, epochs = self.config, self.facts.numbers, self.config.epochs or 0
        scores = bool(epochs or options)  # else `quantize` has nothing to choose, and the file is scored later
        options |= {} if scores else {'no_eval_origin': True, 'no_eval_ptq': True}
        passes = CALIBRATED * numbers['calibration'] + SCORED * numbers['val'] * (2 + epochs) * scores
        passes *= TRIALS if options.get('sensitive') else 1
        passes += LEARNT * epochs * min(200 * config.batch_size, numbers['train'])
        how = *self.model, *flags(target=self.target.name, epochs=epochs), *self.typed('activation', 'calib_images')
        line = command('qat.py', 'quantize', *how, *flags(**options), *self.run(run))
        title = 'calibration' + ' and fine-tuning' * bool(epochs)
        again = (
            command('qat.py', 'quantize', '--resume', self.folder / run) if epochs else ''
        )  # a calibration keeps no state
        yield Step(run, title, self.folder / run / 'report.json', passes * self.facts.seconds, line, again)

        checkpoint, file, name = self.folder / run / DELIVERED, self.int8_file(run), f'{run}-outputs'
        yield from self.files(run, checkpoint, file)
        how = *flags(data=config.data, images=0, show=SHOWN), *self.size, *self.read, *self.run(name)
        line = command('compare_outputs.py', config.weights, checkpoint, file, *how)
        seconds = COMPARED * numbers['val'] * self.facts.seconds
        yield Step(name, 'AP and outputs of the files', self.folder / name / 'compare.json', seconds, line)

        name, where = f'{run}-speed', self.facts.engine_device
        how = *flags(backend=self.shown.name, device=where, batch=config.batch, duration=DURATION), *self.run(name)
        line = command('benchmark_trt.py', self.float_file, file, *how)
        yield Step(name, 'speed', self.folder / name / 'benchmark.json', 6 * DURATION, line)

    def sensitive(self) -> Step:
        """Return the step that measures what the INT8 of each block costs, for --max-drop."""
        file, numbers = self.folder / 'sensitive/summary-sensitive-analysis.json', self.facts.numbers
        seconds = self.facts.seconds * (CALIBRATED * numbers['calibration'] + OF_UNITS * min(100, numbers['val']))
        words = *self.model, *flags(target=self.target.name), *self.typed('calib_images'), *self.run('sensitive')
        return Step('sensitive', 'what each block costs', file, seconds, command('qat.py', 'sensitive', *words))
