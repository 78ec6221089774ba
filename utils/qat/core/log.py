"""What the commands say: lines to the terminal and, once a run has a folder, to its log file; and one bar for each long step.

DEBUG is for --verbose, INFO for everyone but --quiet; warnings, errors and RESULT, what the command was called for, are for all.
The log file has everything. Colours and bars are for terminals: a pipe and a file get plain lines.
"""

import contextlib
import logging
import os
import re
import sys

from utils.qat.core.distributed import is_first
from utils.qat.core.printable import visible
from utils.qat.core.system_errors import OUTPUT

RESULT = logging.WARNING + 5
BOLD, RED, YELLOW = 1, 31, 33  # ANSI
MARKS = {logging.WARNING: ('warning:', YELLOW), logging.ERROR: ('error:', RED)}
BAR = '{desc}{percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left, {rate_noinv_fmt}{postfix}]'


def painted(text, style, stream):
    """`text` in one of the styles above if `stream` is a terminal and the user has nothing against colours (no-color.org)."""
    plain = not stream.isatty() or os.environ.get('NO_COLOR') or os.environ.get('TERM') == 'dumb'
    return text if plain else f'\033[{style}m{text}\033[0m'


class Line(logging.Formatter):
    """Calls warnings and errors by their names; in colours if `coloured` and where stdout is a terminal. What is said moves no cursor and has
    no colours of its own: names of files, classes and layers are in it."""

    def __init__(self, *args, coloured=False):
        super().__init__(*args)
        self.paint = (lambda text, style: painted(text, style, sys.stdout)) if coloured else lambda text, _: text

    def formatMessage(self, record):
        record.message = visible(record.message, keep='\n\t')
        if record.levelno in MARKS:
            record.message = f'{self.paint(*MARKS[record.levelno])} {record.message}'
        record.message = re.sub('(?m)^next: .*', lambda found: self.paint(found[0], BOLD), record.message)
        return super().formatMessage(record)

    def formatException(self, info):
        return visible(super().formatException(info), keep='\n\t')


def _named(error, file):
    """`error`, which if the system refused to write tells where: `explain` needs it."""
    if isinstance(error, OSError):
        error.filename = file
    return error


class Terminal(logging.StreamHandler):
    """To whatever stdout is now; lines appear above the progress bar, if there is one.

    What goes wrong when it writes is raised, and so told in one line, where logging prints a traceback and goes on.
    """

    stream = property(lambda self: sys.stdout, lambda self, stream: None)

    def __init__(self):
        super().__init__()
        self.setFormatter(Line(coloured=True))
        self.setLevel(logging.INFO)

    def emit(self, record):
        library = sys.modules.get('tqdm')  # which is loaded by the first bar
        with library.tqdm.external_write_mode(self.stream) if library else contextlib.nullcontext():
            super().emit(record)

    def handleError(self, record):
        raise _named(sys.exc_info()[1], OUTPUT)


class LogFile(logging.FileHandler):
    """Likewise."""

    def handleError(self, record):
        raise _named(sys.exc_info()[1], self.baseFilename)


LOGGER = logging.getLogger('yolov9-qat')
if not LOGGER.handlers:
    LOGGER.setLevel(logging.DEBUG if is_first() else logging.CRITICAL)
    LOGGER.propagate = False
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # names of files need not be text
    LOGGER.addHandler(Terminal())
TERMINAL = LOGGER.handlers[0]


def is_verbose():
    return TERMINAL.level <= logging.DEBUG


def bar(iterable, text, total=None, unit='batches'):
    """`iterable` with a progress bar called `text` that counts `unit`; where there is no terminal for it, a line before it begins."""
    from tqdm import tqdm

    text = visible(text)
    shown = is_first() and sys.stderr.isatty() and TERMINAL.level <= logging.INFO
    number = total if total is not None or not hasattr(iterable, '__len__') else len(iterable)
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


def log_to(path):
    """Write everything logged from now on to the file `path` too (appended, with the time of day)."""
    handler = LogFile(path, encoding='utf-8', errors='backslashreplace')
    handler.setFormatter(Line('%(asctime)s %(message)s', '%H:%M:%S'))
    LOGGER.addHandler(handler)


def finish(*following, **files):
    """The end of a command: the files it leaves, by what they are, and the commands to type next."""
    width = max(map(len, files), default=0)
    for what, file in files.items():
        LOGGER.log(RESULT, f'{what:<{width}}  {file}')
    for line in following:
        LOGGER.info(f'next: {line}')


class _WithoutBars:
    """stderr without what upstream's progress bars leave behind. `live`: one is shown as long as it counts."""

    def __init__(self, stream, live):
        self.stream, self.live, self.in_bar = stream, live, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        ends_bar, self.in_bar = self.in_bar and text == '\n', text.startswith('\r')
        if not self.in_bar and not ends_bar:
            self.stream.write(text)
        elif self.in_bar and self.live:
            self.stream.write('\r\033[K' if '100%|' in text else text)


@contextlib.contextmanager
def quiet_upstream():
    """Context: upstream's logger keeps its layer tables and "Fusing layers..." to itself, but for --verbose, and its bars do not stay;
    warnings show."""
    from utils.general import LOGGER as upstream  # here: it imports torch, and `-h` must not

    level = upstream.level
    upstream.setLevel(level if is_verbose() else logging.WARNING)
    try:
        with contextlib.redirect_stderr(
            _WithoutBars(sys.stderr, sys.stderr.isatty() and TERMINAL.level <= logging.INFO)
        ):
            yield
    finally:
        upstream.setLevel(level)
