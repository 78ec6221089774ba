"""A batch of a classifier on its way to its score: images and their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class ClassTruth:
    """The classes of the images of a batch."""

    labels: torch.Tensor  # INT64 [B]
    shape: tuple[int, int]  # of the model's input: height, width
    paths: Sequence[str]  # of the images' files


def unit_images(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring images to `device` as models take them: bytes become FP32 in 0..1, others are normalized already."""
    images = images.to(device, non_blocking=True)
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Lay images on a CPU so in memory that the channels of a pixel are side by side; elsewhere they stay as they are.

    All maps of a PyTorch model then lie so, and its convolutions take a quarter less time.
    """
    return images.contiguous(memory_format=torch.channels_last) if images.device.type == 'cpu' else images
