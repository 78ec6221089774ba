"""Data YAML → upstream's dataset of boxes or of masks: checks the YAML and the labels, and holds images out of train."""

import glob
import math
import os
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from utils.dataloaders import IMG_FORMATS, LoadImagesAndLabels
from utils.general import ROOT
from utils.segment.dataloaders import LoadImagesAndLabelsAndMasks

from utils.qat.core.command import require_file
from utils.qat.core.distributed import first_goes_ahead
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, quiet_upstream
from utils.qat.data.labels import check_cache, check_dropped, check_labels, check_names
from utils.qat.untrusted.names import class_names
from utils.qat.untrusted.yaml_file import read_yaml


@dataclass
class Data:
    """A checked data YAML. Paths are absolute: image folders, or text files that list images."""

    file: Path
    train: list
    val: list
    names: dict  # class index → name
    annotations: Path = None  # COCO's instances_val2017.json, where the data is COCO
    flag: str = '--data'  # that named the file
    val_split: float = 0.0  # share of the training images that is held out of training
    segments: bool = False  # the model gives masks, so labels must be polygons

    @property
    def nc(self):
        return len(self.names)


def load_data(file, nc=None, flag='--data', segments=False):
    """Read and check a data YAML given with `flag`; `nc` is the model's class count, to compare, and `segments` whether it gives masks.

    Raises QatError naming the key at fault.
    """
    file = require_file(file, flag, ('.yaml', '.yml'))
    content = read_yaml(file, flag)
    if not isinstance(content, dict):
        raise QatError(f'{flag} {file}: expected keys train:, val: and names:')
    missing = [f'{k}:' for k in ('train', 'val', 'names') if not content.get(k)]
    if missing:
        raise QatError(
            f'{flag} {file}: {" and ".join(missing)} missing; it needs train:, val: (image folders) and names:'
        )

    names = class_names(content['names'], f'{flag} {file}')
    if not isinstance(content.get('nc', 0), (int, type(None))):
        raise QatError(f'{flag} {file}: nc: must be a number, that of the names')
    if content.get('nc') not in (None, len(names)):
        raise QatError(f'{flag} {file}: nc: {content["nc"]} but {len(names)} names')
    if nc is not None and nc != len(names):
        raise QatError(
            f'{flag} {file}: {len(names)} classes, but the model has {nc}; use the data the model was trained on'
        )

    for key in ('path', 'train', 'val'):
        paths = [content.get(key) or ''] if key == 'path' else _as_list(content[key])
        if not all(isinstance(p, str) and '\0' not in p for p in paths):
            raise QatError(f'{flag} {file}: {key}: must be a path{" or a list of paths" * (key != "path")}')
    base = _base_folder(file, content)
    train, val = ([base / p for p in _as_list(content[k])] for k in ('train', 'val'))
    for key, paths in (('train', train), ('val', val)):
        for p in paths:
            if not os.path.exists(p):  # unlike Path.exists, it takes any text
                tried = (
                    ''
                    if os.path.isabs(content.get('path') or '')
                    else "path: was tried from the YOLOv9 folder, from here and from the YAML's; "
                )
                raise QatError(
                    f'{flag} {file}: {key}: {p} does not exist; {tried}correct it{", or make path: absolute" * bool(tried)}'
                )
            if not _has_images(p):
                raise QatError(f'{flag} {file}: {key}: no images in {p} (looked for {", ".join(IMG_FORMATS)})')
    is_coco = any(p.name == 'val2017.txt' for p in val)  # upstream's own criterion
    annotations = base / 'annotations' / 'instances_val2017.json'
    return Data(
        file,
        [str(p) for p in train],
        [str(p) for p in val],
        names,
        annotations if is_coco and annotations.exists() else None,
        flag,
        segments=segments,
    )


def _as_list(value):
    return value if isinstance(value, list) else [value]


def _base_folder(file, content):
    """Folder that the relative paths of a data YAML start from: its path:, taken relative to the upstream tree (as
    upstream does), the current folder, or the YAML's own; the first under which val: exists."""
    path = Path(content.get('path') or '')
    bases = [Path(os.path.abspath(b / path)) for b in (ROOT, Path.cwd(), file.parent)]
    return next((b for b in bases if all(os.path.exists(b / p) for p in _as_list(content['val']))), bases[0])


def _has_images(path):
    if path.is_file():
        return any(line.rsplit('.', 1)[-1].strip().lower() in IMG_FORMATS for line in path.open(errors='ignore'))
    return any(p.suffix[1:].lower() in IMG_FORMATS for p in path.rglob('*.*'))


def _check_polygons(dataset, data):
    """Name the label that has no outline: upstream would give its image the masks of others, or none."""
    for label, rows, outlines in zip(dataset.label_files, dataset.labels, dataset.segments):
        if len(outlines) != len(rows) or any(len(outline) < 3 for outline in outlines):
            raise QatError(
                f'label {label}: has boxes, and the model gives masks, which takes outlines, "class x1 y1 x2 y2 x3 y3 ..." in 0..1; '
                f'use data with these in {data.flag}, or a detection model'
            )


class Readable:
    """What upstream's dataset is beside: an image that OpenCV cannot read, where Pillow found nothing wrong, is told by name."""

    def load_image(self, i):
        try:
            return super().load_image(i)
        except (AssertionError, ValueError, cv2.error) as e:  # ValueError: of a damaged .npy beside it
            raise QatError(
                f'image {self.im_files[i]}: cannot be read; mend or remove it ({" ".join(str(e).split())[:200]})'
            ) from e


