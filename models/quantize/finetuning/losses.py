"""The loss of the fine-tuning: a layer's outputs of the student against those of the float model."""

from collections.abc import Sequence
from typing import Any

import torch

from models.quantize.quantizers import gpu_kernels

# Squared relative error, 80 dB below the teacher: where student and teacher agree, the root's gradient stays finite
TINY = 1e-8


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Sum the squares of each image: [B, ...] → [B]."""
    return x.square().flatten(1).sum(1)


class _SquaredError(torch.autograd.Function):
    """Sum of (student - teacher)² of each image, FP32 [B]; the difference stays in the student's precision."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        difference = student.float() - teacher.float()
        ctx.save_for_backward(difference.to(student.dtype))
        return _energy(difference)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        gradient = (2 * gradient).view(-1, *[1] * (difference.dim() - 1))
        return (difference.float() * gradient).to(difference.dtype), None


def _error_and_energy(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Sum (student - teacher)² and teacher² of each image: [B, ...] twice → FP32 [B, 2]."""
    if gpu_kernels(student.device):
        from models.quantize.gpu.squared_error import squared_error

        sums = squared_error(student, teacher)
        if sums is not None:
            return sums
    return torch.stack((_SquaredError.apply(student, teacher), _energy(teacher.float())), 1)


def relative_error(outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute |outputs - targets| / |targets| of one layer, the mean over the images: [B, ...] of each tensor → FP32 [].

    The error is relative, so that no layer dominates the loss. It is a root, computed image by image, because some images
    have values far beyond the calibrated ranges. The clipped part of these values cannot be learnt, and would otherwise
    make up most of the loss.
    """
    error, energy = torch.stack([_error_and_energy(s, t) for s, t in zip(outputs, targets)]).sum(0).unbind(1)
    return (error / energy.clamp(min=1e-12) + TINY).sqrt().mean()
