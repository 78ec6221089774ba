"""Two models side by side on the same images: how close their outputs are, rank by rank, and in AP.

A model is a callable images → predictions (see file_model.py), so any two backends can be compared. Each runs once per batch,
and one NMS of each serves both the ranks and the AP.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from utils.metrics import box_iou

from utils.qat.core.errors import QatError
from utils.qat.data.masks import same_place_iou
from utils.qat.evaluation.chance import difference
from utils.qat.evaluation.evaluate import Metrics, Scorer
from utils.qat.prediction.detections import detect, prepared
from utils.qat.prediction.outputs import parts

SAME_OBJECT, SAME_DETECTION = (
    0.5,
    0.9,
)  # IoU from which two detections of one class are of one object, and are one detection


@dataclass
class Comparison:
    """How `other` differs from `reference`. Boxes are in pixels of the model's input, scores in 0..1."""

    images: int
    rtol: float
    atol: float
    top: int
    boxes: dict  # of all predictions, before NMS: see Elements.figures; None if a model has NMS inside
    scores: dict
    coefficients: dict  # of masks; this and the next are None without
    prototypes: dict
    ranks: list  # of the top detections, after NMS: see Ranking.ranks
    disagreement: float  # over all ranks
    matched: float  # share of the top detections of either model that have a match in the other
    matched_score: float  # mean absolute difference between a detection and its match: of the scores
    matched_box: float  # of x1, y1, x2, y2
    matched_mask: float  # mean IoU of the masks of a detection and its match; None without masks
    reference: Metrics  # None if the images have no labels
    other: Metrics
    against_reference: (
        dict  # AP of `other` less AP of `reference`, and the chance in it, see chance.difference; None without labels
    )

    @property
    def ap_difference(self):
        """AP of `other` less AP of `reference`; None if the images have no labels."""
        return self.other.ap - self.reference.ap if self.reference else None

    @property
    def mask_ap_difference(self):
        """The same of masks; None without."""
        return self.other.mask['ap'] - self.reference.mask['ap'] if self.reference and self.reference.mask else None

    def plain(self):
        """As plain values; None where there is no figure, and where it is not finite, for which JSON has no name."""
        metrics = {k: m.plain() if m else None for k, m in (('reference', self.reference), ('other', self.other))}
        return _finite(
            {
                **asdict(self),
                **metrics,
                'ap_difference': self.ap_difference,
                'mask_ap_difference': self.mask_ap_difference,
            }
        )

    def excess(self, limits):
        """What is beyond config.Limits, in words; empty if nothing is."""
        if not self.ranks:
            return ['neither model detects anything, so there was nothing to compare']
        found = []
        for what, gain in (('AP', self.ap_difference), ('AP of the masks', self.mask_ap_difference)):
            if abs(gain or 0) > limits.ap:
                found.append(f'{what} differs by {abs(gain):.2g}, allowed {limits.ap:g}')
        if self.matched < limits.matched:
            found.append(
                f'{self.matched:.2%} of the top {self.top} detections are matched, wanted {limits.matched:.0%}'
            )
        if self.matched_score > limits.score:
            found.append(f'their scores differ by {self.matched_score:.2g}, allowed {limits.score:g}')
        if self.matched_mask is not None and self.matched_mask < limits.mask:
            found.append(f'their masks have an IoU of {self.matched_mask:.3f}, wanted {limits.mask:g}')
        return found


def _finite(value):
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Elements:
    """Differences of tensors, element by element, over batches."""

    def __init__(self, rtol, atol):
        self.rtol, self.atol = rtol, atol
        self.count, self.close, self.total, self.largest = 0, 0, 0.0, torch.zeros((), dtype=torch.float64)

    def update(self, reference, other):
        """Two tensors of one shape."""
        reference, other = reference.cpu().double(), other.cpu().double()
        difference = (other - reference).abs()
        self.count += difference.numel()
        self.close += int(torch.isclose(other, reference, self.rtol, self.atol).sum())
        self.total += difference.sum().item()
        self.largest = torch.maximum(self.largest, difference.max())  # unlike max(), it keeps NaN

    def figures(self):
        """max, mean: absolute difference. within: share with |other - reference| <= atol + rtol |reference|, as numpy.isclose. None of nothing."""
        if not self.count:
            return None
        return {'max': self.largest.item(), 'mean': self.total / self.count, 'within': self.close / self.count}


