"""Data YAML → upstream's dataset of boxes or of masks, with checked images and labels.

Upstream skips some bad files without a message, fails later on some, and would run code of others. These checks report each
in one line with its name.
"""

import contextlib
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import Any

import cv2
import numpy as np
from PIL import Image
from utils.augmentations import Albumentations
from utils.dataloaders import IMG_FORMATS, LoadImagesAndLabels, img2label_paths
from utils.general import ROOT
from utils.segment.dataloaders import LoadImagesAndLabelsAndMasks

from utils.qat.config.common import LoaderConfig
from utils.qat.config.settings import Sides
from utils.qat.core.command import command
from utils.qat.core.distributed import first_goes_ahead
from utils.qat.core.errors import QatError, one_line, reporting
from utils.qat.core.files import require_yaml, waits, write_text
from utils.qat.core.log import LOGGER, quiet_upstream
from utils.qat.core.text import is_printable
from utils.qat.data.image_files import image_files
from utils.qat.untrusted.names import class_names
from utils.qat.untrusted.plain_values import ARRAYS, MULTIARRAY, Values, array_state
from utils.qat.untrusted.torch_archive import Call, Refused, read_pickle, without_collector
from utils.qat.untrusted.yaml_file import read_yaml

DEEP = '.tif', '.tiff'  # images that may have 32 bits per value
FLAT = 16  # of 255: a smaller range of pixels is noise
FEWEST, EXACT = 8, 0.005  # labels by which their task is known, and how exact their numbers are in 0..1
CONVERT = 'write its labels as boxes, "class x y width height"'
SINGLE = {0: 'item'}  # upstream's name of the one class of train.py --single-cls
OBJECT = ('O8', False, True), (3, '|', None, None, None, -1, -1, 63)  # NumPy's dtype of objects, as it is pickled


@dataclass
class Data:
    """A checked data YAML."""

    file: Path
    train: list[str]  # absolute paths of image folders, or of text files that list images
    val: list[str]
    names: dict[int, str]
    annotations: Path | None = None  # COCO's instances_val2017.json, if the data is COCO
    flag: str = '--data'  # the option that named the YAML
    val_split: float = 0.0  # share of the training images that is held out of training, in [0, 1)
    single: bool = False  # whether all classes count as one
    masks: bool = False  # whether the model returns masks, so that labels must be polygons

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def labelled(self) -> bool:
        """Whether an image of val has a label file."""
        images = chain.from_iterable(image_files(Path(path), f'{self.flag} {self.file}: val') for path in self.val)
        return any(os.path.exists(label) for image in images for label in img2label_paths([image]))


def images_alone(folder: Path, names: Mapping[int, str], flag: str = '--data') -> Data:
    """Take a folder of images as data for a calibration. names: of the model's classes.

    Raises QatError if it has no images, or a YAML that says more of them.
    """
    if yamls := sorted(folder.glob('*.y*ml')):
        raise QatError(f'{flag} {folder}: a folder with {yamls[0].name} in it; give that: {flag} {yamls[0]}')
    if not image_files(folder, f'{flag} {folder}'):
        raise QatError(f'{flag} {folder}: no images in it (looked for {", ".join(IMG_FORMATS)})')
    paths = [str(folder.absolute())]
    return Data(folder, paths, paths, dict(names), flag=flag)


