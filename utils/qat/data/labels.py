"""Check images and labels, before and after upstream reads them.

Upstream skips some bad files without a message, fails later on some, and would run code of others. These checks report each
in one line with its name.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from utils.dataloaders import LoadImagesAndLabels, img2label_paths

from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.files import waits
from utils.qat.untrusted.pickle_records import Call, Refused, read_pickle, without_collector
from utils.qat.untrusted.plain_values import ARRAYS, MULTIARRAY, Values, array_state

OBJECT = ('O8', False, True), (3, '|', None, None, None, -1, -1, 63)  # NumPy's dtype of objects, as it is pickled


class _Arrays(Values):
    """A builder of plain values and NumPy's arrays of numbers."""

    calls = ARRAYS


def check_cache(files: Collection[str], paths: Sequence[str]) -> None:
    """Refuse a label cache that upstream did not write: upstream unpickles the cache, which could run any code."""
    last = Path(paths[-1])
    # as upstream names it
    cache = (last if last.is_file() else Path(img2label_paths([min(files)])[0]).parent).with_suffix('.cache')
    if waits(cache):
        raise QatError(f'{cache}: a pipe or a device, where YOLOv9 keeps a cache of labels; remove it')
    if not cache.is_file():
        return
    try:
        with without_collector():
            _require_labels(cache.read_bytes())
    except (Refused, ValueError, TypeError) as e:
        raise QatError(
            f'{cache}: no cache of labels as YOLOv9 writes it, so it was not loaded ({e or type(e).__name__}); delete it'
        ) from e


def _require_labels(content: bytes) -> None:
    """Raise Refused, ValueError or TypeError unless it is a NumPy file of one mapping of plain values and arrays."""
    if not content.startswith(b'\x93NUMPY'):
        raise Refused('it is no file of NumPy')
    length = 2 if content[6:7] == b'\1' else 4  # of the header's size, by the version of the format
    start = 8 + length + int.from_bytes(content[8 : 8 + length], 'little')
    record, _ = read_pickle(content[start:])
    if (
        type(record) is not Call
        or record.function.text not in {f'{module}._reconstruct' for module in MULTIARRAY}
        or record.items
    ):
        raise Refused('it holds no array')
    values = _Arrays()
    _, shape, dtype, _, (mapping,) = array_state(values, record)
    if (
        shape != ()
        or (dtype.arguments, dtype.state) != OBJECT
        or dtype.function.text != 'numpy.dtype'
        or type(mapping) is not dict
    ):
        raise Refused('it holds no mapping')
    values.value(mapping)


def check_dropped(files: Sequence[str], data: Any) -> None:
    """Raise QatError if upstream skips an image; name the label at fault, or else the image."""
    for label in map(Path, img2label_paths(files)):
        for number, line in enumerate(label.read_text(errors='replace').splitlines() if label.is_file() else (), 1):
            try:
                c, *values = [float(v) for v in line.split()] or [0] * 5
            except ValueError:
                c, values = 0, []
            if not (
                (len(values) == 4 or (len(values) >= 6 and len(values) % 2 == 0)) and all(0 <= v <= 1 for v in values)
            ):
                raise QatError(
                    f'label {label}:{number}: expected "class x y width height", or an outline, "class x1 y1 x2 y2 x3 y3 ...", with '
                    f'coordinates in 0..1, not {line[:60]!r}'
                )
            _check_class(c, f'{label}:{number}', data)


def require_labels(dataset: LoadImagesAndLabels, key: str, data: Any) -> None:
    """Raise QatError if no image of the set to score has a label. `key` is the set in the data YAML."""
    if any(map(len, dataset.labels)):
        return
    image = Path(dataset.im_files[0])
    places = (place for parent in list(image.parents)[:4] for place in (parent, parent / 'annotations'))
    found = next((file for place in places for file in sorted(place.glob('*.json'))), Path('ANNOTATIONS.json'))
    raise QatError(
        f'{data.flag} {data.file}: {key}: none of its {len(dataset.im_files)} images has a label, so nothing can be scored; the label of '
        f'{image} was looked for in {dataset.label_files[0]}; labels in a COCO JSON are converted by: '
        f'{command("scripts/coco_to_yolo.py", found, image.parent)}'
    )


def check_labels(dataset: LoadImagesAndLabels, data: Any) -> None:
    """Raise QatError for a label that upstream accepts although its class or its outline is wrong."""
    for label, rows, outlines in zip(dataset.label_files, dataset.labels, dataset.segments):
        for c in rows[:, 0].tolist():
            _check_class(c, label, data)
        if any(len(outline) < 3 for outline in outlines):  # upstream reads a box among outlines as two points
            raise QatError(
                f'label {label}: has boxes and outlines, or an outline of less than three points; use one of the two in a file'
            )


def _check_class(c: float, where: str | Path, data: Any) -> None:
    if not (math.isfinite(c) and c == int(c) and 0 <= c < data.nc):
        raise QatError(f'label {where}: class {c:g}, but {data.file} has classes 0..{data.nc - 1}')
