"""Agreement of a written file with PyTorch: the model to trace, test images, and the allowed differences of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.quantize.blocks import is_quantized
from models.quantize.network import head_of
from utils.qat.backends.pytorch import split_outputs, task_of
from utils.qat.config.tables import DEFAULT_TARGET
from utils.qat.core.errors import QatError

# How far ONNX Runtime may be from PyTorch, as |difference| / |PyTorch| (2-norms): over all boxes, over all scores as
# logits (most scores are near 0, where their own ratio says nothing), and over coefficients and prototypes, the source
# of masks. Float graphs differ only by the order of summation, or by FP16 (seen: 0.05 %). With INT8, a value between
# two steps rounds either way, and each such flip is one whole step for the next layer. The effect of flips depends on
# the model (trained ones: up to 2.5 %, with FP16 4.2 %; random weights: 20 %). So it is measured: PyTorch against
# PyTorch with other last bits behind each convolution, and MARGIN times this difference is allowed too. One such
# measurement may be far too small if a few flips make the difference, so a file is refused only after SAMPLES of them.
# The scales themselves must be equal bit for bit.
LIMITS = {('float', 'FP32'): 1e-3, ('float', 'FP16'): 5e-3, ('INT8', 'FP32'): 0.05, ('INT8', 'FP16'): 0.08}
MARGIN, SAMPLES = 3, 8
LAST_BITS = {'FP32': 2.0**-22, 'FP16': 2.0**-12}  # relative to the largest output of a convolution
RELATIVE = 'boxes', 'scores', 'coefficients', 'prototypes', 'logits'  # the errors that must keep the limit
MIN_SCORE = 1e-4  # a lower score counts as this: its logit magnifies float rounding, and no threshold is lower


@dataclass(kw_only=True)
class Agreement:
    """Differences between PyTorch and the engine that checked a written file, on the made images."""

    noise: float  # largest relative error of PyTorch against itself; 0 for a float model
    limit: float  # the relative error allowed
    boxes: float = 0.0  # relative error of the boxes; these four are 0 for a classifier
    scores: float = 0.0  # relative error of the class scores, as logits
    boxes_max: float = 0.0  # largest absolute difference, pixels
    scores_max: float = 0.0  # largest absolute difference, 0..1
    coefficients: float | None = None  # relative error of the mask coefficients; None for a detector
    prototypes: float | None = None  # relative error of the prototypes; None for a detector
    logits: float | None = None  # relative error of a classifier's logits; None for other models
    logits_max: float | None = None  # largest absolute difference of the logits

    def __str__(self) -> str:
        if self.logits is not None:
            return f'logits {self.logits:.3%}; rounding explains up to {self.limit:.1%}'
        masks = ''
        if self.prototypes is not None:
            masks = f', mask coefficients {self.coefficients:.3%}, prototypes {self.prototypes:.3%}'
        return (
            f'boxes {self.boxes:.3%}, scores {self.scores:.3%}{masks} of their spread; '
            f'rounding explains up to {self.limit:.1%}'
        )


def traceable_copy(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Copy a fused model, float or quantized, for tracing: eval mode, and a head that returns only predictions and prototypes.

    `inplace`: whether the head decodes boxes in place.
    """
    model = deepcopy(model).float().eval().requires_grad_(False)
    head = head_of(model)  # a classifier's last layer reads none of these
    head.export, head.inplace = True, inplace
    head.shape = None  # so the anchors are computed anew, inside the trace
    return model


