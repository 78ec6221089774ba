"""Settings that several commands have."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.qat.config.settings import Range, Settings, Sides, option, run
from utils.qat.core.files import in_tree

SEED = Range(0, 2**32 - 1)
SHARE = Range(0.0, 1.0)
SIZE = '--img', '--img-size'  # other flags of --imgsz
TOLERANCE = Range(0)
OR_ALL = Range(0, words='be 1 or more, or 0 for all')  # numbers of images
DEVICE = "GPU number, or 'cpu'; default: the first GPU, else the CPU"
ENGINE_BACKEND = 'tensorrt'  # runs and builds engines by default
SQUARE = (640, 640)
LARGEST = 8192  # pixels: a longer side is a slip, and fills the memory before anything is said
scores = partial(option, group='scores')
classifiers = partial(option, group='classifiers')
segmentation = partial(option, group='segmentation models')
OTHER_WORDS = 'whose class names count if those of data and model are other words for the same classes; default: refuse'
names_from = partial(option, None, OTHER_WORDS, allowed=('data', 'checkpoint'))


def image_sides(untyped: str = '', default: Sides | None = None, flags: Sequence[str] = SIZE) -> Sides:
    """Make the option of height and width of the images. untyped: what they are by default, in words."""
    text = 'height and width in pixels, or one number for both' + f'; default: {untyped}' * bool(untyped)
    return option(default, text, *flags, allowed=Range(32, LARGEST))


@dataclass(frozen=True, kw_only=True)
class FolderConfig(Settings):
    """The folder of a run, PROJECT/NAME."""

    project: Path = option(Path('runs'), 'results go to PROJECT/NAME')
    name: str = option('exp', 'results go to PROJECT/NAME')
    exist_ok: bool = option(False, 'write into PROJECT/NAME of an earlier run')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the name; see Settings.problems."""
        yield from super().problems()
        yield not self.name, '--name: must not be empty'


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(Settings):
    """Images with labels, on which exported models are scored; for classifiers a folder with one folder for each class."""

    data: Path | None = option(
        None,
        'data YAML; its val images are used. For classifiers: a folder with a folder per class',
        parse=in_tree,
    )
    names_from: str | None = names_from()
    images: int = option(0, 'images of the data, at most, evenly spread; 0 = all', allowed=OR_ALL)
    batch_size: int = run(10, 'images at once', allowed=Range(1))
    workers: int = run(8, 'data loading processes', allowed=Range(0))
    classes: Path | None = classifiers(
        None,
        'text file with the folder of each class, a line for each output; default: by index, by the names in the model, or in order',
    )
    mean: tuple[float, ...] = classifiers((0.0, 0.0, 0.0), 'mean of the images, such as 0.485 0.456 0.406')
    std: tuple[float, ...] = classifiers((1.0, 1.0, 1.0), 'their standard deviation, such as 0.229 0.224 0.225')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the normalisation; see Settings.problems."""
        yield from super().problems()
        yield (
            len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0,
            '--mean, --std: three numbers each, for red, green and blue; --std above 0',
        )


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings):
    """How images and their true masks are read. The defaults for masks are the ones of upstream's segment/val.py."""

    device: str = run('', DEVICE)
    batch_size: int = run(10, 'images per batch, of each process', allowed=Range(1))
    imgsz: Sides = image_sides(default=SQUARE)
    workers: int = run(8, 'data loading processes, of each process', allowed=Range(0))
    overlap: bool = segmentation(
        False,
        'true masks in one map, the smaller object on top, as segment/train.py scores; default: one by one, as segment/val.py',
        negatable=True,
    )
    mask_ratio: int = segmentation(
        1,
        'true masks so many times smaller than the image: less memory, coarser',
        '--mask-downsample-ratio',
        allowed=Range(1),
    )
