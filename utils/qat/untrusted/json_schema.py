"""What a file that is gone on from must hold, exactly: every key known, every value of its type and in its range.

A kind is a type (exactly that: True is no int), a function of the value that says whether it fits, a tuple of kinds of which one fits,
[kind] for a list, or {'key': kind, 'key?': kind, str: kind} for these keys, of which one with ? may be missing, and any others.
"""

import json
import math
from dataclasses import MISSING, fields
from pathlib import Path

NONE = type(None)


def between(low, high, kinds=(int, float)):
    """The kind of a number in low..high; NaN is in none."""
    return lambda value: type(value) in kinds and low <= value <= high


SHARE, COUNT, NUMBER, SECONDS = between(0, 1), between(1, 2**53, (int,)), between(-1e30, 1e30), between(0, 1e10)
INDEX, POSITIVE = between(0, 2**53, (int,)), between(0, 1e30)
DECIBELS = between(-math.inf, math.inf, (float,))  # infinite where two models give the same
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
SQNR = {str: DECIBELS}
CALIBRATION = {'method': str, 'biases?': str, 'divergence': {str: NUMBER}}


def misfit(value, kind, place=''):
    """The first place in `value` that is not of `kind`, such as 'epochs[2].ap'; None if all of it is."""
    if isinstance(kind, tuple):
        found = [misfit(value, k, place) for k in kind]
        return None if None in found else max(found, key=len)  # of what it is most alike
    if isinstance(kind, list):
        parts = [(f'{place}[{i}]', v, *kind) for i, v in enumerate(value)] if type(value) is list else None
    elif isinstance(kind, dict):
        parts = _items(value, kind, place) if type(value) is dict else None
    else:
        return None if (type(value) is kind if isinstance(kind, type) else kind(value)) else place or 'all of it'
    if parts is None:
        return place or 'all of it'
    return next((found for at, v, k in parts if (found := misfit(v, k, at))), None)


def _items(value, kind, place):
    """(place, value, kind) of what is in a dict; what is missing or not known has a kind that nothing fits."""

    def at(key):
        return f'{place}{"." * bool(place)}{ascii(key)[1:61] if type(key) is str else "?"}'

    named = {key.removesuffix('?'): k for key, k in kind.items() if key is not str}
    missing = [key for key in kind if key is not str and not key.endswith('?') and key not in value]
    return [
        *((at(key), None, _never) for key in missing),
        *((at(key), v, named.get(key, kind.get(str, _never))) for key, v in value.items()),
    ]


def _never(value):
    return False


def anything(value):
    """The kind of what is not looked at here."""
    return True


def settings_kind(cls):
    """The kind of the settings in the dataclass `cls` as they are written to JSON; ranges are checked by `cls` itself."""
    plain = {Path: str, float: between(-1e9, 1e9), int: between(-(2**32), 2**32, (int,)), list: [str]}
    kinds = {f.name: plain.get(f.type, f.type) for f in fields(cls)}
    return {
        f.name: (NONE, kinds[f.name]) if f.default is None and f.default is not MISSING else kinds[f.name]
        for f in fields(cls)
    }


def read_json(file):
    """Content of a JSON file. Raises ValueError if it is none, OSError if it cannot be read."""
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise ValueError('not a file')
    try:
        return json.loads(file.read_text(encoding='utf-8'))
    except RecursionError as e:
        raise ValueError('lists within lists') from e
