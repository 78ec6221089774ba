"""Datasets → batches: those of an evaluation, of the calibration, and of the epochs of a fine-tuning.

Under torchrun a process has a share of them, (rank, world), and each of its batches is one that a single process would have.
"""

import os
import random
from itertools import islice

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, get_worker_info
from utils.dataloaders import LoadImagesAndLabels

from utils.qat.core.errors import QatError
from utils.qat.data.dataset import open_dataset
from utils.qat.data.masks import COARSE


class Shard:
    """Batches rank, rank + world, ... of a batch sampler."""

    def __init__(self, batches, rank, world):
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self):
        return len(range(self.rank, len(self.batches), self.world))

    def __iter__(self):
        return islice(self.batches, self.rank, None, self.world)


def _in_order(dataset, config, shard):
    """All batches of `dataset`, in order; those of them that `shard` (rank, world) has, each as one process alone would have it."""
    return Shard(BatchSampler(range(len(dataset)), config.batch_size, drop_last=False), *shard)


def _collate(samples):
    """Samples of upstream's dataset → a batch; the masks of each image, where there are any, stay a tensor of their own."""
    images, labels, paths, shapes = LoadImagesAndLabels.collate_fn([sample[:4] for sample in samples])
    masks = [sample[4] for sample in samples] if len(samples[0]) > 4 else []
    if (
        get_worker_info()
    ):  # a worker that finds no shared memory when it sends is not heard: a traceback, and everybody waits
        for tensor in (images, labels, *masks):
            tensor.share_memory_()
    return (images, labels, paths, shapes, masks) if masks else (images, labels, paths, shapes)