def load_data(
    file: str | Path,
    nc: int | None = None,
    flag: str = '--data',
    masks: bool = False,
    own: Mapping[int, str] | None = None,
    names_from: str | None = None,
) -> Data:
    """Read and check a data YAML, for a model of `nc` classes called `own` or, with None, of any number and any names.

    names_from: whose names count where they differ, 'data' or 'checkpoint'; None refuses them.
    """
    file = require_yaml(file, flag)
    who, content = f'{flag} {file}', read_yaml(file, flag)
    if not isinstance(content, dict):
        raise QatError(f'{who}: expected keys train:, val: and names:')
    missing = [f'{k}:' for k in ('train', 'val', 'names') if not content.get(k)]
    if missing:
        raise QatError(f'{who}: {" and ".join(missing)} missing; it needs train:, val: (image folders) and names:')
    names = class_names(content['names'], who)
    if content.get('kpt_shape'):
        raise QatError(f'{who}: kpt_shape: data of pose, boxes with keypoints, which are not read; {CONVERT}')
    if not isinstance(content.get('nc', 0), (int, type(None))):
        raise QatError(f'{who}: nc: must be a number, that of the names')
    if content.get('nc') not in (None, len(names)):
        raise QatError(f'{who}: nc: {content["nc"]} but {len(names)} names')
    single = nc == 1 < len(names) and dict(own or {}) == SINGLE
    if single:
        LOGGER.info(f'{who}: its {len(names)} classes count as one, as in the training of the model (--single-cls)')
        names = SINGLE
    if nc not in (None, len(names)):
        raise QatError(f'{who}: {len(names)} classes, but the model has {nc}; use the data the model was trained on')
    names = _agreed(names, own or names, names_from, who)
    for key in ('path', 'train', 'val'):
        paths = [content.get(key) or ''] if key == 'path' else _as_list(content[key])
        if not all(isinstance(p, str) and '\0' not in p for p in paths):
            raise QatError(f'{who}: {key}: must be a path{" or a list of paths" * (key != "path")}')
    folders = _places(file, content)
    base = next((b for b in folders if all(os.path.exists(_under(b, p)) for p in _as_list(content['val']))), folders[0])
    train, val = (_image_paths(content, key, base, who, folders) for key in ('train', 'val'))
    is_coco = any(Path(p).name == 'val2017.txt' for p in val)  # upstream's own criterion
    annotations = base / 'annotations' / 'instances_val2017.json'
    known = annotations if is_coco and annotations.exists() and not single else None
    return Data(file, train, val, names, known, flag, single=single, masks=masks)


def is_numbered(names: Mapping[int, str]) -> bool:
    """Tell whether classes have no names but numbers, as a training without names gives them."""
    return all(re.fullmatch(f'(class)?[ _]?{i}', name) for i, name in names.items())


def _agreed(names: dict[int, str], own: Mapping[int, str], names_from: str | None, who: str) -> dict[int, str]:
    """Return the names of the classes; raise QatError if the data's `names` and those of the model, `own`, differ in letters or order."""

    def letters(name: str) -> str:
        return ''.join(filter(str.isalnum, name.casefold())) or name

    other = [i for i in names if letters(names[i]) != letters(own[i])]
    if is_numbered(own) or names_from == 'data' or not other:
        return names
    if is_numbered(names) or names_from == 'checkpoint':
        return dict(own)
    order = 'in another order' if sorted(names.values()) == sorted(own.values()) else 'other names'
    raise QatError(
        f'{who}: class {other[0]} is {names[other[0]]!r}, and the model calls it {own[other[0]]!r} ({order}, {len(other)} of {len(names)} '
        'differ); correct names:, or if only the words differ give --names-from data or --names-from checkpoint'
    )


def _as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _places(file: Path, content: dict) -> list[Path]:
    """List the folders that path: of a data YAML may mean: the first with val: is taken.

    A relative path: starts in the upstream tree (as for upstream), here, or beside the YAML; without path: the YAML's own folder comes
    first, because another set may lie here. Its last part counts too: upstream's get_coco.sh writes ./coco, and its coco.yaml says
    ../datasets/coco.
    """
    path = Path(content.get('path') or '')
    meant = (path, path) if path.is_absolute() else (path, path.name)
    bases = (ROOT, Path.cwd(), file.parent) if content.get('path') else (file.parent, ROOT, Path.cwd())
    paths = [base / p for p in meant for base in bases]
    return list(dict.fromkeys(Path(os.path.abspath(p)) for p in paths))


def _under(base: Path, path: str) -> Path:
    """Return a path of a data YAML below `base`. As for upstream, '../train' that does not exist is 'train', as Roboflow writes it."""
    inside = base / path.removeprefix('../')
    return inside if os.path.exists(inside) and not os.path.exists(base / path) else base / path


