"""Plain values, tensors and arrays of numbers from the records of a pickle.

Only the types listed here are built; any other is refused by its name.
"""

import math
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.untrusted.torch_archive import Call, Name, Refused, Stored, read_archive

DEEPEST = 100  # levels of nesting
# Each value counts once per reference: nested lists can grow exponentially without growing the file.
MOST_VALUES = 4_000_000
STORAGES = {
    'torch.FloatStorage': torch.float32,
    'torch.HalfStorage': torch.float16,
    'torch.BFloat16Storage': torch.bfloat16,
    'torch.DoubleStorage': torch.float64,
    'torch.LongStorage': torch.int64,
    'torch.IntStorage': torch.int32,
    'torch.ShortStorage': torch.int16,
    'torch.CharStorage': torch.int8,
    'torch.ByteStorage': torch.uint8,
    'torch.BoolStorage': torch.bool,
}
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
NUMBERS = re.compile('[fiu][1248]|b1')  # NumPy's names of its number types, without the byte order
MULTIARRAY = 'numpy.core.multiarray', 'numpy._core.multiarray'  # before NumPy 2 and since
TRUST = 'take the file from where you trust it'


class Values:
    """The builder of the values of one pickle. It builds each record once, also with several references."""

    # name of a function or class in the pickle → how its value is built from a Call
    calls: ClassVar[Mapping[str, Callable[['Values', Call], object]]]

    def __init__(self, members: Mapping[str, memoryview] | None = None) -> None:
        """Start with the members of the archive that has the pickle, see torch_archive.Archive; None = without archive."""
        self.members = members or {}
        # bytes left for tensors: together at most twice the bytes of the file's data
        self.room = 2 * sum(len(data) for name, data in self.members.items() if name.startswith('data/'))
        # by id of a record: its value, and the number of values in it
        self.made: dict[int, object] = {}
        self.cost: dict[int, int] = {}
        self.busy: set[int] = set()  # ids of the records that are being built
        self.storages: dict[object, torch.Tensor] = {}
        self.count = 0  # values so far

    def value(self, record: object) -> Any:
        """Build a value from a record of torch_archive, or a plain value.

        Raises Refused if the value is not on the list of this file, is damaged, or is too large.
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

    def other(self, record: Call) -> Any:
        """Build an object that `calls` lacks: refused here, but a subclass may build it."""
        raise Refused(f'its pickle asks for {_shown(record.function)}, which was not done; {TRUST}')

    def _values(self, records: list[object] | tuple[object, ...]) -> list[object]:
        self.count += len(records)
        return [self.value(record) for record in records]

    def _mapping(self, record: Mapping[object, object]) -> dict[object, object]:
        self.count += len(record)
        return {_plain(key): self.value(item) for key, item in record.items()}

    def _name(self, record: Name) -> torch.dtype:
        if record.text in DTYPES:
            return DTYPES[record.text]
        raise Refused(f'its pickle asks for {_shown(record)}, which no checkpoint needs as a value; {TRUST}')

    def _stored(self, record: Stored) -> object:
        raise Refused(f'its pickle has data that belong to no tensor; {TRUST}')

    def _call(self, record: Call) -> object:
        build = self.calls.get(record.function.text)
        if build is None:
            return self.other(record)
        try:
            if (
                record.new != (build in NEW)
                or (record.items and build not in WITH_ITEMS)
                or (record.state is not None and build not in WITH_STATE)
            ):
                raise ValueError
            return build(self, record)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as e:
            raise Refused(f'its pickle is damaged: {_shown(record.function)} with arguments that do not fit') from e

    # ---- entries of `calls` ----------------------------------------------------------------------------------------

    def _ordered(self, record: Call) -> OrderedDict[object, object]:
        self.value(record.state)  # PyTorch's version notes of a state dict: checked, then dropped
        () = record.arguments
        return OrderedDict((_plain(key), self.value(item)) for key, item in record.items)

    def _set(self, record: Call) -> set[object]:
        (elements,) = record.arguments
        return set(map(_plain, elements))

    def _size(self, record: Call) -> torch.Size:
        (sides,) = record.arguments
        return torch.Size(map(_count, sides))

    def _device(self, record: Call) -> torch.device:
        return torch.device(*map(_plain, record.arguments))

    def _path(self, record: Call) -> object:
        kind = pathlib.PureWindowsPath if 'Windows' in record.function.text else pathlib.PurePosixPath
        return _plain(str(kind(*map(_plain, record.arguments))))

    def _namespace(self, record: Call) -> dict[object, object]:
        () = record.arguments
        return self._mapping(record.state or {})

    def _encoded(self, record: Call) -> bytes:
        text, encoding = record.arguments  # bytes, which protocol 2 has only as text
        if encoding != 'latin1':
            raise ValueError
        return text.encode('latin1')

    def _tensor(self, record: Call) -> torch.Tensor:
        stored, offset, size, stride, gradient, hooks, *_ = record.arguments
        storage = self._storage(stored)
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

    def _storage(self, record: object) -> torch.Tensor:
        """Build the storage of tensors, [elements]. It shares the memory of the file if its elements are aligned."""
        if type(record) is not Stored:
            raise Refused('it has a tensor without data')
        kind, name, key, _, length = record.key
        data, dtype = self.members[f'data/{key}'], STORAGES[name.text]
        if kind != 'storage' or _count(length) * dtype.itemsize != len(data):
            raise Refused(f'its data/{_plain(key)[:20]} has another size than its tensors say')
        if key not in self.storages:
            made = torch.frombuffer(data, dtype=dtype) if length else torch.empty(0, dtype=dtype)
            aligned = made.data_ptr() % dtype.itemsize == 0
            self.storages[key] = made if aligned else torch.frombuffer(bytearray(data), dtype=dtype)
        if self.storages[key].dtype != dtype:
            raise Refused('it has tensors of two types over the same data')
        return self.storages[key]

    def _parameter(self, record: Call) -> torch.nn.Parameter:
        data, gradient, hooks, *state = record.arguments
        self._values(state)  # checked, and left out
        _require_no_hooks(hooks)
        return torch.nn.Parameter(self.value(data).detach(), requires_grad=gradient is True)

    def _dtype(self, record: Call) -> np.dtype:
        name, _, _ = record.arguments
        version, order, *rest = record.state
        if (
            not NUMBERS.fullmatch(name)
            or order not in ('<', '>', '=', '|')
            or (version, *rest) != (3, None, None, None, -1, -1, 0)
        ):
            raise Refused('it has an array of NumPy whose elements are no numbers')
        return np.dtype(name).newbyteorder(order)

    def _scalar(self, record: Call) -> object:
        dtype, content = map(self.value, record.arguments)
        (value,) = np.frombuffer(content, np.dtype(dtype))
        return value

    def _array(self, record: Call) -> np.ndarray:
        _, shape, dtype, fortran, content = array_state(self, record)
        return (
            np.frombuffer(self.value(content), np.dtype(self.value(dtype)))
            .reshape(tuple(map(_count, shape)), order='F' if fortran is True else 'C')
            .copy(order='K')
        )


def read_values(path: str | Path, flag: str) -> Any:
    """Read a torch.save file of plain values and tensors, which `flag` named. Raises QatError for anything else, or a damaged file."""
    archive = read_archive(require_file(path, flag), flag)
    try:
        return Values(archive.members).value(archive.content)
    except Refused as e:
        raise QatError(f'{flag} {path}: not loaded: {e}') from e


def array_state(values: Values, call: Call) -> tuple:
    """Return the state of a NumPy array: (1, shape, record of its dtype, whether it is Fortran-ordered, elements).

    Raises ValueError or TypeError if it is no array.
    """
    kind, shape, code = call.arguments
    if (
        type(kind) is not Name
        or kind.text != 'numpy.ndarray'
        or shape != (0,)
        or values.value(code) != b'b'
        or call.state[0] != 1
    ):
        raise ValueError
    return call.state


def _plain(value: object) -> Any:
    """Return a scalar; refuse text that is not Unicode, and integers of more than 64 bits."""
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


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError
    return value


def _shown(name: Name) -> str:
    return name.text if len(name.text) <= 80 else f'{name.text[:77]}...'


def is_empty(record: object) -> bool:
    """Tell whether a record is an empty OrderedDict: the hooks of an object that has none."""
    return (
        type(record) is Call
        and record.function.text == 'collections.OrderedDict'
        and not (record.items or record.arguments or record.state)
    )


def _require_no_hooks(record: object) -> None:
    if not is_empty(record):
        raise Refused('it has a tensor with hooks, which are code')


BUILDERS: dict[type, Callable[[Values, Any], object]] = {  # type of a record → how its value is built
    list: Values._values,
    tuple: lambda self, record: tuple(self._values(record)),
    dict: Values._mapping,
    set: lambda self, record: set(map(_plain, record)),
    Name: Values._name,
    Stored: Values._stored,
    Call: Values._call,
}
ARRAYS: dict[str, Callable[[Values, Call], object]] = {
    '_codecs.encode': Values._encoded,
    'numpy.dtype': Values._dtype,
    **{f'{module}.scalar': Values._scalar for module in MULTIARRAY},
    **{f'{module}._reconstruct': Values._array for module in MULTIARRAY},
}
Values.calls = {
    **ARRAYS,
    'collections.OrderedDict': Values._ordered,
    'builtins.set': Values._set,
    '__builtin__.set': Values._set,
    'argparse.Namespace': Values._namespace,
    'torch.Size': Values._size,
    'torch.device': Values._device,
    **{  # _local: Python 3.13
        f'{module}.{kind}Path': Values._path
        for module in ('pathlib', 'pathlib._local')
        for kind in ('Posix', 'Windows')
    },
    'torch._utils._rebuild_tensor_v2': Values._tensor,
    'torch._utils._rebuild_parameter': Values._parameter,
    'torch._utils._rebuild_parameter_with_state': Values._parameter,
}
# Entries of `calls` whose objects are made without their constructor, and may have items and a state
NEW = {Values._namespace}
WITH_ITEMS = {Values._ordered}
WITH_STATE = {Values._ordered, Values._namespace, Values._dtype, Values._array}
