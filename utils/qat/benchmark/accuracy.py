"""Accuracy of what a benchmark measures: AP of a detector, top-1 and top-5 of a classifier, by the session that is timed."""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.benchmark.case import Case, Load
from utils.qat.benchmark.cases import file_of
from utils.qat.benchmark.measured import MeasuredSession
from utils.qat.benchmark.measured_backends import measured_by
from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, bar
from utils.qat.evaluation.evaluate import evaluate


class HalfModel(TorchModel):
    """A model of PyTorch in FP16, for images and predictions in FP32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.half())

    @override
    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = super().__call__(images.half())
        return tuple(part.float() for part in found) if isinstance(found, tuple) else found.float()


class Accuracy:
    """Scores of the models of a benchmark, each computed once, whatever the batches that are measured."""

    def __init__(
        self, config: BenchmarkConfig, device: torch.device, load: Load, left_out: Callable[[str], object]
    ) -> None:
        """Start without scores. `left_out` takes a line for each model that cannot be scored."""
        self.config, self.device, self.load, self.left_out = config, device, load, left_out
        self.known: dict[tuple[Any, ...], dict[str, Any] | None] = {}

    def of(self, case: Case, imgsz: tuple[int, ...] | None) -> dict[str, Any] | None:
        """Score the model of a case that was measured before, so that its engine is there, at height and width `imgsz`.

        Returns:
            'images', the number of them, and 'ap', 'ap50', 'precision', 'recall' (of a model with masks also 'mask': the same of
            masks), or 'top1' and 'top5' of a classifier, in 0..1. None where the model cannot be scored.
        """
        key = case.file, case.backend, case.precision, imgsz
        if key not in self.known:
            try:
                self.known[key] = self._score(case, imgsz)
            except QatError as e:
                self.left_out(f'accuracy of {case.file}: {e}')
                self.known[key] = None
        return self.known[key]

    def _score(self, case: Case, imgsz: tuple[int, ...] | None) -> dict[str, Any]:
        """Open the file of a case as it is measured, and score it."""
        if not imgsz:
            raise QatError('it takes no images')
        size = imgsz[0], imgsz[1]
        file = file_of(case, self.config, self.device, LOGGER.info)
        if case.backend == 'pytorch':
            model = self.load(file, self.device)[0]
            found = HalfModel(model) if case.precision == 'fp16' else TorchModel(model)
            return self._evaluated(found, size)
        with measured_by(case.backend).of_case(case, file, self.device, self.config, self.load) as measured:
            assert isinstance(measured, MeasuredSession)  # only checkpoints, see above, have no session
            return self._evaluated(FileModel(measured.session), size)

    def _evaluated(self, model: TorchModel | FileModel, size: Sides) -> dict[str, Any]:
        """Score a model on images of `size`."""
        data, keys = model.task.labelled(self.config, model, size), ('images', *model.task.keys)
        metrics = evaluate(model, data.loader, data.names, self.device, progress=lambda it: bar(it, 'scoring')).plain()
        found = {k: metrics[k] for k in keys if k in metrics}
        return {**found, **({'mask': {k: metrics['mask'][k] for k in keys[1:]}} if 'mask' in metrics else {})}
