"""A command from its arguments to its exit status: 0 done, 2 a mistake of the user's, 130 interrupted."""

import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
import time
from pathlib import Path

from utils.qat.core.distributed import is_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RED, TERMINAL, painted
from utils.qat.core.printable import is_printable, visible
from utils.qat.core.system_errors import KINDS, OUTPUT, explain

FIRST_SPEAKS = 5  # seconds that a failed process leaves to the first to say the same


class _Speak(argparse.Action):
    """An option that says how much the terminal is told; it leaves nothing in the parsed arguments."""

    def __init__(self, option_strings, dest, level, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.level = level

    def __call__(self, *_):
        TERMINAL.setLevel(self.level)


class Parser(argparse.ArgumentParser):
    """argparse with --quiet and --verbose, whose errors are one line (no usage dump) and leave through QatError like every other
    bad input."""

    def __init__(self, *args, verbose="details and upstream's messages as well", **options):
        """verbose: what --verbose adds, in words."""
        super().__init__(*args, **options)
        speak = self.add_mutually_exclusive_group()
        speak.add_argument(
            '--quiet', action=_Speak, level=logging.WARNING, help='errors, warnings and the result, no more'
        )
        speak.add_argument('--verbose', action=_Speak, level=logging.DEBUG, help=verbose)

    def error(self, message):
        raise QatError(f"{message} (see '{self.prog} -h')")


def run_command(main, argv=None):
    """Run `main(argv)` and turn what it raises into an exit status: 0 done, 2 user's mistake, 130 interrupted.

    Under torchrun most mistakes are met by all processes. The first says so and ends, and torchrun ends the others; only one
    that is alone with its mistake is still there to speak.
    """
    TERMINAL.setLevel(logging.INFO)  # until --quiet or --verbose is met
    start = time.perf_counter()
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            errors='replace'
        )  # where the locale has no arrows or bars, a question mark is better than a traceback
    name = Path(sys.argv[0]).name + f' (process {rank()} of {world_size()})' * (not is_first())
    try:
        status = main(argv) or 0
        LOGGER.debug(f'{name} took {time.perf_counter() - start:.1f} s')
        return status
    except QatError as e:
        problem = str(e)
        _note()
    except KINDS as e:
        if getattr(e, 'filename', None) == OUTPUT:  # a full disk, `| head`
            _silence(sys.stdout)
            if e.errno == errno.EPIPE:  # whoever reads has enough
                return 128 + signal.SIGPIPE
        problem = explain(e)
        if problem is None:
            raise
        problem = visible(problem)
        _note()
    except KeyboardInterrupt as e:
        if is_first():
            advice = f'; go on with: {e}' if str(e) else ''  # see `resumable`
            _say(f'{name}: interrupted; every file that was finished is whole{advice}')
        return 130
    if not is_first():
        time.sleep(FIRST_SPEAKS)
    _say(f'{name}: {painted("error:", RED, sys.stderr)} {problem}')
    return 2


def open_streams():
    """Point standard streams that were closed (`>&-`) at /dev/null.

    Left closed, the next file that is opened would get their number, and whatever prints would write into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    sys.stdout, sys.stderr = sys.stdout or open(1, 'w'), sys.stderr or open(2, 'w')


def _note():
    """Log where the exception at hand was found, if the log can be written to: it may be on the disk that is full."""
    with contextlib.suppress(OSError):
        LOGGER.debug('where it was found:', exc_info=True)


def _silence(stream):
    """Let a stream that cannot be written to swallow the rest, also that which Python writes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(line):
    """Print to stderr, if anybody listens."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


@contextlib.contextmanager
def resumable(command):
    """What is interrupted in the block, or ended by the system, can be gone on with by `command`, and `run_command` says so."""
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(command) from e
    except KINDS as e:
        problem = explain(e)
        if problem is None or getattr(e, 'filename', None) == OUTPUT:
            raise
        raise QatError(f'{problem}; what was finished is whole, go on with: {command}') from e


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
    if not all(
        is_printable(c) or '\ud800' <= c <= '\udfff' for c in str(path)
    ):  # names need not be UTF-8, but are repeated
        raise QatError(f'{flag} {path}: the name has control characters; rename it')
    if suffixes and path.suffix.lower() not in suffixes:
        raise QatError(f'{flag} {path}: expected a file ending in {" or ".join(suffixes)}')
    return path
