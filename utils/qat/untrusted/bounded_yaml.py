"""YAML → plain values, at a cost in proportion to what people write.

YAML can say much in few bytes: an alias repeats a part of the file, a merge copies one, and each may lie within another. So the events
of the parser are counted first, an alias with all that it stands for, and what is beyond the bounds is not built.
"""

import yaml

NODES = 100_000  # values, aliases and merges written out; 21 841 classes with their numbers are 44 000
DEPTH = 20  # of lists and maps within each other; a network has 4
TEXT = 50_000  # characters of a value
DIGITS = 18  # of an integer: beyond, many integers have the same hash, and a map of these takes hours


class TooMuch(yaml.YAMLError):
    """Beyond what anybody writes."""


class Loader(getattr(yaml, 'CSafeLoader', yaml.SafeLoader)):
    """PyYAML's safe loader, in C where there is one. Integers are of bounded length."""

    def construct_yaml_int(self, node):
        if len(node.value) > DIGITS:
            raise TooMuch(f'an integer of {len(node.value)} digits, at most {DIGITS} are read')
        return super().construct_yaml_int(node)


Loader.add_constructor('tag:yaml.org,2002:int', Loader.construct_yaml_int)


def load(text):
    """The one document in `text`, None if there is none. Raises yaml.YAMLError, TooMuch among them, and what PyYAML lets out of dates and
    numbers that are none: ValueError, ArithmeticError, LookupError, TypeError, AttributeError."""
    _require_bounded(text)
    return yaml.load(text, Loader)


def _require_bounded(text):
    """Count nodes by anchors: the size of an alias is that of what it names."""
    sizes, open_nodes = {}, [[None, 0]]  # anchor → nodes; (anchor, nodes so far) of the lists and maps around
    for event in yaml.parse(text, Loader):
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
            anchor, size = None, sizes.get(event.anchor, 1)  # one that names nothing is an error, told by the loader
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
