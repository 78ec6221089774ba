"""SQNR in dB: the ratio of signal to quantization noise in the outputs of the head.

    SQNR = 10 log10( sum of t² / sum of (s - t)² )

The sums are over images, positions and channels of the head's outputs (see head_outputs.py); t comes from the float
model, and s from the quantized model on the same images. Each part (boxes, classes, coefficients and prototypes of
masks) has its own SQNR. Otherwise the large negative logits of the background would hide the rest. 6 dB more is half
the noise amplitude. Chance moves SQNR far less than AP: the first COMPARED images suffice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from models.quantize.head_outputs import ClassScores, HeadOutputs
from models.quantize.quantizers import RoundedOnce
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.distributed import all_reduce
from utils.qat.data.images import channels_last
from utils.qat.evaluation.classes import agreement, divergence

COMPARED = 64  # images of a process, at least; batches are whole


def _parts(raw: HeadOutputs | ClassScores, classes: int) -> list[Sequence[torch.Tensor]]:
    """List the tensors of each part, in the order of Task.parts."""
    if isinstance(raw, ClassScores):
        return [[raw.logits]]
    of_levels = zip(*(m.split((m.shape[1] - classes, classes), 1) for m in raw.maps))
    return [*of_levels, *([x] for x in (raw.coefficients, raw.prototypes) if x is not None)]


def energies(mine: Any, wanted: Any, classes: int) -> torch.Tensor:
    """Sum t² and (s - t)² over each part, of the quantized (`mine`) and the float model (`wanted`): FP64 [parts, 2]."""

    def sums(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.stack((t.double().square().sum(), (s.double() - t).square().sum()))

    pairs = zip(_parts(mine, classes), _parts(wanted, classes))
    return torch.stack([sum(sums(s, t) for s, t in zip(ours, theirs)) for ours, theirs in pairs])


def decibels(sums: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Convert `energies` to dB, by the names of their parts; infinite for equal outputs."""
    signal, noise = sums.t()
    return dict(zip(names, (10 * (signal / noise).log10()).tolist()))


class ComparedModel(TorchModel):
    """A quantized model that compares the outputs of its head with the float model's while it predicts.

    With a detector it compares only the first COMPARED images, because the float model would otherwise take a large part of
    every evaluation. With a classifier it compares all images.
    """

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__(model, context=RoundedOnce(model))
        self.reference = reference.eval()
        self.seen = 0  # images that were compared
        self.sums = torch.zeros(len(self.task.parts), 2, dtype=torch.float64, device=self.device)
        self.apart = torch.zeros(3, dtype=torch.float64, device=self.device)  # agreeing images, divergence, images

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict as a TorchModel does, and add up the energies. `images`: FP32 [B, 3, H, W] in 0..1."""
        output = self.outputs(images)
        if self.seen >= COMPARED and self.task.boxes:
            return self.task.predictions(output)
        self.seen += len(images)
        wanted = self.reference(channels_last(images))
        self.sums += energies(HeadOutputs.of(output), HeadOutputs.of(wanted), self.nc)
        if not self.task.boxes:
            both = torch.stack((agreement(output, wanted), divergence(output, wanted)))
            self.apart += torch.cat((both.sum(1), both.new_tensor([len(images)])))
        return self.task.predictions(output)

    def distance(self) -> dict[str, float]:
        """Compute classes.distance of a classifier from the float model over all images so far; {} for a detector."""
        if self.task.boxes:
            return {}
        same, apart, images = all_reduce(self.apart.clone()).tolist()
        return {'agreement': same / images, 'divergence': apart / images}

    def sqnr(self) -> dict[str, float]:
        """Compute the SQNR of each part in dB, over all images compared so far, by all processes of a torchrun."""
        return decibels(all_reduce(self.sums.clone()), self.task.parts)