class Boxes(Readable, LoadImagesAndLabels):
    pass


class Masks(Readable, LoadImagesAndLabelsAndMasks):
    pass


def open_dataset(data, split, config, stride, masks=None, **options):
    """Upstream's dataset over images of `data`, its labels checked.

    split: 'train', 'val', or 'held out': those of the training images that `data.val_split` takes away from 'train'. masks: settings of
    upstream's dataset that gives masks as well; None = boxes only.
    """
    key = 'val' if split == 'val' else 'train'
    cls = Boxes if masks is None else Masks
    paths = getattr(data, key)
    files = _image_files(paths)
    if not files:
        raise QatError(f'{data.flag} {data.file}: {key}: no images in {", ".join(paths)}')
    check_names(files, data)
    check_cache(files, paths)
    with first_goes_ahead(), quiet_upstream():  # it writes a cache of the labels
        try:
            dataset = cls(
                paths, config.imgsz, config.batch_size, stride=stride, prefix=f'{key}: ', **(masks or {}), **options
            )
        except (AssertionError, ValueError) as e:  # how upstream reports a set without one usable label or image
            check_dropped(files, data)
            raise QatError(
                f'{data.flag} {data.file}: {key}: none of its {len(files)} images can be used, the first is {min(files)} ({e})'
            ) from e
    dropped = sorted(set(files) - set(dataset.im_files))
    check_dropped(dropped, data)
    check_labels(dataset, data)
    if masks:
        _check_polygons(dataset, data)
    if dropped:
        LOGGER.warning(f'{key}: {len(dropped)} images cannot be read and are left out, the first is {dropped[0]}')
    if key == 'train' and data.val_split:
        held_out = _held_out(dataset.im_files, data.val_split)
        _keep(
            dataset,
            [(f in held_out) == (split == 'held out') for f in dataset.im_files],
            config,
            options.get('pad', 0.0),
        )
        if split == 'held out' and not any(map(len, dataset.labels)):
            raise QatError(
                f'--val-split {data.val_split}: none of the {dataset.n} images held out has a label, so they choose '
                'nothing; use a larger share, or leave it out'
            )
    return dataset


def _held_out(files, share):
    """The set of files that --val-split `share` holds out: evenly spread over the names, whatever the seed."""
    files = sorted(files)
    n = round(share * len(files))
    if not 0 < n < len(files):
        raise QatError(
            f'--val-split {share}: the training set has {len(files)} images, of which {n} would be held out and '
            f'{len(files) - n} trained on; use another share, or leave it out'
        )
    return {files[(2 * i + 1) * len(files) // (2 * n)] for i in range(n)}


def _keep(dataset, wanted, config, pad):
    """Leave only the `wanted` images (a bool for each) in upstream's dataset, in place: no mosaic shows another one.

    pad: of rectangles, in strides, as given to the dataset.
    """
    kept = np.flatnonzero(wanted)
    for name in ('im_files', 'label_files', 'labels', 'segments', 'ims', 'npy_files'):
        setattr(dataset, name, [getattr(dataset, name)[i] for i in kept])
    dataset.shapes, dataset.n, dataset.indices = dataset.shapes[kept], len(kept), range(len(kept))
    dataset.batch = np.arange(len(kept)) // config.batch_size
    if (
        dataset.rect
    ):  # sorted by shape already; a batch is as high and as wide as its images need, the longer side of each 1
        ratio = dataset.shapes[:, 1:] / dataset.shapes[:, :1]  # height / width
        sides = np.concatenate((ratio, 1 / ratio), 1).clip(max=1)
        largest = np.array([sides[dataset.batch == b].max(0) for b in range(dataset.batch[-1] + 1)])
        dataset.batch_shapes = np.ceil(largest * config.imgsz / dataset.stride + pad).astype(int) * dataset.stride


def _image_files(paths):
    """The image files that upstream's dataset looks for under `paths`."""
    files = []
    for p in map(Path, paths):
        if p.is_dir():
            files += glob.glob(str(p / '**' / '*.*'), recursive=True)
        else:
            lines = p.read_text(errors='surrogateescape').strip().splitlines()
            files += [x.replace('./', str(p.parent) + os.sep, 1) if x.startswith('./') else x for x in lines]
    return [f for f in files if f.rsplit('.', 1)[-1].lower() in IMG_FORMATS]


def load_hyp(file):
    """Augmentation settings in upstream's format. Raises QatError naming what is missing."""
    file = require_file(file, '--hyp', ('.yaml', '.yml'))
    hyp = read_yaml(file, '--hyp')
    needed = (
        'hsv_h',
        'hsv_s',
        'hsv_v',
        'degrees',
        'translate',
        'scale',
        'shear',
        'perspective',
        'flipud',
        'fliplr',
        'mosaic',
        'mixup',
        'copy_paste',
    )
    missing = [k for k in needed if not isinstance(hyp, dict) or k not in hyp]
    if missing:
        raise QatError(f'--hyp {file}: {", ".join(missing)} missing; take data/hyps/hyp.scratch-high.yaml as a model')
    wrong = [k for k in needed if not (isinstance(hyp[k], (int, float)) and math.isfinite(hyp[k]))]
    if wrong:
        raise QatError(f'--hyp {file}: {", ".join(wrong)}: must be a number')
    return hyp