def _image_paths(content: dict, key: str, base: Path, who: str, folders: Sequence[Path]) -> list[str]:
    """Return the absolute paths under train: or val:, relative ones from `base`.

    Raises QatError, which begins with `who`, for one without images. places: where it was looked for.
    """
    paths = [_under(base, p) for p in _as_list(content[key])]
    for p in paths:
        if not os.path.exists(p):  # Path.exists raises an error for some texts
            elsewhere = f' (path: was looked for in {", ".join(map(str, folders))})' * (len(folders) > 1)
            raise QatError(f'{who}: {key}: {p} does not exist{elsewhere}; correct it')
        if not image_files(p, f'{who}: {key}'):
            raise QatError(f'{who}: {key}: no images in {p} (looked for {", ".join(IMG_FORMATS)})')
    return [str(p) for p in paths]


class Readable:
    """Mixin for upstream's datasets: letterboxes to rectangles too, augments images without labels, names unreadable images.

    Beside its list of images is a link to the cache of their labels.
    """

    im_files: list[str]
    shapes: np.ndarray
    rect: bool
    img_size: object
    sides: Sides | None = None  # of the letterboxed images, if height and width differ

    def __init__(self, *args: object, augment: bool = False, **options: object) -> None:
        super().__init__(*args, **options)
        if augment:  # afterwards, because upstream refuses to augment images without labels
            self.augment, self.mosaic = True, not self.rect
            self.albumentations = Albumentations(size=self.img_size)

    def cache_labels(self, path: Path, prefix: str = '') -> dict:
        """Read the labels, and write their cache where the link `path` leads: upstream would replace the link.

        It is written under a name of this process first, because another one may read the same labels at the same time.
        """
        cache = path.readlink()
        own = cache.with_name(f'.{cache.stem}.{os.getpid()}.tmp.cache')
        found = super().cache_labels(own, prefix)  # type: ignore[misc]  # upstream's dataset has it
        if own.exists():
            own.replace(cache)
        elif cache.parent.exists():  # else there are no labels
            LOGGER.warning(f'{cache}: cannot be written, so each command reads the labels anew')
        return found

    def load_image(self, i: int) -> tuple:
        """Load image `i`, resized to fit, or raise a QatError that names it."""
        if self.sides:
            width, height = self.shapes[i]
            gain = min(self.sides[0] / height, self.sides[1] / width)
            # upstream divides by the longer side, multiplies each side by the result, and truncates
            self.img_size = np.nextafter(gain * max(width, height), np.inf)
        require_integers(self.im_files[i])
        try:
            return super().load_image(i)  # type: ignore[misc]  # upstream's dataset has it
        except (AssertionError, cv2.error) as e:
            raise unreadable(self.im_files[i], e) from e
        finally:
            self.img_size = self.sides or self.img_size  # upstream's letterbox takes both sides too


class BoxDataset(Readable, LoadImagesAndLabels):
    """Upstream's dataset of images and boxes."""


class MaskDataset(Readable, LoadImagesAndLabelsAndMasks):
    """Upstream's dataset of images, boxes and masks."""


def open_dataset(
    data: Data,
    split: str,
    config: LoaderConfig,
    stride: int,
    masks: Mapping[str, Any] | None = None,
    labels: bool = True,
    **options: Any,
) -> BoxDataset | MaskDataset:
    """Open upstream's dataset over the images of a data YAML, and check its labels.

    `split` is 'train', 'val' or 'held out' (training images that `data.val_split` removes from 'train'). `masks` are
    settings of upstream's dataset of masks; None = boxes only. `labels`: whether they are used, so that wrong ones are refused.
    `options` go to upstream's dataset.
    """
    key = 'val' if split == 'val' else 'train'
    cls = BoxDataset if masks is None else MaskDataset
    paths = getattr(data, key)
    files = [file for path in paths for file in image_files(Path(path), f'{data.flag} {data.file}: {key}')]
    require_images(files, data.flag, data.file)
    cache = require_own_cache(files, paths)
    # The first process writes the cache of the labels. What upstream warns of, labels and their cache, is said here.
    with first_goes_ahead(), quiet_upstream(logging.ERROR), TemporaryDirectory() as scratch:
        listed = Path(scratch, 'images.txt')
        write_text(listed, '\n'.join(files))
        listed.with_suffix('.cache').symlink_to(cache)
        try:
            dataset = cls(
                str(listed),
                max(config.imgsz),
                config.batch_size,
                stride=stride,
                prefix=f'{key}: ',
                single_cls=data.single,
                **(masks or {}),
                **options,
            )
        except (AssertionError, ValueError) as e:  # upstream's errors for a set without one usable label or image
            require_readable(files, data)
            raise QatError(
                f'{data.flag} {data.file}: {key}: none of its {len(files)} images can be used, the first is {min(files)} '
                f'({_fault(min(files))}); save them as PNG or JPEG of 8 bits'
            ) from e
    if len(set(config.imgsz)) > 1:
        dataset.sides = config.imgsz
    dropped = sorted(set(files) - set(dataset.im_files))
    if labels:
        require_readable(dropped, data)
        require_valid_labels(dataset, data, bool(masks))
    require_copies(dataset.im_files, dataset.npy_files, dataset.shapes)
    if dropped:
        LOGGER.warning(
            f'{key}: {len(dropped)} left out, because the image{"" if labels else " or its label"} cannot be read; the first is {dropped[0]}'
        )
    if key == 'train' and data.val_split:
        held_out = held_out_files(dataset.im_files, data.val_split)
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


