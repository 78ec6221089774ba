"""Images: checks of their files, reading, upstream's copies of their pixels, and batches on the device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from utils.qat.core.errors import QatError, one_line
from utils.qat.core.files import waits
from utils.qat.core.text import is_printable


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


def check_images(files: Iterable[str], flag: str, data: Path) -> None:
    """Raise QatError for an image whose name is not UTF-8 or has control characters, and for a pipe or a device.

    Upstream hashes the names as UTF-8, and repeats them in messages. Opening a pipe blocks for ever.
    """
    for file in files:
        try:
            file.encode()
        except UnicodeEncodeError as e:
            raise QatError(f'{flag} {data}: the name of the image {os.fsencode(file)!r} is not UTF-8; rename it') from e
        if not is_printable(file):
            raise QatError(f'{flag} {data}: the name of the image {file} has control characters; rename it')
        if waits(file):
            raise QatError(f'image {file}: a pipe or a device, and no file; remove it')


def unreadable(file: str, reason: object = '') -> QatError:
    """Make the error for an image that cannot be read. reason: of a library, if it gave one."""
    said = one_line(reason)
    return QatError(f'image {file}: cannot be read; mend or remove it' + f' ({said})' * bool(said))


def read_bgr(file: str) -> np.ndarray:
    """Read an image by OpenCV: BGR, uint8 [H, W, 3]. Raises QatError if it cannot be read."""
    try:
        image: Any = cv2.imread(file)
    except cv2.error as e:  # such as too many pixels
        raise unreadable(file, e) from e
    if image is None:
        raise unreadable(file)
    return image


def read_rgb(file: str) -> Image.Image:
    """Read an image by Pillow, in RGB. Raises QatError if it cannot be read."""
    try:
        with open(file, 'rb') as content:
            return Image.open(content).convert('RGB')
    except Exception as e:  # Pillow's readers of a format raise whatever they meet in a damaged file
        raise unreadable(file, e or type(e).__name__) from e


def check_copies(files: Sequence[str], copies: Sequence[Path], sizes: Sequence[Sequence[int]]) -> None:
    """Raise QatError unless upstream's copies of images are uint8 arrays of their sizes.

    Upstream reads such a copy, IMG.npy beside IMG.jpg, in place of the image, if it exists. `sizes` are the width and height
    of each image, in pixels.
    """
    for file, copy, (width, height) in zip(files, copies, sizes):
        if not os.path.exists(copy):
            continue
        try:
            if not os.path.isfile(copy):
                raise ValueError('no file')
            pixels = np.lib.format.open_memmap(copy, 'r')
        # NumPy parses the header as Python
        except (ValueError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError) as e:
            raise QatError(f'{copy}: no array of NumPy, and it is read in place of {file}; delete it') from e
        if pixels.dtype != np.uint8 or pixels.shape != (height, width, 3):
            raise QatError(
                f'{copy}: {pixels.dtype} {list(pixels.shape)}, and it is read in place of {file}, which is uint8 '
                f'{[int(height), int(width), 3]}; delete it'
            )


def held_out_files(names: Sequence[str], share: float) -> set[str]:
    """Choose the files that --val-split holds out: evenly spread over the names, whatever their order and the seed.

    So the share holds for each folder too, such as that of a class, up to rounding.
    """
    files = sorted(names)
    n = round(share * len(files))
    if not 0 < n < len(files):
        raise QatError(
            f'--val-split {share}: the training set has {len(files)} images, of which {n} would be held out and '
            f'{len(files) - n} trained on; use another share, or leave it out'
        )
    return {files[(2 * i + 1) * len(files) // (2 * n)] for i in range(n)}
