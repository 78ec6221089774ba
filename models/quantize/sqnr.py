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


class ComparedModel(TorchModel):
    """A TorchModel that compares its head's raw maps with those of `reference`, a float model, while it predicts."""

    def __init__(self, model, reference):
        super().__init__(model)
        self.reference = reference.eval()
        self.sums = torch.zeros(len(PARTS), 2, dtype=torch.float64, device=self.device)  # of t² and (s - t)²

    def __call__(self, images):
        predictions, maps = self.model(images)
        for mine, theirs in zip(maps, self.reference(images)[1]):
            for sums, s, t in zip(self.sums, self._parts(mine), self._parts(theirs)):
                sums += torch.stack((t.double().square().sum(), (s.double() - t).square().sum()))
        return predictions

    def _parts(self, raw):
        """Raw map [B, 4 reg_max + classes, H, W] → boxes, classes."""
        return raw.split((raw.shape[1] - self.nc, self.nc), 1)

    def sqnr(self):
        """{part: dB}, of all images so far, under torchrun of those of all processes; infinite where the maps are equal."""
        signal, noise = all_reduce(self.sums.clone()).t()
        return dict(zip(PARTS, (10 * (signal / noise).log10()).tolist()))
