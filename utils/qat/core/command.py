"""A command from its arguments to its exit status and the next command: 0 done, 2 a user's mistake, 130 interrupted."""

import argparse
import contextlib
import errno
import logging
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from utils.qat.core.distributed import is_first, rank, require_numbers, world_size
from utils.qat.core.errors import KINDS, OUTPUT, QatError, explain
from utils.qat.core.log import LOGGER, RED, TERMINAL, painted
from utils.qat.core.machine import set_environment
from utils.qat.core.text import visible

# Bytes of address space. With less, libraries that PyTorch loads crash or end the process, without an exception to catch.
TORCH_TAKES = 5 * 2**30
FIRST_SPEAKS = 5  # seconds that a failed process waits: the first process may print the same error meanwhile
# `python -c` would import from the current folder: a torch.py there must not run. -I would drop PYTHONPATH and the packages of the
# user too, and -P needs Python 3.11.
ALONE = 'import sys; sys.path[:] = filter(None, sys.path)\n'


class _Speak(argparse.Action):
    """An option that sets the log level of the terminal, and adds nothing to the parsed arguments."""

    def __init__(self, option_strings: Sequence[str], dest: str, level: int, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.level = level

    def __call__(self, *_: object) -> None:
        TERMINAL.setLevel(self.level)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with --quiet and --verbose, which raises QatError for bad arguments."""

    def __init__(
        self, verbose: str = "details and upstream's messages as well", add_help: bool = True, **options: Any
    ) -> None:
        """Make a parser. verbose: help of --verbose. add_help=False: call `add_common` later for -h, --quiet and --verbose."""
        super().__init__(add_help=False, **options)
        self.verbose = verbose
        if add_help:
            self.add_common(self)

    def add_common(self, group: argparse._ActionsContainer) -> None:
        """Add -h, --quiet and --verbose to a group of options."""
        speak = group.add_mutually_exclusive_group()
        speak.add_argument(
            '--quiet', action=_Speak, level=logging.WARNING, help='errors, warnings and the result, no more'
        )
        speak.add_argument('--verbose', action=_Speak, level=logging.DEBUG, help=self.verbose)
        group.add_argument(
            '-h', '--help', action='help', default=argparse.SUPPRESS, help='show this help message and exit'
        )

    def error(self, message: str) -> NoReturn:
        """Raise a bad argument as a QatError."""
        raise QatError(f"{message} (see '{self.prog} -h')")


def run_command(main: Callable[..., int | None], argv: Sequence[str] | None = None, torch: bool = True) -> int:
    """Run `main(argv)` and return the exit status for its result or exception; a bug keeps its traceback.

    The status is the result of `main`; 2 for a user's mistake or a limit of the system, 130 if interrupted, 141 if standard
    output has no reader any more.

    Under torchrun most mistakes occur in all processes at once. The first process prints the error and ends, and torchrun
    ends the others. If only another process fails, it waits, is not ended, and prints its error.
    """
    set_environment()
    TERMINAL.setLevel(logging.INFO)  # --quiet and --verbose change it when they are parsed
    start = time.perf_counter()
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        # A locale may lack arrows and bars: a question mark is better than a traceback.
        stream.reconfigure(errors='replace')  # type: ignore[union-attr]  # Python's own streams have it
    name = Path(sys.argv[0]).name + f' (process {rank()} of {world_size()})' * (not is_first())
    try:
        _require_environment(torch)
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


def _require_environment(torch: bool) -> None:
    """Raise QatError for process settings under which Python, PyTorch or upstream misbehaves."""
    require_numbers()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if torch and limit != resource.RLIM_INFINITY and limit < TORCH_TAKES:
        raise QatError(
            f'out of memory (the address space is limited to {limit / 1e6:.0f} MB: ulimit -v), and PyTorch with its libraries takes '
            f'up to {TORCH_TAKES / 1e6:.0f} MB; allow more: ulimit -v {TORCH_TAKES // 1024}'
        )
    if any(option.partition(':')[0] == 'error' and option.count(':') < 3 for option in sys.warnoptions):
        raise QatError('PYTHONWARNINGS=error, python -W error: stops at any warning of a library; unset PYTHONWARNINGS')
    if sys.flags.optimize:
        raise QatError(
            "PYTHONOPTIMIZE, python -O: switches assertions off, which upstream's checks of images and labels are; unset PYTHONOPTIMIZE"
        )


def open_streams() -> None:
    """Point each closed standard stream (`>&-`) at /dev/null; otherwise the next file gets its number and output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    sys.stdout, sys.stderr = sys.stdout or open(1, 'w'), sys.stderr or open(2, 'w')


def _note() -> None:
    """Log the traceback of the current exception, unless the log's disk is full."""
    with contextlib.suppress(OSError):
        LOGGER.debug('where it was found:', exc_info=True)


def _silence(stream: IO[str]) -> None:
    """Redirect a stream that cannot be written to /dev/null, because Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(line: str) -> None:
    """Print a line to stderr, or nothing if stderr cannot be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


@contextlib.contextmanager
def resumable(state: Path, command: str) -> Iterator[None]:
    """If an interrupt or the system stops the block, and the file `state` is there, raise an error that names `command`.

    The error is a KeyboardInterrupt or a QatError.
    """
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(*([command] if state.is_file() else [])) from e
    except KINDS as e:
        problem = explain(e)
        if problem is None or getattr(e, 'filename', None) == OUTPUT or not state.is_file():
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


def command(file: str | Path, *words: object) -> str:
    """Make the command `python FILE WORDS...` for the current folder; `file` is from the root of the toolkit."""
    # orig_argv, because a launcher changes sys.argv
    started = next((word for word in sys.orig_argv[1:] if word.endswith('.py')), '')
    here = Path(os.path.abspath(os.path.dirname(started)))
    root = here.parent if here.name in ('scripts', 'segment', 'classify') else here
    if (root / file).is_file():
        file = min(os.path.relpath(root / file), str(root / file), key=len)
    typed = (
        f'./{word}' if isinstance(word, Path) and str(word).startswith('-') else str(word) for word in (file, *words)
    )
    return shlex.join(['python', *typed])


def repeated(file: str | Path, *words: object) -> str:
    """Make a command with as many torchrun processes as this run. Arguments: see `command`."""
    typed = command(file, *words)
    return f'torchrun --nproc_per_node {world_size()} {typed.removeprefix("python ")}' if world_size() > 1 else typed


def converted(weights: Path) -> Path:
    """Return the default output of reparameterization.py for a checkpoint."""
    return weights.with_name(f'{weights.stem}-converted.pt')


def export_command(checkpoint: Path, imgsz: Iterable[int], include: str = 'onnx', *words: object) -> str:
    """Make the command that exports a checkpoint. words: further ones."""
    own = ['--dynamic', '--simplify'] if include == 'onnx' else []
    own += ['--imgsz', *map(str, sides_words(imgsz))]
    return command('export_qat.py', '--weights', checkpoint, '--include', include, *own, *words)


def sides_words(imgsz: Iterable[int]) -> list[int]:
    """Return height and width as they are typed: one number if they are equal."""
    sides = list(imgsz)
    return sides[:1] if len(set(sides)) == 1 else sides


def run_apart(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code, with `sys` imported, in a subprocess that imports nothing from the current folder.

    `arguments` are its sys.argv[1:]; `options` are those of subprocess.run. Returns its exit code, standard output and errors.
    """
    line = [sys.executable, '-c', ALONE + code, *map(str, arguments)]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options)
