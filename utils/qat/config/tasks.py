"""The table of tasks, and the interface of a task.

All code that depends on the task of a network is in utils/qat/tasks/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError

if TYPE_CHECKING:
    import torch

    from utils.qat.config.common import LabelledConfig
    from utils.qat.config.settings import Sides
    from utils.qat.core.upstream import Network

# name → file in utils/qat/tasks/
TASKS = {'detect': 'detection', 'segment': 'segmentation', 'classify': 'classification'}


class Task(ABC):
    """A task: everything that depends on it."""

    name: str  # a key of TASKS; exported files have it in their metadata
    title: str  # of its networks, with an article
    results: str  # the results of its networks, in words: 'detections' or 'scores'
    boxes = True  # whether the last layer is a YOLOv9 head, which returns boxes
    masks = False
    augments = True  # whether images for the fine-tuning can be augmented
    steps: tuple[str, ...] = ('pre', 'inference', 'nms')  # of an evaluation, whose times are reported
    imgsz: Sides = (640, 640)  # usual height and width of images, in pixels
    takes: str  # the form of its data, in words
    placeholder: str  # stands for the user's data in a next command
    parts: tuple[str, ...]  # of the outputs, each with its own SQNR
    metrics: Any  # its class of evaluation.metrics

    # ---- data

    @abstractmethod
    def has_data(self, path: str | Path) -> bool:
        """Tell whether data of this task can be at `path`."""

    def data_of(self, path: object, model: object) -> str:
        """Return the data path from a checkpoint if it has data for `model` on this machine, else the placeholder."""
        if not (isinstance(path, str) and self.has_data(path)):
            return self.placeholder
        try:
            self.load_data(Path(path), model)
        except QatError:
            return self.placeholder
        return path

    @abstractmethod
    def load_data(self, file: Path, model: Any, flag: str = '--data', names_from: str | None = None) -> Any:
        """Read and check the data for a `model` with nc, names and kind: a dataset.Data or image_folders.ImageFolders.

        names_from: see dataset.load_data.
        """

    @abstractmethod
    def require_labels(self, file: Path) -> None:
        """Raise QatError unless the evaluation images of `file` have labels."""

    @abstractmethod
    def labelled(self, config: LabelledConfig, model: Any, imgsz: Sides) -> Labelled:
        """Open the labelled images of a command that takes any file, such as compare_outputs.py."""

    @abstractmethod
    def seen_as(self, imgsz: Sequence[int], square: bool) -> str:
        """Describe in words how loaders.Loaders.scored prepares images."""

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize images in 0..1 to the input range of the networks."""
        return images

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Undo `normalized`."""
        return images

    # ---- networks

    @abstractmethod
    def prepare(self, model: Network) -> None:
        """Add the attributes that all models share to a network as its training saved it, in place.

        Any exception means that the network lacks an attribute that training sets.
        """

    @abstractmethod
    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of classes of an exported file from the shapes of its outputs."""

    @abstractmethod
    def predictions(self, output: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Extract the predictions from the output of a network in eval mode."""

    @abstractmethod
    def label_loss(self, model: Network, weight: float) -> Callable[..., torch.Tensor]:
        """Make the loss of the network's outputs against the labels, times `weight`."""

    # ---- scores

    @abstractmethod
    def scorer(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> Any:
        """Make the scorer, which collects matches and computes the metrics; with COCO's `categories` it collects rows too."""

    @abstractmethod
    def postprocess(self, outputs: object, shape: tuple[int, ...], *settings: object) -> Any:
        """Convert outputs of a model, see file_model.py, to the input of the scorer.

        `shape` is height and width of the images, in pixels; `settings` are conf_thres, iou_thres and max_det of
        detections.detect.
        """

    # ---- comparisons

    @abstractmethod
    def comparing(self) -> ModuleType:
        """Return the module that compares models: Differences, details, scores_table, in_a_clause, beyond_limits, limits_text."""

    @abstractmethod
    def lines(self, results: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Any]:
        """Match the best detections or classes of several models, see side_by_side.Line."""


@dataclass(frozen=True)
class Labelled:
    """Labelled images for a model: batches, class names, and the mean and deviation of the normalization."""

    loader: Iterable[tuple]
    names: Mapping[int, str]
    mean: Sequence[float] = (0.0, 0.0, 0.0)
    std: Sequence[float] = (1.0, 1.0, 1.0)


@cache
def load_task(name: str) -> Task:
    """Import the module of a task and return its TASK. name: a key of TASKS."""
    return import_module(f'utils.qat.tasks.{TASKS[name]}').TASK


def task_named(name: str | None) -> Task:
    """Return the task that the metadata of a file name; detection if they name none, or an unknown one."""
    return load_task(name if name in TASKS else 'detect')
