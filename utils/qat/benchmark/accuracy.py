"""Accuracy of what a benchmark measures: AP of a detector, top-1 and top-5 of a classifier, by the session that is timed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from utils.qat.benchmark.case import Case
from utils.qat.benchmark.cases import file_of
from utils.qat.config.common import LoaderConfig
from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, bar
from utils.qat.data.class_folders import class_images
from utils.qat.data.dataset import load_any
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.compare_classes import accuracy_of
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.pytorch import TorchModel
from utils.qat.prediction.registry import session_of
from utils.qat.prediction.session import Load


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
        """Start without scores.

        Args:
            config: gives data, images and workers, and for classifiers mean, std and classes.
            device: where the models run.
            load: loads a checkpoint, for PyTorch.
            left_out: takes a line for each model that cannot be scored.
        """
        self.config, self.device, self.load, self.left_out = config, device, load, left_out
        self.known: dict[tuple[Any, ...], dict[str, Any] | None] = {}

    def of(self, case: Case, imgsz: tuple[int, ...] | None) -> dict[str, Any] | None:
        """Score the model of a case.

        Args:
            case: the case, which was measured before: its engine is there.
            imgsz: height and width in pixels.

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
            return (self._classifier if found.classifies else self._detector)(found, size)
        kind = session_of(case.backend)
        with kind.to_measure(case, file, self.device, self.config, self.load) as session:
            file_model = FileModel(session)
            return (self._classifier if file_model.classifies else self._detector)(file_model, size)

    def _detector(self, model: TorchModel | FileModel, size: Sides) -> dict[str, Any]:
        """Score a detector on images letterboxed to `size`, as `qat.py eval --square` does."""
        config = self.config
        data = load_any(Path(config.data or ''), model)
        settings = LoaderConfig(
            batch_size=config.batch_size, imgsz=size, workers=config.workers, device=self.device.type
        )
        loader = val_loader(data, settings, model.stride, square=True, limit=config.images or None)
        metrics = evaluate(model, loader, data.names, self.device, progress=lambda it: bar(it, 'scoring')).plain()
        keys = 'images', 'ap', 'ap50', 'precision', 'recall'
        mask = metrics.get('mask')
        return {
            **{k: metrics[k] for k in keys},
            **({'mask': {k: mask[k] for k in keys[1:]}} if mask else {}),
        }

    def _classifier(self, model: TorchModel | FileModel, size: Sides) -> dict[str, Any]:
        """Score a classifier."""
        batches = class_images(self.config, size, model)
        return accuracy_of(model, bar(batches, 'scoring'), self.device)
