"""Two models side by side on the same images: how close their outputs are, rank by rank, and in AP.

A model is a callable images → predictions (see backends.py), so any two backends can be compared. Each runs once per batch,
and one NMS of each serves both the ranks and the AP.
"""
import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from utils.metrics import box_iou

from utils.qat.errors import QatError
from utils.qat.evaluate import Metrics, Scorer, detect, prepared

SAME_OBJECT, SAME_DETECTION = 0.5, 0.9  # IoU from which two detections of one class are of one object, and are one detection


@dataclass
class Comparison:
    """How `other` differs from `reference`. Boxes are in pixels of the model's input, scores in 0..1."""
    images: int
    rtol: float
    atol: float
    top: int
    boxes: dict  # of all predictions, before NMS: see Elements.figures; None if a model has NMS inside
    scores: dict
    ranks: list  # of the top detections, after NMS: see Ranking.ranks
    disagreement: float  # over all ranks
    matched: float  # share of the top detections of either model that have a match in the other
    matched_score: float  # mean absolute difference between a detection and its match: of the scores
    matched_box: float  # of x1, y1, x2, y2
    reference: Metrics  # None if the images have no labels
    other: Metrics

    @property
    def ap_difference(self):
        """AP of `other` less AP of `reference`; None if the images have no labels."""
        return self.other.ap - self.reference.ap if self.reference else None

    def plain(self):
        """As plain values; None where there is no figure, and where it is not finite, for which JSON has no name."""
        metrics = {k: m.plain() if m else None for k, m in (('reference', self.reference), ('other', self.other))}
        return _finite({**asdict(self), **metrics, 'ap_difference': self.ap_difference})

    def excess(self, limits):
        """What is beyond config.Limits, in words; empty if nothing is."""
        if not self.ranks:
            return ['neither model detects anything, so there was nothing to compare']
        found = []
        if self.reference and abs(self.ap_difference) > limits.ap:
            found.append(f'AP differs by {abs(self.ap_difference):.2g}, allowed {limits.ap:g}')
        if self.matched < limits.matched:
            found.append(f'{self.matched:.2%} of the top {self.top} detections are matched, wanted {limits.matched:.0%}')
        if self.matched_score > limits.score:
            found.append(f'their scores differ by {self.matched_score:.2g}, allowed {limits.score:g}')
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

    def update(self, reference, other):
        """Detections of one image, [n, 6] and [m, 6]; see evaluate.detect."""
        reference, other = reference.cpu(), other.cpu()
        self._rank(reference[:self.top], other[:self.top])
        self._match(reference[:self.top], other)
        self._match(other[:self.top], reference)

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

    def _match(self, some, others):
        self.looked_for += len(some)
        if len(others):
            iou, which = (box_iou(some[:, :4], others[:, :4]) * (some[:, None, 5] == others[:, 5])).max(1)
            found = iou >= SAME_DETECTION
            self.matched += int(found.sum())
            self.matched_error += (some - others[which]).abs()[found].sum(0)

    def ranks(self):
        """One dict per rank that has a detection: rank (from 1), images (with a detection of either model), the
        reference's mean score, mean absolute score_error and box_error (of x1, y1, x2, y2) where both have a detection,
        and disagreement, as a share of the images."""
        return [{'rank': i + 1, 'images': int(self.either[i]), 'score': _ratio(self.score[i], self.both[i]),
                 'score_error': _ratio(self.score_error[i], self.both[i]), 'box_error': _ratio(self.box_error[i], self.both[i]),
                 'disagreement': _ratio(self.differ[i], self.either[i])} for i in range(self.top) if self.either[i]]

    def figures(self):
        return {'ranks': self.ranks(), 'disagreement': _ratio(self.differ.sum(), self.either.sum()),
                'matched': _ratio(self.matched, self.looked_for), 'matched_score': _ratio(self.matched_error[4], self.matched),
                'matched_box': _ratio(self.matched_error[:4].mean(), self.matched)}


def _ratio(total, count):
    return float(total / count) if count else math.nan


@torch.inference_mode()
def compare(reference, other, loader, device, names=None, rtol=1e-3, atol=1e-3, top=10, progress=None):
    """Run both models over `loader`; returns a Comparison.

    reference, other: images FP32 [B, 3, H, W] in 0..1 on `device` → [B, 4 + nc, N], see evaluate. loader: see
    loaders.val_loader. names: class index → name, to score both; None if the images have no labels. rtol, atol: as in
    numpy.isclose. Raises QatError if the predictions are of different shapes.
    """
    boxes, scores, ranking = Elements(rtol, atol), Elements(rtol, atol), Ranking(top)
    scorers, images_seen = [Scorer(names), Scorer(names)] if names else [], 0
    for images, targets, paths, shapes in progress(loader) if progress else loader:
        images, targets = prepared(images, targets, device)
        predictions = [predict(images) for predict in (reference, other)]
        inside = [isinstance(p, list) for p in predictions]  # NMS was in the model, which shows nothing of what came before
        if not any(inside):
            first, second = predictions
            if first.shape != second.shape:
                raise QatError(f'the models return {list(first.shape)} and {list(second.shape)}: only models with the same '
                               'classes and image size can be compared')
            boxes.update(first[:, :4], second[:, :4])
            scores.update(first[:, 4:], second[:, 4:])
        detections = [[d.to(device) for d in (p if has_nms else detect(p))] for p, has_nms in zip(predictions, inside)]
        for pair in zip(*detections):
            ranking.update(*pair)
        for scorer, found in zip(scorers, detections):
            scorer.update(found, targets, images.shape[2:], paths, shapes)
        images_seen += len(images)
    metrics = [scorer.metrics() for scorer in scorers] or [None, None]
    return Comparison(images_seen, rtol, atol, top, boxes.figures(), scores.figures(), **ranking.figures(),
                      reference=metrics[0], other=metrics[1])
