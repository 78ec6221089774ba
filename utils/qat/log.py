"""What the commands say: one logger to the terminal and, once a run has a folder, to its log file."""
import contextlib
import logging
import sys

from utils.qat.distributed import is_first

LOGGER = logging.getLogger('yolov9-qat')
if not LOGGER.handlers:
    LOGGER.setLevel(logging.INFO if is_first() else logging.CRITICAL)
    LOGGER.propagate = False
    LOGGER.addHandler(logging.StreamHandler(sys.stdout))

BAR = '{l_bar}{bar:20}{r_bar}'  # tqdm: description, bar, count, rate and remaining time


def bar(iterable, text, total=None):
    """`iterable` with a progress bar called `text`."""
    from tqdm import tqdm
    return tqdm(iterable, desc=f'{text:<22}', total=total, bar_format=BAR, leave=False, dynamic_ncols=True,
                disable=not is_first())


def log_to(path):
    """Write everything logged from now on to the file `path` too (appended, with the time of day)."""
    handler = logging.FileHandler(path, encoding='utf-8')
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
