"""Convert the boxes of a COCO JSON file to YOLO's labels: a text file for each image, with a line "class x y width height" per object.

    python scripts/coco_to_yolo.py annotations/instances_val2017.json images/val2017

The labels go where YOLOv9 looks for them: the label of .../images/.../a.jpg is .../labels/.../a.txt. Classes are numbered from 0, in the
order of their COCO ids; the command prints them as `names:` of a data YAML. Crowds and boxes without an area are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_text
from utils.qat.core.log import LOGGER, RESULT, bar


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'annotations', type=Path, metavar='ANNOTATIONS.json', help="COCO's instances_*.json, or another"
    )
    parser.add_argument('images', type=Path, metavar='IMAGES', help='folder of the images that it names')
    parser.add_argument('--exist-ok', action='store_true', help='replace labels that are there')
    args = parser.parse_args(argv)
    require_file(args.annotations, 'ANNOTATIONS', ('.json',))
    if not args.images.is_dir():
        raise QatError(f'IMAGES {args.images}: no such folder')
    return args


def label_of(image: Path) -> Path:
    """Return the label of an image, where upstream's img2label_paths has it: the last folder `images` becomes `labels`."""
    before, found, behind = str(image).rpartition('/images/')
    return Path(f'{before}/labels/{behind}' if found else behind).with_suffix('.txt')


def line(box: Sequence[float], width: float, height: float, number: int) -> str | None:
    """Write a box as a line of a label; None if nothing of it lies in the image.

    Args:
        box: x and y of the upper left corner, width and height, in pixels.
        width: of the image, in pixels.
        height: of the image, in pixels.
        number: of the class.
    """
    x, y, w, h = map(float, box)
    left, right = (min(max(0.0, at), width) / width for at in (x, x + w))
    top, bottom = (min(max(0.0, at), height) / height for at in (y, y + h))
    if not (right > left and bottom > top):  # NaN as well
        return None
    return f'{number} {(left + right) / 2:.6f} {(top + bottom) / 2:.6f} {right - left:.6f} {bottom - top:.6f}'


def read(file: Path) -> Any:
    """Read a COCO file with pycocotools. Raises QatError if it is none."""
    from pycocotools.coco import COCO

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = COCO(str(file))
            missing = [
                key for key in ('images', 'annotations', 'categories') if not isinstance(found.dataset.get(key), list)
            ]
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as e:
        raise QatError(
            f'ANNOTATIONS {file}: no COCO JSON ({" ".join(str(e).split())[:100] or type(e).__name__})'
        ) from e
    if missing:
        raise QatError(f'ANNOTATIONS {file}: no COCO JSON of objects: {", ".join(missing)} missing')
    return found


def labels(coco: Any, folder: Path, annotations: Path) -> dict[Path, str]:
    """Make the labels of all images of a COCO file that lie in `folder`: file → text."""
    numbers = {category: number for number, category in enumerate(sorted(coco.getCatIds()))}
    root, made = folder.resolve(), {}
    try:
        for image in bar(coco.loadImgs(coco.getImgIds()), 'converting', unit='images'):
            file = (root / image['file_name']).resolve()
            if not (file.is_relative_to(root) and file.is_file()):  # a file is data: nothing is written elsewhere
                continue
            boxes = coco.loadAnns(coco.getAnnIds(imgIds=image['id'], iscrowd=False))
            rows = [line(b['bbox'], image['width'], image['height'], numbers[b['category_id']]) for b in boxes]
            made[label_of(file)] = ''.join(f'{row}\n' for row in rows if row)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as e:
        raise QatError(
            f'ANNOTATIONS {annotations}: an image or a box lacks a value or has a wrong one ({type(e).__name__}: {str(e)[:100]})'
        ) from e
    if not made:
        raise QatError(
            f'IMAGES {folder}: has none of the {len(coco.getImgIds())} images that {annotations} names; give their folder'
        )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    args = parse_args(argv)
    coco = read(args.annotations)
    made = labels(coco, args.images, args.annotations)
    there = sorted(file for file in made if file.exists())
    if there and not args.exist_ok:
        raise QatError(f'{there[0]}: is there already, of {len(there)} of the labels; --exist-ok replaces them')
    for file, text in made.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    left_out = len(coco.getImgIds()) - len(made)
    if left_out:
        LOGGER.warning(f'{left_out} of {left_out + len(made)} images are not in {args.images} and got no label')
    names = [str(category['name']) for category in coco.loadCats(sorted(coco.getCatIds()))]
    objects = sum(text.count('\n') for text in made.values())
    LOGGER.log(
        RESULT,
        f'{objects} objects in {len(made)} labels, the first is {min(made)}\nnames: {json.dumps(names, ensure_ascii=False)}',
    )


if __name__ == '__main__':
    sys.exit(run_command(main))
