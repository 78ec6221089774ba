"""Convert the boxes of PASCAL VOC's XML files to YOLO's labels: a text file for each image, with a line "class x y width height" per object.

    python scripts/voc_to_yolo.py Annotations images/train

The objects of IMAGES/a.jpg are those of ANNOTATIONS/a.xml. The labels go where YOLOv9 looks for them: the label of .../images/.../a.jpg is
.../labels/.../a.txt. Classes are numbered from 0 in the order of the alphabet, of all files in ANNOTATIONS, so that the numbers are the
same for train and val; --names gives another order. The command prints them as `names:` of a data YAML. Objects marked as difficult and
boxes without an area are left out.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.log import bar
from utils.qat.data.label_files import label_of, line, write_labels
from utils.qat.untrusted.names import class_names

CORNERS = 'xmin', 'ymin', 'xmax', 'ymax'
SUFFIXES = 'bmp', 'dng', 'jpeg', 'jpg', 'mpo', 'png', 'tif', 'tiff', 'webp', 'pfm'  # of images, for upstream
REMEDY = 'mend it, or take it away'


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('annotations', type=Path, metavar='ANNOTATIONS', help='folder of the XML files')
    parser.add_argument('images', type=Path, metavar='IMAGES', help='folder of the images')
    parser.add_argument('--names', nargs='+', metavar='CLASS', help='all classes, in their order; default: sorted')
    parser.add_argument('--exist-ok', action='store_true', help='replace labels that are there')
    args = parser.parse_args(argv)
    for flag in ('annotations', 'images'):
        if not getattr(args, flag).is_dir():
            raise QatError(f'{flag.upper()} {getattr(args, flag)}: no such folder')
    return args


def read_voc(file: Path) -> ElementTree.Element:
    """Read an XML file; one with a document type, which can hold entities, is refused."""
    with reporting(f'{file}: no XML of PASCAL VOC', ElementTree.ParseError, UnicodeDecodeError, remedy=REMEDY):
        text = file.read_text(encoding='utf-8-sig')
        if '<!' in text.replace('<!--', ''):
            raise QatError(f'{file}: has a document type or CDATA, which annotations do not need; take it out')
        return ElementTree.fromstring(text)


def objects(file: Path) -> list[tuple[str, list[float], bool]]:
    """Read the objects of an XML file: class, corners in pixels, and whether it is marked as difficult."""
    boxes = []
    for i, thing in enumerate(read_voc(file).iter('object')):
        name, box = thing.findtext('name', '').strip(), thing.find('bndbox')
        if not name or box is None:
            raise QatError(f'{file}: object {i} has no {"bndbox" if name else "name"}; {REMEDY}')
        with reporting(f'{file}: object {i}: the corners of its bndbox', ValueError, remedy=REMEDY):
            corners = [float(box.findtext(corner, '')) for corner in CORNERS]
        boxes.append((name, corners, thing.findtext('difficult', '0').strip() == '1'))
    return boxes


def labels(
    images: Mapping[str, Path], files: Mapping[str, list[tuple[str, list[float]]]], numbers: Mapping[str, int]
) -> dict[Path, str]:
    """Make the labels of the images that have an XML file: file → text. images, files: by the name without suffix."""
    from PIL import Image

    made = {}
    for stem in bar(sorted(images.keys() & files.keys()), 'converting', unit='images'):
        with reporting(f'{images[stem]}: no image', OSError, remedy=REMEDY), Image.open(images[stem]) as image:
            width, height = image.size  # that of the XML file is 0 or another in many data sets
        rows = [line(corners, width, height, numbers[name]) for name, corners in files[stem]]
        made[label_of(images[stem].resolve())] = ''.join(f'{row}\n' for row in rows if row)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    args = parse_args(argv)
    found = {f.stem: objects(f) for f in bar(sorted(args.annotations.glob('*.xml')), 'reading', unit='files')}
    files = {stem: [(name, corners) for name, corners, hard in things if not hard] for stem, things in found.items()}
    names = args.names or sorted({name for things in files.values() for name, _ in things})
    class_names(names, '--names' if args.names else f'ANNOTATIONS {args.annotations}')
    for stem, things in files.items():
        if unknown := {name for name, _ in things}.difference(names):
            raise QatError(
                f'{args.annotations / stem}.xml: {min(unknown)!r} is no class of --names {" ".join(names)}; add it'
            )
    images = {f.stem: f for f in args.images.iterdir() if f.suffix[1:].lower() in SUFFIXES}
    made = labels(images, files, {name: i for i, name in enumerate(names)})
    if not made:
        raise QatError(
            f'IMAGES {args.images}: none of its {len(images)} images has one of the {len(files)} XML files of {args.annotations}, '
            'a.xml for a.jpg; give their folders'
        )
    missing = len(images) - len(made)
    hard = sum(len(found[stem]) - len(files[stem]) for stem in images.keys() & files.keys())
    left_out = [f'{missing} of {len(images)} images have no XML file in {args.annotations} and got no label'] * bool(
        missing
    )
    left_out += [f'objects marked as difficult, left out: {hard}'] * bool(hard)
    write_labels(made, names, args.exist_ok, '; '.join(left_out))


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
