"""Losses of a network's outputs against the labels: upstream's, per image, and cross entropy for classifiers."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn as nn
from utils.loss_tal import ComputeLoss
from utils.segment.loss_tal import ComputeLoss as ComputeMaskLoss


def _settings(model: nn.Module) -> SimpleNamespace:
    """Return an object with the attributes that upstream's losses read: plain cross-entropy, as in upstream's settings."""
    return SimpleNamespace(model=model.model, parameters=model.parameters, hyp={'cls_pw': 1.0, 'fl_gamma': 0.0})


class LabelLoss(ComputeLoss):
    """Upstream's training loss of a detector with one head, per image: 7.5 box + 0.5 class + 1.5 DFL, times `weight`.

    It makes the host wait for the device.
    """

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(self, maps: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss FP32 [] of the head's raw maps, [B, 4 bins + classes, H, W] per level.

        `labels` are FP32 [n, 6]: image, class, box as centre, width and height in 0..1.
        """
        loss, _ = super().__call__([m.float() for m in maps], labels)
        return self.weight * loss / len(maps[0])


class MaskLoss(ComputeMaskLoss):
    """Upstream's training loss of a segmentation model: as LabelLoss, with 2.5 mask more."""

    def __init__(self, model: nn.Module, weight: float = 1.0) -> None:
        super().__init__(_settings(model))
        self.weight = weight

    def __call__(
        self,
        outputs: tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor],
        labels: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Compute the loss FP32 [] of raw maps and labels (see LabelLoss), coefficients, prototypes and masks.

        Args:
            outputs: raw maps, coefficients [B, nm, N] and prototypes [B, nm, H / 4, W / 4].
            labels: see LabelLoss.
            masks: of each image, [1, H / 4, W / 4]: the number of the object at each point, from 1; 0 = none.
        """
        maps, coefficients, prototypes = outputs
        masks = torch.cat(masks).to(labels.device).float()
        loss, _ = super().__call__(([m.float() for m in maps], coefficients.float(), prototypes.float()), labels, masks)
        return self.weight * loss / len(prototypes)


class ClassLoss:
    """Cross entropy of a classifier's scores against the labels, the mean over the images, times `weight`."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a batch: logits [B, classes] and classes [B] → FP32 []."""
        return self.weight * nn.functional.cross_entropy(scores.float(), labels)
