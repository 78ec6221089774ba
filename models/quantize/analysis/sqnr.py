"""How much of the head's outputs is quantization noise: SQNR, in dB.

    SQNR = 10 log10( sum of t² / sum of (s - t)² )

over all images, positions and channels of the head's outputs (see head_outputs.py), t of the float model and s of the quantized one on the
same images; for the boxes (the logits of the distances' distribution), the classes (their logits), and the coefficients and prototypes
of masks separately, because the large negative logits of the background would hide the rest. 6 dB more is half the noise. It moves far less by chance than
AP does: a few images suffice.
"""

import torch

from models.quantize.head_outputs import Raw
from utils.qat.core.distributed import all_reduce
from utils.qat.prediction.pytorch import TorchModel

PARTS = ('boxes', 'classes', 'coefficients', 'prototypes')


def _parts(raw, classes):
    """The tensors of each part of a Raw."""
    of_levels = zip(*(m.split((m.shape[1] - classes, classes), 1) for m in raw.maps))
    return [*of_levels, *([x] for x in (raw.coefficients, raw.prototypes) if x is not None)]


def energies(mine, wanted, classes):
    """FP64 [parts, 2]: of each part, the sums of t² and of (s - t)². mine, wanted: Raw."""

    def sums(s, t):
        return torch.stack((t.double().square().sum(), (s.double() - t).square().sum()))

    pairs = zip(_parts(mine, classes), _parts(wanted, classes))
    return torch.stack([sum(sums(s, t) for s, t in zip(ours, theirs)) for ours, theirs in pairs])


def decibels(sums):
    """`energies` → {part: dB}; infinite where the outputs are equal."""
    signal, noise = sums.t()
    return dict(zip(PARTS, (10 * (signal / noise).log10()).tolist()))


class ComparedModel(TorchModel):
    """A TorchModel that compares its head's outputs with those of `reference`, a float model, while it predicts."""

    def __init__(self, model, reference):
        super().__init__(model)
        self.reference = reference.eval()
        self.sums = torch.zeros(len(PARTS) if self.segments else 2, 2, dtype=torch.float64, device=self.device)

    def __call__(self, images):
        output = self.model(images)
        self.sums += energies(Raw.of(output), Raw.of(self.reference(images)), self.nc)
        return self.predictions(output)

    def sqnr(self):
        """{part: dB}, of all images so far, under torchrun of those of all processes."""
        return decibels(all_reduce(self.sums.clone()))
