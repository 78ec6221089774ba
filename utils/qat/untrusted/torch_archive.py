"""Read a file of torch.save once, hash it, and check it member by member.

PyTorch never opens it: torch.load detects the kind of a file from its content, and runs some kinds as programs (TorchScript)
or through other readers (tar). Only one form is accepted here: the zip archive of torch.save since version 1.6, with one
pickle, and tensors as plain bytes.
"""

import hashlib
import re
import stat
import struct
import zipfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.untrusted.pickle_records import Refused, read_pickle

# Bytes. The pickle of the largest YOLOv9, with its optimizer, has 2 MB. One byte can become 70 bytes of objects.
MOST_PICKLE = 8_000_000
MEMBERS = re.compile(
    r'[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)'
)
HEADER = struct.Struct('<4s5H3L2H')  # header of a member: signature, ..., length of its name, of its extra field
AGAIN = "if you trust it, write it again: python -c \"import torch; torch.save(torch.load('OLD.pt', weights_only=False), 'NEW.pt')\""


@dataclass
class Archive:
    """Content of a torch.save file."""

    content: Any  # its pickle as records
    names: set[str]  # all names in the pickle
    members: dict[str, memoryview]  # 'data/KEY' → its bytes
    digest: 'Future[str]'  # SHA-256 of the file as it was read, hex digits


def read_archive(path: str | Path, flag: str = '--weights') -> Archive:
    """Read a torch.save file. flag: the option that named it.

    Raises:
        QatError: it is no such file, is damaged, or holds anything else.
    """
    import torch  # here, because `-h` must not load it

    require_file(path, flag)
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
    # NotImplementedError: another version of zip
    except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, ValueError, EOFError) as e:
        raise QatError(f'{flag} {path}: not a PyTorch checkpoint (or cut short): {e or type(e).__name__}') from e


def plain_archive(path: str | Path, members: re.Pattern[str], needed: str) -> dict[str, memoryview]:
    """Read another kind of zip file from PyTorch: name without the leading folder → bytes.

    Args:
        path: of the file.
        members: allowed names.
        needed: a required name, without the leading folder.

    Raises:
        Refused, zipfile.BadZipFile: it is no such archive, or is damaged.
    """
    with open(path, 'rb') as file:
        content = memoryview(file.read())
        found, sums = _members(file, content, members, needed)
    for name, data in found.items():
        if zlib.crc32(data) != sums[name]:
            raise zipfile.BadZipFile(f'{name} inside is damaged')
    return found


def _members(
    file: BinaryIO, content: memoryview, allowed: re.Pattern[str] = MEMBERS, needed: str = 'data.pkl'
) -> tuple[dict[str, memoryview], dict[str, int]]:
    """Check that each member of a zip file is a plain, separate part of its `content`; see `plain_archive`.

    Returns:
        Name without the leading folder → bytes, and name → CRC-32.
    """
    if content[:4] != b'PK\3\4':
        raise zipfile.BadZipFile(
            f'it does not begin as torch.save writes it since version 1.6; if it is an older file, {AGAIN}'
        )
    with zipfile.ZipFile(file) as archive:
        infos, last = sorted(archive.infolist(), key=lambda info: info.header_offset), archive.start_dir
    if not any(info.filename.endswith(f'/{needed}') for info in infos):
        raise zipfile.BadZipFile('no pickled data inside' if needed == 'data.pkl' else f'no {needed} inside')
    found: dict[str, memoryview] = {}
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
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or name in found:
            raise Refused(f'its member {info.filename[:60]!r} is a link, or is there twice')
        if info.header_offset < end or start + info.file_size > last:
            raise zipfile.BadZipFile(f'{info.filename[:60]!r} reaches into another member')
        end = start + info.file_size
        found[name], sums[name] = content[start:end], info.CRC
    if len(folders) > 1:
        raise Refused('its members are in more than one folder')
    if needed == 'data.pkl' and len(found['data.pkl']) > MOST_PICKLE:
        raise Refused(
            f'its pickle has {len(found["data.pkl"]) / 1e6:.0f} MB, at most {MOST_PICKLE / 1e6:.0f} MB are read'
        )
    if bytes(found.get('byteorder', b'little')) != b'little':
        raise Refused(f'it was written by a big-endian machine; on that one, {AGAIN}')
    return found, sums


def _start(info: zipfile.ZipInfo, content: memoryview) -> int:
    """Find the first byte of a member, after its own header, which must name the same file as the directory."""
    signature, *_, name_length, extra_length = HEADER.unpack_from(content, info.header_offset)
    name = info.header_offset + HEADER.size
    if signature != b'PK\3\4' or bytes(content[name : name + name_length]) != info.orig_filename.encode():
        raise zipfile.BadZipFile(f'{info.filename[:60]!r} is listed, and another file is there')
    return name + name_length + extra_length
