"""The code of each backend, loaded when it is asked for.

config/backends.py has a line for each backend. The file that the line names has SESSION, a class of session.Session.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from utils.qat.config.backends import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.session import Session


def session_of(backend: str) -> type[Session]:
    """Return the class of a backend's sessions. backend: a key of BACKENDS."""
    return import_module(f'{__package__}.{BACKENDS[backend].file}').SESSION


def backends_of(path: Path) -> list[str]:
    """Return the backends that take an exported file in an evaluation, the first choice first."""
    able = [name for name, line in BACKENDS.items() if path.suffix.lower() in line.predicts]
    return [name for name in able if len(able) == 1 or session_of(name).takes(path)]


def open_file(path: Path, device: torch.device = torch.device('cpu'), backend: str | None = None) -> FileModel:
    """Open an exported file for an evaluation.

    Args:
        path: the file.
        device: where it is computed.
        backend: what computes it; None = the first that takes such files.

    Raises:
        QatError: the file is none, or cannot run here, or the backend does not take such files.
    """
    able = backends_of(path)
    if backend is not None and backend not in able:
        raise QatError(
            f'--backend {backend}: {BACKENDS[backend].title} does not run {path.suffix} files; for {path} give '
            f'{" or ".join(able)}'
        )
    chosen = backend or able[0]
    return FileModel(session_of(chosen).to_evaluate(path, device, chosen))
