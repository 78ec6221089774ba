"""Datasets → batches, for an evaluation, for the calibration, and for the epochs of a fine-tuning.

Under torchrun each process takes its share (rank, world) of the batches that a single process would make.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, get_worker_info
from utils.dataloaders import LoadImagesAndLabels

from utils.qat.config.common import LabelledConfig, LoaderConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import BoxDataset, Data, MaskDataset, open_dataset, require_labels, warn_of_flat
from utils.qat.data.image_folders import ClassImages, ImageFolders, open_images

Opened = BoxDataset | MaskDataset | ClassImages

FEW = 8  # images that are looked at before a calibration
WITHOUT = 'labels are not needed by qat.py quantize --epochs 0 and qat.py sensitive --metric distortion'


def _collate(samples: list[tuple]) -> tuple:
    """Collate samples of upstream's dataset (masks stay one tensor per image), or (image, class, path) of a classifier."""
    masks: list[torch.Tensor] = []
    if len(samples[0]) == 3:
        images, labels, paths = zip(*samples)
        batch = torch.stack(images), torch.tensor(labels), paths
    else:
        batch = LoadImagesAndLabels.collate_fn([sample[:4] for sample in samples])
        masks = [sample[4] for sample in samples if len(sample) > 4]
    # If a worker runs out of shared memory when it sends a batch, it prints a traceback, and everybody waits for ever.
    # Here its error reaches the first process.
    if get_worker_info():
        for tensor in (*batch[:2], *masks):
            tensor.share_memory_()
    return (*batch, masks) if masks else batch


