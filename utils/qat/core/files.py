"""Files that are complete at any moment: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import mmap
import os
import re
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from utils.qat.core.errors import QatError
from utils.qat.core.text import escaped, is_printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MADE_BY = 'made by yolov9-qat'  # in each file of an export, or in its sidecar: by it the next export knows what it may replace
TEMPORARY = re.compile(r'\..*\.\d+\.tmp(\..*)?', re.DOTALL)  # names, see `atomic`
LONGEST_NAME = 200  # bytes of a file's name; systems allow 255
YAML = '.yaml', '.yml'
NETWORK = re.compile(r'(resnet|resnext|wide_resnet|mobilenet|efficientnet|regnet|convnext)\w*([-_.]\w+)*')
TREE = Path(__file__).parents[3]  # the patched YOLOv9 folder, with --link too


def sha256(path: str | Path) -> str:
    """Compute the SHA-256 of a file, in hex digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def waits(path: str | Path) -> bool:
    """Tell whether reading `path` could block for ever: it is a pipe, a socket or a device."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # it is not there, or no name of a file
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def write_torch(path: str | Path, content: Mapping[str, object]) -> None:
    """Write `content` as torch.save does, complete at any moment.

    It is pickled in memory first, because the error of torch's own writer does not reveal a full disk.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(path) as tmp:
        tmp.write_bytes(buffer.getbuffer())


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the block succeeds, delete it if not.

    The temporary path keeps the suffix, because writers such as matplotlib choose the format by it. An OSError that names no
    file, or the temporary one, gets `path` as its filename.
    """
    path = Path(path)
    tmp = path.with_name(f'.{path.stem}.{os.getpid()}.tmp{path.suffix}')
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        # the error of a failed write does not name its file; an error of another file keeps its name
        if e.filename is None or Path(str(e.filename)).name.startswith(tmp.stem):
            e.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # none is there, or none can be: the first error says more
            tmp.unlink()


def delete_unfinished(folder: Path) -> None:
    """Delete the temporary files of `atomic` that a killed process has left in a folder, if it is there; links and folders stay."""
    for path in folder.glob('*'):
        if TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def distinct_names(files: Sequence[Path]) -> list[str]:
    """Return the name of each file, or its path where two share a name, or its place in the list where two are one file."""
    names = [f.name if [g.name for g in files].count(f.name) == 1 else str(f) for f in files]
    return [name if names.count(name) == 1 else f'{name} ({i})' for i, name in enumerate(names, 1)]


def require_own(path: Path, text: str) -> None:
    """Raise QatError if `path`, a name that the user did not choose, exists and is not our file.

    A file of ours has the same `text`, or the same first line if this is a comment (#), which names its source.
    """
    if not os.path.lexists(path):
        return
    first, content = text.partition('\n')[0], b''
    if path.is_file():
        with path.open('rb') as file:
            content = file.read(len(text.encode()) + 1)
    if content != text.encode() and not (first.startswith('#') and content.startswith(f'{first}\n'.encode())):
        raise QatError(f'{path}: is there already, and was not made of this model; move it away, or use another folder')


def is_ours(file: Path) -> bool:
    """Tell whether `file`, or its sidecar, holds MADE_BY."""
    return any(_holds(each, MADE_BY.encode()) for each in (file, file.with_name(f'{file.name}.json')))


def require_ours(files: Iterable[Path], way_out: str) -> None:
    """Raise QatError for the first of `files` that is there and is not ours. way_out: what to do, for the message."""
    for file in filter(os.path.lexists, files):
        if not is_ours(file):
            raise QatError(f'{file}: is there already, and this tool did not make it; {way_out}')


def _holds(file: Path, text: bytes) -> bool:
    """Tell whether `file` is a file with `text` in it."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open('rb') as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return memory.find(text) >= 0


def write_text(path: str | Path, text: str) -> None:
    """Write `text` in UTF-8, complete at any moment."""
    with atomic(path) as tmp:
        tmp.write_text(text, encoding='utf-8', errors='backslashreplace')


def write_json(path: str | Path, content: object) -> None:
    """Write `content` as JSON, complete at any moment; values of other types, such as Path, become text."""
    write_text(path, json.dumps(content, indent=2, default=str) + '\n')


def write_document(path: str | Path, title: str, parts: Iterable[str]) -> None:
    """Write a Markdown file. parts: paragraphs, tables and pictures; an empty line comes between them."""
    write_text(path, '\n\n'.join((f'# {escaped(title)}', *parts)) + '\n')


def write_picture(figure: Figure, path: str | Path) -> None:
    """Write a picture, complete at any moment; the suffix of `path` chooses the format."""
    with atomic(path) as tmp, warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing from')  # a class name in a script that the font lacks
        figure.savefig(tmp, dpi=120)


def in_tree(word: str | Path) -> Path:
    """Find a YAML as upstream does: here, in the YOLOv9 folder, or anywhere under data/ and models/ there.

    Returns the path as it is if there is none, or more than one.
    """
    path = Path(word)
    if os.path.exists(path) or path.is_absolute() or path.suffix.lower() not in YAML:
        return path
    files = [file for file in [TREE / path] if file.is_file()]
    for folder in () if files else ('data', 'models'):
        files += map(Path, glob.glob(f'{glob.escape(str(TREE / folder))}/**/{glob.escape(str(path))}', recursive=True))
    return files[0] if len(files) == 1 else path


def is_network(weights: Path) -> bool:
    """Tell whether `weights` is the name of a network of torchvision, such as resnet18, and no file."""
    return bool(NETWORK.fullmatch(weights.name)) and not (weights.suffix or os.path.exists(weights))


def require_yaml(path: str | Path, flag: str) -> Path:
    """Check that a path is a YAML file, and return it as a Path; see `in_tree` and `require_file`."""
    if not os.path.exists(path):
        raise QatError(f'{flag} {path}: no such file here, in {TREE}, or under data/ and models/ there')
    return require_file(path, flag, YAML)


def require_file(path: str | Path, flag: str, suffixes: Collection[str] = ()) -> Path:
    """Check that a path is a file, and return it as a Path. suffixes: allowed endings in lower case; empty = any."""
    path = Path(path)
    if not os.path.exists(path):  # Path.exists raises an error for a name that is too long
        raise QatError(f'{flag} {path}: no such file')
    if not path.is_file():
        raise QatError(f'{flag} {path}: not a file')
    # Messages, pictures and checkpoints repeat the name. A byte that is not UTF-8 is half a character here.
    if not is_printable(str(path)):
        raise QatError(f'{flag} {path}: the name has control characters or is not UTF-8; rename it')
    if suffixes and path.suffix.lower() not in suffixes:
        raise QatError(f'{flag} {path}: expected a file ending in {" or ".join(suffixes)}')
    return path


def require_source(path: Path, flag: str, suffixes: Collection[str]) -> None:
    """Check that a path is a file after which others can be named, such as MODEL.onnx; see `require_file`."""
    require_file(path, flag, suffixes)
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise QatError(
            f'{flag} {path}: the name has more than {LONGEST_NAME} bytes, and files are named after it; rename it'
        )


def require_data(path: Path, flag: str = '--data') -> None:
    """Check that a path is a data YAML, or a folder of a classifier's images."""
    if not path.is_dir():
        require_yaml(path, flag)
