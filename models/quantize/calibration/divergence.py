"""Divergence of a model's detections from the float model's.

It chooses calibrations and ranks units. It is a Kullback-Leibler divergence, summed over every place of the head. Three
parts count at a place: the scores of the classes, the distances to the four sides of the box (the mean of the four), and
the points of the mask (the mean inside the float model's box). The last two have a weight, the float model's best score
at that place. The sum is divided by the sum of these weights, which is near the number of places with an object.

A few images with doubtful detections, which every rounding moves, can make up most of the sum. So calibrations are
compared by `typical_divergence`, in which every image counts the same. Units are ranked by the sum over all images.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from utils.general import xywh2xyxy
from utils.segment.general import crop_mask

from models.quantize.head_outputs import ClassScores, HeadOutputs, bins_of
from models.quantize.quantizers import RoundedOnce
from utils.qat.data.masks import COARSE

OBJECTS = 100  # places per image whose masks count: the places with the highest scores, as many as COCO scores


def split_map(raw: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the raw map of a level into the logits of its sides and of its classes.

    [B, 4 bins + classes, H, W] → [B, 4, bins, H, W] and [B, classes, H, W].
    """
    sides, scores = raw.split((4 * bins, raw.shape[1] - 4 * bins), 1)
    return sides.unflatten(1, (4, bins)), scores


def strongest_places(raw: HeadOutputs, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the places with the highest scores, whose masks count, and the weights of the points of these masks.

    Places are INT64 [B, K]. Weights are [B, K, H / 4, W / 4]: inside the box the score divided by the number of points in
    the box, outside 0.
    """
    scores, places = (
        torch.cat([split_map(m, bins)[1].flatten(2) for m in raw.maps], 2)
        .amax(1)
        .sigmoid()
        .topk(min(OBJECTS, raw.boxes.shape[2]))
    )
    boxes = xywh2xyxy(raw.boxes.transpose(1, 2).gather(1, places[..., None].expand(-1, -1, 4))) / COARSE
    inside = torch.stack([crop_mask(scores.new_ones(len(b), *raw.prototypes.shape[2:]), b) for b in boxes])
    return places, inside * (scores / inside.sum((2, 3)).clamp(min=1))[..., None, None]


def mask_logits(raw: HeadOutputs, places: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the masks at `places` (INT64 [B, K]): [B, K, H / 4, W / 4], not cut at the box."""
    chosen = raw.coefficients.transpose(1, 2).gather(1, places[..., None].expand(-1, -1, raw.coefficients.shape[1]))
    return (chosen @ raw.prototypes.flatten(2)).unflatten(2, raw.prototypes.shape[2:])


def bernoulli_divergence(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Compute the divergence of sigmoid(mine) from sigmoid(theirs), element by element."""
    return theirs.sigmoid() * (theirs - mine) + F.softplus(mine) - F.softplus(theirs)


def divergence_sums(mine: Any, wanted: Any, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the divergence, and its weights, over the places of each image: FP64 [B] both.

    `mine` and `wanted` (of the float model) are HeadOutputs or ClassScores. The weights are about the number of places with an
    object.
    """
    if isinstance(mine, ClassScores):
        return mine.divergence_sums(wanted)
    total, weights = 0.0, 0.0
    for ours, theirs in zip(mine.maps, wanted.maps):
        (sides, scores), (true_sides, true_scores) = (split_map(raw, bins) for raw in (ours, theirs))
        sides, true_sides = sides.log_softmax(2), true_sides.log_softmax(2)
        weight = true_scores.amax(1).sigmoid()  # [B, H, W]
        of_sides = (true_sides.exp() * (true_sides - sides)).sum(2).mean(1) * weight
        total = total + bernoulli_divergence(scores, true_scores).sum((1, 2, 3), dtype=torch.float64)
        total = total + of_sides.sum((1, 2), dtype=torch.float64)
        weights = weights + weight.sum((1, 2), dtype=torch.float64)
    if wanted.prototypes is not None:
        places, weight = strongest_places(wanted, bins)
        of_masks = bernoulli_divergence(mask_logits(mine, places), mask_logits(wanted, places)) * weight
        total = total + of_masks.sum((1, 2, 3), dtype=torch.float64)
    return total, weights


@torch.no_grad()
def log_divergences(
    model: nn.Module, batches: Sequence[torch.Tensor], references: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logarithm of the divergence of each image, and its weight, see `divergence_sums`: FP64 [images] both.

    `batches` are images, FP32 [B, 3, H, W] in 0..1; `references` are outputs of the float model, one per batch.
    """
    bins = bins_of(model.eval())
    with RoundedOnce(model):
        sums = [
            divergence_sums(HeadOutputs.of(model(images)), wanted, bins) for images, wanted in zip(batches, references)
        ]
    totals, weights = map(torch.cat, zip(*sums))
    return totals.clamp(min=torch.finfo(totals.dtype).tiny).log(), weights


def typical(logs: torch.Tensor, weights: torch.Tensor) -> float:
    """Compute the divergence on a typical image: the geometric mean of the sums, divided by the mean of the weights."""
    return float(logs.mean().exp() / weights.mean())


def typical_divergence(model: nn.Module, batches: Sequence[torch.Tensor], references: Sequence[Any]) -> float:
    """Measure the divergence of `model` on a typical image; the arguments are as in `log_divergences`."""
    return typical(*log_divergences(model, batches, references))
