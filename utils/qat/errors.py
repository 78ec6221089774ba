"""The line between a user's mistake and a bug.

A `QatError` is something the user can mend: it prints as one line on stderr and ends the command with exit code 2.
Every other exception is a bug of ours (or of a library) and keeps its traceback.
"""
import argparse
import contextlib
import errno
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from utils.qat.text import cut, is_printable, visible

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # no space, quota, largest file
USERS = *FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG  # what of the system is for the user to mend
FIRST_SPEAKS = 5  # seconds that a failed process leaves to the first to say the same


class QatError(Exception):
    """A mistake of the user's. The message names the file or flag, what is allowed, and what to do next, in one line whatever it repeats."""

    def __str__(self):
        text = super().__str__()
        if text.startswith('Caught QatError in DataLoader worker'):  # whose traceback stands before the message
            text = text.rpartition(f'\n{__name__}.{type(self).__name__}: ')[2].rstrip('\n')
        return cut(visible(text))


class _Speak(argparse.Action):
    """An option that says how much the terminal is told; it leaves nothing in the parsed arguments."""

    def __init__(self, option_strings, dest, level, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.level = level

    def __call__(self, *_):
        from utils.qat.log import TERMINAL  # here: what it needs imports QatError
        TERMINAL.setLevel(self.level)


class Parser(argparse.ArgumentParser):
    """argparse with --quiet and --verbose, whose errors are one line (no usage dump) and leave through QatError like every other
    bad input."""

    def __init__(self, *args, verbose="details and upstream's messages as well", **options):
        """verbose: what --verbose adds, in words."""
        super().__init__(*args, **options)
        speak = self.add_mutually_exclusive_group()
        speak.add_argument('--quiet', action=_Speak, level=logging.WARNING, help='errors, warnings and the result, no more')
        speak.add_argument('--verbose', action=_Speak, level=logging.DEBUG, help=verbose)

    def error(self, message):
        raise QatError(f"{message} (see '{self.prog} -h')")


def run_command(main, argv=None):
    """Run `main(argv)` and turn what it raises into an exit status: 0 done, 2 user's mistake, 130 interrupted.

    Under torchrun most mistakes are met by all processes. The first says so and ends, and torchrun ends the others; only one
    that is alone with its mistake is still there to speak.
    """
    from utils.qat.distributed import is_first, rank, world_size  # here: they import QatError
    from utils.qat.log import LOGGER, RED, TERMINAL, painted
    TERMINAL.setLevel(logging.INFO)  # until --quiet or --verbose is met
    start = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='replace')  # where the locale has no arrows or bars, a question mark is better than a traceback
    name = Path(sys.argv[0]).name + f' (process {rank()} of {world_size()})' * (not is_first())
    try:
        status = main(argv) or 0
        LOGGER.debug(f'{name} took {time.perf_counter() - start:.1f} s')
        return status
    except QatError as e:
        problem = str(e)
        LOGGER.debug('where it was found:', exc_info=True)
    except OSError as e:
        if e.filename is None:  # the terminal, or what stands for it: a full disk, `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if e.errno == errno.EPIPE:  # whoever reads has enough
            return 128 + signal.SIGPIPE
        if e.errno not in USERS:
            raise
        problem = visible(explain(e))
    except KeyboardInterrupt as e:
        if is_first():
            advice = f'; go on with: {e}' if str(e) else ''  # see `resumable`
            print(f'{name}: interrupted; every file that was finished is whole{advice}', file=sys.stderr)
        return 130
    if not is_first():
        time.sleep(FIRST_SPEAKS)
    print(f'{name}: {painted("error:", RED, sys.stderr)} {problem}', file=sys.stderr)
    return 2


def explain(error):
    """An OSError that is the user's to mend, in a line: which file, what is the matter, and what to do."""
    if error.filename is None:
        return f'output: {error.strerror}'
    file = Path(os.fsdecode(error.filename))
    if error.errno not in FULL:
        return f'{file}: {error.strerror}; choose another folder (--project, --save)'
    folder = next(p for p in file.absolute().parents if p.is_dir())
    return f'{file}: {error.strerror}, {shutil.disk_usage(folder).free / 1e6:.1f} MB are free in {folder}; make room, or choose another folder (--project, --save)'


@contextlib.contextmanager
def resumable(command):
    """What is interrupted in the block, or ends for want of space, can be gone on with by `command`, and `run_command` says so."""
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(command) from e
    except OSError as e:
        if e.errno not in FULL:
            raise
        raise QatError(f'{explain(e)}; what was finished is whole, go on with: {command}') from e


@contextlib.contextmanager
def explain_out_of_memory(batch_size):
    """Turn CUDA's out-of-memory error into advice: the batch size to try next."""
    import torch  # here, so that `-h` does not pay for it
    try:
        yield
    except torch.cuda.OutOfMemoryError as e:
        advice = f'try --batch-size {batch_size // 2}' if batch_size > 1 else 'try a smaller --imgsz'
        raise QatError(f'out of GPU memory at --batch-size {batch_size}: {advice}') from e


def require_file(path, flag, suffixes=()):
    """`path` as a Path if it is a readable file with one of `suffixes` (any if empty), else a QatError naming `flag`."""
    path = Path(path)
    if not os.path.exists(path):  # unlike Path.exists, it takes names of any length
        raise QatError(f'{flag} {path}: no such file')
    if not path.is_file():
        raise QatError(f'{flag} {path}: not a file')
    if not all(is_printable(c) or '\ud800' <= c <= '\udfff' for c in str(path)):  # names need not be UTF-8, but are repeated
        raise QatError(f'{flag} {path}: the name has control characters; rename it')
    if suffixes and path.suffix.lower() not in suffixes:
        raise QatError(f"{flag} {path}: expected a file ending in {' or '.join(suffixes)}")
    return path


@contextlib.contextmanager
def atomic(path):
    """Yield a temporary path beside `path`; rename it to `path` if the block succeeds, delete it if not.

    The suffix is kept, because writers such as matplotlib choose the format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f'.{path.stem}.{os.getpid()}.tmp{path.suffix}')
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        e.filename = str(path)  # a failed write does not say where
        raise
    finally:
        tmp.unlink(missing_ok=True)
