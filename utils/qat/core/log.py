"""The output of the commands: lines to the terminal and to the log file of a run, and one bar for each long step.

The terminal shows DEBUG with --verbose, INFO without --quiet, and always warnings, errors and RESULT, the answer of the
command. The log file has everything. Only terminals get colours and bars; pipes and files get plain lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING

from utils.qat.core.distributed import is_first
from utils.qat.core.errors import OUTPUT
from utils.qat.core.text import visible

if TYPE_CHECKING:
    from tqdm import tqdm

RESULT = logging.WARNING + 5
BOLD, RED, YELLOW = 1, 31, 33  # ANSI
MARKS = {logging.WARNING: ('warning:', YELLOW), logging.ERROR: ('error:', RED)}
BAR = '{desc}{percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left, {rate_noinv_fmt}{postfix}]'


def painted(text: str, style: int, stream: IO[str]) -> str:
    """Colour text for a stream that may show colours (see no-color.org); else return it unchanged. style: BOLD, RED, YELLOW."""
    plain = not stream.isatty() or os.environ.get('NO_COLOR') or os.environ.get('TERM') == 'dumb'
    return text if plain else f'\033[{style}m{text}\033[0m'


class LineFormatter(logging.Formatter):
    """A formatter that puts 'warning:' or 'error:' before a line, and escapes characters that control a terminal."""

    def __init__(self, line: str | None = None, time: str | None = None, coloured: bool = False) -> None:
        """Make a formatter. coloured: use colours where stdout is a terminal."""
        super().__init__(line, time)
        self.paint = (lambda text, style: painted(text, style, sys.stdout)) if coloured else lambda text, _: text

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        record.message = visible(record.message, keep='\n\t')
        if record.levelno in MARKS:
            record.message = f'{self.paint(*MARKS[record.levelno])} {record.message}'
        record.message = re.sub('(?m)^next: .*', lambda match: self.paint(match[0], BOLD), record.message)
        return super().formatMessage(record)

    def formatException(self, info: logging._SysExcInfoType) -> str:
        """Return a traceback, its control characters escaped."""
        return visible(super().formatException(info), keep='\n\t')


class Raising(logging.StreamHandler):
    """A handler that raises write errors, so that the command ends with one line; logging would print a traceback and go on."""

    baseFilename = OUTPUT  # the name that FileHandler gives it

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error of writing a record; an OSError gets the name of its file, which `explain` needs."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            error.filename = self.baseFilename
        raise


class Terminal(Raising):
    """A handler that writes to the current stdout, above the progress bar if there is one."""

    stream = property(lambda self: sys.stdout, lambda self, stream: None)

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter(coloured=True))
        # commands change it; a program that imports the toolkit has a terminal of its own
        self.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        library = sys.modules.get('tqdm')  # the first bar loads it
        with library.tqdm.external_write_mode(self.stream) if library else contextlib.nullcontext():
            super().emit(record)


class LogFile(Raising, logging.FileHandler):
    """A handler that writes to a file."""


LOGGER = logging.getLogger('yolov9-qat')
if not LOGGER.handlers:
    LOGGER.setLevel(logging.DEBUG if is_first() else logging.CRITICAL)
    LOGGER.propagate = False
    LOGGER.addHandler(Terminal())
TERMINAL = LOGGER.handlers[0]


def is_verbose() -> bool:
    """Tell whether --verbose was given."""
    return TERMINAL.level <= logging.DEBUG


def bar(iterable: Iterable | None, text: str, total: int | None = None, unit: str = 'batches') -> tqdm:
    """Show a progress bar over an iterable (None: the caller updates it); without a terminal, log one line."""
    from tqdm import tqdm

    text = visible(text)
    shown = is_first() and sys.stderr.isatty() and TERMINAL.level <= logging.INFO
    number = len(iterable) if total is None and isinstance(iterable, Sized) else total
    if not shown:
        LOGGER.info(text if number is None else f'{text}: {number} {unit}')
    return tqdm(
        iterable,
        desc=f'{text:<23}',
        total=number,
        unit=f' {unit}',
        bar_format=BAR,
        leave=False,
        dynamic_ncols=True,
        disable=not shown,
    )


@contextlib.contextmanager
def alive(text: str, seconds: float = 60.0) -> Iterator[None]:
    """Log a line each `seconds` of the block with the time that it has taken; a terminal has a bar."""
    ended, begin = Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(seconds):
            LOGGER.info(f'{text}: {time.monotonic() - begin:.0f} s')

    teller = Thread(target=tell, daemon=True)
    if not sys.stderr.isatty():
        teller.start()
    try:
        yield
    finally:
        ended.set()


def unshown(iterable: Iterable, *_: object, **__: object) -> Iterable:
    """Return an iterable without a progress bar, in place of `bar`."""
    return iterable


def log_to(path: str | Path) -> None:
    """Write all later messages, with their time of day, to a file too; it replaces the file of an earlier call."""
    for earlier in LOGGER.handlers[1:]:
        LOGGER.removeHandler(earlier)
        earlier.close()
    handler = LogFile(path, encoding='utf-8', errors='backslashreplace')
    handler.setFormatter(LineFormatter('%(asctime)s %(message)s', '%H:%M:%S'))
    LOGGER.addHandler(handler)


def finish(*following: str, **files: str | Path) -> None:
    """Print the end of a command: the files that it made (kind → path), and the commands to type next."""
    width = max(map(len, files), default=0)
    for what, file in files.items():
        LOGGER.log(RESULT, f'{what:<{width}}  {file}')
    for line in following:
        LOGGER.info(f'next: {line}')


class _WithoutBars:
    """A stderr without the lines that upstream's progress bars leave; `live` shows bars while they count."""

    def __init__(self, stream: IO[str], live: bool) -> None:
        self.stream, self.live, self.in_bar = stream, live, False

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        ends_bar, self.in_bar = self.in_bar and text == '\n', text.startswith('\r')
        if not self.in_bar and not ends_bar:
            self.stream.write(text)
        elif self.in_bar and self.live:
            self.stream.write('\r\033[K' if '100%|' in text else text)


@contextlib.contextmanager
def quiet_upstream(shown: int = logging.WARNING) -> Iterator[None]:
    """Hide upstream's messages in the block below the level `shown`; --verbose shows all."""
    from utils.general import LOGGER as upstream  # here, because it imports torch, and `-h` must not load it

    level = upstream.level
    upstream.setLevel(level if is_verbose() else shown)
    try:
        stream = _WithoutBars(sys.stderr, sys.stderr.isatty() and TERMINAL.level <= logging.INFO)
        with contextlib.redirect_stderr(stream):  # type: ignore[type-var]  # has all of stderr by __getattr__
            yield
    finally:
        upstream.setLevel(level)
