"""The outputs of a model's head, part by part: raw maps of boxes and classes, coefficients and prototypes of masks; and their SQNR.

The SQNR in dB is the ratio of signal to quantization noise:

    SQNR = 10 log10( sum of t² / sum of (s - t)² )

The sums are over images, positions and channels of the head's outputs; t comes from the float model, and s from the
quantized model on the same images. Each part (boxes, classes, coefficients and prototypes of masks) has its own SQNR.
Otherwise the large negative logits of the background would hide the rest. 6 dB more is half the noise amplitude. Chance
moves SQNR far less than AP: the first COMPARED images suffice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from models.quantize.network import head_of
from models.quantize.quantizers import RoundedOnce
from utils.qat.backends.pytorch import TorchModel, task_of
from utils.qat.core.distributed import all_reduce
from utils.qat.core.errors import QatError
from utils.qat.data.loaders import channels_last
from utils.qat.evaluation.classes import agreement, divergence

HEADS = 'Detect', 'DDetect', 'Segment', 'DSegment'
COMPARED = 64  # images of a process, at least; batches are whole


@dataclass
class ClassScores:
    """Outputs of a classifier, as HeadOutputs for a detector: the logits [B, classes] of one categorical variable."""

    logits: torch.Tensor

    def divergence_sums(self, wanted: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the Kullback-Leibler divergence from `wanted`, and the weight of each image, 1: FP64 [B]."""
        found = divergence(self.logits, wanted.logits)
        return found, torch.ones_like(found)

    def probe(self, draw: Callable[[Sequence[int]], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a random v whose covariance is the Fisher information of the logits, and its weight, FP32 [].

        See divergence.probe.
        """
        p = self.logits.detach().softmax(1)
        one = (len(p), 1)
        index = (p.cumsum(1) < draw(one)).sum(1, keepdim=True).clamp_(max=p.shape[1] - 1)
        drawn = torch.zeros_like(p).scatter_(1, index, 1.0)
        return (drawn - p) * (draw(one) - 0.5).sign(), p.new_tensor(float(len(p)))


@dataclass
class HeadOutputs:
    """Outputs of the head, raw but for the boxes. N is the number of places of all levels, level by level.

    Attributes:
        maps: of each level [B, 4 bins + classes, H, W]: logits of the distances to the four sides, and of the classes.
        boxes: [B, 4, N], decoded: centre, width and height in pixels.
        coefficients: of masks, [B, nm, N]; None for a detector.
        prototypes: of masks, [B, nm, H / 4, W / 4]; None for a detector.
    """

    maps: Sequence[torch.Tensor]
    boxes: torch.Tensor
    coefficients: Any = None
    prototypes: Any = None

    @classmethod
    def of(cls, output: Any) -> Any:
        """Split the output of a model in eval mode with one of HEADS; for a classifier return its ClassScores."""
        if isinstance(output, torch.Tensor):
            return ClassScores(output)
        predictions, rest = output
        maps, *masks = rest if isinstance(rest, tuple) else (rest,)
        return cls(maps, predictions[:, :4], *masks)


def output_tensors(output: Any) -> list[torch.Tensor]:
    """List the floating-point tensors in a layer's output: a tensor, or lists, tuples and dicts of tensors."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in output_tensors(part)]


def output_parts(output: Any) -> list[list[torch.Tensor]]:
    """Group a layer's tensors: maps, coefficients and prototypes of a segmentation head in training mode, else one group."""
    if isinstance(output, tuple) and isinstance(output[0], list):
        return [output_tensors(part) for part in output]
    return [output_tensors(output)]


def bins_of(model: nn.Module) -> int:
    """Return the number of bins in the head's distribution of a distance; 0 for a classifier."""
    return getattr(head_of(model), 'reg_max', 0)


def has_known_head(model: nn.Module) -> bool:
    """Tell whether the outputs of `model` fit HeadOutputs: it is a classifier, or its head is one of HEADS."""
    return not task_of(model).boxes or type(head_of(model)).__name__ in HEADS


def require_known_head(model: nn.Module, purpose: str, instead: str) -> None:
    """Raise QatError if the model's head is not one of HEADS; `purpose` needs one, `instead` is a clause of advice."""
    if not has_known_head(model):
        raise QatError(
            f"{purpose}: only for the heads {', '.join(HEADS)}, and the model's is {type(head_of(model)).__name__}; {instead}"
        )


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
