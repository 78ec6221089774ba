"""Segmentation: detection with a mask for each box, out of prototypes and coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from utils.qat.tasks.detection import Detection

if TYPE_CHECKING:
    import torch

    from utils.qat.core.upstream import Network


class Segmentation(Detection):
    """Segmentation."""

    name = 'segment'
    title = 'a segmentation model'
    masks = True
    parts = (*Detection.parts, 'coefficients', 'prototypes')

    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        return super().classes_in(shapes) - shapes[1][1]  # of prototypes [B, nm, H / 4, W / 4]

    def predictions(self, output: torch.Tensor | tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictions [B, 4 + classes + nm, N] and the prototypes."""
        predictions, rest = output
        return predictions, rest[-1]

    def label_loss(self, model: Network, weight: float) -> Callable[..., torch.Tensor]:
        """Make Detection's: labels teach boxes, and masks follow the teacher.

        With upstream's loss on masks too, the demo with ReLU had 1 to 2 points of mask AP less after every epoch
        (docs/measured/activations.csv).
        """
        of_boxes = super().label_loss(model, weight)
        return lambda outputs, labels: of_boxes(outputs[0], labels)


TASK = Segmentation()
