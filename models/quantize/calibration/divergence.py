"""How far what a model finds is from what the float model finds: calibrations are chosen by it, and units judged.

It is the Kullback-Leibler divergence, at every place of the head, of the classes' scores, of the distances to the four sides of a box
(mean of the four) and of the points of a mask (mean of those in the float model's box), the last two weighted by the float model's best
score there; over the sum of these best scores, which is near the number of places with an object.
"""

import torch
import torch.nn.functional as F
from utils.general import xywh2xyxy
from utils.segment.general import crop_mask

from models.quantize.head_outputs import Raw
from utils.qat.data.masks import COARSE

OBJECTS = 100  # places of an image whose masks count: those of the highest scores, as many as COCO scores


def split(raw, bins):
    """A level's raw map → (sides [B, 4, bins, H, W], classes [B, classes, H, W]), logits."""
    sides, scores = raw.split((4 * bins, raw.shape[1] - 4 * bins), 1)
    return sides.unflatten(1, (4, bins)), scores


def strongest(raw, bins):
    """Where masks count: (places [B, K], of the highest scores; weights [B, K, H / 4, W / 4]: the score there over the number of points in
    the box inside it, 0 outside)."""
    scores, places = (
        torch.cat([split(m, bins)[1].flatten(2) for m in raw.maps], 2)
        .amax(1)
        .sigmoid()
        .topk(min(OBJECTS, raw.boxes.shape[2]))
    )
    boxes = xywh2xyxy(raw.boxes.transpose(1, 2).gather(1, places[..., None].expand(-1, -1, 4))) / COARSE
    inside = torch.stack([crop_mask(scores.new_ones(len(b), *raw.prototypes.shape[2:]), b) for b in boxes])
    return places, inside * (scores / inside.sum((2, 3)).clamp(min=1))[..., None, None]


def mask_logits(raw, places):
    """Logits of the masks at `places` [B, K]: [B, K, H / 4, W / 4], not cut at a box."""
    chosen = raw.coefficients.transpose(1, 2).gather(1, places[..., None].expand(-1, -1, raw.coefficients.shape[1]))
    return (chosen @ raw.prototypes.flatten(2)).unflatten(2, raw.prototypes.shape[2:])


def bernoulli(mine, theirs):
    """Divergence of sigmoid(mine) from sigmoid(theirs), element by element."""
    wanted = theirs.sigmoid()
    return F.binary_cross_entropy_with_logits(mine, wanted, reduction='none') - F.binary_cross_entropy_with_logits(
        theirs, wanted, reduction='none'
    )


def divergence_sums(mine, wanted, bins):
    """(divergence, places with an object), summed over all images and places, FP64 scalars. mine, wanted: Raw, of a model and of the
    float one. bins: of the head, reg_max."""
    total, weights = 0.0, 0.0
    for ours, theirs in zip(mine.maps, wanted.maps):
        (sides, scores), (true_sides, true_scores) = (split(raw.double(), bins) for raw in (ours, theirs))
        sides, true_sides = sides.log_softmax(2), true_sides.log_softmax(2)
        weight = true_scores.amax(1).sigmoid()  # [B, H, W]
        total = total + bernoulli(scores, true_scores).sum()
        total = total + (F.kl_div(sides, true_sides, reduction='none', log_target=True).sum(2).mean(1) * weight).sum()
        weights = weights + weight.sum()
    if wanted.prototypes is not None:
        places, weight = strongest(wanted, bins)
        total = total + (bernoulli(mask_logits(mine, places), mask_logits(wanted, places)) * weight).sum(
            dtype=torch.float64
        )
    return total, weights


@torch.no_grad()
def divergence(model, batches, references):
    """How far the detections of `model`, which has a known head (see head_outputs.py), are from a float model's, at least 0.

    batches: a list of images, FP32 [B, 3, H, W] in 0..1. references: for each, Raw of the float model.
    """
    bins = model.eval().model[-1].reg_max
    sums = (divergence_sums(Raw.of(model(images)), wanted, bins) for images, wanted in zip(batches, references))
    total, weights = map(sum, zip(*sums))
    return (total / weights).item()
