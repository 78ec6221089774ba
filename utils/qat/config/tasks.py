"""The table of tasks, and what a task knows.

Everything that differs between the networks of two tasks is in a file of utils/qat/tasks/, and nothing else branches on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from utils.qat.config.common import LabelledConfig
    from utils.qat.config.settings import Sides

TASKS = {
    'detect': 'detection',
    'segment': 'segmentation',
    'classify': 'classification',
}  # name → file in utils/qat/tasks/


class Task(ABC):
    """The knowledge about the networks of one task.

    Attributes:
        name: a key of TASKS; exported files have it in their metadata.
        title: of its networks, with an article.
        found: what its networks return, in words: 'detections' or 'scores'.
        boxes: whether their last layer is a YOLOv9 head, which finds boxes.
        steps: of an evaluation, whose times are reported.
        augments: whether images for the fine-tuning can be augmented.
        imgsz: usual height and width of images, in pixels.
        settings: fields of LoaderConfig that only its data has.
        takes: what its data is, in words.
        placeholder: stands for the user's data in a next command.
        parts: of the outputs that SQNR is measured of.
        keys: figures in plain metrics. The first one chooses among models.
        columns: titles of these figures.
    """

    name: str
    title: str
    found: str
    boxes = True
    masks = False
    augments = True
    steps: tuple[str, ...] = ('pre', 'inference', 'nms')
    imgsz: Sides = (640, 640)
    settings: frozenset[str] = frozenset()
    takes: str
    placeholder: str
    parts: tuple[str, ...]
    keys: tuple[str, ...]
    columns: tuple[str, ...]

    # ---- data

    @abstractmethod
    def has_data(self, path: str | Path) -> bool:
        """Tell whether data of this task can be at `path`."""

    def data_of(self, path: object) -> str:
        """Return the data that a checkpoint notes, if they are on this machine, else the placeholder."""
        return path if isinstance(path, str) and self.has_data(path) else self.placeholder

    @abstractmethod
    def load_data(self, file: Path, model: Any, flag: str = '--data') -> Any:
        """Check the data for a `model` with nc, names and kind: dataset.Data or image_folders.ImageFolders."""

    @abstractmethod
    def require_labels(self, file: Path) -> None:
        """Raise QatError unless the images for an evaluation in `file` have labels."""

    @abstractmethod
    def labelled(self, config: LabelledConfig, model: Any, imgsz: Sides) -> Labelled:
        """Open the labelled images of a command that takes any file, such as compare_outputs.py."""

    @abstractmethod
    def seen_as(self, imgsz: Sequence[int], square: bool) -> str:
        """Say in words how loaders.val_loader shows images to a model."""

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Bring images in 0..1 to the range that the networks take."""
        return images

    # ---- networks

    @abstractmethod
    def prepare(self, model: nn.Module) -> None:
        """Give a network, as its training saves it, the attributes of the other models, in place.

        Any exception says that the network lacks what a training sets.
        """

    @abstractmethod
    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of classes of an exported file, by the shapes of its outputs."""

    @abstractmethod
    def predictions(self, output: Any) -> Any:
        """Take the predictions out of what a network returns in eval mode."""

    @abstractmethod
    def label_loss(self, model: nn.Module, weight: float) -> Callable[..., torch.Tensor]:
        """Make the loss of the network's outputs against the labels, times `weight`."""

    # ---- scores

    @abstractmethod
    def scorer(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> Any:
        """Make the collector of matches that computes the metrics; with COCO's `categories` it collects rows too."""

    @abstractmethod
    def found_in(self, outputs: Any, shape: tuple[int, ...], *settings: Any) -> Any:
        """Turn outputs of a model, see file_model.py, into what the scorer takes.

        `shape` is height and width of the images, in pixels; `settings` are conf_thres, iou_thres and max_det of
        detections.detect.
        """

    def merit(self, metrics: Mapping[str, Any]) -> float:
        """Compute the number by which models are chosen, of plain metrics; with masks the mean of boxes and masks."""
        first = metrics[self.keys[0]]
        return (first + metrics['mask'][self.keys[0]]) / 2 if 'mask' in metrics else first

    # ---- comparisons

    @abstractmethod
    def differences(self, rtol: float, atol: float, top: int) -> Any:
        """Make the collector of the differences of two models, see compare.compare_all."""

    @abstractmethod
    def comparing(self) -> Any:
        """Return the module that writes and judges comparisons: verdict, tables, scores_table, excess, limits_text."""

    @abstractmethod
    def lines(self, found: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Any]:
        """Line up the best detections or classes of several models, see side_by_side.Line."""


class Labelled(NamedTuple):
    """Labelled images for a model: batches, names of the classes, and mean and deviation that the images were normalized by."""

    loader: Any
    names: Mapping[int, str]
    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)


@cache
def load_task(name: str) -> Task:
    """Load the file of a task and return its TASK. name: a key of TASKS."""
    return import_module(f'utils.qat.tasks.{TASKS[name]}').TASK


def task_named(name: str | None) -> Task:
    """Return the task that the metadata of a file name; files of others name none, or one that is not ours: detection."""
    return load_task(name if name in TASKS else 'detect')
