"""A pickle as a description: its bytes become inert records that nobody can call.

A pickle is a program for a stack machine that may name any callable and call it. This reader runs the same program,
but a name stays a `Name`, a call stays a `Call`, and a tensor's bytes stay a `Stored`. No class or function is looked
up, so none can run. plain_values.py and models/quantize/pickled_modules.py build values from the records, and they
decide what a record may become.
"""

import contextlib
import gc
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

SCALARS = str, int, float, bool, type(None), bytes  # allowed keys of a dictionary and elements of a set
LONGEST_INTEGER = 9  # bytes: 64 bits and a sign


class Refused(Exception):
    """An error of a pickle that is damaged, or asks for more than our files need.

    The message continues the name of the file.
    """


class Name:
    """A class or function that the pickle names.

    Attributes:
        text: 'module.qualified name'.
    """

    __slots__ = ('text',)

    def __init__(self, text: str) -> None:
        self.text = text


class Stored:
    """Data beside the pickle, in its archive.

    Attributes:
        key: as the pickle gives it, of any type.
    """

    __slots__ = ('key',)

    def __init__(self, key: Any) -> None:
        self.key = key


class Call:
    """An object that the pickle makes.

    Attributes:
        function: a Name.
        arguments: a tuple.
        new: the object is made without its constructor.
        items: (key, value) pairs that are put into it.
        state: its attributes as the pickle gives them, of any type, or None.
    """

    __slots__ = 'arguments', 'function', 'items', 'new', 'state'

    def __init__(self, function: Name, arguments: tuple, new: bool) -> None:
        self.function, self.arguments, self.new = function, arguments, new
        self.items: Sequence[tuple[Any, Any]] = ()
        self.state: Any = None


def read_pickle(content: bytes) -> tuple[Any, set[str]]:
    """Read a pickle of protocol 2 to 5.

    Args:
        content: the pickle.

    Returns:
        Its object and all names in it. Beside records there are plain values, lists, tuples, dictionaries and sets.

    Raises:
        Refused: the pickle is damaged, or does something that no file of ours needs.
    """
    try:
        with without_collector():
            return _run(content)
    # all that bytes which are no pickle can raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, struct.error) as e:
        raise Refused(f'its pickle is damaged ({type(e).__name__})') from e


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off in the block: it would look through all new records again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _run(content: bytes) -> tuple[Any, set[str]]:
    """Run the program of a pickle; raises Refused, or the errors that `read_pickle` takes for damage."""
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, Any] = {}
    names: set[str] = set()
    position = 0
    push, pop = stack.append, stack.pop

    def above_mark() -> list[Any]:
        height = marks.pop()
        values = stack[height:]
        del stack[height:]
        return values

    def text_of(length: int) -> str:
        return str(content[position : position + length], 'utf-8', 'surrogatepass')

    while True:
        code = content[position]
        position += 1
        # the most frequent operations first
        if code == BINGET:
            push(memo[content[position]])
            position += 1
        elif code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code == BININT1:
            push(content[position])
            position += 1
        elif code == LONG_BINPUT:
            memo[unsigned(content, position)[0]] = stack[-1]
            position += 4
        elif code in (REDUCE, NEWOBJ):
            arguments, function = pop(), pop()
            if type(function) is not Name or type(arguments) is not tuple:
                raise Refused('its pickle calls an object that it made itself')
            push(Call(function, arguments, code == NEWOBJ))
        elif code in CONSTANTS:
            push(CONSTANTS[code])
        elif code in EMPTY:
            push(EMPTY[code]())
        elif code == MARK:
            marks.append(len(stack))
        elif code in TUPLES:
            count = TUPLES[code]
            top = tuple(stack[-count:])
            del stack[-count:]
            if len(top) < count:
                raise IndexError
            push(top)
        elif code == TUPLE:
            push(tuple(above_mark()))
        elif code in SETS_ITEMS:
            flat = above_mark() if code == SETITEMS else [pop(), pop()][::-1]
            _set_items(stack[-1], flat)
        elif code in FIXED:
            form = FIXED[code]
            push(form.unpack_from(content, position)[0])
            position += form.size
        elif code in LONG_VALUES:
            form, kind = LONG_VALUES[code]
            (length,) = form.unpack_from(content, position)
            position += form.size
            if not 0 <= length <= len(content) - position or (kind is int and length > LONGEST_INTEGER):
                raise ValueError
            data = content[position : position + length]
            push(
                bytes(data)
                if kind is bytes
                else int.from_bytes(data, 'little', signed=True)
                if kind is int
                else text_of(length)
            )
            position += length
        elif code == BINPERSID:
            push(Stored(pop()))
        elif code == BUILD:
            state = pop()
            if type(stack[-1]) is not Call or stack[-1].state is not None:
                raise Refused('its pickle gives attributes to an object that takes none')
            stack[-1].state = state
        elif code == LONG_BINGET:
            push(memo[unsigned(content, position)[0]])
            position += 4
        elif code == BINPUT:
            memo[content[position]] = stack[-1]
            position += 1
        elif code in (APPENDS, APPEND):
            values = above_mark() if code == APPENDS else [pop()]
            if type(stack[-1]) is not list:
                raise Refused('its pickle appends to an object that is no list')
            stack[-1].extend(values)
        elif code == ADDITEMS:
            values = above_mark()
            if type(stack[-1]) is not set or not all(type(value) in SCALARS for value in values):
                raise Refused('its pickle adds to an object that is no set, or what no set of ours has')
            stack[-1].update(values)
        elif code in (GLOBAL, STACK_GLOBAL):
            if code == GLOBAL:
                middle = content.index(b'\n', position)
                end = content.index(b'\n', middle + 1)
                module, name = str(content[position:middle], 'utf-8'), str(content[middle + 1 : end], 'utf-8')
                position = end + 1
            else:
                name, module = pop(), pop()
                if type(module) is not str or type(name) is not str:
                    raise TypeError
            names.add(f'{module}.{name}')
            push(Name(f'{module}.{name}'))
        elif code == POP:
            pop()
        elif code == PROTO:
            position += 1
        elif code == FRAME:
            position += 8
        elif code == STOP:
            return pop(), names
        else:
            raise Refused(
                f'its pickle has operation {code:#x}, which PyTorch and NumPy do not write (protocol 0 or 1, or an extension)'
            )
        if marks and len(stack) < marks[-1]:
            raise IndexError  # an operation took what is below a mark


