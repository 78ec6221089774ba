"""What the commands say: one logger to the terminal and, once a run has a folder, to its log file."""
import contextlib
import logging
import sys

from utils.qat.distributed import is_first

class Terminal(logging.StreamHandler):
    """What goes wrong when it writes is raised, and so told in one line, where logging prints a traceback and goes on."""

    def handleError(self, record):
        raise  # noqa: PLE0704  what is being handled


class LogFile(logging.FileHandler):
    """Likewise."""

    def handleError(self, record):
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            error.filename = self.baseFilename
        raise error


LOGGER = logging.getLogger('yolov9-qat')
if not LOGGER.handlers:
    LOGGER.setLevel(logging.INFO if is_first() else logging.CRITICAL)
    LOGGER.propagate = False
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='backslashreplace')  # names of files need not be text
    LOGGER.addHandler(Terminal(sys.stdout))

BAR = '{l_bar}{bar:20}{r_bar}'  # tqdm: description, bar, count, rate and remaining time


def bar(iterable, text, total=None):
    """`iterable` with a progress bar called `text`."""
    from tqdm import tqdm
    return tqdm(iterable, desc=f'{text:<22}', total=total, bar_format=BAR, leave=False, dynamic_ncols=True,
                disable=not is_first())


def log_to(path):
    """Write everything logged from now on to the file `path` too (appended, with the time of day)."""
    handler = LogFile(path, encoding='utf-8', errors='backslashreplace')
    handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
    LOGGER.addHandler(handler)


@contextlib.contextmanager
def quiet_upstream():
    """Context: upstream's logger keeps its layer tables and "Fusing layers..." to itself; warnings still show."""
    from utils.general import LOGGER as upstream  # here: it imports torch, and `-h` must not
    level = upstream.level
    upstream.setLevel(logging.WARNING)
    try:
        yield
    finally:
        upstream.setLevel(level)
