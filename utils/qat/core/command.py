"""A command from its arguments to its exit status: 0 done, 2 a user's mistake, 130 interrupted."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from utils.qat.core.distributed import is_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RED, TERMINAL, painted
from utils.qat.core.printable import is_printable, visible
from utils.qat.core.system_errors import KINDS, OUTPUT, explain

FIRST_SPEAKS = 5  # seconds that a failed process waits: the first process may print the same error meanwhile


class _Speak(argparse.Action):
    """Set the level of the terminal by an option, and leave nothing in the parsed arguments."""

    def __init__(self, option_strings: Sequence[str], dest: str, level: int, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.level = level

    def __call__(self, *_: Any) -> None:
        TERMINAL.setLevel(self.level)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with --quiet and --verbose, which raises QatError for bad arguments.

    argparse prints its usage and ends the process. Here a bad argument is one line, as every other bad input.
    """

    def __init__(self, *args: Any, verbose: str = "details and upstream's messages as well", **options: Any) -> None:
        """Make a parser.

        Args:
            *args: as ArgumentParser takes them.
            verbose: help of --verbose.
            **options: as ArgumentParser takes them.
        """
        super().__init__(*args, **options)
        speak = self.add_mutually_exclusive_group()
        speak.add_argument(
            '--quiet', action=_Speak, level=logging.WARNING, help='errors, warnings and the result, no more'
        )
        speak.add_argument('--verbose', action=_Speak, level=logging.DEBUG, help=verbose)

    def error(self, message: str) -> NoReturn:
        """Raise a bad argument as a QatError."""
        raise QatError(f"{message} (see '{self.prog} -h')")


def run_command(main: Callable[..., int | None], argv: Sequence[str] | None = None) -> int:
    """Run `main(argv)` and turn its result or its exception into an exit status.

    Under torchrun all processes meet most mistakes at once. The first process prints the error and ends, and
    torchrun ends the others. A process that is alone with its mistake waits, is not ended, and prints it.

    Args:
        main: a command: arguments → exit status; None is 0.
        argv: arguments; None = the process's own.

    Returns:
        0 done, 2 a user's mistake or a limit of the system, 130 interrupted, 141 nobody reads standard output any more.

    Raises:
        Exception: a bug of ours or of a library, with its traceback.
    """
    TERMINAL.setLevel(logging.INFO)  # --quiet and --verbose change it when they are parsed
    start = time.perf_counter()
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        # A locale may lack arrows and bars: a question mark is better than a traceback.
        stream.reconfigure(errors='replace')  # type: ignore[union-attr]  # Python's own streams have it
    name = Path(sys.argv[0]).name + f' (process {rank()} of {world_size()})' * (not is_first())
    try:
        status = main(argv) or 0
        LOGGER.debug(f'{name} took {time.perf_counter() - start:.1f} s')
        return status
    except QatError as e:
        problem = str(e)
        _note()
    except KINDS as e:
        if isinstance(e, OSError) and e.filename == OUTPUT:  # standard output failed: a full disk, a closed pipe
            _silence(sys.stdout)
            if e.errno == errno.EPIPE:  # the reader of the pipe, such as `head`, has ended
                return 128 + signal.SIGPIPE
        reason = explain(e)
        if reason is None:
            raise
        problem = visible(reason)
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


def open_streams() -> None:
    """Point each standard stream that is closed (`>&-`) at /dev/null.

    The next file that a process opens would otherwise get the number of the stream, and each print would write into
    this file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    sys.stdout, sys.stderr = sys.stdout or open(1, 'w'), sys.stderr or open(2, 'w')


def _note() -> None:
    """Log the traceback of the current exception, unless the log is on the disk that is full."""
    with contextlib.suppress(OSError):
        LOGGER.debug('where it was found:', exc_info=True)


def _silence(stream: IO[str]) -> None:
    """Send the rest of a stream that cannot be written to /dev/null; Python flushes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(line: str) -> None:
    """Print a line to stderr, or nothing if stderr cannot be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


@contextlib.contextmanager
def resumable(command: str) -> Iterator[None]:
    """Name the command that resumes the block, if the block is interrupted or the system stops it.

    Args:
        command: the command that resumes the run.

    Raises:
        KeyboardInterrupt: with `command` as its text; `run_command` prints it.
        QatError: the system stopped the block, see system_errors.
    """
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
def explain_out_of_memory(batch_size: int) -> Iterator[None]:
    """Turn CUDA's out-of-memory error in the block into a QatError that names the next batch size to try."""
    import torch  # here, because `-h` must not load it

    try:
        yield
    except torch.cuda.OutOfMemoryError as e:
        advice = f'try --batch-size {batch_size // 2}' if batch_size > 1 else 'try a smaller --imgsz'
        raise QatError(f'out of GPU memory at --batch-size {batch_size}: {advice}') from e


def require_file(path: str | Path, flag: str, suffixes: Collection[str] = ()) -> Path:
    """Check that a path is a file, and return it as a Path.

    Args:
        path: the file.
        flag: the option that gave it.
        suffixes: allowed endings in lower case, such as '.pt'; empty = any.

    Raises:
        QatError: there is no such file, its name has control characters, or its ending is another one.
    """
    path = Path(path)
    if not os.path.exists(path):  # Path.exists raises an error for a name that is too long
        raise QatError(f'{flag} {path}: no such file')
    if not path.is_file():
        raise QatError(f'{flag} {path}: not a file')
    # Messages repeat the name. A byte that is not UTF-8 is a surrogate here, and is allowed.
    if not all(is_printable(c) or '\ud800' <= c <= '\udfff' for c in str(path)):
        raise QatError(f'{flag} {path}: the name has control characters; rename it')
    if suffixes and path.suffix.lower() not in suffixes:
        raise QatError(f'{flag} {path}: expected a file ending in {" or ".join(suffixes)}')
    return path


def require_data(path: Path, flag: str = '--data') -> Path:
    """Check that a path is a data YAML, or a folder of a classifier's images, and return it.

    Raises:
        QatError: it is neither.
    """
    return path if path.is_dir() else require_file(path, flag, ('.yaml', '.yml'))


NETWORK = re.compile(r'(resnet|resnext|wide_resnet|mobilenet|efficientnet|regnet|convnext)\w*([-_.]\w+)*')


def is_network(path: Path) -> bool:
    """Tell whether a path is the name of a network of torchvision, such as resnet18, or a file of its weights (.pth)."""
    if not NETWORK.fullmatch(path.name):
        return False
    return (path.suffix == '.pth' and path.is_file()) or not (path.suffix or os.path.exists(path))
