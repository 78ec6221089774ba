"""Segmentation: detection with a mask for each box, out of prototypes and coefficients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from utils.qat.tasks.detection import Detection, read_by_losses

if TYPE_CHECKING:
    import torch
    from torch import nn


class Segmentation(Detection):
    """Segmentation."""

    name = 'segment'
    title = 'a segmentation model'
    masks = True
    settings = frozenset({'overlap', 'mask_ratio'})
    parts = (*Detection.parts, 'coefficients', 'prototypes')

    def classes_in(self, shapes: Sequence[Sequence[int]]) -> int:
        return super().classes_in(shapes) - shapes[1][1]  # of prototypes [B, nm, H / 4, W / 4]

    def predictions(self, output: Any) -> Any:
        """Return the predictions [B, 4 + classes + nm, N] and the prototypes."""
        predictions, rest = output
        return predictions, rest[-1]

    def label_loss(self, model: nn.Module, weight: float) -> Callable[..., torch.Tensor]:
        """Make upstream's loss: as Detection's, with 2.5 mask more.

        It takes (maps, coefficients [B, nm, N], prototypes [B, nm, H / 4, W / 4]), labels, and the masks of each image [1, H / 4, W / 4]:
        the number of the object at each point, from 1; 0 = none.
        """
        import torch
        from utils.segment.loss_tal import ComputeLoss

        upstream = ComputeLoss(read_by_losses(model))

        def loss(outputs: Any, labels: torch.Tensor, masks: Sequence[torch.Tensor]) -> torch.Tensor:
            maps, *of_masks = outputs
            given = [m.float() for m in maps], *(x.float() for x in of_masks)
            true = torch.cat(tuple(masks)).to(labels.device).float()
            return weight * upstream(given, labels, true)[0] / len(maps[0])

        return loss


TASK = Segmentation()
