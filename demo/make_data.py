#!/usr/bin/env python3
"""Make a small data set for detection, segmentation or classification: handwritten digits on textured canvases.

    python demo/make_data.py --out .work/demo-data

in:  the digits of scikit-learn (1797 grey images of 8x8 pixels), which are in its package, so nothing is downloaded
out: DIR/images/{train,val}/*.jpg, DIR/labels/{train,val}/*.txt (YOLO format, in 0..1) and DIR/data.yaml

    --task detect   bare digits             class cx cy w h             the box
    --task segment  digits as stickers      class x1 y1 x2 y2 ...       the outline
    --task classify one bare digit          DIR/{train,val}/CLASS/*.jpg  the folder, as classify/train.py takes it

A sticker is a digit that is cut out with a border around it. Pen strokes are too thin for masks at a quarter of the
resolution, and this is the resolution at which upstream predicts and compares masks.

* No digit of a val image is in a train image: the 1797 digits are split first.
* Image i of a split depends only on --seed, --size and i. So `--train 400` makes the first 400 images of
  `--train 4000`, and the val images stay the same: weights trained on more images are tested on the same images.
* The same arguments give the same bytes. A second run with the same arguments does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

try:
    import cv2
    import numpy as np
except ImportError:
    if not {'-h', '--help'} & set(sys.argv):  # the help works before they are installed
        raise

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.core.command import Parser, run_command
from utils.qat.core.errors import QatError

# Increase a version when the same arguments give other pictures
VERSION = {'detect': 1, 'segment': 'segment 1', 'classify': 'classify 1'}
STAMP = 'made-with.json'  # the arguments of a folder
SPLITS = 'train', 'val'
VAL_SHARE = 0.2  # of the source digits
ASPECTS = (1.0, 1.0), (0.8, 1.0), (1.0, 0.8)  # height, width in units of --size, so that letterboxing matters
JPEG_QUALITY = 90


def source_split(seed: int, count: int) -> dict[str, np.ndarray]:
    """Split the indices of `count` digits at random into 'train' and 'val'."""
    order = np.random.default_rng(seed).permutation(count)
    n_val = round(VAL_SHARE * count)
    return {'train': order[n_val:], 'val': order[:n_val]}


def texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Paint a canvas, FP32 [height, width, 3] in 0..255: noise between two colours, plus a gradient."""
    noise = np.zeros((height, width), np.float32)
    for octave in range(1, 7):  # coarse to fine: each octave has twice the cells and about half the weight
        cells = rng.random((2**octave + 1, 2**octave + 1), dtype=np.float32) - 0.5
        noise += cv2.resize(cells, (width, height), interpolation=cv2.INTER_CUBIC) * rng.uniform(0.5, 1.5) / octave
    noise = (noise - noise.min()) / (np.ptp(noise) + 1e-6)  # 0..1

    dark, light = np.sort(rng.uniform(20, 235, (2, 3)).astype(np.float32), axis=0)
    light = dark + (light - dark) * rng.uniform(0.3, 0.8)  # less contrast than the digits have
    canvas = dark + noise[..., None] * (light - dark)  # [height, width, 3]

    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    return canvas + rng.uniform(0, 30) * (np.cos(angle) * x + np.sin(angle) * y)[..., None]


