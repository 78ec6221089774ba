"""Losses of the fine-tuning: a layer against the float model's layer, and the head's outputs against the labels."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
from utils.loss_tal import ComputeLoss
from utils.segment.loss_tal import ComputeLoss as ComputeMaskLoss

from models.quantize.quantizers import gpu_kernels
from utils.qat.prediction.pytorch import classifies

# Squared relative error, 80 dB below the teacher: where student and teacher agree, the root's gradient stays finite
TINY = 1e-8


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Sum the squares of each image: [B, ...] → [B]."""
    return x.square().flatten(1).sum(1)


class _SquaredError(torch.autograd.Function):
    """Sum of (student - teacher)² of each image, FP32 [B].

    The difference is kept for the backward pass in the student's precision.
    """

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
    """Compute |outputs - targets| / |targets| of one layer, the mean over the images.

    The error is relative, so that no layer drowns the others. It has a root and is computed image by image, because
    some images have values far beyond the calibrated ranges. The clipped part of these values cannot be learnt, and it
    would otherwise be most of the loss.

    Args:
        outputs: the student's tensors of the layer, each [B, ...].
        targets: the teacher's tensors, the same shapes.

    Returns:
        FP32 [].
    """
    error, energy = torch.stack([_error_and_energy(s, t) for s, t in zip(outputs, targets)]).sum(0).unbind(1)
    return (error / energy.clamp(min=1e-12) + TINY).sqrt().mean()


def _settings(model: nn.Module) -> SimpleNamespace:
    """Give upstream's losses the attributes that they read: plain cross-entropy, as in upstream's settings."""
    return SimpleNamespace(model=model.model, parameters=model.parameters, hyp={'cls_pw': 1.0, 'fl_gamma': 0.0})


class LabelLoss(ComputeLoss):
    """Upstream's training loss of a detector with one head, per image: 7.5 box + 0.5 class + 1.5 DFL, times `weight`.

    It waits for the device.

    Args:
        model: detector; its head gives the number of bins and classes.
        weight: factor of the loss.
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(self, maps: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a batch.

        Args:
            maps: the head's raw maps, [B, 4 bins + classes, H, W] per level.
            labels: FP32 [n, 6]: image, class, box as centre, width and height in 0..1.

        Returns:
            FP32 [].
        """
        loss, _ = super().__call__([m.float() for m in maps], labels)
        return self.weight * loss / len(maps[0])


class MaskLoss(ComputeMaskLoss):
    """Upstream's training loss of a segmentation model: as LabelLoss, with 2.5 mask more.

    Args:
        model: segmentation model.
        weight: factor of the loss.
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(
        self,
        outputs: tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor],
        labels: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Compute the loss of a batch.

        Args:
            outputs: raw maps (see LabelLoss), coefficients [B, nm, N] and prototypes [B, nm, H / 4, W / 4].
            labels: see LabelLoss.
            masks: of each image, [1, H / 4, W / 4]: the number of the object at each point, from 1; 0 = none.

        Returns:
            FP32 [].
        """
        maps, coefficients, prototypes = outputs
        masks = torch.cat(masks).to(labels.device).float()
        loss, _ = super().__call__(([m.float() for m in maps], coefficients.float(), prototypes.float()), labels, masks)
        return self.weight * loss / len(prototypes)


class ClassLoss:
    """Cross entropy of a classifier's scores against the labels, the mean over the images, times `weight`."""

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a batch: logits [B, classes] and classes [B] → FP32 []."""
        return self.weight * nn.functional.cross_entropy(scores.float(), labels)


def label_loss(model: nn.Module, weight: float) -> LabelLoss | MaskLoss | ClassLoss:
    """Make the loss against the labels that fits the head of `model`, times `weight`."""
    if classifies(model):
        return ClassLoss(model, weight)
    return (MaskLoss if hasattr(model.model[-1], 'nm') else LabelLoss)(model, weight)
