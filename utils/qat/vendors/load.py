"""Load the code of a vendor by the names of the tables. Whoever imports this file depends on all rooms: tests/unit/test_imports.py."""

from importlib import import_module
from pathlib import Path

import torch

from utils.qat.backends.file_model import FileModel
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.vendors.measured import Measured
from utils.qat.vendors.session import Session


def measured_by(backend: str) -> type[Measured]:
    """Return the Measured class of a backend. backend: a key of BACKENDS."""
    return import_module(BACKENDS[backend].module).MEASURED


def session_of(backend: str) -> type[Session]:
    """Return the class of a backend's sessions. backend: a key of BACKENDS."""
    return measured_by(backend).opens


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
    if not able:
        suffixes = {suffix for line in BACKENDS.values() for suffix in line.predicts}
        raise QatError(f'{path}: no exported file, whose name ends with {", ".join(sorted(suffixes))}')
    if backend is not None and backend not in able:
        raise QatError(
            f'--backend {backend}: {BACKENDS[backend].title} does not run {path.suffix} files; for {path} give '
            f'{" or ".join(able)}'
        )
    if backend is None:
        require_named(path, able[0])
    chosen = backend or able[0]
    return session_of(chosen).open(path, device, chosen)


def open_file(path: Path, device: torch.device = torch.device('cpu'), backend: str | None = None) -> FileModel:
    """Open an exported file for an evaluation; see `open_session`."""
    return FileModel(open_session(path, device, backend))
