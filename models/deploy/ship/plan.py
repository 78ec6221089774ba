"""The steps of ship: command lines as a user could type them, the file that each leaves, and the time that it will take."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from models.quantize.calibration.ptq import COMPARED as COMPARED_ON
from models.quantize.run.duration import CALIBRATED, CHOSEN, LEARNT, SCORED
from utils.qat.config.qat import LEARNT as TO_LEARN
from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import command_words, flag_of
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import FORMATS, TARGETS
from utils.qat.config.tasks import Task
from utils.qat.core.command import command
from utils.qat.core.run_folder import DELIVERED
from utils.qat.vendors.vendor import Target

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
    result: Path  # is there when the command has ended well
    seconds: float  # expected
    command: str
    beside: tuple[Path, ...] = ()  # further files that later steps need
    needed: bool = True  # whether later steps hang on it


def flags(**values: object) -> list[object]:
    """Return options as words: a list as several words, True as a flag alone, False as none."""
    several = {k: v if isinstance(v, list) else [v] * (v is not True) for k, v in values.items() if v is not False}
    return [word for name, words in several.items() for word in (flag_of(name), *words)]


@dataclass(frozen=True)
class Plan:
    """A plan holds what is known of a model, its data and its engine, and yields the steps of `ship`."""

    config: ShipConfig  # with every default resolved
    task: Task
    numbers: dict[str, int]  # of images of 'val', 'calibration' and 'train'
    seconds: float  # that PyTorch takes for an image
    engine_device: str  # --device of the benchmark
    trt: int  # --trt of the installed TensorRT; 0 for other engines
    digest: str  # of all files that a result hangs on
    folder: Path = Path()

    @property
    def target(self) -> Target:
        """The engine."""
        return TARGETS[self.config.for_ or '']

    @property
    def shown(self) -> Target:
        """The target whose files of the float model it takes, and whose backend takes the time; see Target.stand_in."""
        return TARGETS[self.target.stand_in or self.target.name]

    @property
    def epoch(self) -> float:
        """Seconds of an epoch of fine-tuning."""
        learnt = LEARNT * min(QuantizeConfig.iters * self.config.batch_size, self.numbers['train'])
        return self.seconds * (learnt + SCORED * self.numbers['val'])

    def typed(self, *names: str) -> list[str]:
        """Return the words of settings that are not the defaults."""
        return command_words({name: getattr(self.config, name) for name in names}, ShipConfig)

    def images(self, **given: object) -> list[object]:
        """Return options, and those that tell how images are read."""
        return [*flags(**given), *self.typed('imgsz', 'names_from', 'device', 'batch_size', 'workers')]

    def step(
        self, name: str, title: str, result: str, seconds: float, file: str, *words: object, needed: bool = True
    ) -> Step:
        """Make a step that works in the folder `name`: a command, with its words. seconds: without those of its start."""
        line = command(file, *words, *flags(project=self.folder, name=name, exist_ok=True))
        return Step(name, title, self.folder / name / result, LOADING + seconds, line, needed=needed)

    def verb(self, verb: str, taught: Path | None = None) -> list[object]:
        """Return the first words of a verb of qat.py on the float model, or on the one that was `taught`."""
        return [verb, *self.images(weights=taught or self.config.weights, data=self.config.data)]

    def deployed(self, checkpoint: Path, target: Target) -> Path:
        """Return the file that an engine runs, of a checkpoint in its folder."""
        return checkpoint.with_name(f'{checkpoint.stem}{target.engine or FORMATS[target.include].suffix}')

    @property
    def float_file(self) -> Path:
        """The float file that the engine runs."""
        return self.deployed(self.folder / 'float' / self.config.weights.name, self.shown)

    def int8_file(self, run: str) -> Path:
        """Return the INT8 file of a run of `quantize` that the engine runs."""
        return self.deployed(self.folder / run / DELIVERED, self.target)

    def first(self) -> Iterator[Step]:
        """Yield the steps of the float model."""
        seconds = SCORED * self.numbers['val'] * self.seconds
        yield self.step('float', 'float model', 'metrics.json', seconds, 'qat.py', *self.verb('eval'), '--square')
        yield from self.files('float', self.config.weights, self.float_file)

    def files(self, name: str, checkpoint: Path, made: Path) -> Iterator[Step]:
        """Yield the steps from a checkpoint to the file of the engine."""
        is_float, batch = name == 'float', self.config.batch
        target, kind = (self.shown, 'float') if is_float else (self.target, 'INT8')
        words = [*flags(weights=checkpoint, include=target.include), *self.typed('imgsz')]
        words += ['--dynamic', '--simplify'] if target.include == 'onnx' else flags(batch_size=batch)
        half = is_float and self.trt >= 10  # strongly typed: built in half the time, and as fast
        words += flags(trt=11 if half else self.trt or False, half=half, project=is_float and made.parent)
        file = made.with_name(f'{checkpoint.stem}{FORMATS[target.include].suffix}')
        line, weights = command('export_qat.py', *words), (file.with_suffix('.bin'),) * (file.suffix == '.xml')
        yield Step(f'{name}-export', f'export, {kind}', file, LOADING + EXPORTED, line, weights)
        if target.engine:
            line = command('scripts/build_engine.py', file, *flags(batch=batch, no_trtexec=True))  # by what runs it
            yield Step(f'{name}-engine', f'engine, {kind}', made, LOADING + BUILT, line)

    def quantized(self, run: str, taught: Path | None = None, **options: object) -> Iterator[Step]:
        """Yield the steps from the float model to an INT8 file, its AP and its speed.

        taught: the float model with functions that an earlier run has taught it. options: further ones of `quantize`.
        """
        config, numbers, epochs = self.config, self.numbers, self.config.epochs or 0
        idle = not (epochs or options)  # `quantize` has nothing to choose, and the file is scored later
        passes = CALIBRATED * numbers['calibration'] + CHOSEN * min(COMPARED_ON, numbers['calibration'])
        passes += SCORED * numbers['val'] * 2 * (not idle)
        if config.activation in TO_LEARN and not taught:
            passes += LEARNT * QuantizeConfig.activation_epochs * QuantizeConfig.iters * config.batch_size
        seconds = (TRIALS if options else 1) * (passes * self.seconds + RANGES) + epochs * self.epoch
        activation = 'keep' if taught else config.activation
        own = flags(target=self.target.name, epochs=epochs, activation=activation, **options)
        own += [*flags(no_eval_origin=idle, no_eval_ptq=idle), *self.typed('calib_images')]
        title = 'calibration' + ' and fine-tuning' * bool(epochs)
        checkpoint, file = self.folder / run / DELIVERED, self.int8_file(run)
        step = self.step(run, title, 'report.json', seconds, 'qat.py', *self.verb('quantize', taught), *own)
        yield step._replace(beside=(checkpoint,))
        yield from self.files(run, checkpoint, file)
        words = [config.weights, checkpoint, file, *self.images(data=config.data, images=0, show=SHOWN)]
        name, title = f'{run}-outputs', 'AP and outputs of the files'
        seconds = COMPARED * numbers['val'] * self.seconds + DRAWN
        yield self.step(name, title, 'compare.json', seconds, 'compare_outputs.py', *words, needed=False)
        how = flags(backend=self.shown.name, device=self.engine_device, batch=config.batch, duration=DURATION)
        words = [self.float_file, file, *how]
        name, seconds = f'{run}-speed', 6 * DURATION
        yield self.step(name, 'speed', 'benchmark.json', seconds, 'benchmark_trt.py', *words, needed=False)

    def sensitive(self, taught: Path | None = None) -> Step:
        """Return the step that measures what the INT8 of each block costs, for --max-drop."""
        passes = CALIBRATED * self.numbers['calibration'] + OF_UNITS * min(100, self.numbers['val'])
        words = *self.verb('sensitive', taught), *flags(target=self.target.name), *self.typed('calib_images')
        file = 'summary-sensitive-analysis.json'
        return self.step('sensitive', 'what each block costs', file, passes * self.seconds, 'qat.py', *words)
