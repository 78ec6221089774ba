"""The code of each backend, loaded when it is asked for.

config/backends.py has a line for each backend. The file that the line names has SESSION, a class of session.Session.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from utils.qat.config.backends import BACKENDS
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.session import Session


def session_of(backend: str) -> type[Session]:
    """Return the class of a backend's sessions. backend: a key of BACKENDS."""
    return import_module(f'{__package__}.{BACKENDS[backend].file}').SESSION


def open_file(path: Path, device: torch.device = torch.device('cpu'), backend: str = 'tensorrt') -> FileModel:
    """Open an exported file for an evaluation.

    Args:
        path: the file.
        device: where it is computed.
        backend: what computes it; if this does not take such files, the first that does.

    Raises:
        QatError: the file is none, or cannot run here.
    """
    able = [name for name, line in BACKENDS.items() if path.suffix.lower() in line.predicts]
    chosen = backend if backend in able else able[0]
    return FileModel(session_of(chosen).to_evaluate(path, device, chosen))
