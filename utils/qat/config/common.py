"""Settings that several commands have."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.qat.config.settings import Range, Settings, Sides, option

SEED = Range(0, 2**32 - 1)
SHARE = Range(0.0, 1.0)
TOLERANCE = Range(0)
OR_ALL = Range(0, words='be 1 or more, or 0 for all')  # numbers of images
SIZE = '--img', '--img-size'  # other flags of --imgsz
DEVICE = "GPU number, or 'cpu'; default: the first GPU, else the CPU"
ENGINE_BACKEND = 'tensorrt'  # runs and builds engines by default


@dataclass(frozen=True, kw_only=True)
class FolderConfig(Settings):
    """The folder of a run, PROJECT/NAME."""

    project: Path = option(Path('runs'), 'results go to PROJECT/NAME')
    name: str = option('exp', 'results go to PROJECT/NAME')
    exist_ok: bool = option(False, 'write into PROJECT/NAME even if it exists')


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings):
    """How images and their true masks are read. The defaults for masks are the ones of upstream's segment/val.py."""

    device: str = option('', DEVICE)
    batch_size: int = option(10, 'images per batch, of each process', allowed=Range(1))
    imgsz: Sides = option((640, 640), 'image size in pixels: one number, or height and width', *SIZE, allowed=Range(32))
    workers: int = option(8, 'data loading processes, of each process', allowed=Range(0))
    overlap: bool = option(
        False,
        'true masks as one map, in which the smaller of two objects is on top, as segment/train.py scores; default: one by '
        'one, as segment/val.py',
        group='segmentation models',
        negatable=True,
    )
    mask_ratio: int = option(
        1,
        'true masks so many times smaller than the image: less memory, coarser',
        '--mask-downsample-ratio',
        allowed=Range(1),
        group='segmentation models',
    )


def seen_as(imgsz: Sequence[int], square: bool) -> str:
    """Say in words how loaders.val_loader shows images to a model."""
    height, width = imgsz
    if height == width and not square:
        return f'as padded rectangles of up to {height} x {width}'
    return f'as {"squares" if height == width else "images"} of {height} x {width}'
