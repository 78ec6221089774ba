"""The true objects or classes in the images of a batch, and a model's detections in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from utils.general import non_max_suppression

from utils.qat.data.loaders import unit_images
from utils.qat.data.masks import Masks, PrototypeMasks, true_masks

# Upstream's letterboxing of an image: (height, width) of the original, ((scale of height, of width), padding (x, y))
Placement = tuple[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]


@dataclass
class Truth:
    """The objects in the images of a batch."""

    targets: torch.Tensor  # [n, 6]: image, class, box as centre, width and height in pixels of the model's input
    shape: tuple[int, int]  # of the model's input: height, width
    paths: Sequence[str]  # of the images' files
    shapes: Sequence[Placement]  # of each image
    masks: Sequence[torch.Tensor] = ()  # of each image, see masks.true_masks; empty = boxes only

    def labels(self, image: int) -> torch.Tensor:
        """Return class and box of the objects of an image: [m, 5]."""
        return self.targets[self.targets[:, 0] == image, 1:]

    def masks_of(self, image: int) -> torch.Tensor:
        """Return the masks of the objects of an image: FP32 [m, H, W]."""
        return true_masks(self.masks[image].to(self.targets.device), len(self.labels(image)))


@dataclass
class ClassTruth:
    """The classes of the images of a batch."""

    labels: torch.Tensor  # INT64 [B]
    shape: tuple[int, int]  # of the model's input: height, width
    paths: Sequence[str]  # of the images' files


@dataclass
class Detections:
    """The objects that a model found in an image, highest score first."""

    rows: torch.Tensor  # [n, 6]: box, xyxy in pixels of the model's input, score, class
    masks: Masks | None = None  # of a segmentation model

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice | torch.Tensor) -> Detections:
        return Detections(self.rows[which], self.masks[which] if self.masks else None)


def prepared(batch: Sequence, device: torch.device) -> tuple[torch.Tensor, Truth | ClassTruth]:
    """Prepare a batch of a loader (loaders.Loaders.scored) for a model on `device`, and for its scorer.

    Returns images, FP32 [B, 3, H, W] in 0..1, and their Truth; for a classifier normalized images and a ClassTruth.
    """
    images, targets, paths, *rest = batch
    images = unit_images(images, device)
    height, width = images.shape[2:]
    if not rest:
        return images, ClassTruth(targets, (height, width), paths)
    shapes, *masks = rest
    targets = targets.to(device) * torch.tensor((1, 1, width, height, width, height), device=device)
    return images, Truth(targets, (height, width), paths, shapes, *masks)


def detect(
    outputs: torch.Tensor | tuple[torch.Tensor, ...] | list[Detections],
    shape: tuple[int, ...],
    conf_thres: float = 0.001,
    iou_thres: float = 0.7,
    max_det: int = 300,
) -> list[Detections]:
    """Convert the outputs of a model (see file_model.py) to the detections of each image, by upstream's NMS.

    `shape` is height and width of the images, in pixels. Above the IoU `iou_thres` NMS drops the box with the lower score. Detections of
    NMS inside the model are returned as they are.
    """
    if isinstance(outputs, list):
        return outputs
    predictions, prototypes = outputs if isinstance(outputs, tuple) else (outputs, None)
    coefficients = 0 if prototypes is None else prototypes.shape[1]
    detections = []
    # Image by image: upstream's NMS gives up on the rest of a batch when a time limit is over.
    for i, p in enumerate(predictions):
        (rows,) = non_max_suppression(
            p[None], conf_thres, iou_thres, multi_label=True, max_det=max_det, nm=coefficients
        )
        masks = None if prototypes is None else PrototypeMasks(rows[:, 6:], prototypes[i], rows[:, :4], shape)
        detections.append(Detections(rows[:, :6], masks))
    return detections
