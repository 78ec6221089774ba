"""A folder of a classifier's images: train/ and val/ or test/, and in each of them a folder per class.

Images are prepared as in classify/val.py: the centre square, resized, RGB, normalized by ImageNet's mean and deviation.
No other file has this preparation.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize
from utils.augmentations import IMAGENET_MEAN, IMAGENET_STD, CenterCrop, ToTensor
from utils.dataloaders import IMG_FORMATS

from utils.qat.config.common import LoaderConfig
from utils.qat.core.errors import QatError
from utils.qat.core.text import visible
from utils.qat.data.dataset import held_out_files, require_images, unreadable
from utils.qat.untrusted.names import class_names

MEAN, STD = tuple(IMAGENET_MEAN), tuple(IMAGENET_STD)  # of RGB in 0..1
normalized = Normalize(MEAN, STD)  # images [..., 3, H, W] in 0..1 → as a classifier takes them


@dataclass(frozen=True)
class ImageFolders:
    """A checked folder of images."""

    file: Path
    train: Path  # the folders inside it with a folder of images for each class
    val: Path
    names: dict[int, str]
    flag: str = '--data'  # the option that named the folder
    val_split: float = 0.0  # share of the training images that is held out of training, in [0, 1)
    annotations: None = None  # as dataset.Data
    masks: bool = False
    labelled: bool = True

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)


def class_folders(folder: Path, flag: str) -> list[str]:
    """List the class folders in a folder, in the order of their indices; each must have an image."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not names:
        raise QatError(f'{flag} {folder}: needs a folder of images for each class, such as {folder / "cat" / "1.jpg"}')
    class_names(names, f'{flag} {folder}')
    empty = [name for name in names if not images_in(folder / name)]
    if empty:
        raise QatError(
            f'{flag} {folder / visible(empty[0])}: no images in it (looked for {", ".join(IMG_FORMATS)}); put some there, or remove '
            'the folder in train/ and val/ and train again'
        )
    return names


def images_in(folder: Path) -> list[str]:
    """List the image files in a folder and below, sorted."""
    return sorted(str(p) for p in folder.rglob('*.*') if p.suffix[1:].lower() in IMG_FORMATS)


def split_folders(folder: Path, flag: str = '--data') -> tuple[Path, Path, list[str]]:
    """Check a folder of images for any classifier: return train/, then test/ or else val/, and the class names."""
    train, val = folder / 'train', folder / 'test'
    val = val if val.is_dir() else folder / 'val'
    if not train.is_dir() or not val.is_dir():
        raise QatError(
            f'{flag} {folder}: no folder {"train" if val.is_dir() else "val or test"} in it; a classifier takes a folder with train/ '
            'and val/ (or test/), and in each of them a folder of images for each class'
        )
    classes, in_val = class_folders(train, flag), class_folders(val, flag)
    missing, extra = sorted(set(classes) - set(in_val)), sorted(set(in_val) - set(classes))
    if missing or extra:
        raise QatError(
            f'{flag} {folder}: {visible((missing or extra)[0])} is a class in {(train if missing else val).name}/ and not in '
            f'{(val if missing else train).name}/; both need the same folders'
        )
    return train, val, classes


def load_image_folders(folder: Path, names: Mapping[int, str], flag: str = '--data') -> ImageFolders:
    """Check a folder of images for a classifier with the classes `names`; see `split_folders`."""
    train, val, classes = split_folders(folder, flag)
    if len(classes) != len(names):
        raise QatError(
            f'{flag} {folder}: {len(classes)} class folders, but the model has {len(names)} classes; use the data the model was '
            'trained on'
        )
    known = {*names.values()} & {*classes}
    if known and known != {*classes}:
        raise QatError(
            f'{flag} {folder}: {visible(min({*classes} - known))} is no class of the model, which has {visible(min({*names.values()} - known))}; '
            'use the data the model was trained on'
        )
    return ImageFolders(folder, train, val, dict(enumerate(classes)), flag)


def read_bgr(file: str) -> np.ndarray:
    """Read an image by OpenCV: BGR, uint8 [H, W, 3]. Raises QatError if it cannot be read."""
    try:
        image = cv2.imread(file)
    except cv2.error as e:  # such as too many pixels
        raise unreadable(file, e) from e
    if image is None:
        raise unreadable(file)
    return image


class ClassImages(Dataset):
    """The images of class folders, prepared as in classify/val.py."""

    albumentations = None  # nothing is augmented, see loaders.Seeded

    def __init__(self, files: Sequence[tuple[str, int]], config: LoaderConfig) -> None:
        self.im_files, self.labels = [file for file, _ in files], [label for _, label in files]
        self.prepare = Compose([CenterCrop(config.imgsz), ToTensor(), normalized])

    def __len__(self) -> int:
        return len(self.im_files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str]:
        """Return an image, FP32 [3, H, W], its class and its path."""
        path = self.im_files[index]
        return self.prepare(read_bgr(path)), self.labels[index], path


def open_images(data: ImageFolders, split: str, config: LoaderConfig) -> ClassImages:
    """Open the images of a split: 'train', 'val', or 'held out', which data.val_split removes from 'train'."""
    folder = data.val if split == 'val' else data.train
    files = [(file, index) for index, name in data.names.items() for file in images_in(folder / name)]
    if split != 'val' and data.val_split:
        held_out = held_out_files([file for file, _ in files], data.val_split)
        files = [item for item in files if (item[0] in held_out) == (split == 'held out')]
    require_images((file for file, _ in files), data.flag, data.file)
    for file, _ in files:
        if not os.path.getsize(file):
            raise unreadable(file, 'it is empty')
    return ClassImages(files, config)
