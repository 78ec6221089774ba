"""Losses of the fine-tuning, each a scalar: of a layer against the float model's, and of the detections against the labels."""
from types import SimpleNamespace

import torch
from utils.loss_tal import ComputeLoss

from utils.qat.errors import QatError


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
        difference, = ctx.saved_tensors
        gradient = (2 * gradient).view(-1, *[1] * (difference.dim() - 1))
        return (difference.float() * gradient).to(difference.dtype), None


def relative_error(outputs, targets):
    """|outputs - targets| / |targets| of one layer, mean over the images, a scalar: relative, so that no layer drowns the others.

    The root, and image by image, because some images have values far beyond the calibrated ranges: what is clipped of these, and
    cannot be learnt, would else be most of the loss. outputs, targets: the layer's tensors [B, ...], of student and teacher.
    """
    error = sum(_SquaredError.apply(s, t) for s, t in zip(outputs, targets))
    return (error / sum(_energy(t.float()) for t in targets).clamp(min=1e-12) + TINY).sqrt().mean()


def is_plain_detector(model):
    """Whether the head of `model` gives boxes and classes and nothing else."""
    return type(model.model[-1]).__name__ in ('Detect', 'DDetect')


def require_detector(model, what, instead):
    """Raise QatError, saying `what` needs it and what to do `instead`, if `model` is no plain detector."""
    if not is_plain_detector(model):
        raise QatError(f"{what}: only for a plain detector (Detect, DDetect), and the model's head is "
                       f'{type(model.model[-1]).__name__}; {instead}')


class LabelLoss(ComputeLoss):
    """Callable: the head's raw maps, one [B, 4 * bins + classes, H, W] per level, and labels [n, 6] (image, class, box as centre,
    width and height in 0..1) → scalar, FP32.

    It is `weight` times upstream's training loss of a model with one head, per image: 7.5 box + 0.5 class + 1.5 DFL. It waits
    for the device.
    """

    def __init__(self, model, weight=1.0):
        hyp = {'cls_pw': 1.0, 'fl_gamma': 0.0}  # plain cross-entropy, as in upstream's settings; it reads them from the model
        super().__init__(SimpleNamespace(model=model.model, parameters=model.parameters, hyp=hyp))
        self.weight = weight

    def __call__(self, maps, labels):
        loss, _ = super().__call__([m.float() for m in maps], labels)
        return self.weight * loss / len(maps[0])
