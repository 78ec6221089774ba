"""The folder of a run: a new one for each run, and one process that writes to it."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import socket
import stat
from pathlib import Path

from utils.qat.core.distributed import is_first
from utils.qat.core.errors import QatError

LOCK = '.lock'  # in the folder of a run while a process works there: names it, and carries its lock
OURS = 'weights', 'log.txt'  # what a run opens by name, and a link would lead out of its folder


@contextlib.contextmanager
def run_folder(config):
    """Context: the folder of --resume, or else PROJECT/NAME, numbered if it exists and --exist-ok is not given.

    No other process of ours writes there meanwhile. A folder that is still empty at the end goes again. Only the first process
    of a torchrun gets the folder; the others get None, see distributed.from_first. Raises QatError at once if another process
    works there.
    """
    if not is_first():
        yield None
        return
    resume, made = getattr(config, 'resume', None), []
    folder = resume or _make(config.project / config.name, config.exist_ok, made)
    try:
        with writing(folder, '--resume' if resume else '--exist-ok'):
            links = [folder / name for name in OURS if (folder / name).is_symlink()]
            if links:
                raise QatError(
                    f'{links[0]}: a link, and a run writes to its own folder only; put the file or folder itself there'
                )
            yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _make(path, exist_ok, made):
    """Make and return the folder `path`, or path2, path3, ...; of two processes each gets its own. made: gets what was made."""
    missing = list(itertools.takewhile(lambda parent: not parent.exists(), path.parents))
    path.parent.mkdir(parents=True, exist_ok=True)
    made += missing
    for folder in itertools.chain([path], (Path(f'{path}{n}') for n in itertools.count(2))):
        try:
            folder.mkdir()
        except FileExistsError:
            if exist_ok and folder.is_dir():
                return folder
            if exist_ok:
                raise
        else:
            made.insert(0, folder)
            return folder


@contextlib.contextmanager
def writing(folder, flag):
    """Context: this process is the one that writes to `folder`. flag: the option that named an existing folder.

    The system takes the lock back when the process ends, however it ends. A lock file that is left is of a killed process, and
    harmless. Raises QatError at once, and changes nothing, if another process holds the lock. Does nothing but in the first
    process of a torchrun.
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
        if _is(file, descriptor):  # the folder may have been deleted, and made anew by another run
            with contextlib.suppress(OSError):
                file.unlink()  # first, so that whoever has opened it meanwhile finds that it is gone
        os.close(descriptor)


def _locked(file, flag):
    """Descriptor of the lock file `file`, locked by this process."""
    while True:
        descriptor, kind = _open(file)
        try:
            _lock(descriptor, kind, file, flag)
            if kind == fcntl.LOCK_SH:
                file.unlink()  # of another user's process, which is gone
            elif _is(file, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed by the process that held it, between our opening and our locking


def _open(file):
    """(descriptor, kind of lock) of the lock file, which is made if it is missing."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), fcntl.LOCK_EX
    except PermissionError:  # to make it; or it is another user's, and can be looked at
        with contextlib.suppress(OSError):
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), fcntl.LOCK_SH
        raise


def _lock(descriptor, kind, file, flag):
    """Lock without waiting. POSIX's lock, not flock's: that would live on in the workers of a DataLoader, which outlast a killed run."""
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
        who = re.fullmatch(rb'(\d{1,10}) ([\w.-]{1,255})\n', os.pread(descriptor, 300, 0), re.ASCII)
        pid, host = (part.decode() for part in who.groups()) if who else (None, None)
        which, end = (
            (f'process {pid} on {host}', f'end it there (kill {pid})') if who else ('another process', 'end it')
        )
        raise QatError(
            f'{flag} {file.parent}: {which} is writing to it; let it finish, or {end} and repeat this command'
            + ', or leave --exist-ok out' * (flag == '--exist-ok')
        ) from e


def _is(file, descriptor):
    """Whether the open file is the one that has the name `file`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(file))
    except OSError:
        return False
