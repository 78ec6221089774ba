"""A YAML file that a flag names, as plain values, with a limit on their number.

A few bytes of YAML can mean many values: an alias repeats a part of the file, a merge copies one, and they can be nested. So
the events of the parser are counted first, an alias with the part that it repeats, and a file beyond the limits is not built.
"""

from pathlib import Path
from typing import Any

import yaml

from utils.qat.core.errors import QatError, one_line

LARGEST_YAML = 2_000_000  # bytes; the names of 20 000 classes are a quarter of it
NODES = 100_000  # values, with all that aliases and merges repeat; 21 841 classes with their numbers are 44 000
DEPTH = 20  # lists and maps within each other; a network has 4
TEXT = 50_000  # characters of a value
DIGITS = 18  # of an integer: many longer ones can share one hash, and a map of these takes hours


class TooMuch(yaml.YAMLError):
    """The error for a YAML file beyond these limits."""


class BoundedLoader(getattr(yaml, 'CSafeLoader', yaml.SafeLoader)):  # type: ignore[misc]  # one of the two, by the build
    """PyYAML's safe loader, in C where there is one; its integers have a bounded length."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Build an integer, or raise TooMuch if it is too long."""
        if len(node.value) > DIGITS:
            raise TooMuch(f'an integer of {len(node.value)} digits, at most {DIGITS} are read')
        return super().construct_yaml_int(node)


BoundedLoader.add_constructor('tag:yaml.org,2002:int', BoundedLoader.construct_yaml_int)


def load_yaml(text: str) -> object:
    """Read the one document of a YAML text, as plain values; None if the text is empty.

    Raises yaml.YAMLError for no valid YAML, or TooMuch; and ValueError, ArithmeticError, LookupError, TypeError or AttributeError for an
    invalid date or number, for which PyYAML does not convert the error.
    """
    _require_bounded(text)
    return yaml.load(text, BoundedLoader)


def _require_bounded(text: str) -> None:
    """Raise TooMuch if a text is beyond the limits; an alias has the size of the part that it names."""
    sizes: dict[str, int | None] = {}  # anchor → nodes; None while its list or map is open
    open_nodes: list[list[Any]] = [[None, 0]]  # (anchor, nodes so far) of the lists and maps around
    for event in yaml.parse(text, BoundedLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([event.anchor, 1])
            if event.anchor:
                sizes[event.anchor] = None
            if len(open_nodes) > DEPTH:
                raise TooMuch(f'more than {DEPTH} lists and maps within each other')
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 1)  # the loader reports an alias that names nothing
            if size is None:
                raise TooMuch(f'the anchor {event.anchor[:40]} contains itself')
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
            if len(event.value) > TEXT:
                raise TooMuch(f'a value of {len(event.value)} characters, at most {TEXT} are read')
        else:
            continue
        if anchor:
            sizes[anchor] = size
        open_nodes[-1][1] += size
        if open_nodes[-1][1] > NODES:
            raise TooMuch(f'more than {NODES} values, those that aliases repeat included')


def read_yaml(file: Path, flag: str) -> Any:
    """Read the YAML file that `flag` named. Raises QatError if it is no YAML, or beyond the limits."""
    if file.stat().st_size > LARGEST_YAML:
        raise QatError(
            f'{flag} {file}: {file.stat().st_size / 1e6:.1f} MB, at most {LARGEST_YAML / 1e6:.0f} MB are read; is it another file?'
        )
    try:
        return load_yaml(file.read_text(encoding='utf-8', errors='ignore'))
    except TooMuch as e:
        raise QatError(f'{flag} {file}: not read: {e}; is it another file?') from e
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as e:
        raise QatError(f'{flag} {file}: not valid YAML: {one_line(e, 300)}') from e
