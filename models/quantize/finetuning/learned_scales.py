"""Scales of activations that learn with the weights (LSQ, https://arxiv.org/abs/1902.08153), as exponents of two.

Because of the exponent, a step of the optimizer changes a scale by a share of itself. The forward pass rounds scales to
FP16 numbers, as `Quantizer.set_amax` does, and the gradient passes straight through the rounding. So the saved scales
are the scales of the computation.
"""

from typing import Any

import torch
import torch.nn as nn

from models.quantize.quantizers import MAX_AMAX, MIN_AMAX, QMAX, QMIN, FixedScales, Quantizer, named_quantizers

# A rounding error is kept in parts of an INT8 step, -126..126. QMIN and QMAX mark a clipped value.
PARTS = 252


class _Quantize(torch.autograd.Function):
    """Fake-quantize `inputs` with a scale, FP32 [], that has a gradient.

    Let x / scale = q - error, with an integer q. The gradient of the scale is the error of each value inside the range,
    and the end of the range, in steps, for a clipped value. One byte per value is kept for the backward pass. The
    outputs and the gradient of the inputs are equal to PyTorch's own operator. That operator cannot serve here: in
    PyTorch 2.4 it takes no BF16 inputs with a tensor as scale.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, scale: torch.Tensor, zero_point: int) -> torch.Tensor:
        ctx.zero_point = zero_point
        steps = inputs.float() * scale.reciprocal()
        rounded = steps.round()
        # -error; 1.5 or more for a clipped value
        kept = steps.add_(rounded).sub_(rounded.clamp_(QMIN - zero_point, QMAX - zero_point), alpha=2)
        ctx.save_for_backward(kept.mul_(PARTS).clamp_(QMIN, QMAX).to(torch.int8))
        return rounded.mul_(scale).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        inside = (kept > QMIN) & (kept < QMAX)
        to_scale = torch.where(inside, kept * (-1 / PARTS), kept.float() - ctx.zero_point).mul_(gradient).sum()
        return gradient * inside, to_scale, None


def rounded_scales(log2: torch.Tensor) -> torch.Tensor:
    """Round the scales 2^log2 to FP16 numbers; the gradient is the gradient without the rounding.

    Args:
        log2: FP32, any shape.

    Returns:
        The scales, FP32 with values of FP16, the same shape.
    """
    scale = log2.exp2()
    fixed = scale.detach().clamp(MIN_AMAX / QMAX, MAX_AMAX / QMAX).half().float()
    return scale + (fixed - scale.detach())


class LearnedScales(FixedScales):
    """Context as FixedScales, but the scales of activations are 2^`log2` and learn.

    After a step of the optimizer `write` gives the scales to the quantizers.

    Args:
        model: quantized, calibrated.
        share: see FixedScales.

    Attributes:
        log2: FP32 parameter, one value per activation quantizer.
    """

    def __init__(self, model: nn.Module, share: bool = False) -> None:
        super().__init__(model, share)
        self.learning = [q for _, q in named_quantizers(model) if q._axis is None]
        self.log2 = torch.nn.Parameter(torch.stack([q.scale for q in self.learning]).log2())

    def _quantize(self, quantizer: Quantizer, inputs: torch.Tensor) -> torch.Tensor:
        if quantizer._axis is None:
            return _Quantize.apply(inputs, self.moving[quantizer], self.scales[quantizer][1])
        return super()._quantize(quantizer, inputs)

    def __enter__(self) -> None:
        super().__enter__()
        self.moving = dict(zip(self.learning, rounded_scales(self.log2).unbind()))

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        del self.moving  # it would keep the autograd graph in memory

    @torch.no_grad()
    def write(self) -> None:
        """Write the scales to the quantizers, in place: a CUDA graph knows tensors by their memory."""
        torch._foreach_copy_([q._amax for q in self.learning], (rounded_scales(self.log2) * QMAX).unbind())
