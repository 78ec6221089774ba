"""Check names of classes and modules from a file: one line of printable characters, because messages repeat them."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.text import is_printable

if TYPE_CHECKING:
    from utils.qat.core.upstream import Network

LONGEST = 200  # characters of a name
# YAML reads the names `yes`, 7 and 2020-01-01 as values of these types.
SCALARS = (str, int, float, bool, datetime.date, datetime.datetime, type(None))


def is_name(name: str) -> bool:
    """Tell whether a name is printable and not too long."""
    return len(name) <= LONGEST and is_printable(name)


def class_names(names: object, source: str) -> dict[int, str]:
    """Check the names of classes, a list or a map from 0..n-1, and return them by index. source: the file or flag, for messages.

    Raises QatError if `names` is something else, or a name is too long or not printable: labels.txt has one name on each line, so a
    line break in a name would shift all that follow.
    """
    names = dict(enumerate(names)) if isinstance(names, (list, tuple)) else names
    if (
        not isinstance(names, dict)
        or set(names) != set(range(len(names)))
        or any(type(name) not in SCALARS for name in names.values())
    ):
        raise QatError(f'{source}: names: must be a list, or map 0..n-1 to names')
    names = {i: str(names[i]) for i in range(len(names))}
    for i, name in names.items():
        if not is_name(name):
            raise QatError(
                f'{source}: names: {name[:40]!r}, the name of class {i}, must be one line of printable characters, at most {LONGEST}'
            )
    return names


def fitting(names: dict[int, str], nc: int | None, source: str) -> dict[int, str]:
    """Return the names of `nc` classes (None: of any number); other numbers of names tell nothing of any class, so they become numbers."""
    if nc in (None, len(names)):
        return names
    LOGGER.warning(f'{source}: {len(names)} names for {nc} classes, so they are left out; its classes have numbers')
    return {i: str(i) for i in range(nc or 0)}


def require_colours(channels: object, source: str) -> None:
    """Raise QatError, which begins with `source`, for a model that takes another number of channels than 3."""
    if isinstance(channels, int) and channels != 3:
        raise QatError(f'{source}: takes {channels} channel{"s" * (channels > 1)}; only 3 are supported (RGB)')


def require_names(model: Network, source: str) -> None:
    """Check the names of a loaded model's classes and layers, and keep its class names as a map from 0..n-1.

    Raises QatError, which begins with `source`, if a name is too long or not printable.
    """
    layers = getattr(model, 'model', None)
    nc = getattr(layers[-1], 'nc', None) if layers is not None else None
    model.names = fitting(class_names(model.names, source), nc, source)  # upstream's attribute
    for path, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not all(map(is_name, path.split('.'))):
            raise QatError(
                f'{source}: has a layer called {path[:40]!r}; names of layers must be one line of printable characters'
            )
