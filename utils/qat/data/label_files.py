"""Write YOLO's labels: a text file for each image, with a line "class x y width height" per object."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.qat.core.errors import QatError
from utils.qat.core.files import write_text
from utils.qat.core.log import LOGGER, RESULT


def label_of(image: Path) -> Path:
    """Return the label of an image, where upstream's img2label_paths has it: the last folder `images` becomes `labels`."""
    before, folder, behind = str(image).rpartition('/images/')
    return Path(f'{before}/labels/{behind}' if folder else behind).with_suffix('.txt')


def line(corners: Sequence[float], width: float, height: float, number: int) -> str | None:
    """Write a box (left, top, right, bottom, in pixels) of class `number` as a line; None if it is outside of the image."""
    left, right = (min(max(0.0, at), width) / width for at in corners[::2])
    top, bottom = (min(max(0.0, at), height) / height for at in corners[1::2])
    if not (right > left and bottom > top):  # NaN as well
        return None
    return f'{number} {(left + right) / 2:.6f} {(top + bottom) / 2:.6f} {right - left:.6f} {bottom - top:.6f}'


def write_labels(made: Mapping[Path, str], names: Sequence[str], exist_ok: bool, left_out: str) -> None:
    """Write labels (file → text), and say how many and their classes. left_out: a warning of what got none, or ''.

    Raises QatError if one is there already, unless `exist_ok`; then nothing is written.
    """
    there = sorted(file for file in made if file.exists())
    if there and not exist_ok:
        raise QatError(f'{there[0]}: is there already, of {len(there)} of the labels; --exist-ok replaces them')
    for file, text in made.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    if left_out:
        LOGGER.warning(left_out)
    objects = sum(text.count('\n') for text in made.values())
    LOGGER.log(
        RESULT,
        f'{objects} objects in {len(made)} labels, the first is {min(made)}\nnames: {json.dumps([*names], ensure_ascii=False)}',
    )