def _set_items(target: Any, flat: list[Any]) -> None:
    """Put items into a dictionary or a Call.

    Args:
        target: the dictionary or Call.
        flat: key, value, key, value, ...
    """
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    if not all(type(key) in SCALARS for key, _ in pairs):
        raise Refused('its pickle has a key that is neither text nor a number')
    if type(target) is dict:
        target.update(pairs)
    elif type(target) is Call:
        target.items = [*target.items, *pairs]
    else:
        raise Refused('its pickle sets items of an object that has none')


# Operations as numbers, as an element of bytes is.
(
    BININT1,
    BINGET,
    LONG_BINGET,
    BINPUT,
    LONG_BINPUT,
    MEMOIZE,
    REDUCE,
    NEWOBJ,
    BUILD,
    MARK,
    TUPLE,
    SETITEM,
    SETITEMS,
    APPEND,
    APPENDS,
    ADDITEMS,
    GLOBAL,
    STACK_GLOBAL,
    BINPERSID,
    POP,
    PROTO,
    FRAME,
    STOP,
) = (
    getattr(pickle, name)[0]
    for name in (
        'BININT1',
        'BINGET',
        'LONG_BINGET',
        'BINPUT',
        'LONG_BINPUT',
        'MEMOIZE',
        'REDUCE',
        'NEWOBJ',
        'BUILD',
        'MARK',
        'TUPLE',
        'SETITEM',
        'SETITEMS',
        'APPEND',
        'APPENDS',
        'ADDITEMS',
        'GLOBAL',
        'STACK_GLOBAL',
        'BINPERSID',
        'POP',
        'PROTO',
        'FRAME',
        'STOP',
    )
)
SETS_ITEMS = SETITEM, SETITEMS
CONSTANTS = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False, pickle.EMPTY_TUPLE[0]: ()}
EMPTY = {pickle.EMPTY_LIST[0]: list, pickle.EMPTY_DICT[0]: dict, pickle.EMPTY_SET[0]: set}
TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
FIXED = {
    pickle.BININT[0]: struct.Struct('<i'),
    pickle.BININT2[0]: struct.Struct('<H'),
    pickle.BINFLOAT[0]: struct.Struct('>d'),
}
LONG_VALUES: dict[int, tuple[struct.Struct, type]] = {  # operation → (form of the length, type of the value)
    pickle.BINUNICODE[0]: (struct.Struct('<I'), str),
    pickle.SHORT_BINUNICODE[0]: (struct.Struct('<B'), str),
    pickle.BINUNICODE8[0]: (struct.Struct('<Q'), str),
    pickle.BINBYTES[0]: (struct.Struct('<I'), bytes),
    pickle.SHORT_BINBYTES[0]: (struct.Struct('<B'), bytes),
    pickle.BINBYTES8[0]: (struct.Struct('<Q'), bytes),
    pickle.LONG1[0]: (struct.Struct('<B'), int),
    pickle.LONG4[0]: (struct.Struct('<i'), int),
}
unsigned = struct.Struct('<I').unpack_from
