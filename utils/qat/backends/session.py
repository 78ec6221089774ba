"""A file that a backend has opened: its description and its run.

config/tables.py has a line for each backend. The file that the line names defines SESSION, a subclass of Session.
benchmark/measured.py adds what the benchmark needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError


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


def session_of(backend: str) -> type[Session]:
    """Return the class of a backend's sessions. backend: a key of BACKENDS."""
    return import_module(f'{__package__}.{BACKENDS[backend].file}').SESSION


def backends_of(path: Path) -> list[str]:
    """Return the backends that take an exported file in an evaluation, in order of preference."""
    able = [name for name, line in BACKENDS.items() if path.suffix.lower() in line.predicts]
    return [name for name in able if len(able) == 1 or session_of(name).takes(path)]


def require_named(path: Path, backend: str) -> None:
    """Raise QatError if `backend`, which the file needs and the user did not name, runs native code of the file."""
    if BACKENDS[backend].native:
        raise QatError(
            f'{path}: a package of {BACKENDS[backend].title}, which is native code and runs when it is loaded; that takes its name, '
            f'so if you trust the file: --backend {backend}'
        )


def open_session(path: Path, device: torch.device, backend: str | None = None) -> Session:
    """Open an exported file in `backend`; None = the first that takes such files.

    Raises QatError if the file is invalid or cannot run here; or if the backend does not take such files, or must be named.
    """
    able = backends_of(path)
    if backend is not None and backend not in able:
        raise QatError(
            f'--backend {backend}: {BACKENDS[backend].title} does not run {path.suffix} files; for {path} give '
            f'{" or ".join(able)}'
        )
    if backend is None:
        require_named(path, able[0])
    chosen = backend or able[0]
    return session_of(chosen).open(path, device, chosen)
