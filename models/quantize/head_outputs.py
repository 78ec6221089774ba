"""The outputs of a model's head, part by part: raw maps of boxes and classes, coefficients and prototypes of masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from models.quantize.network import layers
from utils.qat.backends.pytorch import task_of
from utils.qat.core.errors import QatError
from utils.qat.evaluation.classes import divergence

HEADS = 'Detect', 'DDetect', 'Segment', 'DSegment'


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

        See fisher.probe.
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


def head_of(model: nn.Module) -> nn.Module:
    """Return the last layer of a model."""
    return [*layers(model).values()][-1]


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
