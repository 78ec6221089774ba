"""A measurement to make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.qat.benchmark.model_files import Inputs, Network
from utils.qat.config.backends import BACKENDS
from utils.qat.config.settings import Sides

# A function that loads a checkpoint: the model, and whether it is quantized
Load = Callable[[Path, torch.device], tuple[torch.nn.Module, bool]]


def pixels(imgsz: Sequence[int] | None) -> str:
    """Write height and width in pixels: '640 px', '480 x 640 px'; '' for None."""
    return f'{" x ".join(map(str, dict.fromkeys(imgsz)))} px' if imgsz else ''


@dataclass
class Case:
    """A measurement to make."""

    network: Network
    backend: str  # one of BACKENDS
    precision: str  # of MEASURED; '' for an engine that does not tell
    imgsz: Sides | None  # height and width in pixels; None = those of the file
    batch: int  # images per query
    inputs: Inputs  # empty for an engine, which says it when it is loaded

    @property
    def file(self) -> Path:
        """Return the user's file that is run, or that an engine is built of."""
        checkpoint = self.network.checkpoint if self.backend == 'pytorch' else None
        return checkpoint or self.network.file

    def __str__(self) -> str:
        return ', '.join(
            (
                str(self.file),
                BACKENDS[self.backend].title,
                *[self.precision.upper()] * bool(self.precision),
                *filter(None, [pixels(self.imgsz)]),
                f'batch {self.batch}',
            )
        )
