"""Settings of `compare_outputs.py`."""

from dataclasses import dataclass
from pathlib import Path

from utils.qat.core.errors import check


@dataclass
class CompareConfig:
    """`compare_outputs.py`."""

    reference: Path
    other: Path
    data: Path = None  # data YAML of a detector; of a classifier a folder with one folder of images for each class
    random: int = None  # so many images of noise instead
    images: int = 100  # of the data, at most, evenly spread; 0 = all
    imgsz: int = None  # pixels; None = that of the files, or 640
    batch_size: int = 10
    rtol: float = 1e-3  # |other - reference| <= atol + rtol |reference| is equal
    atol: float = 1e-3
    top: int = 10  # ranks to compare
    mean: list = (0.0, 0.0, 0.0)  # what a classifier's images, in 0..1, are normalised with
    std: list = (1.0, 1.0, 1.0)
    device: str = ''
    backend: str = 'tensorrt'  # what runs engines
    workers: int = 8
    seed: int = 57  # of --random
    project: Path = Path('runs/compare')
    name: str = 'exp'
    exist_ok: bool = False

    def __post_init__(self):
        check(
            [
                ((self.data is None) == (self.random is None), '--data, --random: give one of the two'),
                (self.random is not None and self.random < 1, f'--random {self.random}: must be 1 or more'),
                (self.images < 0, f'--images {self.images}: must be 1 or more, or 0 for all'),
                (self.imgsz is not None and self.imgsz < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
                (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
                (not 0 <= self.rtol < float('inf'), f'--rtol {self.rtol}: must be 0 or more'),
                (not 0 <= self.atol < float('inf'), f'--atol {self.atol}: must be 0 or more'),
                (self.top < 1, f'--top {self.top}: must be 1 or more'),
                (
                    len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0,
                    '--mean, --std: three numbers each, for red, green and blue; --std above 0',
                ),
            ]
        )
