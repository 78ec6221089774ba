"""Settings of a command: dataclass fields with their options, help texts and allowed values.

Annotations are read as types, so a file with settings has no `from __future__ import annotations`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin

from utils.qat.core.command import typed_sides
from utils.qat.core.errors import QatError, check
from utils.qat.untrusted.json_schema import NONE, between

Sides = tuple[int, int]  # height, width in pixels; one number stands for both
WHAT, RUN = 'what and where', 'run'  # the first and the last group of -h


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`. Infinity and NaN never belong to them."""

    low: float
    high: float = math.inf
    without: float | None = None  # an excluded end
    words: str = ''  # the range in an error message, after 'must'; '' = from the bounds

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value not in (self.without, math.inf)

    def __str__(self) -> str:
        if self.words or self.high == math.inf:
            return self.words or f'be {self.low:g} or more'
        if isinstance(self.low, int):
            return f'lie in {self.low} to {self.high}'
        return f'lie in {"[("[self.without == self.low]}{self.low:g}, {self.high:g}{"])"[self.without == self.high]}'


@dataclass(frozen=True)
class Option:
    """The command-line option of a setting, and its allowed values; see `option`."""

    help: str
    flags: tuple[str, ...]
    allowed: Range | tuple | None = None
    metavar: str | None = None
    group: str = WHAT
    parse: Callable[[str], Any] | None = None
    positional: bool = False
    negatable: bool = False
    each: bool = False


def option(default: Any, help: str, *flags: str, **how: Any) -> Any:
    """Make a dataclass field that can be typed. Its flag is its name: `batch_size` is --batch-size.

    Args:
        default: MISSING = it must be typed.
        help: text of -h, to which the default is appended unless it is there. Empty = it cannot be typed.
        flags: other flags, such as '-w'.
        how: other fields of Option. `allowed`: Range of a number, or tuple of choices; of several values, each one is checked.
            `group`: its title in -h. `parse`: word → value, where the type of the field does not do it.
            `positional`: typed without a flag. `negatable`: a switch with a --no- form too. `each`: several values can be typed;
            each makes its own settings.
    """
    return field(default=default, metadata={'option': Option(help, flags, **how)})


run = partial(option, group=RUN)


def option_of(kind: type, name: str) -> Option | None:
    """Find the Option of a field. A subclass that only changes the default keeps the option of its base."""
    found = (base.__dict__.get('__dataclass_fields__', {}).get(name) for base in kind.__mro__)
    return next((f.metadata['option'] for f in found if f and f.metadata), None)


def flag_of(name: str, value: Any = None) -> str:
    """Return the flag of a setting: --NAME, or --no-NAME for the value False."""
    return f'--{"no-" * (value is False)}{name.replace("_", "-")}'


def kind_of(annotation: Any) -> tuple[type, bool]:
    """Read an annotation, without its `| None`: the type of one value, and whether there can be several."""
    if isinstance(annotation, UnionType):
        [annotation] = (kind for kind in get_args(annotation) if kind is not NoneType)
    several = get_origin(annotation) is tuple
    return (get_args(annotation)[0] if several else annotation), several


def is_sides(field: Field[Any]) -> bool:
    """Tell whether a field is a height and a width."""
    return field.type in (Sides, Sides | None)


def plain(value: Any) -> Any:
    """Return a setting as JSON has it: a path as text, several values as a list."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, (list, tuple)) else value


def require_multiples(imgsz: Sides, stride: int, flag: str = '--imgsz') -> None:
    """Raise QatError unless the sides are multiples of the model's largest stride; other feature maps do not fit together."""
    below = [max(1, side // stride) * stride for side in imgsz]
    above = [max(1, -(-side // stride)) * stride for side in imgsz]
    if below == above == list(imgsz):
        return
    given, *near = (' '.join(map(str, typed_sides(sides))) for sides in (imgsz, below, above))
    raise QatError(
        f'{flag} {given}: must be multiples of {stride}, the stride of the model, such as {" or ".join(dict.fromkeys(near))}'
    )


def json_kinds(kind: type['Settings']) -> dict[str, Any]:
    """Return the kind of each setting in JSON, see json_schema.misfit. The settings themselves check ranges."""
    one = {Path: str, float: between(-1e9, 1e9), int: between(-(2**32), 2**32, (int,))}
    kinds = {}
    for f in fields(kind):
        element, several = kind_of(f.type)
        kind_in_json = one.get(element, element)
        kind_in_json = [kind_in_json] if several else kind_in_json
        kinds[f.name] = (NONE, kind_in_json) if isinstance(f.type, UnionType) else kind_in_json
    return kinds


@dataclass(frozen=True)
class Settings:
    """Settings of a command. The constructor raises one QatError that names every wrong setting by its flag."""

    HIDDEN: ClassVar[tuple[str, ...]] = ()  # accepted for command lines of earlier tools, but not shown by -h

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):
                value = tuple(value)
            if is_sides(f) and isinstance(value, int):
                value = (value,)
            if is_sides(f) and value and len(value) == 1:
                value = value * 2
            object.__setattr__(self, f.name, value)
        check([*(p for f in fields(self) for p in _not_allowed(self, f)), *self.problems()])

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Yield (whether it is wrong, message) for combinations of settings."""
        return ()

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON has them."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}


def _not_allowed(settings: Settings, field: Field[Any]) -> Iterator[tuple[Any, str]]:
    """Yield (whether it is wrong, message) for a single setting."""
    option, value, flag = option_of(type(settings), field.name), getattr(settings, field.name), flag_of(field.name)
    if option is None or value is None:
        return
    several = kind_of(field.type)[1]
    if is_sides(field):
        yield len(value) != 2, f'{flag} {" ".join(map(str, value))}: one number, or height and width'
    if option.allowed is not None:
        bad = [v for v in (value if several else [value]) if v not in option.allowed]
        wrong = f'{flag} {" ".join(map(str, bad))}: must'
        if isinstance(option.allowed, tuple):
            one = 'of' if several else 'one of'
            yield bad or (several and not value), f'{wrong} be {one} {", ".join(map(str, option.allowed))}'
        else:
            yield bad, f'{wrong} {option.allowed}'