def glyph(rng: np.random.Generator, digit: np.ndarray, side: float) -> np.ndarray:
    """Draw a digit [8, 8] as a soft mask, FP32 [height, width] in 0..1, scaled, and slightly rotated and stretched.

    It is about `side` pixels high, and cropped to the visible part. One cubic warp scales, rotates and stretches. It leaves
    edges of side/8 pixels, too soft for the sides of a box, so a steep ramp sharpens them to one or two pixels.
    """
    angle = np.deg2rad(rng.uniform(-12, 12))
    stretch = rng.uniform(0.85, 1.2)
    scale = side / 8
    matrix = scale * np.array([[np.cos(angle) * stretch, -np.sin(angle)], [np.sin(angle) * stretch, np.cos(angle)]])
    canvas = int(np.ceil(side * 1.6))  # room for the rotated and stretched corners
    shift = canvas / 2 - matrix @ [3.5, 3.5]  # centre of the source onto the centre of the canvas
    ink = cv2.warpAffine(
        (digit / digit.max()).astype(np.float32),
        np.column_stack([matrix, shift]),
        (canvas, canvas),
        flags=cv2.INTER_CUBIC,
    )
    threshold = rng.uniform(0.3, 0.42)  # pen width: lower fills the holes of an 8, higher breaks faint strokes
    ramp = 1.5 / scale  # ink rises by at most about 1/scale per pixel
    mask = np.clip((ink - threshold) / ramp + 0.5, 0, 1)

    return mask[visible(mask)]


