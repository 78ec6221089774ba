"""How much of the head's outputs is quantization noise: SQNR, in dB.

    SQNR = 10 log10( sum of t² / sum of (s - t)² )

over all images, positions and channels of the head's raw maps, t of the float model and s of the quantized one on the same
images; for the boxes (the logits of the distances' distribution) and the classes (their logits) separately, because the
large negative logits of the background would hide the boxes. 6 dB more is half the noise. It moves far less by chance than
AP does: a few images suffice.
"""
import torch

from utils.qat.backends import TorchModel
from utils.qat.distributed import all_reduce

PARTS = ('boxes', 'classes')


def energies(maps, references, classes):
    """FP64 [2, 2]: of each part, the sums of t² and of (s - t)². maps, references: raw maps [B, 4 reg_max + classes, H, W]."""
    sums = 0
    for mine, theirs in zip(maps, references):
        parts = zip(*(raw.split((raw.shape[1] - classes, classes), 1) for raw in (mine, theirs)))
        sums = sums + torch.stack([torch.stack((t.double().square().sum(), (s.double() - t).square().sum())) for s, t in parts])
    return sums


def decibels(sums):
    """`energies` → {part: dB}; infinite where the maps are equal."""
    signal, noise = sums.t()
    return dict(zip(PARTS, (10 * (signal / noise).log10()).tolist()))


class ComparedModel(TorchModel):
    """A TorchModel that compares its head's raw maps with those of `reference`, a float model, while it predicts."""

    def __init__(self, model, reference):
        super().__init__(model)
        self.reference = reference.eval()
        self.sums = torch.zeros(len(PARTS), 2, dtype=torch.float64, device=self.device)

    def __call__(self, images):
        predictions, maps = self.model(images)
        self.sums += energies(maps, self.reference(images)[1], self.nc)
        return predictions

    def sqnr(self):
        """{part: dB}, of all images so far, under torchrun of those of all processes."""
        return decibels(all_reduce(self.sums.clone()))
