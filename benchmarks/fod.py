#!/usr/bin/env python3
"""Split FOD-A by sequence: a frame of a video that a model has learnt from must not score it.

    git clone https://github.com/thenorthwes/fodadataset
    python scripts/voc_to_yolo.py fodadataset/Annotations fodadataset/JPEGImages
    python ../benchmarks/fod.py fodadataset/JPEGImages runs/fod

runs/fod/200.yaml, 1000.yaml, 5000.yaml and all.yaml have as many images to learn from, evenly spread over the sequences, and all score the same
1,500. A sequence ends where the class changes or the picture jumps. Of each class the last sequences score, until they have 18 % of its frames; of
two sequences the shorter; of one none. Needs Pillow, NumPy and PyYAML, neither torch nor YOLOv9.
"""

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

SIDE = 24  # of the small grey pictures that are compared
JUMP = 10  # mean difference of two of them, of 255, between sequences
SHORTEST = 15  # frames of a sequence; fewer belong to the one before
SCORED, SCORE = 0.18, 1500  # share of a class's frames, and images
NUMBERS = {'200': 200, '1000': 1000, '5000': 5000, 'all': None}
NAMES = (
    'AdjustableClamp AdjustableWrench Battery Bolt BoltNutSet BoltWasher ClampPart Cutter FuelCap Hammer Hose Label LuggagePart LuggageTag MetalPart '
    'MetalSheet Nail Nut PaintChip Pen PlasticPart Pliers Rock Screw Screwdriver SodaCan Tape Washer Wire Wood Wrench'
).split()


def small(path: Path) -> np.ndarray:
    """Read a picture as grey [SIDE, SIDE]."""
    picture = Image.open(path)
    picture.draft('RGB', (75, 75))
    return np.asarray(picture.convert('L').resize((SIDE, SIDE)), dtype=np.int16)


def sequences(files: Sequence[Path]) -> dict[str, list[list[Path]]]:
    """Group frames, in their order: class → its sequences."""
    found: dict[str, list[list[Path]]] = {}
    before, kind = np.empty(0), ''
    for file in files:
        picture, last = small(file), kind
        kind = file.with_suffix('.txt').read_text().split()[0]
        if kind != last or np.abs(picture - before).mean() > JUMP:
            found.setdefault(kind, []).append([])
        found[kind][-1].append(file)
        before = picture
    for kind, parts in found.items():
        whole: list[list[Path]] = []
        for part in parts:
            if whole and len(part) < SHORTEST:
                whole[-1] += part
            else:
                whole.append(part)
        found[kind] = whole
    return found


def split(parts: list[list[Path]]) -> tuple[list[Path], list[Path]]:
    """Split the sequences of a class into frames to learn from and frames that score."""
    if len(parts) == 2:
        parts = sorted(parts, key=len, reverse=True)
    scored: list[Path] = []
    wanted = SCORED * sum(map(len, parts))
    while len(parts) > 1 and len(scored) < wanted:
        *parts, last = parts
        scored += last
    return [*chain(*parts)], scored


def spread(files: Sequence[Path], number: int | None) -> Sequence[Path]:
    """Choose a number of files evenly; None = all."""
    return [files[int((i + 0.5) * len(files) / number)] for i in range(number)] if number else files


def main() -> None:
    """Write the lists and the data YAMLs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('images', type=Path, help='folder of the images and their labels')
    parser.add_argument('out', type=Path, help='folder for the lists')
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    halves = [split(parts) for parts in sequences(sorted(args.images.resolve().glob('*.jpg'))).values()]
    learn, score = (sorted(chain(*part)) for part in zip(*halves))
    for name, number in NUMBERS.items():
        lists = {'train': spread(learn, number), 'val': spread(score, SCORE)}
        for kind, files in lists.items():
            (out / f'{name}-{kind}.txt').write_text(''.join(f'{file}\n' for file in files))
        content = {'path': str(out), **{kind: f'{name}-{kind}.txt' for kind in lists}, 'names': NAMES}
        (out / f'{name}.yaml').write_text(yaml.safe_dump(content))
        print(f'{out / name}.yaml: {len(lists["train"])} images to learn from, {len(lists["val"])} that score')


if __name__ == '__main__':
    main()
