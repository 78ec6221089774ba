"""Read a file of torch.save once, hash it, check it member by member, and read its pickle as records.

PyTorch never opens it: torch.load detects the kind of a file from its content, and runs some kinds as programs (TorchScript)
or through other readers (tar). Only one form is accepted here: the zip archive of torch.save since version 1.6, with one
pickle, and tensors as plain bytes.

A pickle is a program for a stack machine that may name any callable and call it. Here Python's own machine runs it, but
a name stays a `Name`, a call a `Call`, and a tensor's bytes a `Stored`: no class or function is looked up, so none can
run. plain_values.py and models/quantize/pickled_modules.py decide what to build from a record.
"""

import contextlib
import gc
import hashlib
import io
import pickle
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from utils.qat.core.errors import QatError, one_line

SCALARS = str, int, float, bool, type(None), bytes  # allowed keys of a dictionary and elements of a set
OPERATIONS = """
    PROTO FRAME POP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT LONG1 LONG4 BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT
    SETITEM SETITEMS EMPTY_SET ADDITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ
    BUILD STOP""".split()  # those that PyTorch and NumPy write
# Bytes. The pickle of the largest YOLOv9, with its optimizer, has 2 MB. One byte can become 70 bytes of objects.
MOST_PICKLE = 8_000_000
MEMBERS = re.compile(
    r'[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)'
)
HEADER = struct.Struct('<4s5H3L2H')  # header of a member: signature, ..., length of its name, of its extra field
OLDER = b'\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.'  # start of files of PyTorch before 1.6
AGAIN = "if you trust it, write it again: python -c \"import torch; torch.save(torch.load('OLD.pt', weights_only=False), 'NEW.pt')\""


class Refused(Exception):
    """The error for a file that is damaged, or needs more than our files do. The message continues the file's name."""


# What readers of an archive raise for a damaged one; NotImplementedError: another version of zip
DAMAGED = Refused, zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, ValueError, EOFError


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
    """An object that the pickle creates; `new` without its constructor."""

    __slots__ = 'arguments', 'function', 'items', 'new', 'state'

    def __init__(self, function: Name, arguments: tuple, new: bool) -> None:
        self.function, self.arguments, self.new = function, arguments, new
        self.items: Sequence[tuple[object, object]] = ()  # (key, value) pairs to set in it
        self.state: Any = None  # its attributes, of any type; None without


def read_pickle(content: bytes) -> tuple[object, set[str]]:
    """Read a pickle of protocol 2 to 5: its object, of records, plain values, lists, tuples, dictionaries and sets, and all names in it.

    Raises Refused if the pickle is damaged, or does something that no file of ours needs.
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

    def __missing__(self, code: int) -> object:
        raise Refused(
            f'its pickle has operation {code:#x}, which PyTorch and NumPy do not write (protocol 0 or 1, or an extension)'
        )


class _Machine(pickle._Unpickler):  # the one written in Python: the one in C has no table of operations
    """Python's stack machine, whose operations call, import and look up nothing."""

    dispatch: ClassVar[_Operations]
    pop_mark: Callable[[], list[object]]  # Python's

    def __init__(self, content: bytes) -> None:
        file = io.BytesIO(content)
        super().__init__(file)
        self.read, self.readline = file.read, file.readline
        self.stack: list[object] = []
        self.metastack: list[list[object]] = []
        self.append = self.stack.append
        self.names: set[str] = set()

    def load(self) -> object:
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

    def persistent_load(self, key: object) -> Stored:
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

    def _set(self, pairs: list[tuple[object, object]]) -> None:
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


@dataclass
class Archive:
    """Content of a torch.save file."""

    content: object  # its pickle as records
    names: set[str]  # all names in the pickle
    members: dict[str, memoryview]  # 'data/KEY' → its bytes
    digest: 'Future[str]'  # SHA-256 of the file as it was read, hex digits