def made_images(batch: int, imgsz: Sequence[int]) -> torch.Tensor:
    """Make images with structure at many scales, the same every time: FP32 [batch, 3, H, W] in 0..1. imgsz: H and W."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        F.interpolate(torch.rand(batch, 3, n, n, generator=generator), size=tuple(imgsz), mode='bilinear')
        for n in (3, 10, 40)
    ]
    return sum(layers) / len(layers)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def output_differences(ours: Any, theirs: Any, engine: str = 'ONNX Runtime') -> dict[str, float]:
    """Compare the outputs of `engine` with PyTorch's: predictions [B, 4 + nc, N], or with masks (predictions, prototypes).

    Returns figures of Agreement: 'boxes', 'scores', 'boxes_max', 'scores_max', and for masks 'coefficients' and 'prototypes';
    for a classifier 'logits' and 'logits_max'. Raises QatError if the shapes differ.
    """
    ours, theirs = ({name: part.cpu() for name, part in split_outputs(outputs).items()} for outputs in (ours, theirs))
    shapes = [[tuple(part.shape) for part in model.values()] for model in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise QatError(f'{engine} returns {shapes[0]}, PyTorch {shapes[1]}')
    absolute = [name for name in ('boxes', 'scores', 'logits') if name in ours]
    figures = {f'{name}_max': (ours[name] - theirs[name]).abs().max().item() for name in absolute}
    for model in (ours, theirs):
        if 'scores' in model:
            model['scores'] = model['scores'].logit(MIN_SCORE)
    return {**figures, **{name: _relative(ours[name], theirs[name]) for name in theirs}}


def rounding_noise(model: nn.Module, images: torch.Tensor, theirs: Any, last_bits: float, seed: int) -> float:
    """Randomize the last bits of each convolution's output, and return the largest error of RELATIVE in the model's outputs.

    `model` is in the form of `traceable_copy`, and `theirs` are its outputs without the change. `last_bits` is the largest change,
    relative to the largest output of a convolution.
    """
    generator = torch.Generator(images.device).manual_seed(seed)

    def round_otherwise(conv: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        noise = 2 * torch.rand(result.shape, generator=generator, device=result.device) - 1
        return result + noise * last_bits * result.abs().max()

    hooks = [m.register_forward_hook(round_otherwise) for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    try:
        moved = output_differences(model(images), theirs)
    finally:
        for hook in hooks:
            hook.remove()
    return max(moved.get(name, 0) for name in RELATIVE)


class Reference:
    """A model's outputs for made images, with which those of a written file must agree.

    Attributes:
        traced: the model in the form of `traceable_copy`.
        images: FP32 [batch, 3, H, W], normalized as the model wants them, on its device.
        outputs: for these images.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batch: int, imgsz: Sequence[int]) -> None:
        self.traced, self.quantized = traceable_copy(model), is_quantized(model)
        device = next(model.parameters()).device
        self.images = task_of(model).normalized(made_images(batch, imgsz)).to(device)
        self.outputs = self.traced(self.images)

    @torch.no_grad()
    def require_agreement(self, ours: Any, engine: str, typing: str) -> Agreement:
        """Compare `ours`, the outputs of a written file in `engine` for the same images.

        `typing`, 'FP32' or 'FP16', is the type of everything that is not INT8. Raises QatError if they differ by more than LIMITS,
        and by more than MARGIN times the rounding noise of the model.
        """
        figures = output_differences(ours, self.outputs, engine)
        limit, noise = LIMITS['INT8' if self.quantized else 'float', typing], 0.0
        errors = {name: figures[name] for name in RELATIVE if name in figures}

        def agree() -> bool:
            return all(error <= limit for error in errors.values())

        for seed in range(1, 1 + SAMPLES * self.quantized):
            noise = max(noise, rounding_noise(self.traced, self.images, self.outputs, LAST_BITS[typing], seed))
            limit = max(limit, MARGIN * noise)
            if agree():
                break
        if not agree():
            raise QatError(
                f'{engine} differs from PyTorch by {", ".join(f"{e:.2%} ({name})" for name, e in errors.items())}, '
                f'more than {limit:.1%}; no file was written'
            )
        return Agreement(noise=noise, limit=limit, **figures)


def metadata_of(model: nn.Module, kept_float: Sequence[str] = (), target: str = DEFAULT_TARGET) -> dict[str, Any]:
    """Return the metadata of an exported file: stride, class names, task, and settings that differ from their defaults.

    `kept_float` are paths of blocks that are float by choice; `target` is a key of TARGETS.
    """
    masks = getattr(head_of(model), 'nm', None)
    return {
        'stride': int(max(model.stride)),
        'names': model.names,
        'task': task_of(model).name,
        **({} if masks is None else {'nm': masks}),
        **({'kept_float': list(kept_float)} if kept_float else {}),
        **({'target': target} if target != DEFAULT_TARGET else {}),
    }
