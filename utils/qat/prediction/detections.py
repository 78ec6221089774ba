"""A batch on its way to its score: the objects in its images, and the detections of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from utils.general import non_max_suppression

from utils.qat.data.masks import Masks, PrototypeMasks, true_masks


@dataclass
class Truth:
    """What is known of the images of a batch."""

    targets: torch.Tensor  # [n, 6]: image, class, box as centre, width and height in pixels of the model's input
    shape: tuple  # of the model's input: height, width
    paths: list  # of the images' files
    shapes: list  # of each image: (height, width) of the original, and how it was scaled and padded; upstream's
    masks: list = None  # of each image, as upstream's dataset gives them, see masks.true_masks; None = boxes only

    def labels(self, image):
        """[m, 5]: class and box of the objects of an image."""
        return self.targets[self.targets[:, 0] == image, 1:]

    def masks_of(self, image):
        """FP32 [m, H, W]: masks of the objects of an image."""
        return true_masks(self.masks[image].to(self.targets.device), len(self.labels(image)))


@dataclass
class Detections:
    """What was found in an image, highest score first."""

    rows: torch.Tensor  # [n, 6]: box, xyxy in pixels of the model's input, score, class
    masks: Masks = None  # of a segmentation model

    def __len__(self):
        return len(self.rows)


def prepared(batch, device):
    """A loader's batch as models take it: (images FP32 [B, 3, H, W] in 0..1, Truth)."""
    images, targets, paths, shapes, *masks = batch
    images = images.to(device, non_blocking=True).float() / 255
    height, width = images.shape[2:]
    targets = targets.to(device) * torch.tensor((1, 1, width, height, width, height), device=device)
    return images, Truth(targets, (height, width), paths, shapes, *masks)


def detect(outputs, shape, conf_thres=0.001, iou_thres=0.7, max_det=300):
    """What a model finds in each image, by upstream's NMS: a list of Detections.

    outputs: see file_model.py; what comes from NMS inside the model is taken as it is. shape: height and width of the images.
    """
    if isinstance(outputs, list):
        return outputs
    predictions, prototypes = outputs if isinstance(outputs, tuple) else (outputs, None)
    coefficients = 0 if prototypes is None else prototypes.shape[1]
    found = []
    for i, p in enumerate(
        predictions
    ):  # image by image: upstream's NMS gives up on the rest of a batch when a time limit is over
        rows = non_max_suppression(p[None], conf_thres, iou_thres, multi_label=True, max_det=max_det, nm=coefficients)[
            0
        ]
        masks = PrototypeMasks(rows[:, 6:], prototypes[i], rows[:, :4], shape) if coefficients else None
        found.append(Detections(rows[:, :6], masks))
    return found
