"""A file of torch.save: read once, hashed as read, and looked at member by member. PyTorch never opens it.

torch.load decides by the content what a file is, and runs some kinds as programs (TorchScript) or through other readers (tar). So only
one form passes here: the zip archive that torch.save has written since version 1.6, with one pickle, and tensors as plain bytes.
"""

import hashlib
import re
import stat
import struct
import zipfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from utils.qat.core.command import require_file
from utils.qat.core.errors import QatError
from utils.qat.untrusted.pickle_records import Refused, read_pickle

MOST_PICKLE = (
    8_000_000  # bytes; that of the largest YOLOv9, with its optimizer, has 2 MB. Each can become 70 bytes of objects
)
MEMBERS = re.compile(
    r'[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+)'
)
HEADER = struct.Struct('<4s5H3L2H')  # of a member: signature, ..., length of the name, length of the extra field
AGAIN = "if you trust it, write it again: python -c \"import torch; torch.save(torch.load('OLD.pt', weights_only=False), 'NEW.pt')\""


@dataclass
class Archive:
    """content: its pickle as records. names: the set of names in it. members: 'data/KEY' → a memoryview of bytes. digest: its result is the
    SHA-256 of the file as it was read, in hex digits."""

    content: object
    names: set
    members: dict
    digest: Future


def read_archive(path, flag='--weights'):
    """Read a torch.save file given with `flag`. Raises QatError, naming the file, if it is none, is damaged, or holds anything else."""
    import torch  # here, so that `-h` does not pay for it

    require_file(path, flag)
    try:
        with open(path, 'rb') as file:
            size = file.seek(0, 2)
            file.seek(0)
            content = memoryview(
                torch.empty(size, dtype=torch.uint8).numpy()
            )  # PyTorch's memory is aligned for its tensors
            if file.readinto(content) != size:
                raise Refused('it was changed while it was read')
            pool = ThreadPoolExecutor(2)  # both leave Python to the others while they compute
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
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        struct.error,
        UnicodeDecodeError,
        ValueError,
        EOFError,
    ) as e:  # NotImplementedError: of another zip version
        raise QatError(f'{flag} {path}: not a PyTorch checkpoint (or cut short): {e or type(e).__name__}') from e


def _members(file, content):
    """(members of a zip file, their CRC-32), by names without the leading folder. Each is checked to be plain bytes of `content` of its own."""
    if content[:4] != b'PK\3\4':
        raise zipfile.BadZipFile(
            f'it does not begin as torch.save writes it since version 1.6; if it is an older file, {AGAIN}'
        )
    with zipfile.ZipFile(file) as archive:
        infos, last = sorted(archive.infolist(), key=lambda info: info.header_offset), archive.start_dir
    if not any(info.filename.endswith('/data.pkl') for info in infos):
        raise zipfile.BadZipFile('no pickled data inside')
    found, sums, end, folders = {}, {}, 0, set()
    for info in infos:
        folder, _, name = info.filename.partition('/')
        if not MEMBERS.fullmatch(info.filename):
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
    if len(found['data.pkl']) > MOST_PICKLE:
        raise Refused(
            f'its pickle has {len(found["data.pkl"]) / 1e6:.0f} MB, at most {MOST_PICKLE / 1e6:.0f} MB are read'
        )
    if bytes(found.get('byteorder', b'little')) != b'little':
        raise Refused(f'it was written by a big-endian machine; on that one, {AGAIN}')
    return found, sums


def _start(info, content):
    """Where the bytes of a member begin: behind its own header, which must name the same file as the directory at the end."""
    signature, *_, name_length, extra_length = HEADER.unpack_from(content, info.header_offset)
    name = info.header_offset + HEADER.size
    if signature != b'PK\3\4' or bytes(content[name : name + name_length]) != info.orig_filename.encode():
        raise zipfile.BadZipFile(f'{info.filename[:60]!r} is listed, and another file is there')
    return name + name_length + extra_length
