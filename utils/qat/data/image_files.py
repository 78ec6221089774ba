"""Image files under the paths of a data YAML: those in a folder and below, or those that a text file lists.

Upstream reads the name of a folder as a pattern, follows links in circles, and takes relative lines of a list from the current
folder. So its dataset gets a list of the files that are found here.
"""

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from utils.dataloaders import IMG_FORMATS

from utils.qat.core.errors import QatError
from utils.qat.core.files import waits

MOST_FOLDERS = 100_000  # below one path
LARGEST_LIST = 500_000_000  # bytes; ImageNet's is a fifth
WANTED = 'give a folder, or a text file with the path of an image on each line'
SYSTEM = '/proc/', '/sys/'  # their files are no files


def image_files(path: Path, who: str) -> list[str]:
    """List the image files that a path of a data YAML names, sorted. who: flag, file and key, for messages."""
    files = _in_folder(path, who) if path.is_dir() else _in_list(path, who)
    return sorted(file for file in files if file.rpartition('.')[2].lower() in IMG_FORMATS)


def _in_folder(folder: Path, who: str) -> Iterator[str]:
    """Yield the files in a folder and below, through links too, from each folder once; hidden ones are left out."""
    visited = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited or f'{os.path.realpath(parent)}/'.startswith(SYSTEM):
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        if len(visited) > MOST_FOLDERS:
            raise QatError(f'{who}: more than {MOST_FOLDERS} folders below {folder}; name the folder of the images')
        folders[:] = [name for name in folders if not name.startswith('.')]
        yield from (os.path.join(parent, name) for name in files if not name.startswith('.'))


def _in_list(file: Path, who: str) -> Iterator[str]:
    """Yield the files on the lines of a text file; a relative one starts in its folder, or as for upstream in the current one."""
    if waits(file) or file.stat().st_size > LARGEST_LIST:
        raise QatError(f'{who}: {file}: a pipe, a device or too large, and no list of images; {WANTED}')
    content = file.read_bytes()
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode(*(('utf-16', 'replace') if wide else ('utf-8-sig', 'surrogateescape')))
    if '\0' in text:
        raise QatError(f'{who}: {file}: no text; {WANTED}')
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip()
        if not name or name.startswith('#'):
            continue
        names = name, name.replace('\\', '/')
        meant = [os.path.join(base, each.removeprefix('./')) for each in names for base in (file.parent, Path.cwd())]
        existing = next(filter(os.path.exists, meant), None)
        if not existing:
            start = file.parent.absolute()
            raise QatError(f'{who}: {file}, line {number}: {name} does not exist; relative lines start at {start}')
        yield existing
