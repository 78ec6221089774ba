"""Losses of the fine-tuning, each a scalar: of a layer against the float model's, and of what is found against the labels."""

from types import SimpleNamespace

import torch
from utils.loss_tal import ComputeLoss
from utils.segment.loss_tal import ComputeLoss as ComputeMaskLoss

TINY = 1e-8  # squared relative error, 80 dB below the teacher: keeps the root's gradient finite where student and teacher agree


def _energy(x):
    """[B, ...] → sum of squares of each image, [B]."""
    return x.square().flatten(1).sum(1)


class _SquaredError(torch.autograd.Function):
    """sum((student - teacher)²) of each image, FP32 [B]; keeps the difference for the backward pass in the student's precision."""

    @staticmethod
    def forward(ctx, student, teacher):
        difference = student.float() - teacher.float()
        ctx.save_for_backward(difference.to(student.dtype))
        return _energy(difference)

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        gradient = (2 * gradient).view(-1, *[1] * (difference.dim() - 1))
        return (difference.float() * gradient).to(difference.dtype), None


def relative_error(outputs, targets):
    """|outputs - targets| / |targets| of one layer, mean over the images, a scalar: relative, so that no layer drowns the others.

    The root, and image by image, because some images have values far beyond the calibrated ranges: what is clipped of these, and
    cannot be learnt, would else be most of the loss. outputs, targets: the layer's tensors [B, ...], of student and teacher.
    """
    error = sum(_SquaredError.apply(s, t) for s, t in zip(outputs, targets))
    return (error / sum(_energy(t.float()) for t in targets).clamp(min=1e-12) + TINY).sqrt().mean()


def _settings(model):
    """What upstream's losses read of `model`: plain cross-entropy, as in upstream's settings."""
    return SimpleNamespace(model=model.model, parameters=model.parameters, hyp={'cls_pw': 1.0, 'fl_gamma': 0.0})


class LabelLoss(ComputeLoss):
    """Callable: the head's raw maps, one [B, 4 * bins + classes, H, W] per level, and labels [n, 6] (image, class, box as centre,
    width and height in 0..1) → scalar, FP32.

    It is `weight` times upstream's training loss of a model with one head, per image: 7.5 box + 0.5 class + 1.5 DFL. It waits
    for the device.
    """

    def __init__(self, model, weight=1.0):
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(self, maps, labels):
        loss, _ = super().__call__([m.float() for m in maps], labels)
        return self.weight * loss / len(maps[0])


class MaskLoss(ComputeMaskLoss):
    """The same of a segmentation model, and 2.5 mask. Callable: (raw maps, coefficients [B, nm, N], prototypes [B, nm, H / 4, W / 4]),
    labels, and masks of each image, [1, H / 4, W / 4] of the number of the object, from 1."""

    def __init__(self, model, weight=1.0):
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(self, outputs, labels, masks):
        maps, coefficients, prototypes = outputs
        masks = torch.cat(masks).to(labels.device).float()
        loss, _ = super().__call__(([m.float() for m in maps], coefficients.float(), prototypes.float()), labels, masks)
        return self.weight * loss / len(prototypes)


def label_loss(model, weight):
    """The loss for the head of `model`."""
    return (MaskLoss if hasattr(model.model[-1], 'nm') else LabelLoss)(model, weight)
