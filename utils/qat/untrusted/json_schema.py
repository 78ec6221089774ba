"""Check plain values, such as the content of a JSON file: every key is known, every value has its type and range.

A kind says which values fit. It is one of

- a type: exactly this type fits, so that True is no int;
- a function: the value fits if it returns True;
- a tuple of kinds: one of them fits;
- [kind]: a list whose values all fit;
- {'key': kind, 'key?': kind, str: kind}: a dict with these keys. A key with ? may be missing. `str` stands for all
  other keys; without it no other key is allowed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NONE = type(None)


def between(low: float, high: float, kinds: tuple[type, ...] = (int, float)) -> Callable[[Any], bool]:
    """Make the kind of numbers in low..high, of one of the types `kinds`; NaN does not fit."""
    return lambda value: type(value) in kinds and low <= value <= high


def items(fits: Callable[[object], bool], low: int, high: float = math.inf) -> Callable[[object], bool]:
    """Make the kind of lists of low..high values that all fit."""
    return lambda value: type(value) is list and low <= len(value) <= high and all(map(fits, value))


SHARE, COUNT, NUMBER, SECONDS = between(0, 1), between(1, 2**53, (int,)), between(-1e30, 1e30), between(0, 1e10)
INDEX, POSITIVE = between(0, 2**53, (int,)), between(0, 1e30)
DECIBELS = between(-math.inf, math.inf, (float,))  # infinite if two models give the same values
CHANCE = {'difference': between(-1, 1), 'chance': POSITIVE}  # interval.difference, and with masks:
AGAINST = {**CHANCE, 'mask?': CHANCE}
SQNR = {str: DECIBELS}
CALIBRATION = {'images?': COUNT, 'method': str, 'biases?': str, 'divergence': {str: NUMBER}}


def misfit(value: object, kind: object, entry: str = '') -> str | None:
    """Find the first part of a value of JSON, at `entry` in its file, that is not of its kind; for kinds see the head of this file.

    Returns its place, such as 'epochs[2].ap'; None if everything fits.
    """
    wrong = _wrong(value, kind)
    return None if wrong is None else f'{entry}{wrong}'.lstrip('.') or 'all of it'


def _wrong(value: object, kind: Any) -> str | None:
    """Return the place of a misfit from `value` on, such as '[2].ap'; '' for `value` itself."""
    if isinstance(kind, tuple):
        misfits = [_wrong(value, k) for k in kind]
        # of the kind that fits best
        return None if None in misfits else max(filter(None, misfits), key=len, default='')
    if isinstance(kind, list):
        if type(value) is not list:
            return ''
        return next((f'[{i}]{wrong}' for i, v in enumerate(value) if (wrong := _wrong(v, *kind)) is not None), None)
    if isinstance(kind, dict):
        if type(value) is not dict:
            return ''
        parts = _items(value, kind)
        return next((f'.{_shown(key)}{wrong}' for key, v, k in parts if (wrong := _wrong(v, k)) is not None), None)
    return None if (type(value) is kind if isinstance(kind, type) else kind(value)) else ''


def first_wrong(entries: Mapping[str, object]) -> str | None:
    """Return the first entry that contradicts another; None if there is none. entries: entry → whether it does."""
    return next((entry for entry, wrong in entries.items() if wrong), None)


def _shown(key: object) -> str:
    return ascii(key)[1:-1][:60] if type(key) is str else '?'


def _items(value: dict, kind: dict) -> Iterator[tuple[object, object, object]]:
    """Yield (key, value, kind) of each entry of a dict; a missing or unknown key gets a kind that nothing fits."""
    for key in kind:
        if key is not str and not key.endswith('?') and key not in value:
            yield key, None, _never
    named = {key.removesuffix('?'): k for key, k in kind.items() if key is not str}
    other = kind.get(str, _never)
    for key, part in value.items():
        yield key, part, named.get(key, other) if type(key) is str else _never


def _never(value: object) -> bool:
    return False


def anything(value: object) -> bool:
    """Accept any value: the kind of a value that is not checked."""
    return True


def read_json(file: Path, kind: object = anything) -> Any:
    """Read a JSON file. kind: expected content, see the head of this file.

    Raises ValueError if it is no JSON, no file, or of another kind, and OSError if it cannot be read.
    """
    if file.exists() and not file.is_file():  # reading a pipe would wait
        raise ValueError('not a file')
    try:
        content = json.loads(file.read_text(encoding='utf-8'))
    except RecursionError as e:
        raise ValueError('lists within lists') from e
    if wrong := misfit(content, kind):
        raise ValueError(f'{wrong} is missing, or not as expected')
    return content