def _loader(dataset, config, batches, world=1):
    """batches: sized and re-iterable over lists of what `dataset` takes as index. world: how many processes load at once."""
    workers = min(config.workers, max(1, (os.cpu_count() or 1) // world), config.batch_size)
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_collate,
        persistent_workers=workers > 0,
        pin_memory=config.device != 'cpu' and torch.cuda.is_available(),
        generator=torch.Generator(),
    )


def _spread(dataset, limit):
    """At most `limit` images, evenly spread over the set."""
    n = min(limit, len(dataset))
    return Subset(dataset, [i * len(dataset) // n for i in range(n)])


def val_loader(data, config, stride, square=False, limit=None, split='val', shard=(0, 1)):
    """Validation batches (images uint8 [B, 3, H, W], targets [n, 6], paths, shapes), as upstream's val.py makes them; where the model
    gives masks, as segment/val.py does, with a fifth item, see detections.Truth.

    square: letterboxed to imgsz x imgsz, as a deployed model with a fixed input sees them; else padded rectangles.
    limit: so many of the images at most, evenly spread over the set; only with `square`, as rectangles are padded for the
    batch that they have in the whole set. split: see dataset.open_dataset. shard: see `_in_order`.
    """
    masks = {'downsample_ratio': config.mask_ratio, 'overlap': config.overlap} if data.segments else None
    dataset = open_dataset(data, split, config, stride, masks, rect=not square, pad=0.5)
    dataset = _spread(dataset, limit) if limit else dataset
    return _loader(dataset, config, _in_order(dataset, config, shard), shard[1])


class Images:
    """Re-iterable view of a loader: only the images, FP32 [B, 3, H, W] in 0..1 on `device`; with `labels`, pairs of them and
    FP32 [n, 6]: image in the batch, class, box as centre, width and height in 0..1; and as a third their masks, where the data has them."""

    def __init__(self, loader, device, labels=False):
        self.loader, self.device, self.labels = loader, device, labels

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for images, labels, _, _, *masks in self.loader:
            images = images.to(self.device, non_blocking=True).float() / 255
            yield (images, labels.to(self.device, non_blocking=True), *masks) if self.labels else images


def calibration_images(data, config, stride, device, shard=(0, 1)):
    """Un-augmented, letterboxed training images: `calib_images` of them, evenly spread over the set. shard: see `_in_order`."""
    dataset = _spread(open_dataset(data, 'train', config, stride), config.calib_images)
    return Images(_loader(dataset, config, _in_order(dataset, config, shard), shard[1]), device)


def few(images, limit, config):
    """At most `limit` of the calibration images `images`, evenly spread over them: the same ones in every process."""
    dataset = _spread(images.loader.dataset, limit)
    return Images(_loader(dataset, config, _in_order(dataset, config, (0, 1))), images.device)


class Seeded:
    """Dataset over pairs (index, seed): `dataset[index]`, with everything random in it begun from `seed`, 0..2^32 - 1."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item):
        index, seed = item
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        transform = getattr(self.dataset.albumentations, 'transform', None)  # not where nothing is augmented
        if hasattr(transform, 'set_random_seed'):  # albumentations that keep a random state of their own
            transform.set_random_seed(seed)
        return self.dataset[index]


class EpochBatches:
    """Batch sampler: lists of (index, seed of its augmentation) of the epoch `epoch`; both follow from (seed, epoch) alone.

    n: images in the set. shard: (rank, ranks): every `ranks`-th batch of the list that a single process has, from `rank`
    on. With several, a batch that is not full and batches that do not go round are left out: all take the same steps. epoch:
    from 0.
    """

    def __init__(self, n, batch_size, seed, shard=(0, 1)):
        self.n, self.batch_size, self.seed, (self.rank, self.ranks) = n, batch_size, seed, shard
        self.epoch = 0
        if not len(self):
            raise QatError(
                f'--batch-size {batch_size}: {self.ranks} processes need {self.ranks} full batches, and there are {n} training '
                'images; use a smaller --batch-size, or fewer processes'
            )

    def __len__(self):
        return -(-self.n // self.batch_size) if self.ranks == 1 else self.n // self.batch_size // self.ranks

    def __iter__(self):
        generator = np.random.RandomState((self.seed, self.epoch))
        order = generator.permutation(self.n).tolist()
        seeds = generator.randint(2**32, size=self.n, dtype=np.int64).tolist()
        for number in range(len(self)):
            start = (number * self.ranks + self.rank) * self.batch_size
            yield [(i, seeds[i]) for i in order[start : start + self.batch_size]]


class TrainingImages(Images):
    """Images that are others in each epoch. epoch: that of the next pass, from 0; a pass moves it on."""

    epoch = 0

    def __iter__(self):
        self.loader.batch_sampler.epoch = self.epoch
        self.epoch += 1
        return super().__iter__()


def training_images(data, config, stride, device, hyp=None, shard=(0, 1)):
    """Training images in random order, for fine-tuning; with their labels if config.task_loss counts them. These must exist in
    any case.

    hyp: how they are augmented, see dataset.load_hyp; None = letterboxed, as for calibration. An epoch's images follow from
    config.seed and its number, whatever the number of workers and the epochs before. shard: (rank, ranks), see EpochBatches.
    """
    masks = (
        {'downsample_ratio': COARSE, 'overlap': True} if data.segments and config.task_loss else None
    )  # as segment/train.py
    dataset = open_dataset(data, 'train', config, stride, masks, augment=hyp is not None, hyp=hyp)
    batches = EpochBatches(len(dataset), config.batch_size, config.seed, shard)
    return TrainingImages(_loader(Seeded(dataset), config, batches, shard[1]), device, labels=config.task_loss > 0)


def random_images(number, batch_size, imgsz, seed):
    """Batches of noise, as `val_loader` makes them: images uint8 [B, 3, imgsz, imgsz], and no targets, paths or shapes."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, number, batch_size):
        yield (
            torch.randint(
                256, (min(batch_size, number - start), 3, imgsz, imgsz), dtype=torch.uint8, generator=generator
            ),
            torch.zeros(0, 6),
            [],
            [],
        )


def class_images(config, imgsz):
    """Batches of (images FP32 [B, 3, imgsz, imgsz], labels [B]) of a folder with one folder for each class, in the order of their names.

    The shorter side of an image becomes imgsz / 0.875, as classifiers are evaluated, and its centre is cut out; values are in 0..1, then
    normalised with config.mean and config.std. config: a config.engine.CompareConfig. Raises QatError if there is no such folder.
    """
    from torchvision import datasets, transforms  # here: upstream needs no more of it than NMS

    steps = transforms.Compose(
        [
            transforms.Resize(round(imgsz / 0.875)),
            transforms.CenterCrop(imgsz),
            transforms.ToTensor(),
            transforms.Normalize(config.mean, config.std),
        ]
    )
    try:
        dataset = datasets.ImageFolder(config.data, steps)
    except OSError as e:
        raise QatError(
            f'--data {config.data}: for classifiers a folder with one folder of images for each class, such as val/cat/1.jpg'
        ) from e
    dataset = _spread(dataset, config.images) if config.images else dataset
    return DataLoader(dataset, config.batch_size, num_workers=min(config.workers, os.cpu_count() or 1))
