"""SQNR, in dB, is the ratio of signal to quantization noise in the outputs of the head.

    SQNR = 10 log10( sum of t² / sum of (s - t)² )

The sums are over all images, positions and channels of the head's outputs (see head_outputs.py); t comes from the float
model, and s from the quantized model on the same images. Each part has its own SQNR: the boxes (logits of the
distribution of the distances), the classes (logits), and the coefficients and prototypes of masks. Otherwise the large
negative logits of the background would hide the rest. 6 dB more is half the noise. Chance moves SQNR far less than AP:
a few images suffice.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn

from models.quantize.head_outputs import Raw
from utils.qat.core.distributed import all_reduce
from utils.qat.prediction.pytorch import TorchModel

PARTS = ('boxes', 'classes', 'coefficients', 'prototypes')


def _parts(raw: Raw, classes: int) -> list[Sequence[torch.Tensor]]:
    """List the tensors of each part, in the order of PARTS."""
    of_levels = zip(*(m.split((m.shape[1] - classes, classes), 1) for m in raw.maps))
    return [*of_levels, *([x] for x in (raw.coefficients, raw.prototypes) if x is not None)]


def energies(mine: Raw, wanted: Raw, classes: int) -> torch.Tensor:
    """Sum t² and (s - t)² over each part.

    Args:
        mine: outputs of the quantized model (s).
        wanted: outputs of the float model (t) on the same images.
        classes: number of classes of the head.

    Returns:
        FP64 [parts, 2]; a detector has the first two of PARTS.
    """

    def sums(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.stack((t.double().square().sum(), (s.double() - t).square().sum()))

    pairs = zip(_parts(mine, classes), _parts(wanted, classes))
    return torch.stack([sum(sums(s, t) for s, t in zip(ours, theirs)) for ours, theirs in pairs])


def decibels(sums: torch.Tensor) -> dict[str, float]:
    """Convert `energies` to dB by part; infinite for equal outputs."""
    signal, noise = sums.t()
    return dict(zip(PARTS, (10 * (signal / noise).log10()).tolist()))


class ComparedModel(TorchModel):
    """A TorchModel that compares the outputs of its head with the float model's while it predicts.

    Args:
        model: quantized.
        reference: the float model.
    """

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__(model)
        self.reference = reference.eval()
        self.sums = torch.zeros(len(PARTS) if self.segments else 2, 2, dtype=torch.float64, device=self.device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict as a TorchModel does, and add up the energies. `images`: FP32 [B, 3, H, W] in 0..1."""
        output = self.model(images)
        self.sums += energies(Raw.of(output), Raw.of(self.reference(images)), self.nc)
        return self.predictions(output)

    def sqnr(self) -> dict[str, float]:
        """Compute the SQNR of each part in dB, over all images so far (under torchrun of all processes)."""
        return decibels(all_reduce(self.sums.clone()))
