"""Settings of `compare_outputs.py`."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from utils.qat.config.backends import PREDICTING
from utils.qat.config.common import DEVICE, SEED, SIZE, TOLERANCE, FolderConfig, LabelledConfig
from utils.qat.config.engine import in_order
from utils.qat.config.settings import Range, Sides, option, run

comparison = partial(option, group='comparison')


@dataclass(frozen=True)
class CompareConfig(LabelledConfig, FolderConfig):
    """Settings of `compare_outputs.py`."""

    reference: Path = option(MISSING, 'checkpoint (.pt), .onnx, .xml or .engine', metavar='A', positional=True)
    others: tuple[Path, ...] = option(
        MISSING, 'one or more like it; each is compared with A', metavar='B', positional=True
    )
    random: int | None = option(None, 'use N images of noise instead of --data', metavar='N', allowed=Range(1))
    _: KW_ONLY
    images: int = 100
    imgsz: Sides | None = option(
        None,
        'height and width in pixels, or one number for both; default: that of the files, or 640',
        *SIZE,
        allowed=Range(32),
    )
    device: str = run('', DEVICE)
    rtol: float = comparison(1e-3, 'relative tolerance, as in numpy.isclose', allowed=TOLERANCE)
    atol: float = comparison(1e-3, 'absolute tolerance; for boxes in pixels', allowed=TOLERANCE)
    top: int = comparison(10, 'ranks to compare', allowed=Range(1))
    show: int = comparison(
        3,
        'images whose best detections or classes stand side by side in the report; 0 = none',
        allowed=Range(0),
    )
    backend: tuple[str, ...] | None = option(
        None,
        f'what runs exported files, of {",".join(PREDICTING)}: one, or one for each model; default: the first that takes the file',
        parse=in_order,
        allowed=PREDICTING,
    )
    seed: int = run(57, 'seed of --random', allowed=SEED)
    project: Path = Path('runs/compare')

    @property
    def models(self) -> tuple[Path, ...]:
        """Return A and all B."""
        return self.reference, *self.others

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the source of the images; see Settings.problems."""
        yield (self.data is None) == (self.random is None), '--data, --random: give one of the two'
        yield from super().problems()
