"""Compare detectors: the differences of their predictions and of their best detections, rank by rank, and their AP."""

import json
import math
from collections.abc import Sequence

import numpy as np
import torch
from utils.metrics import box_iou

from utils.qat.backends.detections import Detections
from utils.qat.backends.pytorch import split_outputs
from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.core.text import markdown_table, number
from utils.qat.data.masks import Masks, same_place_iou
from utils.qat.evaluation.compare import NUMPY_TOLERANCE, Comparison, ElementDifferences, ranks_tables, tolerance_title
from utils.qat.evaluation.interval import EXPLAINED, in_words
from utils.qat.evaluation.metrics import Metrics, from_json
from utils.qat.evaluation.score_tables import models_table

SAME_OBJECT = 0.5  # IoU from which two detections of one class show the same object
SAME_DETECTION = 0.9  # IoU from which they match
PREDICTED = {  # part of the predictions, see pytorch.split_outputs → its title
    'boxes': 'boxes (px)',
    'scores': 'scores',
    'coefficients': 'mask coefficients',
    'prototypes': 'prototypes',
}
RANK_COLUMNS = {  # key of Ranking.ranks → title, format
    'box_error': ('box difference (px)', '.3g'),
    'disagreement': ('another detection at this rank', '.1%'),
    'unmatched': ('without a match at any rank', '.1%'),
}


def beyond_limits(comparison: Comparison, limits: Limits) -> list[str]:
    """Describe each difference in a comparison that is beyond `limits`; empty if there is none."""
    if not comparison['ranks']:
        return ['neither model detects anything, so there was nothing to compare']
    beyond = []
    for what, gain in (('AP', comparison['ap_difference']), ('AP of the masks', comparison['mask_ap_difference'])):
        if gain is not None and abs(gain) > limits.ap:
            beyond.append(f'{what} differs by {abs(gain):.2g}, allowed {limits.ap:g}')
    matched, score, iou = (comparison[key] for key in ('matched', 'matched_score', 'matched_mask'))
    if matched < limits.matched:
        beyond.append(
            f'{matched:.2%} of the top {comparison["top"]} detections are matched, wanted {limits.matched:.0%}'
        )
    if (score or 0) > limits.score:
        beyond.append(f'their scores differ by {score:.2g}, allowed {limits.score:g}')
    if iou is not None and iou < limits.mask:
        beyond.append(f'their masks have an IoU of {iou:.3f}, wanted {limits.mask:g}')
    return beyond


Outputs = torch.Tensor | Sequence  # of a model: a tensor, two, or detections of each image


