"""Settings of `scripts/verify_tensorrt.py`."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path
from typing import Any

from utils.qat.config.backends import ENGINES
from utils.qat.config.common import ENGINE_BACKEND, SIZE, FolderConfig
from utils.qat.config.settings import Range, Sides, option


@dataclass(frozen=True)
class VerifyConfig(FolderConfig):
    """Settings of `scripts/verify_tensorrt.py`."""

    weights: Path = option(MISSING, 'INT8 checkpoint of qat.py quantize')
    float_weights: Path = option(MISSING, 'the float checkpoint that it was made of, with one branch', '--float')
    data: Path = option(MISSING, 'data YAML')
    imgsz: Sides = option((640, 640), 'height and width in pixels, or one number for both', *SIZE, allowed=Range(32))
    _: KW_ONLY
    segment: Path | None = option(None, 'INT8 checkpoint of a segmentation model; without it those rows are skipped')
    segment_data: Path | None = option(None, 'its data YAML')
    classify: Path | None = option(None, 'INT8 checkpoint of a classifier; without it those rows are skipped')
    classify_data: Path | None = option(None, 'the folder of its images')
    backend: str = option(
        ENGINE_BACKEND, 'TensorRT, or TensorRT-RTX; the builder of TensorRT-RTX needs no GPU', allowed=ENGINES
    )
    images: int = option(100, 'number of val images that the files are compared on, at most', allowed=Range(1))
    minutes: float = option(
        20.0, 'time for all rows; rows that have not begun by then are skipped', allowed=Range(0, without=0)
    )
    duration: float = option(3.0, 'seconds of each measurement of speed', allowed=Range(0, without=0))
    only: tuple[str, ...] = option((), 'check these rows and no others, such as "build plain" "timing cache"')
    project: Path = Path('runs/verify')

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the options that need each other; see Settings.problems."""
        for task in ('segment', 'classify'):
            given = getattr(self, task), getattr(self, f'{task}_data')
            yield given.count(None) == 1, f'--{task}, --{task}-data: give both or none'
