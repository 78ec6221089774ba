"""Settings of `compare_outputs.py`."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path
from typing import Any

from utils.qat.config.backends import PREDICTING
from utils.qat.config.common import DEVICE, OR_ALL, SEED, SIZE, TOLERANCE, FolderConfig
from utils.qat.config.engine import words
from utils.qat.config.settings import Range, Sides, option


@dataclass(frozen=True)
class CompareConfig(FolderConfig):
    """Settings of `compare_outputs.py`."""

    reference: Path = option(MISSING, 'checkpoint (.pt), .onnx, .xml or .engine', metavar='A', positional=True)
    other: Path = option(MISSING, 'checkpoint (.pt), .onnx, .xml or .engine', metavar='B', positional=True)
    data: Path | None = option(
        None, 'data YAML; its val images are used. For classifiers: a folder with one folder of images for each class'
    )
    random: int | None = option(None, 'use N images of noise instead of --data', metavar='N', allowed=Range(1))
    _: KW_ONLY
    images: int = option(100, 'number of images of the data, at most, evenly spread; 0 = all', allowed=OR_ALL)
    imgsz: Sides | None = option(
        None,
        'image size in pixels: one number, or height and width; default: the size of the files, or 640',
        *SIZE,
        allowed=Range(32),
    )
    batch_size: int = option(10, 'images at once', allowed=Range(1))
    device: str = option('', DEVICE)
    workers: int = option(8, 'data loading processes', allowed=Range(0))
    rtol: float = option(1e-3, 'relative tolerance, as in numpy.isclose', allowed=TOLERANCE)
    atol: float = option(1e-3, 'absolute tolerance; for boxes in pixels', allowed=TOLERANCE)
    top: int = option(10, 'ranks to compare', allowed=Range(1))
    mean: tuple[float, ...] = option(
        (0.0, 0.0, 0.0), "mean of a classifier's images, in 0..1, such as 0.485 0.456 0.406"
    )
    std: tuple[float, ...] = option((1.0, 1.0, 1.0), 'their standard deviation, such as 0.229 0.224 0.225')
    backend: tuple[str, ...] | None = option(
        None,
        f'what runs exported files, of {", ".join(PREDICTING)}: one, or one for each model, such as onnxruntime,openvino; '
        'default: the first of them that takes the file',
        parse=words,
        allowed=PREDICTING,
    )
    seed: int = option(57, 'seed of --random', allowed=SEED)
    project: Path = Path('runs/compare')

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the source of the images and the normalisation; see Settings.problems."""
        yield (self.data is None) == (self.random is None), '--data, --random: give one of the two'
        yield (
            len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0,
            '--mean, --std: three numbers each, for red, green and blue; --std above 0',
        )
