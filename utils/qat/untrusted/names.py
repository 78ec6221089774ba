"""Names of classes and of modules, which files bring along: of printable characters, so that they can be repeated in a line of their own."""

import datetime

from utils.qat.core.errors import QatError
from utils.qat.core.printable import is_printable

LONGEST = 200  # characters of a name
SCALARS = (
    str,
    int,
    float,
    bool,
    datetime.date,
    datetime.datetime,
    type(None),
)  # what YAML makes of `yes`, 7 and 2020-01-01


def is_printable_text(text):
    return text.isprintable() or all(map(is_printable, text))


def is_name(name):
    return len(name) <= LONGEST and is_printable_text(name)


def class_names(names, source):
    """{class index: name} of a list of names, or of a map from 0..n-1. Raises QatError, naming `source`, if it is none, or a name is not
    in one line of printable characters: labels.txt has a name on each line, and a second line would shift all that follow."""
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


def require_names(model, source):
    """Check the names in a model that was loaded, of its classes and its layers; it keeps the first as a map from 0..n-1."""
    model.names = class_names(model.names, source)
    for path, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not all(map(is_name, path.split('.'))):
            raise QatError(
                f'{source}: has a layer called {path[:40]!r}; names of layers must be one line of printable characters'
            )
