"""Plain values, tensors and arrays of numbers from the records of a pickle.

Only the types listed here are built; any other is refused by its name.
"""

import math
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from utils.qat.core.errors import QatError
from utils.qat.untrusted.pickle_records import Call, Name, Refused, Stored
from utils.qat.untrusted.torch_archive import read_archive

DEEPEST = 100  # levels of nesting
# Each value counts as often as it is referred to: lists of lists of lists grow without growing the file.
MOST_VALUES = 4_000_000
STORAGES = {
    f'torch.{name}Storage': dtype
    for name, dtype in {
        'Float': torch.float32,
        'Half': torch.float16,
        'BFloat16': torch.bfloat16,
        'Double': torch.float64,
        'Long': torch.int64,
        'Int': torch.int32,
        'Short': torch.int16,
        'Char': torch.int8,
        'Byte': torch.uint8,
        'Bool': torch.bool,
    }.items()
}
DTYPES = {f'torch.{str(dtype).removeprefix("torch.")}': dtype for dtype in STORAGES.values()}
NUMBERS = re.compile('[fiu][1248]|b1')  # NumPy's names of its number types, without the byte order
MULTIARRAY = 'numpy.core.multiarray', 'numpy._core.multiarray'  # before NumPy 2 and since
TRUST = 'take the file from where you trust it'


