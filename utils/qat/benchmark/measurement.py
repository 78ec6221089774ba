"""A planned measurement, and the conditions that all measurements of a benchmark share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.qat.backends.pytorch import TorchModel
from utils.qat.benchmark.model_files import Inputs, ModelFile
from utils.qat.config.deploy import BenchmarkConfig
from utils.qat.config.settings import Sides
from utils.qat.config.tables import BACKENDS


def pixels(imgsz: Sequence[int] | None) -> str:
    """Format height and width in pixels: '640 px', '480 x 640 px'; '' for None."""
    return f'{" x ".join(map(str, dict.fromkeys(imgsz)))} px' if imgsz else ''


@dataclass(frozen=True)
class Conditions:
    """Conditions that all measurements of a benchmark share."""

    config: BenchmarkConfig
    device: torch.device
    open_checkpoint: Callable[[Path, torch.device], TorchModel]


@dataclass
class Measurement:
    """A planned measurement."""

    model: ModelFile
    backend: str  # one of BACKENDS
    precision: str  # of MEASURED; '' if the engine does not tell
    imgsz: Sides | None  # height and width in pixels; None = those of the file
    batch: int  # images per query
    inputs: Inputs  # empty for an engine, which tells them when it is loaded

    @property
    def file(self) -> Path:
        """Return the user's file that runs, or from which an engine is built."""
        checkpoint = self.model.checkpoint if self.backend == 'pytorch' else None
        return checkpoint or self.model.file

    def __str__(self) -> str:
        parts = str(self.file), BACKENDS[self.backend].title, self.precision.upper(), pixels(self.imgsz)
        return ', '.join([*filter(None, parts), f'batch {self.batch}'])
