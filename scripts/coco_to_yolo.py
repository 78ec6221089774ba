"""Convert the boxes of a COCO JSON file to YOLO's labels: a text file for each image, with a line "class x y width height" per object.

    python scripts/coco_to_yolo.py annotations/instances_val2017.json images/val2017

The labels go where YOLOv9 looks for them: the label of .../images/.../a.jpg is .../labels/.../a.txt. Classes are numbered from 0, in the
order of their COCO ids; the command prints them as `names:` of a data YAML. Crowds and boxes without an area are left out.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.core.log import bar
from utils.qat.core.text import is_printable
from utils.qat.data.coco_file import SIZE, read_coco
from utils.qat.data.label_files import label_of, line, write_labels
from utils.qat.untrusted.names import class_names


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


def _is_path(value: object) -> bool:
    return type(value) is str and is_printable(value)


def labels(coco: dict[str, Any], folder: Path, annotations: Path) -> dict[Path, str]:
    """Make the labels of all images of a COCO file that exist in `folder`: file → text."""
    numbers = {number: i for i, number in enumerate(sorted(category['id'] for category in coco['categories']))}
    root, made = folder.resolve(), {}
    boxes: dict[int | str, list[dict[str, Any]]] = {image['id']: [] for image in coco['images']}
    for box in coco['annotations']:
        if not box.get('iscrowd'):
            boxes[box['image_id']].append(box)
    for image in bar(coco['images'], 'converting', unit='images'):
        file = Path(os.path.realpath(root / image['file_name']))
        if not (file.is_relative_to(root) and os.path.isfile(file)):  # the file is untrusted: write nothing elsewhere
            continue
        rows = [
            line((x, y, x + width, y + height), image['width'], image['height'], numbers[box['category_id']])
            for box in boxes[image['id']]
            for x, y, width, height in [map(float, box['bbox'])]
        ]
        made[label_of(file)] = ''.join(f'{row}\n' for row in rows if row)
    if not made:
        raise QatError(
            f'IMAGES {folder}: has none of the {len(coco["images"])} images that {annotations} names; give their folder'
        )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    args = parse_args(argv)
    who = f'ANNOTATIONS {args.annotations}'
    coco = read_coco(args.annotations, who, {'file_name': _is_path, **SIZE}, category={'name': str})
    names = class_names([c['name'] for c in sorted(coco['categories'], key=lambda c: c['id'])], who)
    made = labels(coco, args.images, args.annotations)
    missing = len(coco['images']) - len(made)
    left_out = f'{missing} of {missing + len(made)} images are not in {args.images} and got no label' * bool(missing)
    write_labels(made, [*names.values()], args.exist_ok, left_out)


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
