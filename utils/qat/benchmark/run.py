"""Measurements of one batch and image size → their rows: the files are timed in turns.

Then each model that was timed is scored: AP of a detector, top-1 and top-5 of a classifier.
Load by other processes and a clock that falls with the temperature then meet all files alike, so that their figures can be compared.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from utils.qat.benchmark.model_files import shapes_of
from utils.qat.benchmark.rows import Accuracy, Facts, Load, Row
from utils.qat.benchmark.timing import Timing
from utils.qat.benchmark.usage import Usage
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.text import pixels
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import measured_by
from utils.qat.vendors.measured import Conditions, Inputs, Measured, Measurement, fixed_batch

TURNS = 5  # of each file
LEAST_QUERIES = 2  # of a turn, however long they take: with TURNS the 10 of trtexec's --iterations


@dataclass
class Running:
    """A file, and what was measured of it so far.

    Attributes:
        measured: the file, if it stays open between its turns.
        inputs: known when it is open.
        facts: what a row says of the file itself.
        memory: see Usage.added.
        turns: seconds from and to, since the start of the sampling.
    """

    measurement: Measurement
    measured: Measured | None = None
    inputs: Inputs = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    facts: Facts | None = None
    memory: Load = field(default_factory=Load)
    turns: list[tuple[float, float]] = field(default_factory=list)

    def turn(self, conditions: Conditions, usage: Usage, opened: ExitStack) -> None:
        """Take a turn. Raises QatError if the file does not run.

        A GPU has one file open at a time: two engines with CUDA graphs in one process take 4 to 7 % longer than each alone
        (docs/tensorrt.md#measured). On a CPU the file stays open in `opened`, because it may take long to compile.
        """
        config, begun = conditions.config, usage.begin()
        with ExitStack() as once:
            measured = self.measured or self._open(conditions, once if conditions.device.type == 'cuda' else opened)
            start = usage.now()
            self.timing.turn(measured, config.warmup / TURNS, config.duration / TURNS, LEAST_QUERIES)
            self.turns.append((start, usage.now()))
            if len(self.turns) == 1:
                self.memory, self.facts = usage.added(begun), self._facts(measured)
        if conditions.device.type == 'cuda':
            del measured
            free_memory()

    def _open(self, conditions: Conditions, opened: ExitStack) -> Measured:
        """Open the file, and make its inputs; the memory on the device is freed when `opened` ends."""
        one = self.measurement
        kind = measured_by(one.backend)
        file = kind.file_to_run(one, conditions)
        measured = opened.enter_context(kind(one, file, conditions))
        self.inputs = shapes_of(measured.accepts, one.batch, one.imgsz, file) if measured.accepts else one.inputs
        measured.prepare(self.inputs)
        if conditions.device.type != 'cuda':
            self.measured = measured
        return measured

    def _facts(self, measured: Measured) -> Facts:
        measurement, model, accepts = self.measurement, self.measurement.model, measured.accepts
        return {
            'model': str(measurement.file),
            'given': str(model.file),
            'backend': BACKENDS[measurement.backend].title,
            'types': measured.types,
            'precision': measurement.precision,
            'imgsz': next((shape[2:] for _, shape in self.inputs.values() if len(shape) == 4), None),
            'batch': measurement.batch,
            'open_batch': measurement.backend == 'pytorch' or fixed_batch(accepts or model.inputs) is None,
            'size_bytes': measured.size,
            'parameters': measured.parameters or model.parameters,
            'layers': measured.layers or model.layers,
            'outputs': len(measured.outputs),
            'streams': measured.streams,
            'notes': list(measured.notes),
        }

    def row(self, usage: Usage) -> Row:
        """Sum up all turns: a row of benchmark.json."""
        figures = self.timing.figures()
        assert self.facts  # it took its turns
        return {
            **self.facts,
            **figures,
            'images_per_s': figures['qps'] * self.measurement.batch,
            'usage': {**self.memory, **usage.during(self.turns), 'turns': self.turns} if self.memory else None,
            'accuracy': None,  # see `score`; set after all measurements
        }


def run_in_groups(
    measurements: Sequence[Measurement], conditions: Conditions, usage: Usage, leave_out: Callable[[str], None]
) -> Iterator[tuple[Measurement, Row]]:
    """Run measurements, those of one batch and image size in turns; yield the rows of each group. Arguments: see `run_in_turns`."""
    for kind in dict.fromkeys(measured_by(one.backend) for one in measurements):
        kind.build_missing([one for one in measurements if measured_by(one.backend) is kind], conditions)
    groups = in_groups(measurements)
    with usage, bar(None, 'measuring', len(measurements) * TURNS, 'turns') as shown:
        for number, (title, group) in enumerate(groups.items(), 1):
            LOGGER.info(f'{number} of {len(groups)}: {title}, {len(group)} in turns')
            yield from run_in_turns(group, conditions, usage, leave_out, shown.update)


def in_groups(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Group the measurements that are compared with each other, by batch and image size: these in words → measurements."""
    groups: dict[str, list[Measurement]] = {}
    for one in measurements:
        shapes = [shape for _, shape in one.inputs.values() if len(shape) == 4]
        size = one.imgsz or (shapes[0][2:] if shapes else None)
        groups.setdefault(', '.join(filter(None, (f'batch {one.batch}', pixels(size)))), []).append(one)
    return groups


def run_in_turns(
    measurements: Sequence[Measurement],
    conditions: Conditions,
    usage: Usage,
    leave_out: Callable[[str], None],
    count: Callable[[], object],
) -> list[tuple[Measurement, Row]]:
    """Measure files in turns, and free their memory on the device.

    Args:
        measurements: of one batch and image size.
        conditions: of all of them.
        usage: samples memory and load.
        leave_out: gets the reason why a file does not run under these conditions.
        count: is called after each turn.
    """
    running = [Running(measurement) for measurement in measurements]
    try:
        with ExitStack() as opened:
            for turn in range(TURNS):
                # Every other round goes backwards: then no file always follows the same one.
                for one in running[:: -1 if turn % 2 else 1]:
                    if len(one.turns) < turn:
                        continue  # an earlier one failed
                    try:
                        one.turn(conditions, usage, opened)
                    except QatError as e:
                        leave_out(str(e))
                    except torch.cuda.OutOfMemoryError:
                        leave_out(f'{one.measurement}: out of GPU memory; give a smaller --batch or --imgsz')
                    count()
            return [(one.measurement, one.row(usage)) for one in running if len(one.turns) == TURNS]
    finally:
        running.clear()
        free_memory()


def free_memory() -> None:
    """Free the memory of closed files on the device, before that of the next ones is measured."""
    gc.collect()
    torch.cuda.empty_cache()


def score(done: Sequence[tuple[Measurement, Row]], conditions: Conditions, leave_out: Callable[[str], None]) -> None:
    """Set the 'accuracy' of rows, once for all batches of a model. leave_out: gets the reason why a model has none."""
    scores: dict[tuple[object, ...], Accuracy | None] = {}
    for measurement, row in done:
        scored = measurement.file, measurement.backend, measurement.precision, row['imgsz']
        if scored not in scores:
            try:
                scores[scored] = accuracy_of(measurement, row['imgsz'], conditions)
            except QatError as e:
                scores[scored] = None
                leave_out(f'accuracy of {measurement.file}: {e}')
        row['accuracy'] = scores[scored]


def accuracy_of(measurement: Measurement, imgsz: Sequence[int] | None, conditions: Conditions) -> Accuracy:
    """Score a model as it was measured, at height and width `imgsz`; its engine must exist.

    Returns:
        'images', their number, and 'ap', 'ap50', 'precision', 'recall' (with masks also 'mask': the same of masks), or 'top1'
        and 'top5' of a classifier, in 0..1.

    Raises:
        QatError: the model cannot be scored.
    """
    if not imgsz:
        raise QatError('it takes no images')
    kind = measured_by(measurement.backend)
    with kind(measurement, kind.file_to_run(measurement, conditions), conditions) as measured:
        model = measured.predicting()
        data = model.task.labelled(conditions.config, model, (imgsz[0], imgsz[1]))
        metrics = evaluate(model, data.loader, data.names, conditions.device, progress=lambda it: bar(it, 'scoring'))
    scores = metrics.to_json()
    keys = [key for key in ('images', *metrics.columns) if key in scores]
    masks = {'mask': {k: metrics.mask[k] for k in metrics.columns}} if metrics.mask else {}
    return {**{k: scores[k] for k in keys}, **masks}