class Values:
    """The builder of the values of one pickle.

    It builds each record once, however often the record is referred to.

    Attributes:
        calls: name of a function or class in the pickle → function that builds its value from a Call.
    """

    calls: ClassVar[Mapping[str, Callable[[Any, Call], Any]]]

    def __init__(self, members: Mapping[str, memoryview] | None = None) -> None:
        """Make a builder.

        Args:
            members: of the archive that has the pickle, see torch_archive.Archive; None = a pickle by itself.
        """
        self.members = members or {}
        # bytes left for tensors: all together have at most twice the bytes of the file's data
        self.room = 2 * sum(len(data) for name, data in self.members.items() if name.startswith('data/'))
        # by id of a record: its value, and the number of values in it
        self.made: dict[int, Any] = {}
        self.cost: dict[int, int] = {}
        self.busy: set[int] = set()  # ids of the records that are being built
        self.storages: dict[Any, torch.Tensor] = {}
        self.count = 0  # values so far

    def value(self, record: Any) -> Any:
        """Build a value.

        Args:
            record: of pickle_records, or a plain value.

        Raises:
            Refused: the value is not on the list of this file, is damaged, or is too large.
        """
        build = BUILDERS.get(type(record))
        if build is None:
            return _plain(record)
        key = id(record)
        if key not in self.cost:
            if key in self.busy:
                raise Refused('it has an object that contains itself')
            if len(self.busy) == DEEPEST:
                raise Refused(f'its objects are nested more than {DEEPEST} deep')
            self.busy.add(key)
            before = self.count
            self.made[key] = build(self, record)
            self.cost[key], self.count = self.count - before + 1, before
            self.busy.discard(key)
        self.count += self.cost[key]
        if self.count > MOST_VALUES:
            raise Refused(f'it has more than {MOST_VALUES} values, counted as often as they are used')
        return self.made[key]

    def values(self, records: Sequence[Any]) -> list[Any]:
        """Build a list of values."""
        self.count += len(records)
        return [self.value(record) for record in records]

    def mapping(self, record: Mapping[Any, Any]) -> dict[Any, Any]:
        """Build a dictionary."""
        self.count += len(record)
        return {_plain(key): self.value(item) for key, item in record.items()}

    def name(self, record: Name) -> torch.dtype:
        """Build the value of a name: only a dtype of PyTorch is one."""
        if record.text in DTYPES:
            return DTYPES[record.text]
        raise Refused(f'its pickle asks for {_shown(record)}, which no checkpoint needs as a value; {TRUST}')

    def stored(self, record: Stored) -> Any:
        """Refuse data that belong to no tensor."""
        raise Refused(f'its pickle has data that belong to no tensor; {TRUST}')

    def call(self, record: Call) -> Any:
        """Build an object by its entry of `calls`; the constructor, items and state must be as the entry has them."""
        name = record.function.text
        build = self.calls.get(name)
        if build is None:
            return self.other(record)
        try:
            if (
                record.new != (name in NEW)
                or (record.items and name not in WITH_ITEMS)
                or (record.state is not None and name not in WITH_STATE)
            ):
                raise ValueError
            return build(self, record)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as e:
            raise Refused(f'its pickle is damaged: {_shown(record.function)} with arguments that do not fit') from e

    def other(self, record: Call) -> Any:
        """Build an object that `calls` does not have: here none, but a subclass may know it."""
        raise Refused(f'its pickle asks for {_shown(record.function)}, which was not done; {TRUST}')

    # ---- entries of `calls` ----------------------------------------------------------------------------------------

    def ordered(self, record: Call) -> OrderedDict[Any, Any]:
        """Build an OrderedDict, such as a state dict."""
        self.value(record.state)  # a state dict has PyTorch's notes on versions here: checked, and left out
        _arguments(record, 0)
        return OrderedDict((_plain(key), self.value(item)) for key, item in record.items)

    def set_(self, record: Call) -> set[Any]:
        """Build a set."""
        (elements,) = _arguments(record, 1)
        return set(map(_plain, elements))

    def size(self, record: Call) -> torch.Size:
        """Build a torch.Size."""
        return torch.Size(map(_count, _arguments(record, 1)[0]))

    def device(self, record: Call) -> torch.device:
        """Build a torch.device."""
        return torch.device(*map(_plain, record.arguments))

    def path(self, record: Call) -> Any:
        """Build the text of a path."""
        kind = pathlib.PureWindowsPath if 'Windows' in record.function.text else pathlib.PurePosixPath
        return _plain(str(kind(*map(_plain, record.arguments))))

    def namespace(self, record: Call) -> dict[Any, Any]:
        """Build the arguments of a command, an argparse.Namespace, as a dictionary."""
        _arguments(record, 0)
        return self.mapping(record.state or {})

    def encoded(self, record: Call) -> bytes:
        """Build bytes, which protocol 2 has only as text."""
        text, encoding = _arguments(record, 2)
        if encoding != 'latin1':
            raise ValueError
        return text.encode('latin1')

    def tensor(self, record: Call) -> torch.Tensor:
        """Build a tensor over a part of its storage: size, stride and offset, in elements, stay within it."""
        stored, offset, size, stride, gradient, hooks, *_ = record.arguments
        storage = self.storage(stored)
        size, stride = (tuple(map(_count, numbers)) for numbers in (size, stride))
        count = math.prod(size)
        end = _count(offset) + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        if count and max(end, count) > len(storage):
            raise Refused('it has a tensor that reaches beyond its data')
        self.room -= count * storage.element_size()
        if self.room < 0:
            raise Refused('it has tensors of more bytes than its file')
        _require_no_hooks(hooks)
        return storage.as_strided(size, stride, offset).requires_grad_(gradient is True)

    def storage(self, record: Any) -> torch.Tensor:
        """Build the storage of tensors as a tensor [elements].

        It shares the memory of the file if its elements are aligned there.
        """
        if type(record) is not Stored:
            raise Refused('it has a tensor without data')
        kind, dtype, key, _, length = record.key
        data, dtype = self.members[f'data/{key}'], STORAGES[dtype.text]
        if kind != 'storage' or _count(length) * dtype.itemsize != len(data):
            raise Refused(f'its data/{_plain(key)[:20]} has another size than its tensors say')
        if key not in self.storages:
            made = torch.frombuffer(data, dtype=dtype) if length else torch.empty(0, dtype=dtype)
            self.storages[key] = (
                made if made.data_ptr() % dtype.itemsize == 0 else torch.frombuffer(bytearray(data), dtype=dtype)
            )
        if self.storages[key].dtype != dtype:
            raise Refused('it has tensors of two types over the same data')
        return self.storages[key]

    def parameter(self, record: Call) -> torch.nn.Parameter:
        """Build a parameter, without its state."""
        data, gradient, hooks, *state = record.arguments
        self.values(state)
        _require_no_hooks(hooks)
        return torch.nn.Parameter(self.value(data).detach(), requires_grad=gradient is True)

    def dtype(self, record: Call) -> np.dtype:
        """Build a number type of NumPy, from its name and byte order alone."""
        name, *_ = _arguments(record, 3)
        version, order, *rest = record.state
        if (
            not NUMBERS.fullmatch(name)
            or order not in ('<', '>', '=', '|')
            or (version, *rest) != (3, None, None, None, -1, -1, 0)
        ):
            raise Refused('it has an array of NumPy whose elements are no numbers')
        return np.dtype(name).newbyteorder(order)

    def scalar(self, record: Call) -> Any:
        """Build a number of NumPy."""
        dtype, content = map(self.value, _arguments(record, 2))
        (value,) = np.frombuffer(content, np.dtype(dtype))
        return value

    def array(self, record: Call) -> np.ndarray:
        """Build an array of numbers."""
        _, shape, dtype, fortran, content = array_state(self, record)
        return (
            np.frombuffer(self.value(content), np.dtype(self.value(dtype)))
            .reshape(tuple(map(_count, shape)), order='F' if fortran is True else 'C')
            .copy(order='K')
        )


