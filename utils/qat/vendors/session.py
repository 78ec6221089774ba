"""A file that a backend has opened: its description and its run. measured.py adds what the benchmark needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from utils.qat.config.tables import BACKENDS, DEFAULT_TARGET, TARGETS, load_target

# Names of the tensors of a file without NMS: images → predictions, and prototypes of a segmentation model
IMAGES, OUTPUTS = 'images', ('output0', 'output1')


@dataclass
class Signature:
    """Inputs, outputs and metadata of an exported file.

    Attributes:
        inputs: name → shape; an open axis is a name or None, as the engine gives it.
        outputs: name → shape, likewise.
        metadata: text of the export, by key; untrusted.
        batch: smallest and largest; None = as in the shape of the input.
    """

    inputs: Mapping[str, Sequence[Any]]
    outputs: Mapping[str, Sequence[Any]]
    metadata: dict[str, str]
    batch: tuple[int, int] | None = None


class Session(ABC):
    """A file that an engine has loaded for a device."""

    def __init__(self, file: Path, device: torch.device) -> None:
        self.file, self.device = file, device

    @classmethod
    def open(cls, file: Path, device: torch.device, backend: str) -> Session:
        """Load a file for exact results rather than speed. Raises QatError if it cannot be loaded here."""
        return cls(file, device)

    @staticmethod
    def takes(file: Path) -> bool:
        """Tell whether `file` is for this engine, if two engines share a suffix."""
        return True

    @property
    def notes(self) -> Sequence[str]:
        """Return notes on how the engine runs the file, known after the first run."""
        return ()

    @abstractmethod
    def signature(self) -> Signature:
        """Describe the file. Raises QatError if its names or metadata cannot be read."""

    @abstractmethod
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the outputs, by name, for inputs on any device.

        They are on the session's device, and valid until the next call.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the memory on the device."""


def simulated_note(metadata: Mapping[str, str], backend: str) -> list[str]:
    """Return a line if `backend` only simulates the INT8 of an exported file, by the file's metadata; else nothing.

    Raises QatError if the metadata name no target.
    """
    if backend not in metadata.get('simulated_in', '').split(','):
        return []
    title, made_for = BACKENDS[backend].title, load_target(metadata.get('target', DEFAULT_TARGET)).title
    return [
        f'{title} computes INT8 convolutions of this file in float: it was quantized for {made_for}; '
        f'for speed in {title}: qat.py quantize --target {backend}'
    ]


def padded_note(metadata: Mapping[str, str], backend: str) -> list[str]:
    """Return a line if the widths of an exported file are padded for another engine, by the file's metadata; else nothing."""
    if 'padded' not in metadata:
        return []
    title, other = BACKENDS[backend].title, '--include openvino' if backend == 'openvino' else '--no-pad'
    return [
        f'widths of this file are padded for {TARGETS[DEFAULT_TARGET].title}, which costs {title} time; a file without: export_qat.py {other}'
    ]
