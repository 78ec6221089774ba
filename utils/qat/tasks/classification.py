"""Classification: one score for each class, learnt from a folder of images for each class and scored by top-1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from utils.qat.config.common import LabelledConfig
from utils.qat.config.settings import Sides
from utils.qat.config.tasks import Labelled, Task
from utils.qat.core.errors import QatError
from utils.qat.evaluation.metrics import ClassMetrics

if TYPE_CHECKING:
    import torch

    from utils.qat.core.upstream import Network
    from utils.qat.data.image_folders import ImageFolders
    from utils.qat.evaluation.classes import ClassScorer
    from utils.qat.evaluation.side_by_side import Line

STRIDE = 32  # pixels, of a network of torchvision; upstream takes the same


class Classification(Task):
    """Classification."""

    name = 'classify'
    title = 'a classifier'
    results = 'scores'
    boxes = False
    augments = False
    imgsz = (224, 224)
    takes = 'a folder with train/ and val/, and in each a folder of images for each class'
    placeholder = 'FOLDER'
    steps = ('pre', 'inference')
    parts = ('scores',)
    metrics = ClassMetrics

    def has_data(self, path: str | Path) -> bool:
        """Tell whether `path` is a folder; Path.is_dir raises an error for a name that is too long."""
        return os.path.isdir(path)

    def load_data(self, file: Path, model: Any, flag: str = '--data', names_from: str | None = None) -> ImageFolders:
        from utils.qat.data.image_folders import load_image_folders

        if not file.is_dir():
            raise QatError(
                f'{flag} {file}: the model is a classifier ({model.kind}), which takes {self.takes}; labels of boxes are for detectors'
            )
        return load_image_folders(file, model.names, flag)

    def require_labels(self, file: Path) -> None:
        from utils.qat.data.image_folders import split_folders

        split_folders(file)

    def labelled(self, config: LabelledConfig, model: Any, imgsz: Sides) -> Labelled:
        """Open a folder with train/ and val/; for third-party classifiers see other_classifiers.class_images."""
        from utils.qat.data.image_folders import MEAN, STD
        from utils.qat.data.loaders import labelled_images
        from utils.qat.data.other_classifiers import class_images

        if not model.by_toolkit:
            loader = class_images(config, imgsz, model.nc, model.names, model.device)
            return Labelled(loader, model.names, config.mean, config.std)
        data = self.load_data(Path(config.data or ''), model)
        return Labelled(labelled_images(data, config, imgsz, model.stride, model.device), model.names, MEAN, STD)

    def seen_as(self, imgsz: Sequence[int], square: bool) -> str:
        return f'as their middle in {imgsz[0]} x {imgsz[1]}'

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize images by ImageNet's mean and deviation."""
        from utils.qat.data.image_folders import normalized

        return normalized(images)

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        from utils.qat.data.image_folders import MEAN, STD

        return images * images.new_tensor(STD)[:, None, None] + images.new_tensor(MEAN)[:, None, None]

    def prepare(self, model: Network) -> None:
        """Add a stride and names to a classifier if it has none, and make its activation functions not in-place.

        Code elsewhere identifies tensors by identity. Raises ValueError if it does not return one score for each class.
        """
        import torch

        modules: Iterable[Any] = model.modules()
        for m in modules:
            if getattr(m, 'inplace', False):
                m.inplace = False
        if not hasattr(model, 'stride'):
            model.stride = torch.tensor([float(STRIDE)])
        with torch.no_grad():
            scores = model(torch.zeros(1, 3, 2 * STRIDE, 2 * STRIDE))
        if not isinstance(scores, torch.Tensor) or scores.dim() != 2:
            raise ValueError('a classifier returns one score for each class')
        if not getattr(model, 'names', None):
            model.names = {i: str(i) for i in range(scores.shape[1])}
        if len(model.names) != scores.shape[1]:
            raise ValueError(f'{len(model.names)} names of classes and {scores.shape[1]} scores')

    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        return shapes[0][1]  # of scores [B, classes]

    def predictions(self, output: torch.Tensor | tuple) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return output

    def label_loss(self, model: Network, weight: float) -> Callable[..., torch.Tensor]:
        """Make the cross entropy of logits [B, classes] against classes [B], the mean over the images."""
        from torch.nn.functional import cross_entropy

        return lambda scores, labels: weight * cross_entropy(scores.float(), labels)

    def scorer(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> ClassScorer:
        """Make a ClassScorer; a classifier has no rows in COCO's format."""
        from utils.qat.evaluation.classes import ClassScorer

        return ClassScorer(names)

    def postprocess(self, outputs: object, shape: tuple[int, ...], *settings: object) -> object:
        return outputs

    def comparing(self) -> ModuleType:
        from utils.qat.evaluation import compare_classes

        return compare_classes

    def lines(self, results: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Line]:
        from utils.qat.evaluation.side_by_side import class_lines

        return class_lines(results, names, top)


TASK = Classification()
