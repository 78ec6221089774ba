"""Images on the device, and the true classes of a batch."""

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
    """Move images to `device`, and convert uint8 to FP32 in 0..1; other images are normalized already."""
    images = images.to(device, non_blocking=True)
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Convert CPU images to channels-last; on other devices return them unchanged.

    All maps of a PyTorch model are then channels-last too, and its convolutions take a quarter less time.
    """
    return images.contiguous(memory_format=torch.channels_last) if images.device.type == 'cpu' else images
