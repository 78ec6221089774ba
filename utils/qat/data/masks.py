"""The masks of the detections in one image, in the two forms that models return, and the true masks.

A mask is computed only on request, at one of two sizes. `coarse` is the size of the prototypes, a quarter of the model's
input, at which upstream's segment/val.py scores. `fine` is the size of the input, for masks in files. Both are cut at the
box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from utils.segment.general import crop_mask, process_mask, process_mask_upsample

COARSE = 4  # pixels of the input for one pixel of a prototype, along each side


@dataclass
class PrototypeMasks:
    """Masks as sigmoid(coefficients [n, nm] @ prototypes [nm, H / 4, W / 4]) > 0.5, by upstream's own functions."""

    coefficients: torch.Tensor
    prototypes: torch.Tensor
    boxes: torch.Tensor  # FP32 [n, 4], xyxy in pixels of the model's input
    shape: tuple[int, ...]  # height and width of the model's input

    def coarse(self) -> torch.Tensor:
        """Compute the masks at a quarter of the size: FP32 [n, H / 4, W / 4], 0 or 1."""
        return process_mask(self.prototypes, self.coefficients, self.boxes, self.shape)

    def fine(self) -> torch.Tensor:
        """Compute the masks at the size of the input: FP32 [n, H, W], 0 or 1."""
        return process_mask_upsample(self.prototypes, self.coefficients, self.boxes, self.shape)

    def __getitem__(self, which: slice | torch.Tensor) -> PrototypeMasks:
        return PrototypeMasks(self.coefficients[which], self.prototypes, self.boxes[which], self.shape)


@dataclass
class BoxMasks:
    """Masks as crops, from a model with NMS inside: [n, R, R] in 0..1, R x R cells that divide the box evenly; else as PrototypeMasks."""

    crops: torch.Tensor
    boxes: torch.Tensor
    shape: tuple[int, ...]

    def coarse(self) -> torch.Tensor:
        """Compute the masks at a quarter of the size, see PrototypeMasks."""
        return self._paste(COARSE)

    def fine(self) -> torch.Tensor:
        """Compute the masks at the size of the input, see PrototypeMasks."""
        return self._paste(1)

    def _paste(self, stride: int) -> torch.Tensor:
        """Paste the crops into a grid of one point every `stride` pixels, with linear interpolation."""
        height, width = (side // stride for side in self.shape)
        boxes = self.boxes / stride
        x1, y1, x2, y2 = boxes.t()[..., None]  # [n, 1] each

        def places(number: int, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
            """Return the centres of pixels along one axis, in units of the box from -1 to 1."""
            return (torch.arange(number, device=boxes.device) + 0.5 - low) / (high - low) * 2 - 1

        x, y = places(width, x1, x2), places(height, y1, y2)  # [n, width], [n, height]
        grid = torch.stack((x[:, None].expand(-1, height, -1), y[..., None].expand(-1, -1, width)), 3)
        pasted = F.grid_sample(self.crops[:, None], grid, align_corners=False, padding_mode='border')[:, 0]
        inside = crop_mask(pasted, boxes - 0.5)  # points outside the box are unknown
        # Upstream's rule uses the corners of pixels, not their centres.
        return crop_mask(inside, boxes).gt(0.5).float()

    def __getitem__(self, which: slice | torch.Tensor) -> BoxMasks:
        return BoxMasks(self.crops[which], self.boxes[which], self.shape)


Masks = PrototypeMasks | BoxMasks  # of the n detections in one image; an index chooses some of them


def true_masks(masks: torch.Tensor, number: int) -> torch.Tensor:
    """Split the masks of upstream's dataset for an image into one per object: FP32 [number, H, W].

    `masks` is [number, H, W] of 0 and 1, or [1, H, W] of the number of the object, from 1.
    """
    if len(masks) != number:
        masks = masks == torch.arange(1, number + 1, device=masks.device)[:, None, None]
    return masks.float()


def resized(masks: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Resize true masks [m, H, W] to (height, width), as upstream's segment/val.py does."""
    if masks.shape[1:] == size:
        return masks
    return F.interpolate(masks[None], size, mode='bilinear', align_corners=False)[0].gt(0.5).float()


def same_place_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute the pairwise IoU [n] of masks [n, H, W] of 0 and 1; 1 if both are empty, as for small boxes."""
    second = second.to(first.device)
    common = (first * second).sum((1, 2))
    union = first.sum((1, 2)) + second.sum((1, 2)) - common
    return torch.where(union > 0, common / union.clamp(min=1), 1.0)