def read_values(path: str | Path, flag: str) -> Any:
    """Read a torch.save file of plain values and tensors.

    Args:
        path: the file.
        flag: the option that gave it.

    Raises:
        QatError: the file holds anything else, or is damaged.
    """
    archive = read_archive(path, flag)
    try:
        return Values(archive.members).value(archive.content)
    except Refused as e:
        raise QatError(f'{flag} {path}: not loaded: {e}') from e


def _plain(value: Any) -> Any:
    """Return a scalar whose text is Unicode and whose whole numbers have at most 64 bits."""
    if type(value) is int and value.bit_length() > 64:
        raise Refused('it has a whole number of more than 64 bits')
    if type(value) is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise Refused('it has text that is not Unicode') from e
    if type(value) not in (str, int, float, bool, type(None), bytes):
        raise TypeError
    return value


def _count(value: Any) -> int:
    """Return a whole number of at least 0."""
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError
    return value


def _shown(name: Name) -> str:
    """Return the text of a Name, cut to a length that fits a line."""
    return name.text if len(name.text) <= 80 else f'{name.text[:77]}...'


def _arguments(call: Call, count: int) -> tuple:
    """Return the arguments of a Call, which must be `count`."""
    if len(call.arguments) != count:
        raise ValueError
    return call.arguments


def array_state(values: Values, call: Call) -> Any:
    """Take apart the record of an array of NumPy.

    Args:
        values: the builder.
        call: the record.

    Returns:
        (1, its shape, the record of its dtype, whether its columns come first, its elements).

    Raises:
        ValueError, TypeError: it is none.
    """
    kind, shape, code = _arguments(call, 3)
    if (
        type(kind) is not Name
        or kind.text != 'numpy.ndarray'
        or shape != (0,)
        or values.value(code) != b'b'
        or call.state[0] != 1
    ):
        raise ValueError
    return call.state


def _require_no_hooks(record: Any) -> None:
    if (
        type(record) is not Call
        or record.function.text != 'collections.OrderedDict'
        or record.items
        or record.arguments
    ):
        raise Refused('it has a tensor with hooks, which are code')


BUILDERS: dict[type, Callable[[Values, Any], Any]] = {  # type of a record → function that builds its value
    list: lambda self, record: self.values(record),
    tuple: lambda self, record: tuple(self.values(record)),
    dict: Values.mapping,
    set: lambda self, record: set(map(_plain, record)),
    Name: Values.name,
    Stored: Values.stored,
    Call: Values.call,
}
ARRAYS: dict[str, Callable[[Values, Call], Any]] = {
    '_codecs.encode': Values.encoded,
    'numpy.dtype': Values.dtype,
    **{f'{module}.scalar': Values.scalar for module in MULTIARRAY},
    **{f'{module}._reconstruct': Values.array for module in MULTIARRAY},
}
Values.calls = {
    **ARRAYS,
    'collections.OrderedDict': Values.ordered,
    'builtins.set': Values.set_,
    '__builtin__.set': Values.set_,
    'argparse.Namespace': Values.namespace,
    'torch.Size': Values.size,
    'torch.device': Values.device,
    # _local: Python 3.13
    **{
        f'{module}.{kind}Path': Values.path for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows')
    },
    'torch._utils._rebuild_tensor_v2': Values.tensor,
    'torch._utils._rebuild_parameter': Values.parameter,
    'torch._utils._rebuild_parameter_with_state': Values.parameter,
}
# Names of `calls` whose objects are made without their constructor, may get items, and may have a state
NEW = {'argparse.Namespace'}
WITH_ITEMS = {'collections.OrderedDict'}
WITH_STATE = {
    'collections.OrderedDict',
    'argparse.Namespace',
    'numpy.dtype',
    *(name for name in ARRAYS if name.endswith('_reconstruct')),
}
