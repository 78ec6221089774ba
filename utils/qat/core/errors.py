"""What goes wrong, in one printable line: a user's mistake, or an error of the system.

The user can correct a `QatError`: the command prints it as one line on stderr and ends with exit code 2. A full disk,
missing memory or a killed process is no bug either: `explain` names the file or the limit, and the remedy. Python, PyTorch
and OpenCV have exception classes for some of these errors; the words of the message identify the others. Every other
exception is a bug of ours or of a library, and keeps its traceback.
"""

import contextlib
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from utils.qat.core.text import cut, visible

FULL = errno.ENOSPC, errno.EDQUOT  # no space, quota
OUTPUT = '<output>'  # filename of an OSError of standard output
KINDS = OSError, MemoryError, RuntimeError, ImportError  # classes of errors that the system can cause
SHM = Path('/dev/shm')
KILLED = (
    'a data loading process was killed, which the system does when memory runs out; use fewer --workers or a smaller '
    '--batch-size, and repeat the command'
)
PROCESSES = 'no more processes or threads are allowed (ulimit -u, or the limits of the container); use fewer --workers'
TORCHVISION = (
    'torchvision cannot load its compiled part: it is of another PyTorch: ./install_dependencies.sh, or ulimit -v leaves it no '
    'memory'
)
UNPATCHED = (
    'this folder is no patched YOLOv9, which the commands run in; lay the toolkit over a clone: '
    'scripts/get_yolov9.sh ../yolov9 && ./patch_yolov9.sh ../yolov9 && cd ../yolov9'
)
INSTALL = f"install what the commands need, in the toolkit's folder: PYTHON={shlex.quote(sys.executable)} ./install_dependencies.sh"
PLACES = '--project, --save, for temporary files TMPDIR'
OPEN_FILES = 'too many open files; allow more with: ulimit -n 4096, or use fewer --workers'


class QatError(Exception):
    """A user's mistake, in one printable line: the file or flag, the allowed values and the next step."""

    def __str__(self) -> str:
        text = super().__str__()
        if text.startswith('Caught QatError in DataLoader worker'):  # then a traceback precedes the message
            text = text.rpartition(f'\n{__name__}.{type(self).__name__}: ')[2].rstrip('\n')
        return cut(visible(text))


@contextlib.contextmanager
def naming(source: object) -> Iterator[None]:
    """Prefix a QatError of the block with the file or flag that it is about."""
    try:
        yield
    except QatError as e:
        raise QatError(f'{source}: {e}') from e


def one_line(text: object, most: int = 200) -> str:
    """Return a text on one line of at most `most` characters; of an error what it says, or else its kind."""
    return ' '.join(str(text).split())[:most] or type(text).__name__ * isinstance(text, BaseException)


@contextlib.contextmanager
def reporting(problem: str, *errors: type[BaseException], remedy: str = '', most: int = 200) -> Iterator[None]:
    """Raise errors of a library in the block as a QatError: the problem, what the library says on one line, and the remedy.

    A QatError passes as it is.
    """
    try:
        yield
    except QatError:
        raise
    except errors as e:
        # of any kind: which one
        said = f'{type(e).__name__}: ' * (Exception in errors) + one_line(e, most)
        raise QatError(f'{problem} ({said})' + f'; {remedy}' * bool(remedy)) from e


def refuse(problems: Iterable[tuple[object, str]]) -> None:
    """Raise one QatError with the messages of all problems found. problems: pairs (whether it is one, its message)."""
    bad = [text for is_bad, text in problems if is_bad]
    if bad:
        raise QatError('; '.join(bad))


def explain(error: BaseException) -> str | None:
    """Explain an error of the system in one line; None for any other error."""
    number, reason, file = (getattr(error, name, None) for name in ('errno', 'strerror', 'filename'))
    if number and file is not None:
        return f'output: {reason}' if file == OUTPUT else _of_file(number, reason, file)
    if number in (*FULL, errno.EROFS, errno.EACCES):  # without a file's name it is no failed write but a semaphore
        return _shared_memory()
    for kind, words, line in CASES:
        if isinstance(error, kind) and re.search(words, str(error)):
            return line if isinstance(line, str) else line()
    # a name with a dot is a part of a package that is there
    if isinstance(error, ModuleNotFoundError) and '.' not in (error.name or '.'):
        return f'the package {error.name} is not installed for {sys.executable}; {INSTALL}'
    return None


def _of_file(number: int, reason: str | None, name: str | bytes) -> str:
    file = Path(os.fsdecode(name))
    if number in FULL:
        folder = next(p for p in file.absolute().parents if p.is_dir())
        return (
            f'{file}: {reason}, {shutil.disk_usage(folder).free / 1e6:.1f} MB are free in {folder}; make room, or choose another '
            f'folder ({PLACES})'
        )
    if number == errno.EFBIG:
        return (
            f'{file}: {reason}, for ulimit -f or for the file system; allow more, or choose another folder ({PLACES})'
        )
    if number == errno.ENOENT:
        return f'{file}: {reason}; it or its folder was moved or deleted meanwhile, put it back and repeat the command'
    if number in (errno.EMFILE, errno.ENFILE):
        return OPEN_FILES
    return f'{file}: {reason}; choose another folder ({PLACES})'


def _shared_memory() -> str:
    free = f' ({shutil.disk_usage(SHM).free / 1e6:.0f} MB are free in {SHM})' if SHM.is_dir() else ''
    return f'out of shared memory{free}, through which data loading processes pass images; use --workers 0, or give a container more: docker run --shm-size=8g'


def _memory() -> str:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = (
        f' (the address space is limited to {limit / 1e6:.0f} MB: ulimit -v)' if limit != resource.RLIM_INFINITY else ''
    )
    return f'out of memory{limited}; use fewer --workers, a smaller --batch-size or --imgsz'


CASES: tuple[tuple[type[BaseException], str, str | Callable[[], str]], ...] = (
    # class, words of the message, line: the first that fits
    (MemoryError, '', _memory),
    (ModuleNotFoundError, r"^No module named '(models|utils)[.']", UNPATCHED),
    (Exception, 'Too many open files|ancdata', OPEN_FILES),
    (Exception, r'Bus error|shared memory (object|limit)|shared memory\(shm\)|</torch_', _shared_memory),
    (RuntimeError, 'operator torchvision::nms does not exist', TORCHVISION),
    (RuntimeError, r'^DataLoader worker.*(was killed|killed by signal|exited unexpectedly)', KILLED),
    (Exception, "(?i)can(no|')t allocate memory|not enough memory|bad_alloc|failed to map segment", _memory),
    (Exception, "Resource temporarily unavailable|can't start new thread", PROCESSES),
)
