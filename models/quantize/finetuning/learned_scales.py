"""Scales of activations that learn with the weights (LSQ, https://arxiv.org/abs/1902.08153), as exponents of two.

So a step of the optimizer changes a scale by a share of itself. The forward pass rounds scales to FP16 numbers, as
`Quantizer.set_amax` does, and the gradient passes straight through that: what is saved is what was computed with.
"""

import torch

from models.quantize.quantizers import MAX_AMAX, MIN_AMAX, QMAX, QMIN, FixedScales, named_quantizers

PARTS = (
    252  # of an INT8 step, in which its rounding error is kept: -126..126; what is clipped is marked by QMIN and QMAX
)


class _Quantize(torch.autograd.Function):
    """Fake-quantize `inputs` with a scale that has a gradient, FP32 []. With x / scale = q - error, q an integer, that is the
    error of a value inside the range, and QMIN or QMAX of one that is clipped; one byte per value is kept for it.

    Values and the gradient of the inputs are those of PyTorch's own operator, whose 2.4 takes no BF16 with a scale that is a tensor.
    """

    @staticmethod
    def forward(ctx, inputs, scale):
        steps = inputs.float() * scale.reciprocal()
        rounded = steps.round()
        kept = steps.add_(rounded).sub_(rounded.clamp_(QMIN, QMAX), alpha=2)  # -error; of what is clipped 1.5 or more
        ctx.save_for_backward(kept.mul_(PARTS).clamp_(QMIN, QMAX).to(torch.int8))
        return rounded.mul_(scale).to(inputs.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        inside = (kept > QMIN) & (kept < QMAX)
        to_scale = torch.where(inside, kept * (-1 / PARTS), kept).mul_(gradient).sum()
        return gradient * inside, to_scale


def rounded_scales(log2):
    """The scales 2^log2 (FP32), FP16 numbers in FP32, with the gradient of those before rounding."""
    scale = log2.exp2()
    fixed = scale.detach().clamp(MIN_AMAX / QMAX, MAX_AMAX / QMAX).half().float()
    return scale + (fixed - scale.detach())


class LearnedScales(FixedScales):
    """Context: as FixedScales, but the scales of activations are those of `log2`, a parameter of shape [activation quantizers].

    After a step of the optimizer `write` gives them to the quantizers.
    """

    def __init__(self, model, share=False):
        super().__init__(model, share)
        self.learning = [q for _, q in named_quantizers(model) if q._axis is None]
        self.log2 = torch.nn.Parameter(torch.stack([q.scale for q in self.learning]).log2())

    def _quantize(self, quantizer, inputs):
        if quantizer._axis is None:
            return _Quantize.apply(inputs, self.moving[quantizer])
        return super()._quantize(quantizer, inputs)

    def __enter__(self):
        super().__enter__()
        self.moving = dict(zip(self.learning, rounded_scales(self.log2).unbind()))

    def __exit__(self, *exception):
        super().__exit__(*exception)
        del self.moving  # the graph that hangs on them

    @torch.no_grad()
    def write(self):
        """In place, since a CUDA graph knows tensors by their memory."""
        torch._foreach_copy_([q._amax for q in self.learning], (rounded_scales(self.log2) * QMAX).unbind())
