"""The code of each backend, loaded when it is asked for.

config/backends.py has a line for each backend, and the file that the line names has

    MODEL    class of a FileModel, made of (path, device, backend); what an evaluation asks for predictions. None if it has none
    RUNNER   class of a Runner, which the benchmark measures
"""

from importlib import import_module

from utils.qat.config.backends import BACKENDS


def code_of(backend):
    """The module of a backend, a key of BACKENDS."""
    return import_module(f'{__package__}.{BACKENDS[backend].file}')


def open_file(path, device, backend='tensorrt'):
    """The exported file `path` as a FileModel on a torch.device, computed by `backend`, or, if that does not take such files, by
    the first that does. Raises QatError if the file is none, or cannot run here."""
    able = [name for name, line in BACKENDS.items() if path.suffix.lower() in line.predicts]
    chosen = backend if backend in able else able[0]
    return code_of(chosen).MODEL(path, device, chosen)