def _finite(value: object) -> Comparison:
    """Replace the numbers in plain values that are not finite by None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


class Ranking:
    """Differences of the `top` detections of each image by score, compared rank by rank, and regardless of rank.

    At a rank the models disagree if the classes differ, the IoU is below SAME_OBJECT, or only one model has a detection
    there. Rounding alone can swap detections with nearly equal scores: two ranks then disagree, although no detection is
    lost. So each detection is also searched among all detections of the other model: one of the same class with
    IoU >= SAME_DETECTION is its match. (NMS leaves at most one match: two boxes this close to a third have an IoU above
    0.8 with each other.)
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.either, self.both, self.differ = np.zeros((3, top), int)  # images, per rank
        self.score, self.other_score, self.score_error, self.box_error = np.zeros((4, top))
        self.looked_for, self.matched = np.zeros((2, top), int)  # detections of either model, per rank
        self.matched_error = torch.zeros(6)  # x1, y1, x2, y2, score, class
        self.mask_iou, self.with_masks = 0.0, 0  # of matched detections

    def update(self, reference: Detections, other: Detections) -> None:
        """Add the detections of one image."""
        first, second = reference.rows.cpu(), other.rows.cpu()
        self._rank(first[: self.top], second[: self.top])
        self._match(first[: self.top], second, reference.masks, other.masks)
        self._match(second[: self.top], first, other.masks, reference.masks)

    def _rank(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Compare the top detections [n, 6] of an image rank by rank."""
        both, either = sorted((len(reference), len(other)))
        self.either[:either] += 1
        self.both[:both] += 1
        reference, other = reference[:both], other[:both]
        error = (other - reference).abs()
        self.score[:both] += reference[:, 4].numpy()
        self.other_score[:both] += other[:, 4].numpy()
        self.score_error[:both] += error[:, 4].numpy()
        self.box_error[:both] += error[:, :4].mean(1).numpy()
        agree = (error[:, 5] == 0) & (box_iou(reference[:, :4], other[:, :4]).diagonal() >= SAME_OBJECT)
        self.differ[:both] += ~agree.numpy()
        self.differ[both:either] += 1

    def _match(self, some: torch.Tensor, others: torch.Tensor, masks: Masks | None, other_masks: Masks | None) -> None:
        """Search the top detections `some` [n, 6] of one model among all detections `others` [m, 6] of the other."""
        self.looked_for[: len(some)] += 1
        if len(others):
            iou, which = (box_iou(some[:, :4], others[:, :4]) * (some[:, None, 5] == others[:, 5])).max(1)
            same = iou >= SAME_DETECTION
            self.matched[: len(some)] += same.numpy()
            self.matched_error += (some - others[which]).abs()[same].sum(0)
            if masks is not None and other_masks is not None and same.any():
                iou = same_place_iou(masks[same.nonzero()[:, 0]].coarse(), other_masks[which[same]].coarse())
                self.mask_iou += iou.sum().item()
                self.with_masks += len(iou)

    def ranks(self) -> list[dict[str, object]]:
        """Compute the figures of each rank that has a detection."""
        return [
            {
                'rank': i + 1,
                'images': int(self.either[i]),  # in which either model has a detection at this rank
                # means over the images in which both have one: of the scores, of their absolute difference, and of that of the
                # boxes' x1, y1, x2, y2, in pixels
                'score': _ratio(self.score[i], self.both[i]),
                'other_score': _ratio(self.other_score[i], self.both[i]),
                'score_error': _ratio(self.score_error[i], self.both[i]),
                'box_error': _ratio(self.box_error[i], self.both[i]),
                'disagreement': _ratio(self.differ[i], self.either[i]),  # share of `images`
                # share of the detections of either model at this rank without a match at any rank of the other
                'unmatched': 1 - _ratio(self.matched[i], self.looked_for[i]),
            }
            for i in range(self.top)
            if self.either[i]
        ]

    def summary(self) -> dict[str, object]:
        """Compute the part of Differences.comparison about the top detections."""
        matched = self.matched.sum()
        return {
            'ranks': self.ranks(),
            'disagreement': _ratio(self.differ.sum(), self.either.sum()),  # over all ranks
            'matched': _ratio(matched, self.looked_for.sum()),  # share of the detections of either model
            # means over a detection and its match: absolute differences of score and of x1, y1, x2, y2, and the masks' IoU
            'matched_score': _ratio(self.matched_error[4], matched),
            'matched_box': _ratio(self.matched_error[:4].mean(), matched),
            'matched_mask': _ratio(self.mask_iou, self.with_masks) if self.with_masks else None,
        }


def _ratio(total: torch.Tensor | float, count: torch.Tensor | float) -> float:
    """Divide; NaN if there is nothing to divide by."""
    return float(total / count) if count else math.nan


class Differences:
    """Differences of a detector from the reference, over batches."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
        self.settings = {'rtol': rtol, 'atol': atol, 'top': top}
        self.predictions = {part: ElementDifferences(rtol, atol) for part in PREDICTED}
        self.ranking = Ranking(top)

    def update(
        self,
        reference: Outputs,
        other: Outputs,
        detections: Sequence[Detections],
        other_detections: Sequence[Detections],
    ) -> None:
        """Add a batch: the outputs of both models, and the detections of both."""
        if not isinstance(reference, list) and not isinstance(other, list):  # else NMS is inside a model
            first, second = split_outputs(reference), split_outputs(other)
            shapes = [[list(part.shape) for part in outputs.values()] for outputs in (first, second)]
            if shapes[0] != shapes[1]:
                raise QatError(
                    f'the models return {shapes[0]} and {shapes[1]}: only models with the same task, classes and image size '
                    'can be compared'
                )
            for part in first:
                self.predictions[part].update(first[part], second[part])
        for of_reference, of_other in zip(detections, other_detections):
            self.ranking.update(of_reference, of_other)

    def comparison(self, images: int, reference: Metrics | None, other: Metrics | None) -> Comparison:
        """Compute the comparison over all batches so far. The metrics are None if the images have no labels.

        Returns plain values: boxes in pixels of the input, scores in 0..1. None for missing values, and for values that are not
        finite, which JSON lacks.
        """
        first, second = (metrics.to_json() if metrics else None for metrics in (reference, other))
        gain = mask_gain = None
        if first and second:
            gain = second['ap'] - first['ap']
            if 'mask' in first and 'mask' in second:
                mask_gain = second['mask']['ap'] - first['mask']['ap']
        return _finite(
            {
                'images': images,
                **self.settings,
                # before NMS: None if a model has it inside; coefficients and prototypes are None without masks
                **{part: differences.summary() for part, differences in self.predictions.items()},
                **self.ranking.summary(),  # after NMS
                'reference': first,
                'other': second,
                'against_reference': other.against(reference) if reference and other else None,
                'ap_difference': gain,
                'mask_ap_difference': mask_gain,
            }
        )


def details(comparisons: Sequence[Comparison], names: Sequence[str]) -> list[str]:
    """Format differences of all predictions, and rank by rank, as Markdown tables. names: of the first model, then the others."""
    predictions = [
        (name, title, number(e['max'], '.3g'), number(e['mean'], '.3g'), number(e['within'], '.2%'))
        for name, comparison in zip(names[1:], comparisons)
        for part, title in PREDICTED.items()
        if (e := comparison[part])
    ]
    titles = 'model', 'all predictions', 'max difference', 'mean difference', tolerance_title(comparisons[0])
    written = [f'{markdown_table(titles, predictions)}\n\n{NUMPY_TOLERANCE}'] if predictions else []
    return [*written, *ranks_tables(comparisons, names, RANK_COLUMNS)]


def scores_table(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """Format the AP of several detectors, and the difference of each from the first in points; '' without labels."""
    models = [from_json(scores) for scores in (comparisons[0]['reference'], *(c['other'] for c in comparisons))]
    if not models[0]:
        return ''
    changes = [c['against_reference'] for c in comparisons]
    return f'{models_table(names, models, changes)}\n\n({EXPLAINED})'


def in_a_clause(comparison: Comparison) -> str:
    """Describe the distance of a detector from the first in a clause."""
    clauses, matched, iou = [], comparison['matched'], comparison['matched_mask']
    if comparison['against_reference']:
        clauses.append(in_words(comparison['against_reference']))
    if matched is not None:
        clauses.append(f'{matched:.2%} of the top {comparison["top"]} detections have their match in the other')
    if matched:
        masks = f', their masks have an IoU of {number(iou, ".3g")}' * (iou is not None)
        clauses.append(
            f'in the mean its score differs by {number(comparison["matched_score"], ".3g")}, its box by '
            f'{number(comparison["matched_box"], ".3g")} px{masks}'
        )
    return '; '.join(clauses) or 'neither detects anything'


def limits_text(limits: Limits, comparison: Comparison) -> str:
    """Describe the limits of --verify."""
    masks = f', the IoU of their masks at least {limits.mask:g}' * (comparison['matched_mask'] is not None)
    return (
        f'AP within {limits.ap:g}, at least {limits.matched:.0%} matched, their scores within {limits.score:g}{masks}'
    )