class Loader(DataLoader):
    """A DataLoader that raises RuntimeError for a killed worker within 5 s, when it next waits for a batch.

    PyTorch's handler of SIGCHLD raises an error at once, at any place in the code. Some libraries take it for an error of
    their own (matplotlib: "Invalid bounding box") or swallow it, so this class removes the handler.
    """

    dataset: Any  # upstream's, which has no types, or a Subset of it

    def __init__(self, dataset: Dataset, config: LoaderConfig, batches: Iterable[list], world: int = 1) -> None:
        """Load `batches` of indices, in one of `world` processes that load at once."""
        workers = min(config.workers, max(1, (os.cpu_count() or 1) // world), config.batch_size)
        if 'jax' in sys.modules:  # LiteRT's converter: it has threads, beside which no process can be forked safely
            workers = 0
        super().__init__(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=_collate,
            persistent_workers=workers > 0,
            pin_memory=config.device != 'cpu' and torch.cuda.is_available(),
            generator=torch.Generator(),
        )
        self.config = config

    def __iter__(self) -> Iterator[tuple]:  # type: ignore[override]  # PyTorch's own iterator is private
        before = signal.getsignal(signal.SIGCHLD)
        try:
            batches = super().__iter__()
            if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
                signal.signal(signal.SIGCHLD, before)
            yield from batches
        except (ConnectionError, EOFError) as e:
            raise RuntimeError('DataLoader worker was killed while it handed over a batch') from e


def unshuffled(dataset: Opened | Subset, config: LoaderConfig, shard: tuple[int, int] = (0, 1)) -> Loader:
    """Make batches of a dataset in its order. shard: (rank, world), for the batches rank, rank + world, ..."""
    rank, world = shard
    batches = list(BatchSampler(range(len(dataset)), config.batch_size, drop_last=False))
    return Loader(dataset, config, batches[rank::world], world)


def spread(dataset: Any, limit: int) -> Any:
    """Select at most `limit` images, evenly spread over the set, as a Subset."""
    n = min(limit, len(dataset))
    return Subset(dataset, [i * len(dataset) // n for i in range(n)])


def unit_images(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move images to `device`, and convert uint8 to FP32 in 0..1; other images are normalized already."""
    images = images.to(device, non_blocking=True)
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Convert CPU images to channels-last; on other devices return them unchanged.

    All maps of a PyTorch model are then channels-last too, and its convolutions take a quarter less time.
    """
    return images.contiguous(memory_format=torch.channels_last) if images.device.type == 'cpu' else images


class Images:
    """A re-iterable view of a loader that yields images FP32 [B, 3, H, W] in 0..1 on a device; for a classifier normalized.

    With `labels` it yields tuples: the images; FP32 [n, 6]: image in the batch, class, box as centre, width and height
    in 0..1. For a classifier the labels are its classes, INT64 [B].
    """

    def __init__(self, loader: Loader, device: torch.device, labels: bool = False) -> None:
        self.loader, self.device, self.labels = loader, device, labels

    def __len__(self) -> int:
        return len(self.loader)

    def spread(self, limit: int) -> Images:
        """Select at most `limit` images without labels, evenly spread, the same in every process."""
        return Images(unshuffled(spread(self.loader.dataset, limit), self.loader.config), self.device)

    def __iter__(self) -> Iterator[Any]:
        for images, labels, *_ in self.loader:
            images = channels_last(unit_images(images, self.device))
            yield (images, labels.to(self.device, non_blocking=True)) if self.labels else images


class Seeded(Dataset):
    """A dataset over pairs (index, seed): `dataset[index]` with its random numbers seeded in 0..2^32 - 1."""

    def __init__(self, dataset: LoadImagesAndLabels) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int]) -> tuple:
        index, seed = item
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        transform: object = getattr(self.dataset.albumentations, 'transform', None)  # None where nothing is augmented
        if hasattr(transform, 'set_random_seed'):  # new versions of albumentations have a random state of their own
            transform.set_random_seed(seed)
        return self.dataset[index]


class EpochBatches:
    """A batch sampler: lists of (index, seed of its augmentation), which depend only on the seed and the epoch.

    Process `rank` of `ranks` takes every `ranks`-th batch of a single process. With several processes it drops an incomplete
    batch, and batches left over, so that all processes take the same number of steps.
    """

    def __init__(self, n: int, batch_size: int, seed: int, shard: tuple[int, int] = (0, 1)) -> None:
        self.n, self.batch_size, self.seed, (self.rank, self.ranks) = n, batch_size, seed, shard
        self.epoch, self.drop_last = 0, self.ranks > 1
        if not len(self):
            raise QatError(
                f'--batch-size {batch_size}: {self.ranks} processes need {self.ranks} full batches, and there are {n} training '
                'images; use a smaller --batch-size, or fewer processes'
            )

    def __len__(self) -> int:
        return self.n // self.batch_size // self.ranks if self.drop_last else -(-self.n // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        generator = np.random.RandomState((self.seed, self.epoch))
        order = generator.permutation(self.n).tolist()
        seeds = generator.randint(2**32, size=self.n, dtype=np.int64).tolist()
        for number in range(len(self)):
            start = (number * self.ranks + self.rank) * self.batch_size
            yield [(i, seeds[i]) for i in order[start : start + self.batch_size]]


class TrainingImages(Images):
    """Images that differ from epoch to epoch; each epoch adds 1 to `epoch`, from 0, and has `passes` passes over the images."""

    epoch, passes = 0, 1

    def __init__(self, loader: Loader, batches: EpochBatches, device: torch.device, labels: bool = False) -> None:
        super().__init__(loader, device, labels)
        self.batches = batches  # of the loader

    def fill(self, steps: int) -> None:
        """Let an epoch have at least `steps` batches, however few the images, and full ones, because others run without the CUDA graph."""
        self.batches.drop_last |= self.batches.n >= self.batches.batch_size
        self.passes = -(-steps // len(self.loader))

    def __len__(self) -> int:
        return self.passes * len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        first = self.epoch * self.passes
        self.epoch += 1
        for number in range(first, first + self.passes):
            self.batches.epoch = number
            yield from super().__iter__()


@dataclass(frozen=True)
class Loaders:
    """Opens the images of a data set in batches, for a model with the largest `stride`, in pixels.

    Under torchrun `shard`, (rank, world), is the share of this process.
    """

    data: Data | ImageFolders
    config: Any  # LoaderConfig; for a calibration CalibrationConfig, for a fine-tuning QuantizeConfig
    stride: int
    device: torch.device = torch.device('cpu')  # of the images for a calibration and a fine-tuning
    shard: tuple[int, int] = (0, 1)

    def scored(
        self, square: bool = False, limit: int | None = None, split: str = 'val', need_labels: bool = True
    ) -> Loader:
        """Make the batches of an evaluation as upstream's val.py does, or segment/val.py for a model with masks.

        `square` letterboxes to imgsz, as for a deployed model with a fixed input; otherwise images become padded rectangles,
        unless height and width of imgsz differ. `limit` selects that many images, evenly spread, and needs `square`, because
        the padding of a rectangle depends on its batch in the whole set. `split` is 'val' or 'held out'. `need_labels` refuses
        images without any label.

        Returns:
            Batches (images uint8 [B, 3, H, W], targets [n, 6], paths, shapes), with masks a fifth, see detections.Truth.
        """
        masks = {'downsample_ratio': self.config.mask_ratio, 'overlap': self.config.overlap}
        rect = not square and len(set(self.config.imgsz)) == 1
        dataset = self._open(split, masks, need_labels, rect=rect, pad=0.5)
        if need_labels and isinstance(self.data, Data):
            require_labels(dataset, 'val' if split == 'val' else 'train', self.data, f'scored; {WITHOUT}')
        return unshuffled(spread(dataset, limit) if limit else dataset, self.config, self.shard)

    def calibration(self) -> Images:
        """Make the batches of the calibration: `calib_images` of the training images, letterboxed, without augmentation."""
        dataset = spread(self._open('train', labels=False), self.config.calib_images)
        if isinstance(self.data, Data):
            warn_of_flat((dataset.dataset.load_image(i)[0] for i in dataset.indices[:FEW]), self.data)
        return Images(unshuffled(dataset, self.config, self.shard), self.device)

    def training(self, hyp: dict[str, float] | None = None, labels: bool = False) -> TrainingImages:
        """Make the batches of a fine-tuning: training images in random order, with `labels` for a loss on them.

        The images of an epoch depend only on config.seed and its number, not on the number of
        workers or on earlier epochs. Without `hyp`, see dataset.load_hyp, they are letterboxed as for calibration.
        """
        dataset = self._open('train', labels=labels, augment=hyp is not None, hyp=hyp)
        if labels and isinstance(self.data, Data):
            require_labels(dataset, 'train', self.data, 'learnt from; --task-loss 0 needs none')
        batches = EpochBatches(len(dataset), self.config.batch_size, self.config.seed, self.shard)
        loader = Loader(Seeded(dataset), self.config, batches, self.shard[1])
        return TrainingImages(loader, batches, self.device, labels)

    def _open(
        self, split: str, masks: Mapping[str, object] | None = None, labels: bool = True, **options: object
    ) -> Opened:
        """Open the dataset of a split, see dataset.open_dataset; `masks` are settings of masks, if the data has any."""
        if isinstance(self.data, ImageFolders):
            return open_images(self.data, split, self.config)
        return open_dataset(
            self.data, split, self.config, self.stride, masks if self.data.masks else None, labels, **options
        )


def labelled_images(
    data: Data | ImageFolders, config: LabelledConfig, imgsz: Sides, stride: int, device: torch.device
) -> Loader:
    """Make the batches of a command that takes any file: the val images as in `qat.py eval --square`."""
    settings = LoaderConfig(batch_size=config.batch_size, imgsz=imgsz, workers=config.workers, device=device.type)
    return Loaders(data, settings, stride).scored(square=True, limit=config.images or None)


def random_images(number: int, batch_size: int, imgsz: Sides, seed: int) -> Iterator[tuple]:
    """Yield batches of noise, as `Loaders.scored` makes them, without targets, paths and shapes."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, number, batch_size):
        yield (
            torch.randint(256, (min(batch_size, number - start), 3, *imgsz), dtype=torch.uint8, generator=generator),
            torch.zeros(0, 6),
            [],
            [],
        )
