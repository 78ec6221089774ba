"""The outputs of a model's head, part by part: raw maps of boxes and classes, coefficients and prototypes of masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from utils.qat.core.errors import QatError

HEADS = 'Detect', 'DDetect', 'Segment', 'DSegment'


@dataclass
class Raw:
    """Outputs of the head, raw but for the boxes. N is the number of places of all levels, level by level.

    Attributes:
        maps: of each level [B, 4 bins + classes, H, W]: logits of the distances to the four sides, and of the classes.
        boxes: [B, 4, N], decoded: centre, width and height in pixels.
        coefficients: tensor of masks, [B, nm, N]; None for a detector.
        prototypes: tensor of masks, [B, nm, H / 4, W / 4]; None for a detector.
    """

    maps: Sequence[torch.Tensor]
    boxes: torch.Tensor
    coefficients: Any = None
    prototypes: Any = None

    @classmethod
    def of(cls, output: Any) -> 'Raw':
        """Take the parts of the output of a model in eval mode with one of HEADS."""
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
    """Group the tensors of a layer's output.

    Returns:
        Maps, coefficients and prototypes for a segmentation head in training mode; one group for any other layer.
    """
    if isinstance(output, tuple) and isinstance(output[0], list):
        return [output_tensors(part) for part in output]
    return [output_tensors(output)]


def has_known_head(model: nn.Module) -> bool:
    """Tell whether the outputs of `model` fit Raw: its head is one of HEADS."""
    return type(model.model[-1]).__name__ in HEADS


def require_known_head(model: nn.Module, purpose: str, instead: str) -> None:
    """Refuse a model whose head is not one of HEADS.

    Args:
        model: of upstream, float or quantized.
        purpose: option or command that needs such a head.
        instead: advice, a clause.

    Raises:
        QatError: with `purpose` and `instead`.
    """
    if not has_known_head(model):
        raise QatError(
            f"{purpose}: only for the heads {', '.join(HEADS)}, and the model's is {type(model.model[-1]).__name__}; {instead}"
        )