def _keep(dataset: LoadImagesAndLabels, wanted: Sequence[bool], config: LoaderConfig, pad: float) -> None:
    """Keep only the `wanted` images in upstream's dataset, in place, so that mosaics use no others. `pad` is in strides."""
    kept = np.flatnonzero(wanted)
    for name in ('im_files', 'label_files', 'labels', 'segments', 'ims', 'npy_files'):
        setattr(dataset, name, [getattr(dataset, name)[i] for i in kept])
    dataset.shapes, dataset.n, dataset.indices = dataset.shapes[kept], len(kept), range(len(kept))
    dataset.batch = np.arange(len(kept)) // config.batch_size
    if dataset.rect:
        # The images are sorted by shape. A batch takes the height and width of its largest images, whose longer side is 1.
        ratio = dataset.shapes[:, 1:] / dataset.shapes[:, :1]  # height / width
        sides = np.concatenate((ratio, 1 / ratio), 1).clip(max=1)
        largest = np.array([sides[dataset.batch == b].max(0) for b in range(dataset.batch[-1] + 1)])
        dataset.batch_shapes = np.ceil(largest * max(config.imgsz) / dataset.stride + pad).astype(int) * dataset.stride


def require_images(files: Iterable[str], flag: str, data: Path) -> None:
    """Raise QatError for an image whose name is not UTF-8 or has control characters, and for a pipe or a device.

    Upstream hashes the names as UTF-8, and repeats them in messages. Opening a pipe blocks for ever.
    """
    for file in files:
        try:
            file.encode()
        except UnicodeEncodeError as e:
            raise QatError(f'{flag} {data}: the name of the image {os.fsencode(file)!r} is not UTF-8; rename it') from e
        if not is_printable(file):
            raise QatError(f'{flag} {data}: the name of the image {file} has control characters; rename it')
        if waits(file):
            raise QatError(f'image {file}: a pipe or a device, and no file; remove it')


def _fault(file: str) -> str:
    """Say why upstream, which reads an image by Pillow, cannot use `file`."""
    try:
        with Image.open(file) as image:
            image.verify()
            return f'{image.format} of {image.width} x {image.height}, and upstream takes {", ".join(IMG_FORMATS)} of at least 10 x 10'
    except (OSError, SyntaxError, ValueError) as e:  # Pillow's errors for a damaged file
        return one_line(e)


def require_integers(file: str) -> None:
    """Raise QatError for an image of 32 bits per value, which OpenCV would read as black; of 16 bits it reads the upper eight."""
    if file.lower().endswith(DEEP):
        with contextlib.suppress(OSError), Image.open(file) as image:  # else OpenCV says what is wrong
            if image.mode in ('F', 'I'):
                raise unreadable(file, '32 bits per value; save it with 8 or 16')


def warn_of_flat(images: Iterable[np.ndarray], data: Data) -> None:
    """Warn if none of some images has structure: a calibration on them says nothing of the ranges."""
    if all(np.ptp(image) < FLAT for image in images):
        LOGGER.warning(f'{data.flag} {data.file}: the images for the calibration have no structure; look at them')


def unreadable(file: str, reason: object = '') -> QatError:
    """Make the error for an image that cannot be read. reason: of a library, if it gave one."""
    said = one_line(reason)
    return QatError(f'image {file}: cannot be read; mend or remove it' + f' ({said})' * bool(said))


