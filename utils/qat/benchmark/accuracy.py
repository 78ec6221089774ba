"""Accuracy of measured models, each by what was timed: AP of a detector, top-1 and top-5 of a classifier."""

from collections.abc import Callable, Sequence
from typing import Any

from utils.qat.benchmark.tables import Row
from utils.qat.core.errors import QatError
from utils.qat.core.log import bar
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import measured_by
from utils.qat.vendors.measured import Conditions, Measurement


def score(done: Sequence[tuple[Measurement, Row]], conditions: Conditions, leave_out: Callable[[str], None]) -> None:
    """Set the 'accuracy' of rows, once for all batches of a model. leave_out: gets the reason why a model has none."""
    scores: dict[tuple[Any, ...], dict[str, Any] | None] = {}
    for measurement, row in done:
        scored = measurement.file, measurement.backend, measurement.precision, row['imgsz']
        if scored not in scores:
            try:
                scores[scored] = accuracy_of(measurement, row['imgsz'], conditions)
            except QatError as e:
                scores[scored] = None
                leave_out(f'accuracy of {measurement.file}: {e}')
        row['accuracy'] = scores[scored]


def accuracy_of(measurement: Measurement, imgsz: tuple[int, ...] | None, conditions: Conditions) -> dict[str, Any]:
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
    found = metrics.to_json()
    keys = [key for key in ('images', *metrics.columns) if key in found]
    masks = {'mask': {k: metrics.mask[k] for k in metrics.columns}} if metrics.mask else {}
    return {**{k: found[k] for k in keys}, **masks}
