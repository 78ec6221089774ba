"""Read a pickle as inert records, without calls.

A pickle is a program for a stack machine that may name any callable and call it. Here Python's own machine runs it, but
a name stays a `Name`, a call a `Call`, and a tensor's bytes a `Stored`: no class or function is looked up, so none can
run. plain_values.py and models/quantize/pickled_modules.py decide what to build from a record.
"""

import contextlib
import gc
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

SCALARS = str, int, float, bool, type(None), bytes  # allowed keys of a dictionary and elements of a set
OPERATIONS = """
    PROTO FRAME POP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT LONG1 LONG4 BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT
    SETITEM SETITEMS EMPTY_SET ADDITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ
    BUILD STOP""".split()  # those that PyTorch and NumPy write


class Refused(Exception):
    """The error for a file that is damaged, or needs more than our files do. The message continues the file's name."""


class Name:
    """A class or function that the pickle names: 'module.qualified name'."""

    __slots__ = ('text',)

    def __init__(self, text: str) -> None:
        self.text = text


class Stored:
    """Data beside the pickle, in its archive, by a key of any type."""

    __slots__ = ('key',)

    def __init__(self, key: Any) -> None:
        self.key = key


class Call:
    """An object that the pickle creates.

    Attributes:
        new: whether it is made without its constructor.
        items: (key, value) pairs to set in it.
        state: its attributes, of any type; None without.
    """

    __slots__ = 'arguments', 'function', 'items', 'new', 'state'

    def __init__(self, function: Name, arguments: tuple, new: bool) -> None:
        self.function, self.arguments, self.new = function, arguments, new
        self.items: Sequence[tuple[Any, Any]] = ()
        self.state: Any = None


def read_pickle(content: bytes) -> tuple[Any, set[str]]:
    """Read a pickle of protocol 2 to 5.

    Returns:
        Its object, of records, plain values, lists, tuples, dictionaries and sets; and all names in it.

    Raises:
        Refused: the pickle is damaged, or does something that no file of ours needs.
    """
    machine = _Machine(content)
    try:
        with without_collector():
            return machine.load(), machine.names
    except Refused:
        raise
    except Exception as e:  # bytes that are no pickle raise errors of any kind
        raise Refused(f'its pickle is damaged ({type(e).__name__})') from e


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off in the block: it would scan all new records again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Operations(dict[int, Callable[[Any], None]]):
    """Code of an operation → its method."""

    def __missing__(self, code: int) -> Any:
        raise Refused(
            f'its pickle has operation {code:#x}, which PyTorch and NumPy do not write (protocol 0 or 1, or an extension)'
        )


class _Machine(pickle._Unpickler):  # the one written in Python: the one in C has no table of operations
    """Python's stack machine, whose operations call, import and look up nothing."""

    dispatch: ClassVar[_Operations]
    pop_mark: Callable[[], list[Any]]  # Python's

    def __init__(self, content: bytes) -> None:
        file = io.BytesIO(content)
        super().__init__(file)
        self.read, self.readline = file.read, file.readline
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        self.names: set[str] = set()

    def load(self) -> Any:
        """Run the program. Raises Refused, or the errors that `read_pickle` takes for damage."""
        read, operations = self.read, self.dispatch
        try:
            while True:
                operations[read(1)[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # missing in its stub
            return stop.value

    def find_class(self, module: str, name: str) -> Name:
        """Keep a name."""
        self.names.add(f'{module}.{name}')
        return Name(f'{module}.{name}')

    def persistent_load(self, key: Any) -> Stored:
        """Keep the key of data beside the pickle."""
        return Stored(key)

    def load_frame(self) -> None:
        """Skip the size of a frame: the content is in memory already."""
        self.read(8)

    def load_reduce(self, new: bool = False) -> None:
        """Keep a call."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(arguments) is not tuple:
            raise Refused('its pickle calls an object that it made itself')
        self.append(Call(function, arguments, new))

    def load_newobj(self) -> None:
        """Keep the making of an object without its constructor."""
        self.load_reduce(new=True)

    def load_build(self) -> None:
        """Keep the state of an object."""
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Call or made.state is not None:
            raise Refused('its pickle gives attributes to an object that takes none')
        made.state = state

    def load_additems(self) -> None:
        """Add to a set."""
        values, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set or not all(type(value) in SCALARS for value in values):
            raise Refused('its pickle adds to an object that is no set, or what no set of ours has')
        target.update(values)

    def load_setitems(self) -> None:
        """Put items into a dictionary or a Call."""
        flat = self.pop_mark()
        self._set(list(zip(flat[::2], flat[1::2], strict=True)))

    def load_setitem(self) -> None:
        """Put an item into a dictionary or a Call."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set([(key, value)])

    def _set(self, pairs: list[tuple[Any, Any]]) -> None:
        target = self.stack[-1]
        if not all(type(key) in SCALARS for key, _ in pairs):
            raise Refused('its pickle has a key that is neither text nor a number')
        if type(target) is dict:
            target.update(pairs)
        elif type(target) is Call:
            target.items = [*target.items, *pairs]
        else:
            raise Refused('its pickle sets items of an object that has none')


# The class above overrides some of Python's methods. APPEND and APPENDS are Python's: only lists have the methods that they
# call.
_Machine.dispatch = _Operations(
    (code, vars(_Machine).get(f'load_{name.lower()}', pickle._Unpickler.dispatch[code]))
    for name in OPERATIONS
    for code in getattr(pickle, name)
)
