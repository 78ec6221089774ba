"""Image files: checks of their names, reading, and upstream's copies of their pixels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import cv2
import numpy as np
from PIL import Image

from utils.qat.core.errors import QatError
from utils.qat.core.files import waits
from utils.qat.core.text import is_printable_text


def check_images(files: Iterable[str], flag: str, data: Path) -> None:
    """Raise QatError for an image whose name is not UTF-8 or has control characters, and for a pipe or a device.

    Upstream hashes the names as UTF-8, and repeats them in messages. Opening a pipe blocks for ever.
    """
    for file in files:
        try:
            file.encode()
        except UnicodeEncodeError as e:
            raise QatError(f'{flag} {data}: the name of the image {os.fsencode(file)!r} is not UTF-8; rename it') from e
        if not is_printable_text(file):
            raise QatError(f'{flag} {data}: the name of the image {file} has control characters; rename it')
        if waits(file):
            raise QatError(f'image {file}: a pipe or a device, and no file; remove it')


def unreadable(file: str, reason: object = '') -> QatError:
    """Make the error for an image that cannot be read. reason: of a library, if it gave one."""
    said = ' '.join(str(reason).split())[:200]
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
