"""Detection: boxes with a class and a score, learnt from a data YAML and scored by AP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from utils.qat.config.common import LabelledConfig, LoaderConfig
from utils.qat.config.settings import Sides
from utils.qat.config.tasks import Labelled, Task
from utils.qat.core.errors import QatError
from utils.qat.evaluation.metrics import DetectionMetrics

if TYPE_CHECKING:
    import torch

    from utils.qat.core.upstream import Network
    from utils.qat.data.dataset import Data
    from utils.qat.evaluation.detection_scores import Scorer
    from utils.qat.evaluation.score_file import Model
    from utils.qat.evaluation.side_by_side import Line


def read_by_losses(model: Network) -> SimpleNamespace:
    """Return an object with the attributes that upstream's losses read: plain cross-entropy, as in upstream's settings."""
    return SimpleNamespace(model=model.model, parameters=model.parameters, hyp={'cls_pw': 1.0, 'fl_gamma': 0.0})


class Detection(Task):
    """Detection."""

    name = 'detect'
    title = 'a detector'
    results = 'detections'
    takes = 'a data YAML with train:, val: and names:'
    placeholder = 'DATA.yaml'
    parts: tuple[str, ...] = ('boxes', 'classes')
    metrics = DetectionMetrics

    def has_data(self, path: str | Path) -> bool:
        """Tell whether `path` is a file; Path.is_file raises an error for a name that is too long."""
        return os.path.isfile(path)

    def load_data(self, file: Path, model: Model, flag: str = '--data', names_from: str | None = None) -> Data:
        from utils.qat.data.dataset import images_alone, load_data

        if any(child.is_dir() for child in file.glob('train/*')):  # a folder for each class
            raise QatError(
                f'{flag} {file}: a folder, and the model is no classifier ({model.kind}); it takes {self.takes}, or to calibrate one folder of images'
            )
        if file.is_dir():
            return images_alone(file, model.names or {}, flag)
        return load_data(file, model.nc, flag, self.masks, model.names, names_from)

    def require_labels(self, file: Path) -> None:
        from utils.qat.data.dataset import load_data
        from utils.qat.data.loaders import Loaders

        Loaders(load_data(file), LoaderConfig(workers=0), 32).scored(square=True)

    def labelled(self, config: LabelledConfig, model: Model, imgsz: Sides) -> Labelled:
        """Open the val images of a data YAML, letterboxed to `imgsz` as in `qat.py eval --square`."""
        from utils.qat.data.loaders import labelled_images

        data = self.load_data(Path(config.data or ''), model, names_from=config.names_from)
        return Labelled(labelled_images(data, config, imgsz, model.stride, model.device), data.names)

    def seen_as(self, imgsz: Sequence[int], square: bool) -> str:
        height, width = imgsz
        if height == width and not square:
            return f'as rectangles of up to {height} x {width} and padding'
        return f'as {"squares" if height == width else "rectangles"} of {height} x {width}'

    def prepare(self, model: Network) -> None:
        """Check that the attributes that upstream's training sets exist."""
        len(model.names), model.model[-1].nc

    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        return shapes[0][1] - 4  # of predictions [B, 4 + classes, N]

    def predictions(self, output: torch.Tensor | tuple) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the predictions [B, 4 + classes, N]; the rest is for training."""
        return output[0]

    def label_loss(self, model: Network, weight: float) -> Callable[..., torch.Tensor]:
        """Make upstream's loss of a head's raw maps, per image: 7.5 box + 0.5 class + 1.5 DFL. It makes the host wait for the device.

        It takes maps [B, 4 bins + classes, H, W] per level, and labels FP32 [n, 6]: image, class, box as centre, width and height
        in 0..1.
        """
        from utils.loss_tal import ComputeLoss

        upstream = ComputeLoss(read_by_losses(model))

        def loss(maps: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
            return weight * upstream([m.float() for m in maps], labels)[0] / len(maps[0])

        return loss

    def scorer(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> Scorer:
        from utils.qat.evaluation.detection_scores import Scorer

        return Scorer(names, categories)

    def postprocess(self, outputs: Any, shape: tuple[int, ...], *settings: Any) -> Any:
        from utils.qat.backends.detections import detect

        return detect(outputs, shape, *settings)

    def comparing(self) -> ModuleType:
        from utils.qat.evaluation import compare_detections

        return compare_detections

    def lines(self, results: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Line]:
        from utils.qat.evaluation.side_by_side import detection_lines

        return detection_lines(results, names, top)


TASK = Detection()
