"""The folder of a run: each run gets a new one, and only one process writes to it."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.qat.core.distributed import is_first
from utils.qat.core.errors import QatError
from utils.qat.core.files import waits

# The lock file in the folder of a run. It has the number and host of the process that works there, or worked there last.
LOCK = '.lock'
# Runs of earlier versions left no lock file. A report of a run has these keys.
REPORTS = ('report.json', 'metrics.json', 'compare.json', 'benchmark.json', 'summary-sensitive-analysis.json')
REPORT_KEYS = {'settings', 'versions'}
CONTENT = re.compile(rb'(\d{1,10}) ([\w.-]{1,255})\n', re.ASCII)  # of LOCK
OURS = 'weights', 'log.txt'  # a run opens these by name, and a link would lead out of its folder
DELIVERED = 'weights/best.pt'  # another name of the best model so far, under the same name in every run


@contextlib.contextmanager
def run_folder(config: object) -> Iterator[Path | None]:
    """Yield `own_folder` on the first process of a torchrun, and None on the others, see distributed.from_first."""
    if is_first():
        with own_folder(config) as folder:
            yield folder
    else:
        yield None


@contextlib.contextmanager
def own_folder(config: Any) -> Iterator[Path]:
    """Yield the folder of a run: the folder of --resume, or a new one, PROJECT/NAME or that with the next free number.

    With --exist-ok the folder must be empty or of an earlier run, because a run would overwrite files of any other folder.
    No other process of ours writes there meanwhile. A new folder that is still empty at the end is removed.
    """
    resume = getattr(config, 'resume', None)
    made: list[Path] = []
    folder = resume or _make(config.project / config.name, config.exist_ok, made)
    try:
        with writing(folder, '--resume' if resume else '--exist-ok'):
            links = [folder / name for name in OURS if (folder / name).is_symlink()]
            if links:
                raise QatError(
                    f'{links[0]}: a link, and a run writes to its own folder only; put the file or folder itself there'
                )
            for path in folder.rglob('*'):
                if waits(path):
                    raise QatError(f'{path}: a pipe or a device, in the folder of a run; remove it')
            yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _make(path: Path, exist_ok: bool, made: list[Path]) -> Path:
    """Make the folder `path`, or path2, path3, ...; `made` gets the new folders, the innermost first."""
    missing = list(itertools.takewhile(lambda parent: not parent.exists(), path.parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    made += missing
    folders = itertools.chain([path], (Path(f'{path}{n}') for n in itertools.count(2)))
    while True:
        folder = next(folders)
        try:
            folder.mkdir()
        except FileExistsError:
            if exist_ok and folder.is_dir():
                _require_run(folder)
                return folder
            if exist_ok:
                raise
        else:
            made.insert(0, folder)
            return folder


def _in(folder: Path) -> list[str]:
    """Return the names in a folder, without the lock file."""
    return sorted({path.name for path in folder.iterdir()} - {LOCK})


def _require_run(folder: Path) -> None:
    """Raise QatError for a folder with files but without the lock file or report of an earlier run."""
    held = _in(folder)
    if held and not os.path.lexists(folder / LOCK) and not any(_is_report(folder / name) for name in REPORTS):
        raise QatError(
            f'--exist-ok {folder}: has {held[0]}, and is not the folder of an earlier run; leave --exist-ok out, or choose another --name'
        )


def _is_report(file: Path) -> bool:
    """Tell from its content whether a file is the report of a run."""
    if not file.is_file():
        return False
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and REPORT_KEYS <= content.keys()


@contextlib.contextmanager
def writing(folder: Path, flag: str) -> Iterator[None]:
    """Make this process, or the first of a torchrun, the only one that writes to `folder` in the block.

    Raises QatError at once if another process holds the lock. The system releases the lock when the process ends, however it
    ends. The lock file stays unless it is the only file: it marks the folder of a run.
    """
    if not is_first():
        yield
        return
    file = folder / LOCK
    descriptor = _locked(file, flag)
    try:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f'{os.getpid()} {socket.gethostname()}\n'.encode(errors='replace'), 0)
        except OSError as e:
            e.filename = str(file)
            raise
        yield
    finally:
        if _is(file, descriptor):  # another run may have deleted the folder and made it anew
            with contextlib.suppress(OSError):
                if not _in(folder):
                    file.unlink()  # before it is closed: a process that has opened it meanwhile sees that it is gone
        os.close(descriptor)


def _locked(file: Path, flag: str) -> int:
    """Return a descriptor of the lock file `file`, locked by this process."""
    while True:
        descriptor, kind = _open(file)
        try:
            _lock(descriptor, kind, file, flag)
            _require_ours(descriptor, file)
            if kind == fcntl.LOCK_SH:
                file.unlink()  # left by another user's process that has ended
            elif _is(file, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its process removed it between our opening and our locking: try again


def _open(file: Path) -> tuple[int, int]:
    """Open the lock file, and make it if it is missing; return (descriptor, kind of lock)."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), fcntl.LOCK_EX
    except PermissionError:  # the folder is read-only; or the file is another user's, and readable
        with contextlib.suppress(OSError):
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), fcntl.LOCK_SH
        raise


def _lock(descriptor: int, kind: int, file: Path, flag: str) -> None:
    """Lock without waiting.

    This is a POSIX lock. A flock would survive in the workers of a DataLoader, which outlive a killed run.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise QatError(f'{file}: not a file; remove it')
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise QatError(
                f'{file.parent}: cannot be locked ({e.strerror}), and without locks two runs would mix; '
                'choose a folder on another file system with --project'
            ) from e
        who = CONTENT.fullmatch(os.pread(descriptor, 300, 0))
        pid, host = (part.decode() for part in who.groups()) if who else (None, None)
        which, end = (
            (f'process {pid} on {host}', f'end it there (kill {pid})') if who else ('another process', 'end it')
        )
        raise QatError(
            f'{flag} {file.parent}: {which} is writing to it; let it finish, or {end} and repeat this command'
            + ', or leave --exist-ok out' * (flag == '--exist-ok')
        ) from e


def _require_ours(descriptor: int, file: Path) -> None:
    """Raise QatError for a lock file that another program wrote; an empty one is of a process that was killed."""
    content = os.pread(descriptor, 300, 0)
    if content and not re.match(rb'\d+ ', content):  # a host may be called anything
        raise QatError(f'{file}: not of a run of this toolkit; move it away, or choose another folder')


def _is(file: Path, descriptor: int) -> bool:
    """Tell whether `file` is still the name of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(file))
    except OSError:
        return False
