"""The steps of ship: command lines as a user could type them, the file that each leaves, and the time that it will take."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from models.quantize.calibration.ptq import COMPARED as COMPARED_ON
from models.quantize.run.duration import CALIBRATED, CHOSEN, LEARNT, SCORED
from utils.qat.config.deploy import BenchmarkConfig, CompareConfig
from utils.qat.config.qat import LEARNT as TO_LEARN
from utils.qat.config.qat import EvalConfig, QuantizeConfig, SensitiveConfig
from utils.qat.config.settings import Settings, command_words
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import FORMATS, TARGETS
from utils.qat.config.tasks import Task
from utils.qat.core.command import command, export_command
from utils.qat.core.run_folder import DELIVERED
from utils.qat.vendors.vendor import Target

FLOAT = 'float'  # the name of the steps of the float model
READ = 'data', 'imgsz', 'names_from', 'device', 'batch_size', 'workers'  # settings that tell how images are read
SHOWN = 10  # images side by side
DURATION = 3  # seconds of a measurement
# Expected times. In passes of the float model, as in duration.py: a comparison, and `sensitive`
COMPARED, OF_UNITS, TRIALS = 6, 8, 4  # and calibrations of `quantize --max-drop`, 1 to 12
# Seconds: until a command has its libraries and model; an export, an engine, the search of ranges, the pictures
LOADING, EXPORTED, BUILT, RANGES, DRAWN = 5, 8, 160, 10, 8


class Step(NamedTuple):
    """A command."""

    name: str
    title: str
    files: tuple[Path, ...]  # are there when the command has ended well; the first is its result
    seconds: float  # expected
    command: str
    needed: bool = True  # whether later steps hang on it


@dataclass(frozen=True)
class Plan:
    """A plan holds what is known of a model, its data and its engine, and yields the steps of `ship`."""

    config: ShipConfig  # with every default resolved
    task: Task
    numbers: dict[str, int]  # of images of 'val', 'calibration' and 'train'
    seconds: float  # that PyTorch takes for an image
    engine_device: str  # --device of the benchmark
    trt: int  # --trt of the installed TensorRT; 0 for other engines
    digest: str  # of the engine and all files that a result hangs on
    folder: Path = Path()
    reduce_range: bool = False  # for an engine whose INT8 sums overflow here

    @property
    def target(self) -> Target:
        """The engine."""
        return TARGETS[self.config.for_ or '']

    @property
    def shown(self) -> Target:
        """The target whose files of the float model it takes, and whose backend takes the time; see Target.stand_in."""
        return TARGETS[self.target.stand_in or self.target.name]

    @property
    def made_for(self) -> dict[str, object]:
        """Settings of `quantize` and `sensitive` by which the engine's INT8 is right here."""
        return {'target': self.target.name, 'reduce_range': self.reduce_range}

    def learns(self, taught: Path | None) -> bool:
        """Tell whether a run learns its activation functions; taught: see `quantized`."""
        return self.config.activation in TO_LEARN and not taught

    def epoch(self, taught: Path | None = None) -> float:
        """Compute the seconds of an epoch of fine-tuning."""
        most = QuantizeConfig.iters * self.config.batch_size  # which learnt functions take of fewer images too
        learnt = most if self.learns(taught) else min(most, self.numbers['train'])
        return self.seconds * (LEARNT * learnt + SCORED * self.numbers['val'])

    def words(self, kind: type[Settings], *names: str, **own: object) -> list[object]:
        """Return the words of a command with settings of this `kind`: those with `names` are those of ship."""
        return [*command_words({**{name: getattr(self.config, name) for name in names}, **own}, kind)]

    def step(
        self, name: str, title: str, files: str, seconds: float, program: str, *words: object, needed: bool = True
    ) -> Step:
        """Make a step that works in the folder `name`, where it leaves `files`. seconds: without those of its start."""
        line = command(program, *words, '--project', self.folder, '--name', name, '--exist-ok')
        left = tuple(self.folder / name / file for file in files.split())
        return Step(name, title, left, LOADING + seconds, line, needed)

    def file(self, run: str) -> Path:
        """Return the file that the engine runs: of a run of `quantize` the INT8 file, of FLOAT the float one."""
        target, made = (self.shown, self.config.weights.name) if run == FLOAT else (self.target, DELIVERED)
        checkpoint = self.folder / run / made
        return checkpoint.with_name(f'{checkpoint.stem}{target.engine or FORMATS[target.include].suffix}')

    def first(self) -> Iterator[Step]:
        """Yield the steps of the float model."""
        seconds = SCORED * self.numbers['val'] * self.seconds
        words = self.words(EvalConfig, 'weights', *READ, square=True)
        yield self.step(FLOAT, 'float model', 'metrics.json', seconds, 'qat.py', 'eval', *words)
        yield from self.exported(FLOAT, self.config.weights)

    def exported(self, run: str, checkpoint: Path) -> Iterator[Step]:
        """Yield the steps from the checkpoint of a run to the file that the engine runs."""
        is_float, batch, made = run == FLOAT, self.config.batch, self.file(run)
        target, kind = (self.shown, 'float') if is_float else (self.target, 'INT8')
        half = is_float and self.trt >= 10  # strongly typed: built in half the time, and as fast
        words: list[object] = ['--trt', 11 if half else self.trt] * bool(self.trt) + ['--half'] * half
        words += ['--batch-size', batch] * (target.include != 'onnx') + ['--project', made.parent] * is_float
        line = export_command(checkpoint, self.config.imgsz, target.include, *words)
        file = made.with_name(f'{checkpoint.stem}{FORMATS[target.include].suffix}')
        files = file, *[file.with_suffix('.bin')] * (file.suffix == '.xml')
        yield Step(f'{run}-export', f'export, {kind}', files, LOADING + EXPORTED, line)
        if target.engine:
            line = command('scripts/build_engine.py', file, '--batch', batch, '--no-trtexec')  # by what runs it
            yield Step(f'{run}-engine', f'engine, {kind}', (made,), LOADING + BUILT, line)

    def quantized(self, run: str, taught: Path | None = None, **options: object) -> Iterator[Step]:
        """Yield the steps from the float model to an INT8 file, its AP and its speed.

        taught: the float model with functions that an earlier run has taught it. options: further ones of `quantize`.
        """
        config, numbers, epochs = self.config, self.numbers, self.config.epochs or 0
        idle = not (epochs or options)  # `quantize` has nothing to choose, and the file is scored later
        passes = CALIBRATED * numbers['calibration'] + CHOSEN * min(COMPARED_ON, numbers['calibration'])
        passes += SCORED * numbers['val'] * 2 * (not idle)
        if self.learns(taught):
            passes += LEARNT * QuantizeConfig.activation_epochs * QuantizeConfig.iters * config.batch_size
        seconds = (TRIALS if options else 1) * (passes * self.seconds + RANGES) + epochs * self.epoch(taught)
        own = {**self.made_for, 'eval_origin': not idle, 'eval_ptq': not idle, **options}
        own |= {'weights': taught, 'activation': 'keep'} if taught else {'weights': config.weights}
        words = self.words(QuantizeConfig, *READ, 'calib_images', 'epochs', 'activation', **own)
        title = 'calibration' + ' and fine-tuning' * bool(epochs)
        yield self.step(run, title, f'report.json {DELIVERED}', seconds, 'qat.py', 'quantize', *words)
        checkpoint, file = self.folder / run / DELIVERED, self.file(run)
        yield from self.exported(run, checkpoint)
        name, title, seconds = f'{run}-outputs', 'AP and outputs of the files', COMPARED * numbers['val'] * self.seconds
        words = [config.weights, checkpoint, file, *self.words(CompareConfig, *READ, images=0, show=SHOWN)]
        yield self.step(name, title, 'compare.json', seconds + DRAWN, 'compare_outputs.py', *words, needed=False)
        how = {'backend': self.shown.name, 'device': self.engine_device, 'duration': DURATION}
        words = [self.file(FLOAT), file, *self.words(BenchmarkConfig, 'batch', **how)]
        name, seconds = f'{run}-speed', 6 * DURATION
        yield self.step(name, 'speed', 'benchmark.json', seconds, 'benchmark_trt.py', *words, needed=False)

    def sensitive(self, taught: Path | None = None) -> Step:
        """Return the step that measures what the INT8 of each block costs, for --max-drop."""
        passes = CALIBRATED * self.numbers['calibration'] + OF_UNITS * min(100, self.numbers['val'])
        own = {'weights': taught or self.config.weights, **self.made_for}
        words = 'sensitive', *self.words(SensitiveConfig, *READ, 'calib_images', **own)
        file = 'summary-sensitive-analysis.json'
        return self.step('sensitive', 'what each block costs', file, passes * self.seconds, 'qat.py', *words)