def require_copies(files: Sequence[str], copies: Sequence[Path], sizes: Iterable[Sequence[int]]) -> None:
    """Raise QatError unless upstream's copies of images are uint8 arrays of their sizes.

    Upstream reads such a copy, IMG.npy beside IMG.jpg, in place of the image, if it exists. `sizes` are the width and height
    of each image, in pixels.
    """
    for file, copy, (width, height) in zip(files, copies, sizes):
        if not os.path.exists(copy):
            continue
        try:
            if not os.path.isfile(copy):
                raise ValueError('no file')
            pixels = np.lib.format.open_memmap(copy, 'r')
        # NumPy parses the header as Python
        except (ValueError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError) as e:
            raise QatError(f'{copy}: no array of NumPy, and it is read in place of {file}; delete it') from e
        if pixels.dtype != np.uint8 or pixels.shape != (height, width, 3):
            raise QatError(
                f'{copy}: {pixels.dtype} {list(pixels.shape)}, and it is read in place of {file}, which is uint8 '
                f'{[int(height), int(width), 3]}; delete it'
            )


def held_out_files(names: Sequence[str], share: float) -> set[str]:
    """Choose the files that --val-split holds out: evenly spread over the names, whatever their order and the seed.

    So the share holds for each folder too, such as that of a class, up to rounding.
    """
    files = sorted(names)
    n = round(share * len(files))
    if not 0 < n < len(files):
        raise QatError(
            f'--val-split {share}: the training set has {len(files)} images, of which {n} would be held out and '
            f'{len(files) - n} trained on; use another share, or leave it out'
        )
    return {files[(2 * i + 1) * len(files) // (2 * n)] for i in range(n)}


AUGMENTATION = (
    'hsv_h hsv_s hsv_v degrees translate scale shear perspective flipud fliplr mosaic mixup copy_paste'.split()
)
# Augmentation for a model that learns much from few images without labels: half of them in mosaics of four
VARIED = {
    **dict.fromkeys(AUGMENTATION, 0.0),
    **dict(hsv_h=0.015, hsv_s=0.4, hsv_v=0.3, translate=0.1, scale=0.5, fliplr=0.5, mosaic=0.5),
}
# For a loss on the labels: near to the images themselves, and no mirror, which makes another class of an arrow or a digit
MILD = {**VARIED, 'scale': 0.1, 'fliplr': 0.0, 'mosaic': 0.0}


def load_hyp(file: Path) -> dict[str, float]:
    """Read augmentation settings in upstream's format."""
    hyp = read_yaml(file, '--hyp')
    missing = [k for k in AUGMENTATION if not isinstance(hyp, dict) or k not in hyp]
    if missing:
        raise QatError(f'--hyp {file}: {", ".join(missing)} missing; take data/hyps/hyp.scratch-high.yaml as a model')
    wrong = [k for k in AUGMENTATION if not (isinstance(hyp[k], (int, float)) and math.isfinite(hyp[k]))]
    if wrong:
        raise QatError(f'--hyp {file}: {", ".join(wrong)}: must be a number')
    return hyp


class _Arrays(Values):
    """A builder of plain values and NumPy's arrays of numbers."""

    calls = ARRAYS


def require_own_cache(files: Collection[str], paths: Sequence[str]) -> Path:
    """Return where the cache of labels is, or will be. Upstream unpickles it, which could run any code: one that is not its own is refused."""
    last = Path(paths[-1])
    # as upstream names it
    cache = (last if last.is_file() else Path(img2label_paths([min(files)])[0]).parent).with_suffix('.cache')
    if waits(cache):
        raise QatError(f'{cache}: a pipe or a device, where YOLOv9 keeps a cache of labels; remove it')
    problem = f'{cache}: no cache of labels as YOLOv9 writes it, so it was not loaded'
    with reporting(problem, Refused, ValueError, TypeError, remedy='delete it'), without_collector():
        if cache.is_file():
            _require_labels(cache.read_bytes())
    return cache


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


def require_readable(files: Sequence[str], data: Data) -> None:
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
                    f'coordinates in 0..1 (no keypoints of pose), not {line[:60]!r}'
                )
            if not data.single:
                _require_class(c, f'{label}:{number}', data)


def _start_of(file: Path) -> bytes:
    """Read the first bytes of a file, among which a COCO JSON has its first keys; none of a folder, a pipe or a device."""
    if not file.is_file():
        return b''
    with open(file, 'rb') as opened:
        return opened.read(1 << 16)


def require_labels(dataset: LoadImagesAndLabels, key: str, data: Data, use: str) -> None:
    """Raise QatError if no image of a set has a label. `key` is the set in the data YAML; `use`: what labels are for, as a participle."""
    if any(map(len, dataset.labels)):
        return
    image, label = Path(dataset.im_files[0]), Path(dataset.label_files[0])
    folders = [
        p for parent in list(image.parents)[:4] for p in (parent, parent / 'annotations', parent / 'Annotations')
    ]
    found = (file for folder in folders for file in sorted(folder.glob('*.json')) if b'"images"' in _start_of(file))
    annotations = next(found, Path('ANNOTATIONS.json'))
    kind, convert = 'a COCO JSON', command('scripts/coco_to_yolo.py', annotations, image.parent)
    if voc := next((folder for folder in folders if next(folder.glob('*.xml'), None)), None):
        kind, convert = 'XML files', command('scripts/voc_to_yolo.py', voc, image.parent)
    raise QatError(
        f'{data.flag} {data.file}: {key}: none of its {len(dataset.im_files)} images has a label, so nothing can be {use}; the label of '
        f'{image}, {label}, {"is empty" if label.exists() else "is not there"}; labels in {kind} are converted by: {convert}'
    )


def require_valid_labels(dataset: LoadImagesAndLabels, data: Data, masks: bool) -> None:
    """Raise QatError for a label that upstream accepts although its class or its outline is wrong.

    Boxes with keypoints, and rotated ones, have the form of outlines, and are refused by name. For masks each object needs an outline: without, upstream would assign its image the masks of another, or none.
    """
    if kind := _of_another_task(dataset.segments):
        where = dataset.label_files[0]
        raise QatError(f'{data.flag} {data.file}: its labels are {kind}, as in {where}, not read; {CONVERT}')
    for label, rows, outlines in zip(dataset.label_files, dataset.labels, dataset.segments):
        for c in rows[:, 0].tolist():
            _require_class(c, label, data)
        if any(len(outline) < 3 for outline in outlines):  # upstream reads a box among outlines as two points
            raise QatError(
                f'label {label}: has boxes and outlines, or an outline of less than three points; use one of the two in a file'
            )
        if masks and len(outlines) != len(rows):
            raise QatError(
                f'label {label}: has boxes, and the model gives masks, which takes outlines, "class x1 y1 x2 y2 x3 y3 ..." in 0..1; '
                f'use data with these in {data.flag}, or a detection model'
            )


def _of_another_task(segments: Iterable[Sequence[np.ndarray]]) -> str:
    """Name the task of labels that are no outlines, though upstream reads them so; '' for outlines, which differ in length or place."""
    rows = [outline.reshape(-1) for of_file in segments for outline in of_file]
    if len(rows) < FEWEST or len({len(row) for row in rows}) > 1:
        return ''
    points = np.stack(rows).reshape(len(rows), -1, 2)
    centre, half, keypoints = points[:, :1], points[:, 1:2] / 2, points[:, 2:]
    inside = (abs(keypoints - centre) <= half + EXACT) | (keypoints == 0)  # 0 0: not seen
    in_image = (centre >= half - EXACT) & (centre + half <= 1 + EXACT)
    if points.shape[1] > 4 and inside.mean() > 0.95 and in_image.all():
        return 'of pose, boxes with keypoints'
    if points.shape[1] != 4:
        return ''
    side = abs(points[:, 1] - points[:, 0]).min(1)
    parallel = abs(points[:, 0] - points[:, 1] + points[:, 2] - points[:, 3]).max(1) < EXACT
    return 'of OBB, rotated boxes' if parallel.mean() > 0.9 and (side > EXACT).any() else ''


def _require_class(c: float, where: str | Path, data: Data) -> None:
    if not (math.isfinite(c) and c == int(c) and 0 <= c < data.nc):
        raise QatError(f'label {where}: class {c:g}, but {data.file} has classes 0..{data.nc - 1}')