def visible(mask: np.ndarray) -> tuple[slice, slice]:
    """Find the rows and columns in which a soft mask [height, width] is visible."""
    rows, columns = (np.flatnonzero((mask > 0.5).any(axis)) for axis in (1, 0))
    return np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def sticker(rng: np.random.Generator, ink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut a sticker around a digit: return soft masks of the sticker and of the digit, of one shape, cropped to the sticker.

    The outline follows the digit at some distance. Holes are filled, and the border is wide enough to hold a broken
    digit together, so a sticker is one piece with one outline.
    """
    border = round(rng.uniform(0.09, 0.15) * max(ink.shape))
    ink = np.pad(ink, 4 * border)
    outlines: Sequence[np.ndarray] = ()
    while len(outlines) != 1:
        disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * border + 1, 2 * border + 1))
        grown = cv2.dilate((ink > 0.5).astype(np.uint8), disc)
        outlines, _ = cv2.findContours(grown, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        border += 1
    shape = cv2.drawContours(np.zeros(ink.shape, np.float32), outlines, -1, 1.0, cv2.FILLED)
    shape = cv2.GaussianBlur(shape, (0, 0), max(ink.shape) / 150)  # smooths the steps of single pixels
    return shape[visible(shape)], ink[visible(shape)]


def contrasting_colour(rng: np.random.Generator, background: np.ndarray) -> np.ndarray:
    """Choose a colour [3] whose brightness differs clearly from the mean colour `background` [3]."""
    brightness = float(background.mean())
    room = {1: 250 - brightness, -1: brightness - 5}  # possible distance up and down
    sign = max(room, key=room.__getitem__) if min(room.values()) < 60 else rng.choice([1, -1])
    target = brightness + sign * rng.uniform(60, min(room[sign], 170))
    colour = rng.uniform(0, 255, 3)
    return np.clip(target + 0.5 * (colour - colour.mean()), 0, 255).astype(np.float32)


def free_place(
    rng: np.random.Generator,
    taken: Sequence[tuple[int, int, int, int]],
    box_hw: tuple[int, int],
    canvas_hw: tuple[int, int],
    overlap: float,
    tries: int = 30,
) -> tuple[int, int] | None:
    """Find a random free place for a box on a canvas: its top-left corner (y, x), or None.

    `taken` are boxes x1, y1, x2, y2 in pixels. `overlap` is the largest allowed overlap of two boxes, as a share of the
    smaller one.
    """
    (h, w), (height, width) = box_hw, canvas_hw
    if h > height or w > width:
        return None
    for _ in range(tries):
        y, x = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
        for x1, y1, x2, y2 in taken:
            common = max(0, min(x2, x + w) - max(x1, x)) * max(0, min(y2, y + h) - max(y1, y))
            if common > overlap * min(h * w, (x2 - x1) * (y2 - y1)):
                break
        else:
            return y, x
    return None


def make_image(
    rng: np.random.Generator, digits: np.ndarray, targets: np.ndarray, size: int, task: Task
) -> tuple[np.ndarray, list[tuple[int, int, int, np.ndarray]]]:
    """Paint one picture, whose longer side has `size` pixels, with some of the digits [n, 8, 8].

    Returns:
        The picture, BGR uint8 [height, width, 3]; and (class, x, y, mask) of each digit on it. The mask is bool [h, w],
        cropped to the visible part. x and y are its top-left corner in the picture, in pixels.
    """
    height, width = (round(size * side) for side in ASPECTS[rng.integers(len(ASPECTS))])
    canvas = texture(rng, height, width)
    things: list[tuple[int, int, int, np.ndarray]] = []
    for _ in range(rng.integers(task.per_image[0], task.per_image[1] + 1)):
        # log-uniform: as many digits from 24 to 48 pixels as from 48 to 96, so P3, P4 and P5 are all used
        side = np.exp(rng.uniform(*np.log(task.digit_size))) * size / 320
        which = rng.integers(len(digits))
        layers = task.layers(rng, glyph(rng, digits[which], side))
        h, w = layers[0].shape
        taken = [(x, y, x + mask.shape[1], y + mask.shape[0]) for _, x, y, mask in things]
        corner = free_place(rng, taken, (h, w), (height, width), task.overlap)
        if corner is None:  # the canvas is full
            continue
        y, x = corner
        under = canvas[y : y + h, x : x + w]
        background = under.mean((0, 1))
        for layer in layers:
            colour = contrasting_colour(rng, background)
            under += layer[..., None] * (colour - under)
            background = colour
        things.append((int(targets[which]), x, y, layers[0] > 0.5))
    canvas += rng.standard_normal(canvas.shape, dtype=np.float32) * np.float32(rng.uniform(1, 5))  # sensor noise
    return np.clip(canvas, 0, 255).round().astype(np.uint8), things


def box_line(x: int, y: int, mask: np.ndarray, height: int, width: int) -> str:
    """Write the box around a mask for a label file: cx cy w h, relative to the picture of `height` x `width`."""
    h, w = mask.shape
    return f'{(x + x + w) / 2 / width:.6f} {(y + y + h) / 2 / height:.6f} {w / width:.6f} {h / height:.6f}'


def polygon_line(x: int, y: int, mask: np.ndarray, height: int, width: int) -> str:
    """Write the outline of a mask for a label file: x1 y1 x2 y2 ..., relative to the picture of `height` x `width`.

    The points are the centres of the mask's outermost pixels. Upstream rounds points down to whole pixels and fills the
    polygon including these pixels, which gives exactly the same mask.
    """
    [outline], _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(x, y))
    return ' '.join(f'{(px + 0.5) / width:.6f} {(py + 0.5) / height:.6f}' for px, py in outline[:, 0])


class Task(NamedTuple):
    """The content of the pictures of a task, and the form of their labels."""

    per_image: tuple[int, int]
    digit_size: tuple[int, int]  # pixels of the longer side at --size 320; scales with --size
    overlap: float  # largest share of a box that another may cover
    # soft mask of a digit -> soft masks to paint in this order; the first has the visible shape
    layers: Callable[[np.random.Generator, np.ndarray], Sequence[np.ndarray]]
    # (x, y, mask, height, width) -> text behind the class in a label file; None = class folders
    line: Callable[..., str] | None


TASKS = {  # digit_size is without the border of a sticker
    'detect': Task((3, 8), (24, 110), 0.05, lambda rng, ink: [ink], box_line),
    'segment': Task((2, 5), (44, 140), 0.0, sticker, polygon_line),
    'classify': Task((1, 1), (110, 180), 0.0, lambda rng, ink: [ink], None),
}


def make_split(folder: Path, split: str, count: int, size: int, seed: int, task: Task) -> None:
    """Write `count` pictures and label files of one split under `folder`."""
    from sklearn.datasets import load_digits  # in the function: the import takes a second, and `-h` must not
    from tqdm import tqdm

    digits = load_digits()
    sources = source_split(seed, len(digits.images))[split]
    images, labels = folder / 'images' / split, folder / 'labels' / split
    classes = [folder / split / str(c) for c in range(10)]
    for made in (images, labels) if task.line else classes:
        made.mkdir(parents=True)
    for i in tqdm(range(count), desc=f'{split} images', file=sys.stdout, disable=not sys.stdout.isatty()):
        rng = np.random.default_rng([seed, SPLITS.index(split), i])  # every image has its own sequence
        image, things = make_image(rng, digits.images[sources], digits.target[sources], size, task)
        ok, jpeg = cv2.imencode('.jpg', image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        assert ok, 'OpenCV could not encode a JPEG'
        if task.line is None:
            (classes[things[0][0]] / f'{i:05d}.jpg').write_bytes(jpeg.tobytes())
            continue
        (images / f'{i:05d}.jpg').write_bytes(jpeg.tobytes())
        (labels / f'{i:05d}.txt').write_text(
            ''.join(f'{c} {task.line(*what, *image.shape[:2])}\n' for c, *what in things)
        )


def data_yaml(out: Path) -> str:
    """Write the text of data.yaml, with an absolute path: upstream looks for a relative path beside its own sources."""
    return (
        f'path: {json.dumps(str(out))}\ntrain: images/train\nval: images/val\nnc: 10\n'
        f'names: {json.dumps([str(c) for c in range(10)])}\n'
    )


def make_data(
    out: Path, task: str = 'detect', train: int = 400, val: int = 100, size: int = 320, seed: int = 0
) -> bool:
    """Make a data set in the folder `out`; return False if it was already there with the same arguments, else True.

    Nothing is overwritten: QatError is raised if the folder has other content.
    """
    out = out.absolute()
    stamp = json.dumps(dict(version=VERSION[task], train=train, val=val, size=size, seed=seed)) + '\n'
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        made_with = out / STAMP
        if not made_with.is_file():
            raise QatError(f'--out {out} exists and was not made by this program; choose another folder')
        if made_with.read_text() != stamp:
            raise QatError(
                f'--out {out} was made with {made_with.read_text().strip()}; delete it or choose another folder'
            )
        if TASKS[task].line and (out / 'data.yaml').read_text() != data_yaml(out):  # the folder was moved
            (out / 'data.yaml').write_text(data_yaml(out))
        return False

    part = out.with_name(f'.{out.name}.{os.getpid()}.part')
    try:
        part.mkdir(parents=True)
        for split, count in zip(SPLITS, (train, val)):
            make_split(part, split, count, size, seed, TASKS[task])
        if TASKS[task].line:
            (part / 'data.yaml').write_text(data_yaml(out))
        (part / STAMP).write_text(stamp)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def integer(low: int, high: int) -> Callable[[str], int]:
    """Make an argparse type for whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f'{text!r} is not a whole number from {low} to {high}')
        return int(text)

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    """Make the data set of the command line."""
    parser = Parser(description='Make a small data set of handwritten digits.')
    parser.add_argument('--out', required=True, type=Path, metavar='DIR', help='folder to make')
    parser.add_argument('--task', choices=TASKS, default='detect', help='what the labels are for (default detect)')
    parser.add_argument('--train', type=integer(1, 100_000), default=400, help='training images (default 400)')
    parser.add_argument('--val', type=integer(1, 100_000), default=100, help='validation images (default 100)')
    parser.add_argument('--size', type=integer(96, 2048), default=320, help='longer side in pixels (default 320)')
    parser.add_argument('--seed', type=integer(0, 2**32 - 1), default=0, help='seed (default 0)')
    args = parser.parse_args(argv)
    made = make_data(**vars(args))
    print(f'{args.out}: {args.train} train and {args.val} val images', '' if made else '(already there)')


if __name__ == '__main__':
    sys.exit(run_command(main, torch=False))
