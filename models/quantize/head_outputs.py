"""What the head of a model gives, part by part: raw maps of boxes and classes, and of a segmentation model what its masks are made of."""

from dataclasses import dataclass

import torch

from utils.qat.core.errors import QatError

HEADS = 'Detect', 'DDetect', 'Segment', 'DSegment'


@dataclass
class Raw:
    """Outputs of the head that nothing has been computed of, in order of the places of all levels together, N of them."""

    maps: (
        list  # of each level [B, 4 bins + classes, H, W]: logits of the distances to the four sides, and of the classes
    )
    boxes: torch.Tensor  # [B, 4, N], decoded: centre, width and height in pixels
    coefficients: torch.Tensor = None  # [B, nm, N]
    prototypes: torch.Tensor = None  # [B, nm, H / 4, W / 4]

    @classmethod
    def of(cls, output):
        """output: of a model in eval mode with one of HEADS."""
        predictions, rest = output
        maps, *masks = rest if isinstance(rest, tuple) else (rest,)
        return cls(maps, predictions[:, :4], *masks)


def tensors(output):
    """The floating-point tensors in a layer's output (a tensor, or lists, tuples and dicts of them)."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = output.values()
    return [t for part in output for t in tensors(part)]


def parts(output):
    """A layer's output as groups of tensors: of a segmentation head that is training maps, coefficients and prototypes, of all else one."""
    if isinstance(output, tuple) and isinstance(output[0], list):
        return [tensors(part) for part in output]
    return [tensors(output)]


def has_known_head(model):
    """Whether the outputs of `model` are those of Raw."""
    return type(model.model[-1]).__name__ in HEADS


def require_known_head(model, what, instead):
    """Raise QatError, saying `what` needs it and what to do `instead`, if the head of `model` is none of HEADS."""
    if not has_known_head(model):
        raise QatError(
            f"{what}: only for the heads {', '.join(HEADS)}, and the model's is {type(model.model[-1]).__name__}; {instead}"
        )