class Ranking:
    """The `top` detections of each image by score: rank by rank, and whether the other model has them at any rank.

    At a rank the models disagree if the classes differ, the IoU is below SAME_OBJECT, or only one has a detection there.
    Detections with nearly equal scores change places by rounding alone, and then two ranks disagree though nothing was
    lost. So each is also looked for among all detections of the other model: one of its class with IoU >= SAME_DETECTION
    is its match. (NMS leaves at most one: two boxes that close to a third have an IoU above 0.8 with each other.)
    """

    def __init__(self, top):
        self.top = top
        self.either, self.both, self.differ = np.zeros((3, top), int)  # images, per rank
        self.score, self.score_error, self.box_error = np.zeros((3, top))
        self.looked_for, self.matched, self.matched_error = 0, 0, torch.zeros(6)  # x1, y1, x2, y2, score, class
        self.mask_iou, self.with_masks = 0.0, 0  # of matched detections

    def update(self, reference, other):
        """Detections of one image."""
        first, second = reference.rows.cpu(), other.rows.cpu()
        self._rank(first[: self.top], second[: self.top])
        self._match(first[: self.top], second, reference.masks, other.masks)
        self._match(second[: self.top], first, other.masks, reference.masks)

    def _rank(self, reference, other):
        both, either = sorted((len(reference), len(other)))
        self.either[:either] += 1
        self.both[:both] += 1
        reference, other = reference[:both], other[:both]
        error = (other - reference).abs()
        self.score[:both] += reference[:, 4].numpy()
        self.score_error[:both] += error[:, 4].numpy()
        self.box_error[:both] += error[:, :4].mean(1).numpy()
        agree = (error[:, 5] == 0) & (box_iou(reference[:, :4], other[:, :4]).diagonal() >= SAME_OBJECT)
        self.differ[:both] += ~agree.numpy()
        self.differ[both:either] += 1

    def _match(self, some, others, masks, other_masks):
        self.looked_for += len(some)
        if len(others):
            iou, which = (box_iou(some[:, :4], others[:, :4]) * (some[:, None, 5] == others[:, 5])).max(1)
            found = iou >= SAME_DETECTION
            self.matched += int(found.sum())
            self.matched_error += (some - others[which]).abs()[found].sum(0)
            if masks is not None and found.any():
                iou = same_place_iou(masks[found.nonzero()[:, 0]].coarse(), other_masks[which[found]].coarse())
                self.mask_iou += iou.sum().item()
                self.with_masks += len(iou)

    def ranks(self):
        """One dict per rank that has a detection: rank (from 1), images (with a detection of either model), the
        reference's mean score, mean absolute score_error and box_error (of x1, y1, x2, y2) where both have a detection,
        and disagreement, as a share of the images."""
        return [
            {
                'rank': i + 1,
                'images': int(self.either[i]),
                'score': _ratio(self.score[i], self.both[i]),
                'score_error': _ratio(self.score_error[i], self.both[i]),
                'box_error': _ratio(self.box_error[i], self.both[i]),
                'disagreement': _ratio(self.differ[i], self.either[i]),
            }
            for i in range(self.top)
            if self.either[i]
        ]

    def figures(self):
        return {
            'ranks': self.ranks(),
            'disagreement': _ratio(self.differ.sum(), self.either.sum()),
            'matched': _ratio(self.matched, self.looked_for),
            'matched_score': _ratio(self.matched_error[4], self.matched),
            'matched_box': _ratio(self.matched_error[:4].mean(), self.matched),
            'matched_mask': _ratio(self.mask_iou, self.with_masks) if self.with_masks else None,
        }


def _ratio(total, count):
    return float(total / count) if count else math.nan


@torch.inference_mode()
def compare(reference, other, loader, device, names=None, rtol=1e-3, atol=1e-3, top=10, progress=None):
    """Run both models over `loader`; returns a Comparison.

    reference, other: images FP32 [B, 3, H, W] in 0..1 on `device` → predictions, see file_model.py. loader: see
    loaders.val_loader. names: class index → name, to score both; None if the images have no labels. rtol, atol: as in
    numpy.isclose. Raises QatError if the predictions are of different shapes.
    """
    elements, ranking = [Elements(rtol, atol) for _ in range(4)], Ranking(top)  # see outputs.parts
    scorers, images_seen = [Scorer(names), Scorer(names)] if names else [], 0
    for batch in progress(loader) if progress else loader:
        images, truth = prepared(batch, device)
        outputs = [predict(images) for predict in (reference, other)]
        if not any(isinstance(out, list) for out in outputs):  # NMS inside shows nothing of what came before
            apart = [list(parts(out).values()) for out in outputs]
            shapes = [[list(part.shape) for part in of_one] for of_one in apart]
            if shapes[0] != shapes[1]:
                raise QatError(
                    f'the models return {shapes[0]} and {shapes[1]}: only models with the same task, classes and image size '
                    'can be compared'
                )
            for element, *pair in zip(elements, *apart):
                element.update(*pair)
        detections = [detect(out, truth.shape) for out in outputs]
        for pair in zip(*detections):
            ranking.update(*pair)
        for scorer, found in zip(scorers, detections):
            scorer.update(found, truth)
        images_seen += len(images)
    metrics = [scorer.metrics(resample=True) for scorer in scorers] or [None, None]
    return Comparison(
        images_seen,
        rtol,
        atol,
        top,
        *(e.figures() for e in elements),
        **ranking.figures(),
        reference=metrics[0],
        other=metrics[1],
        against_reference=difference(*(m.resampled for m in metrics)) if names else None,
    )
