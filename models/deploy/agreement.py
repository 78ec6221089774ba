"""Agreement of a written file with PyTorch: the model to trace, test images, and the allowed differences of the outputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.quantize.blocks import is_quantized
from models.quantize.calibration.calibrate import added
from models.quantize.network import head_of, removed_after
from utils.qat.backends.pytorch import split_outputs, stride_of, task_of
from utils.qat.config.tables import DEFAULT_TARGET
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY
from utils.qat.core.upstream import Network

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
MIN_SCORE = 1e-4  # a lower score counts as this: its logit magnifies float rounding, and no threshold is lower


@dataclass(kw_only=True)
class Agreement:
    """Differences between PyTorch and the engine that checked a written file, on the made images."""

    errors: dict[str, float]  # relative errors of the parts, see `output_differences`
    noise: float  # largest relative error of PyTorch against itself; 0 for a float model
    limit: float  # the relative error allowed

    def __str__(self) -> str:
        titles = {'coefficients': 'mask coefficients'}
        parts = ', '.join(f'{titles.get(name, name)} {error:.3%}' for name, error in self.errors.items())
        spread = '' if 'logits' in self.errors else ' of their spread'
        return f'{parts}{spread}; rounding explains up to {self.limit:.1%}'


def traceable_copy(model: Network, inplace: bool = False) -> Network:
    """Copy a fused model, float or quantized, for tracing: eval mode, and a head that returns only predictions and prototypes.

    `inplace`: whether the head decodes boxes in place.
    """
    model = deepcopy(model).float().eval().requires_grad_(False)
    # A classifier's last layer reads none of these; without a shape the anchors are computed anew, inside the trace
    vars(head_of(model)).update(export=True, inplace=inplace, shape=None)
    return model


def made_images(batch: int, imgsz: Sequence[int]) -> torch.Tensor:
    """Make images with structure at many scales, the same every time: FP32 [batch, 3, H, W] in 0..1. imgsz: H and W."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        F.interpolate(torch.rand(batch, 3, n, n, generator=generator), size=tuple(imgsz), mode='bilinear')
        for n in (3, 10, 40)
    ]
    return added(layers) / len(layers)


def output_differences(computed: Any, wanted: Any, engine: str = 'ONNX Runtime') -> dict[str, float]:
    """Compare the outputs of `engine` with PyTorch's: predictions [B, 4 + nc, N], or with masks (predictions, prototypes).

    Returns the relative error of each part of pytorch.split_outputs, of scores as logits. Raises QatError if the shapes differ.
    """
    computed, wanted = (
        {name: part.cpu() for name, part in split_outputs(outputs).items()} for outputs in (computed, wanted)
    )
    shapes = [[tuple(part.shape) for part in model.values()] for model in (computed, wanted)]
    if shapes[0] != shapes[1]:
        raise QatError(f'{engine} returns {shapes[0]}, PyTorch {shapes[1]}')
    for model in (computed, wanted):
        if 'scores' in model:
            model['scores'] = model['scores'].logit(MIN_SCORE)
    return {
        name: ((computed[name] - part).norm() / part.norm().clamp(min=1e-12)).item()  # some parts are all zeros
        for name, part in wanted.items()
    }


@contextmanager
def other_last_bits(model: Network, last_bits: float, seed: int) -> Iterator[None]:
    """Within this context, each convolution's output has other last bits, at random, as other kernels give them.

    `last_bits` is the largest change, relative to the largest output of a convolution.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)

    def round_otherwise(conv: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        noise = 2 * torch.rand(result.shape, generator=generator, device=result.device) - 1
        return result + noise * last_bits * result.abs().max()

    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    with removed_after(conv.register_forward_hook(round_otherwise) for conv in convs):
        yield


def rounding_noise(model: Network, images: torch.Tensor, wanted: object, last_bits: float, seed: int) -> float:
    """Return the largest relative error of the model's outputs with `other_last_bits`.

    `model` is in the form of `traceable_copy`, and `wanted` are its outputs without the change.
    """
    with other_last_bits(model, last_bits, seed):
        return max(output_differences(model(images), wanted).values())


class Reference:
    """A model's outputs for made images, with which those of a written file must agree.

    Attributes:
        traced: the model in the form of `traceable_copy`.
        images: FP32 [batch, 3, H, W], normalized as the model wants them, on its device.
        outputs: for these images.
    """

    @torch.no_grad()
    def __init__(self, model: Network, batch: int, imgsz: Sequence[int]) -> None:
        self.traced, self.quantized = traceable_copy(model), is_quantized(model)
        device = next(model.parameters()).device
        self.images = task_of(model).normalized(made_images(batch, imgsz)).to(device)
        self.outputs = self.traced(self.images)

    @torch.no_grad()
    def require_agreement(self, computed: object, engine: str, typing: str) -> Agreement:
        """Compare `computed`, the outputs of a written file in `engine` for the same images.

        `typing`, 'FP32' or 'FP16', is the type of everything that is not INT8. Raises QatError if they differ by more than LIMITS,
        and by more than MARGIN times the rounding noise of the model.
        """
        errors = output_differences(computed, self.outputs, engine)
        limit, noise = LIMITS['INT8' if self.quantized else 'float', typing], 0.0

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
        return Agreement(errors=errors, noise=noise, limit=limit)


def metadata_of(model: Network, kept_float: Sequence[str] = (), target: str = DEFAULT_TARGET) -> dict[str, object]:
    """Return the metadata of an exported file: stride, class names, task, and settings that differ from their defaults.

    `kept_float` are paths of blocks that are float by choice; `target` is a key of TARGETS.
    """
    masks = getattr(head_of(model), 'nm', None)
    return {
        'description': MADE_BY,  # Ultralytics' package shows it
        'stride': stride_of(model),
        'names': model.names,
        'task': task_of(model).name,
        **({} if masks is None else {'nm': masks}),
        **({'kept_float': list(kept_float)} if kept_float else {}),
        **({'target': target} if target != DEFAULT_TARGET else {}),
    }
