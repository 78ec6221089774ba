"""Masks of the detections of one image, in the two forms in which models give them, and the truth that they are scored against.

A mask is computed only where it is asked for, at one of two sizes: `coarse`, that of the prototypes, a quarter of the model's input,
at which upstream's segment/val.py scores; and `fine`, that of the input, for masks that are written. Both cut at the box.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from utils.segment.general import crop_mask, process_mask, process_mask_upsample

COARSE = 4  # input pixels to one of a prototype


class Masks(ABC):
    """`boxes`: FP32 [n, 4], xyxy in pixels of the model's input. `shape`: height and width of that."""

    @abstractmethod
    def coarse(self):
        """FP32 [n, H / 4, W / 4], 0 or 1."""

    @abstractmethod
    def fine(self):
        """FP32 [n, H, W], 0 or 1."""

    @abstractmethod
    def __getitem__(self, which):
        """Those of some of the detections."""


@dataclass
class PrototypeMasks(Masks):
    """sigmoid(coefficients @ prototypes) > 0.5, by upstream's own functions. coefficients: [n, nm]. prototypes: [nm, H / 4, W / 4]."""

    coefficients: torch.Tensor
    prototypes: torch.Tensor
    boxes: torch.Tensor
    shape: tuple

    def coarse(self):
        return process_mask(self.prototypes, self.coefficients, self.boxes, self.shape)

    def fine(self):
        return process_mask_upsample(self.prototypes, self.coefficients, self.boxes, self.shape)

    def __getitem__(self, which):
        return PrototypeMasks(self.coefficients[which], self.prototypes, self.boxes[which], self.shape)


@dataclass
class BoxMasks(Masks):
    """Masks that a model with NMS inside has cut out: crops [n, R, R] in 0..1, each of the area of its box, which they divide evenly."""

    crops: torch.Tensor
    boxes: torch.Tensor
    shape: tuple

    def coarse(self):
        return self._paste(COARSE)

    def fine(self):
        return self._paste(1)

    def _paste(self, stride):
        """The crops in their places on a grid of one point every `stride` pixels, between whose values is linear."""
        height, width = (side // stride for side in self.shape)
        boxes = self.boxes / stride
        x1, y1, x2, y2 = boxes.t()[..., None]  # [n, 1] each

        def places(number, low, high):  # of the centres of pixels, in units of the box from -1 to 1
            return (torch.arange(number, device=boxes.device) + 0.5 - low) / (high - low) * 2 - 1

        x, y = places(width, x1, x2), places(height, y1, y2)  # [n, width], [n, height]
        grid = torch.stack((x[:, None].expand(-1, height, -1), y[..., None].expand(-1, -1, width)), 3)
        pasted = F.grid_sample(self.crops[:, None], grid, align_corners=False, padding_mode='border')[:, 0]
        inside = crop_mask(pasted, boxes - 0.5)  # of points beside the box nothing is known
        return (
            crop_mask(inside, boxes).gt(0.5).float()
        )  # upstream's rule is about the corners of pixels, not about their centres

    def __getitem__(self, which):
        return BoxMasks(self.crops[which], self.boxes[which], self.shape)


def true_masks(masks, number):
    """Masks of the `number` objects of an image, as upstream's dataset gives them → FP32 [number, H, W].

    masks: [number, H, W] of 0 and 1, or, overlapping, [1, H, W] of the number of the object, from 1.
    """
    if len(masks) != number:
        masks = masks == torch.arange(1, number + 1, device=masks.device)[:, None, None]
    return masks.float()


def resized(masks, size):
    """True masks [m, H, W] at another size (height, width), as upstream's segment/val.py has them."""
    if masks.shape[1:] == size:
        return masks
    return F.interpolate(masks[None], size, mode='bilinear', align_corners=False)[0].gt(0.5).float()


def same_place_iou(first, second):
    """IoU [n] of each mask of `first` [n, H, W] with that of `second`; 1 where both are empty, as those of small boxes may be."""
    second = second.to(first.device)
    common = (first * second).sum((1, 2))
    union = first.sum((1, 2)) + second.sum((1, 2)) - common
    return torch.where(union > 0, common / union.clamp(min=1), 1.0)