def read_archive(path: str | Path, flag: str = '--weights') -> Archive:
    """Read a torch.save file, which `flag` named. Raises QatError if it is no such file, is damaged, or holds anything else."""
    import torch  # here, because `-h` must not load it

    try:
        with open(path, 'rb') as file:
            size = file.seek(0, 2)
            file.seek(0)
            # PyTorch's memory is aligned for its tensors.
            content = torch.empty(size, dtype=torch.uint8).numpy().data
            if file.readinto(content) != size:
                raise Refused('it was changed while it was read')
            pool = ThreadPoolExecutor(2)  # SHA-256 and CRC-32 release Python's lock while they compute
            digest = pool.submit(lambda: hashlib.sha256(content).hexdigest())
            members, sums = _members(file, content)
        damaged = pool.submit(lambda: [name for name, data in members.items() if zlib.crc32(data) != sums[name]])
        pool.shutdown(wait=False)
        record, names = read_pickle(bytes(members['data.pkl']))
        if damaged.result():
            raise zipfile.BadZipFile(f'{damaged.result()[0]} inside is damaged')
        return Archive(record, names, members, digest)
    except Refused as e:
        raise QatError(f'{flag} {path}: not loaded: {e}') from e
    except DAMAGED as e:
        raise QatError(f'{flag} {path}: not a PyTorch checkpoint (or cut short): {one_line(e, 500)}') from e


def plain_archive(path: str | Path, members: re.Pattern[str], needed: str) -> dict[str, memoryview]:
    """Read another kind of zip file from PyTorch: name without the leading folder → bytes.

    `members` are the allowed names, `needed` is a required one. Raises Refused or zipfile.BadZipFile if it is no such archive, or is
    damaged.
    """
    with open(path, 'rb') as file:
        content = memoryview(file.read())
        stored, sums = _members(file, content, members, needed)
    for name, data in stored.items():
        if zlib.crc32(data) != sums[name]:
            raise zipfile.BadZipFile(f'{name} inside is damaged')
    return stored


def _members(
    file: BinaryIO, content: memoryview, allowed: re.Pattern[str] = MEMBERS, needed: str = 'data.pkl'
) -> tuple[dict[str, memoryview], dict[str, int]]:
    """Check that each member of a zip file is a plain, separate part of its `content`; see `plain_archive`.

    Returns name without the leading folder → bytes, and name → CRC-32.
    """
    if content[:4] != b'PK\3\4':
        if content[: len(OLDER)] == OLDER:
            raise zipfile.BadZipFile(f'it is of PyTorch before 1.6; {AGAIN}; if that fails, it is cut: copy it again')
        raise zipfile.BadZipFile(f'{"torch.save did not write it" if content else "empty"}; copy it again')
    with zipfile.ZipFile(file) as archive:
        infos, last = sorted(archive.infolist(), key=lambda info: info.header_offset), archive.start_dir
    if not any(info.filename.endswith(f'/{needed}') for info in infos):
        raise zipfile.BadZipFile('no pickled data inside' if needed == 'data.pkl' else f'no {needed} inside')
    stored: dict[str, memoryview] = {}
    sums: dict[str, int] = {}
    folders: set[str] = set()
    end = 0
    for info in infos:
        folder, _, name = info.filename.partition('/')
        if not allowed.fullmatch(info.filename):
            kind = (
                'a TorchScript archive, which is a program'
                if name.startswith(('code/', 'constants'))
                else 'an archive of another kind'
            )
            raise Refused(f'it is {kind} (it holds {info.filename[:60]!r}); use the checkpoint of the training')
        folders.add(folder)
        start = _start(info, content)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise Refused(
                f'its member {info.filename[:60]!r} is compressed or encrypted, which torch.save does not do; {AGAIN}'
            )
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or name in stored:
            raise Refused(f'its member {info.filename[:60]!r} is a link, or is there twice')
        if info.header_offset < end or start + info.file_size > last:
            raise zipfile.BadZipFile(f'{info.filename[:60]!r} reaches into another member')
        end = start + info.file_size
        stored[name], sums[name] = content[start:end], info.CRC
    if len(folders) > 1:
        raise Refused('its members are in more than one folder')
    if needed == 'data.pkl' and len(stored['data.pkl']) > MOST_PICKLE:
        raise Refused(
            f'its pickle has {len(stored["data.pkl"]) / 1e6:.0f} MB, at most {MOST_PICKLE / 1e6:.0f} MB are read'
        )
    if bytes(stored.get('byteorder', b'little')) != b'little':
        raise Refused(f'it was written by a big-endian machine; on that one, {AGAIN}')
    return stored, sums


def _start(info: zipfile.ZipInfo, content: memoryview) -> int:
    """Find the first byte of a member, after its own header, which must name the same file as the directory."""
    signature, *_, name_length, extra_length = HEADER.unpack_from(content, info.header_offset)
    name = info.header_offset + HEADER.size
    if signature != b'PK\3\4' or bytes(content[name : name + name_length]) != info.orig_filename.encode():
        raise zipfile.BadZipFile(f'{info.filename[:60]!r} is listed, and another file is there')
    return name + name_length + extra_length
