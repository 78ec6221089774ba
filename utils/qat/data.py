"""Data YAML → images: checks the YAML and the labels, and builds loaders on upstream's dataset class."""
import glob
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import yaml
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset
from utils.dataloaders import IMG_FORMATS, LoadImagesAndLabels, img2label_paths, seed_worker
from utils.general import ROOT

from utils.qat.distributed import first_goes_ahead
from utils.qat.errors import QatError, require_file
from utils.qat.log import LOGGER, quiet_upstream


@dataclass
class Data:
    """A checked data YAML. Paths are absolute: image folders, or text files that list images."""
    file: Path
    train: list
    val: list
    names: dict  # class index → name
    annotations: Path = None  # COCO's instances_val2017.json, where the data is COCO
    flag: str = '--data'  # that named the file

    @property
    def nc(self):
        return len(self.names)


def load_data(file, nc=None, flag='--data'):
    """Read and check a data YAML given with `flag`; `nc` is the model's class count, to compare.

    Raises QatError naming the key at fault.
    """
    file = require_file(file, flag, ('.yaml', '.yml'))
    try:
        content = yaml.safe_load(file.read_text(encoding='utf-8', errors='ignore'))
    except yaml.YAMLError as e:
        raise QatError(f"{flag} {file}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(content, dict):
        raise QatError(f'{flag} {file}: expected keys train:, val: and names:')
    missing = [f'{k}:' for k in ('train', 'val', 'names') if not content.get(k)]
    if missing:
        raise QatError(f"{flag} {file}: {' and '.join(missing)} missing; it needs train:, val: (image folders) and names:")

    names = content['names']
    names = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(names, dict) or sorted(names) != list(range(len(names))):
        raise QatError(f'{flag} {file}: names: must be a list, or map 0..n-1 to names')
    if content.get('nc') not in (None, len(names)):
        raise QatError(f"{flag} {file}: nc: {content['nc']} but {len(names)} names")
    if nc is not None and nc != len(names):
        raise QatError(f'{flag} {file}: {len(names)} classes, but the model has {nc}; use the data the model was trained on')

    base = _base_folder(file, content)
    train, val = ([base / p for p in _as_list(content[k])] for k in ('train', 'val'))
    for key, paths in (('train', train), ('val', val)):
        for p in paths:
            if not p.exists():
                raise QatError(f'{flag} {file}: {key}: {p} does not exist')
            if not _has_images(p):
                raise QatError(f"{flag} {file}: {key}: no images in {p} (looked for {', '.join(IMG_FORMATS)})")
    is_coco = any(p.name == 'val2017.txt' for p in val)  # upstream's own criterion
    annotations = base / 'annotations' / 'instances_val2017.json'
    return Data(file, [str(p) for p in train], [str(p) for p in val], {i: str(n) for i, n in names.items()},
                annotations if is_coco and annotations.exists() else None, flag)


def _as_list(value):
    return value if isinstance(value, list) else [value]


def _base_folder(file, content):
    """Folder that the relative paths of a data YAML start from: its path:, taken relative to the upstream tree (as
    upstream does), the current folder, or the YAML's own; the first under which val: exists."""
    path = Path(content.get('path') or '')
    bases = [Path(os.path.abspath(b / path)) for b in (ROOT, Path.cwd(), file.parent)]
    return next((b for b in bases if all((b / p).exists() for p in _as_list(content['val']))), bases[0])


def _has_images(path):
    if path.is_file():
        return any(line.rsplit('.', 1)[-1].strip().lower() in IMG_FORMATS for line in path.open(errors='ignore'))
    return any(p.suffix[1:].lower() in IMG_FORMATS for p in path.rglob('*.*'))


def _check_labels(dataset, data, dropped):
    """Name the label that is out of range: upstream leaves its image out (`dropped`), or fails on it later."""
    for file in dropped:
        label = Path(img2label_paths([file])[0])
        for number, line in enumerate(label.read_text(errors='ignore').splitlines() if label.is_file() else (), 1):
            try:
                values = [float(v) for v in line.split()]
            except ValueError:
                values = []
            if line.strip() and (len(values) < 5 or not all(0 <= v <= 1 for v in values[1:])):
                raise QatError(f'label {label}:{number}: expected "class x y width height" with coordinates in 0..1, '
                               f'not {line[:60]!r}')
    for label, rows in zip(dataset.label_files, dataset.labels):
        wrong = [int(c) for c in rows[:, 0] if not 0 <= c < data.nc]
        if wrong:
            raise QatError(f'label {label}: class {wrong[0]}, but {data.file} has classes 0..{data.nc - 1}')


def _dataset(data, split, config, stride, **options):
    """Upstream's dataset over the `train` or `val` images of `data`, its labels checked."""
    with first_goes_ahead(), quiet_upstream():  # it writes a cache of the labels
        try:
            dataset = LoadImagesAndLabels(getattr(data, split), config.imgsz, config.batch_size, stride=stride,
                                          prefix=f'{split}: ', **options)
        except (AssertionError, ValueError) as e:  # how upstream reports a set without one usable label or image
            raise QatError(f'{data.flag} {data.file}: {split}: {e}') from e
    dropped = sorted(set(_image_files(getattr(data, split))) - set(dataset.im_files))
    _check_labels(dataset, data, dropped)
    if dropped:
        LOGGER.warning(f'{split}: {len(dropped)} images cannot be read and are left out, the first is {dropped[0]}')
    return dataset


def _image_files(paths):
    """The image files that upstream's dataset looks for under `paths`."""
    files = []
    for p in map(Path, paths):
        if p.is_dir():
            files += glob.glob(str(p / '**' / '*.*'), recursive=True)
        else:
            lines = p.read_text().strip().splitlines()
            files += [x.replace('./', str(p.parent) + os.sep, 1) if x.startswith('./') else x for x in lines]
    return [f for f in files if f.rsplit('.', 1)[-1].lower() in IMG_FORMATS]


class Shard:
    """Batches rank, rank + world, ... of a batch sampler. even: only those rounds of which every process has a batch."""

    def __init__(self, batches, rank, world, even=False):
        self.batches, self.rank, self.world = batches, rank, world
        self.stop = len(batches) // world * world if even else len(batches)

    def __len__(self):
        return len(range(self.rank, self.stop, self.world))

    def __iter__(self):
        return islice(self.batches, self.rank, self.stop, self.world)


def _loader(dataset, config, shard, seed=0, training=False):
    """Batches of `dataset`: number shard[0], shard[0] + shard[1], ... of them, each as one process alone would have it.

    training: in random order; where there are several shards, all have equally many batches, and all those are full.
    """
    generator = torch.Generator().manual_seed(seed)
    order = RandomSampler(dataset, generator=generator) if training else SequentialSampler(dataset)
    rounds = training and shard[1] > 1
    batches = Shard(BatchSampler(order, min(config.batch_size, len(dataset)), drop_last=rounds), *shard, even=rounds)
    workers = min(config.workers, max(1, (os.cpu_count() or 1) // shard[1]), config.batch_size)
    collate = (dataset.dataset if isinstance(dataset, Subset) else dataset).collate_fn
    return DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=collate, worker_init_fn=seed_worker,
                      persistent_workers=workers > 0, pin_memory=torch.cuda.is_available(), generator=generator)


def _spread(dataset, limit):
    """At most `limit` images, evenly spread over the set."""
    n = min(limit, len(dataset))
    return Subset(dataset, [i * len(dataset) // n for i in range(n)])


def val_loader(data, config, stride, square=False, limit=None, shard=(0, 1)):
    """Validation batches (images uint8 [B, 3, H, W], targets [n, 6], paths, shapes), as upstream's val.py makes them.

    square: letterboxed to imgsz x imgsz, as a deployed model with a fixed input sees them; else padded rectangles.
    limit: so many of the images at most, evenly spread over the set; only with `square`, as rectangles are padded for the
    batch that they have in the whole set. shard: (rank, world), see `_loader`.
    """
    dataset = _dataset(data, 'val', config, stride, rect=not square, pad=0.5)
    return _loader(_spread(dataset, limit) if limit else dataset, config, shard)


class Images:
    """Re-iterable view of a loader: only the images, FP32 [B, 3, H, W] in 0..1 on `device`."""

    def __init__(self, loader, device):
        self.loader, self.device = loader, device

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for images, *_ in self.loader:
            yield images.to(self.device, non_blocking=True).float() / 255


def calibration_images(data, config, stride, device, shard=(0, 1)):
    """Un-augmented, letterboxed training images: `calib_images` of them, evenly spread over the set. shard: see `_loader`."""
    dataset = _dataset(data, 'train', config, stride)
    return Images(_loader(_spread(dataset, config.calib_images), config, shard), device)


def training_images(data, config, stride, device, hyp, shard=(0, 1)):
    """Augmented training images in random order (seeded), for fine-tuning. Labels are not used but must exist.

    shard: see `_loader`. Raises QatError if there is not a batch for every process.
    """
    dataset = _dataset(data, 'train', config, stride, augment=True, hyp=hyp)
    loader = _loader(dataset, config, shard, config.seed, training=True)
    if not len(loader):
        raise QatError(f'--batch-size {config.batch_size}: {shard[1]} processes need {shard[1]} batches, and {data.flag} {data.file} '
                       f'has {len(dataset)} training images; use a smaller --batch-size, or fewer processes')
    return Images(loader, device)


def load_hyp(file):
    """Augmentation settings in upstream's format. Raises QatError naming what is missing."""
    file = require_file(file, '--hyp', ('.yaml', '.yml'))
    hyp = yaml.safe_load(file.read_text(errors='ignore'))
    needed = ('hsv_h', 'hsv_s', 'hsv_v', 'degrees', 'translate', 'scale', 'shear', 'perspective', 'flipud', 'fliplr',
              'mosaic', 'mixup', 'copy_paste')
    missing = [k for k in needed if not isinstance(hyp, dict) or k not in hyp]
    if missing:
        raise QatError(f"--hyp {file}: {', '.join(missing)} missing; take data/hyps/hyp.scratch-high.yaml as a model")
    return hyp
