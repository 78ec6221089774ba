"""The exact content of a JSON file that a command resumes from: every key known, every value of its type and range.

A kind says which values fit. It is one of

- a type: exactly this type fits, so that True is no int;
- a function: the value fits if it returns True;
- a tuple of kinds: one of them fits;
- [kind]: a list whose values all fit;
- {'key': kind, 'key?': kind, str: kind}: a dict with these keys. A key with ? may be missing. `str` stands for all
  other keys; without it there may be none.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

NONE = type(None)


def between(low: float, high: float, kinds: tuple[type, ...] = (int, float)) -> Callable[[Any], bool]:
    """Make the kind of a number in low..high, of one of the types `kinds`; NaN does not fit."""
    return lambda value: type(value) in kinds and low <= value <= high


SHARE, COUNT, NUMBER, SECONDS = between(0, 1), between(1, 2**53, (int,)), between(-1e30, 1e30), between(0, 1e10)
INDEX, POSITIVE = between(0, 2**53, (int,)), between(0, 1e30)
DECIBELS = between(-math.inf, math.inf, (float,))  # infinite where two models give the same values
FIGURES = {'ap': SHARE, 'ap50': SHARE, 'precision': SHARE, 'recall': SHARE}
COCO = {'ap': NUMBER, 'ap50': NUMBER, 'ap75': NUMBER}
CHANCE = {'difference': between(-1, 1), 'chance': POSITIVE}  # chance.difference, and with masks:
AGAINST = {**CHANCE, 'mask?': CHANCE}
METRICS = {  # evaluate.Metrics.plain
    **FIGURES,
    'images': COUNT,
    'instances': COUNT,
    'mask?': {**FIGURES, 'coco?': COCO},
    'coco?': COCO,
    'per_class': [{'class': INDEX, 'name': str, 'instances': INDEX, **FIGURES, 'mask?': (NONE, FIGURES)}],
}
CLASS_FIGURES = {'top1': SHARE, 'top5': SHARE, 'mean_class': SHARE}
CLASS_METRICS = {  # classes.ClassMetrics.plain, and beside the float model classes.distance
    **CLASS_FIGURES,
    'images': COUNT,
    'agreement?': SHARE,
    'divergence?': NUMBER,
    'per_class': [{'class': INDEX, 'name': str, 'images': COUNT, 'top1': SHARE, 'top5': SHARE}],
}
SQNR = {str: DECIBELS}
CALIBRATION = {'method': str, 'biases?': str, 'divergence': {str: NUMBER}}


def misfit(value: Any, kind: Any, place: str = '') -> str | None:
    """Find the first part of a value that is not of its kind.

    Args:
        value: a value as json.loads returns it.
        kind: see the head of this file.
        place: where the value stands in the file.

    Returns:
        Its place, such as 'epochs[2].ap'; None if everything fits.
    """
    if isinstance(kind, tuple):
        found = [misfit(value, k, place) for k in kind]
        return None if None in found else max(filter(None, found), key=len)  # of the kind that fits best
    if isinstance(kind, list):
        parts = [(f'{place}[{i}]', v, *kind) for i, v in enumerate(value)] if type(value) is list else None
    elif isinstance(kind, dict):
        parts = _items(value, kind, place) if type(value) is dict else None
    else:
        return None if (type(value) is kind if isinstance(kind, type) else kind(value)) else place or 'all of it'
    if parts is None:
        return place or 'all of it'
    return next((wrong for at, v, k in parts if (wrong := misfit(v, k, at))), None)


def _items(value: dict, kind: dict, place: str) -> list[tuple[str, Any, Any]]:
    """Return (place, value, kind) of each entry of a dict; a missing or unknown key gets a kind that nothing fits."""

    def at(key: Any) -> str:
        return f'{place}{"." * bool(place)}{ascii(key)[1:61] if type(key) is str else "?"}'

    named = {key.removesuffix('?'): k for key, k in kind.items() if key is not str}
    missing = [key for key in kind if key is not str and not key.endswith('?') and key not in value]
    return [
        *((at(key), None, _never) for key in missing),
        *((at(key), v, named.get(key, kind.get(str, _never))) for key, v in value.items()),
    ]


def _never(value: Any) -> bool:
    return False


def anything(value: Any) -> bool:
    """Be the kind of a value that is not checked."""
    return True


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it is no JSON, or no file.
        OSError: it cannot be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe would wait
        raise ValueError('not a file')
    try:
        return json.loads(file.read_text(encoding='utf-8'))
    except RecursionError as e:
        raise ValueError('lists within lists') from e
