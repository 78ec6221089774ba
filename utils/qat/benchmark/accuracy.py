"""Accuracy of a benchmarked model, by the timed session: AP of a detector, top-1 and top-5 of a classifier."""

from typing import Any

import torch
from typing_extensions import override

from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.benchmark.measured import Conditions, MeasuredSession, Measurement
from utils.qat.benchmark.measured_backends import file_to_run, measured_by
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.core.log import bar
from utils.qat.evaluation.evaluate import evaluate


class HalfModel(TorchModel):
    """A model of PyTorch in FP16, for images and predictions in FP32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.half())

    @override
    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = super().__call__(images.half())
        return tuple(part.float() for part in found) if isinstance(found, tuple) else found.float()


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
    size, file = (imgsz[0], imgsz[1]), file_to_run(measurement, conditions)
    if measurement.backend == 'pytorch':
        model = conditions.open_checkpoint(file, conditions.device)
        return _scores(HalfModel(model.model) if measurement.precision == 'fp16' else model, size, conditions)
    with measured_by(measurement.backend)(measurement, file, conditions) as measured:
        assert isinstance(measured, MeasuredSession)  # only checkpoints, see above, have no session
        return _scores(FileModel(measured.session), size, conditions)


def _scores(model: TorchModel | FileModel, size: Sides, conditions: Conditions) -> dict[str, Any]:
    """Score a model on images of `size`."""
    data, keys = model.task.labelled(conditions.config, model, size), ('images', *model.task.keys)
    metrics = evaluate(
        model, data.loader, data.names, conditions.device, progress=lambda it: bar(it, 'scoring')
    ).plain()
    found = {k: metrics[k] for k in keys if k in metrics}
    return {**found, **({'mask': {k: metrics['mask'][k] for k in keys[1:]}} if 'mask' in metrics else {})}
