"""Detectors side by side: the differences of their predictions and of their best detections, rank by rank, and their AP."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from utils.metrics import box_iou

from utils.qat.backends.detections import Detections
from utils.qat.backends.file_model import parts
from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.core.markdown import markdown_table
from utils.qat.data.masks import Masks, same_place_iou
from utils.qat.evaluation.chance import EXPLAINED, difference, in_words, plus_minus
from utils.qat.evaluation.compare import Elements
from utils.qat.evaluation.detection_scores import Metrics
from utils.qat.evaluation.figures import models_table

SAME_OBJECT = 0.5  # IoU from which two detections of one class are of the same object
SAME_DETECTION = 0.9  # IoU from which they count as the same detection


@dataclass
class Comparison:
    """Differences of the model `other` from the model `reference`: boxes in pixels of the input, scores in 0..1."""

    images: int
    rtol: float
    atol: float
    top: int
    # differences of all predictions, before NMS, see Elements.figures
    boxes: dict[str, float] | None  # these four are None if a model has NMS inside
    scores: dict[str, float] | None
    coefficients: dict[str, float] | None  # these two, of the masks, are None also without masks
    prototypes: dict[str, float] | None
    # differences of the top detections, after NMS
    ranks: list[dict[str, Any]]  # see Ranking.ranks
    disagreement: float  # over all ranks
    matched: float  # share of the top detections of either model that have a match in the other
    matched_score: float  # mean absolute difference of the scores of a detection and its match
    matched_box: float  # mean absolute difference of their x1, y1, x2, y2
    matched_mask: float | None  # mean IoU of their masks; None without masks
    # scores; all None if the images have no labels
    reference: Metrics | None
    other: Metrics | None
    against_reference: dict[str, Any] | None  # AP of `other` less AP of `reference`, with chance, see chance.difference

    @property
    def ap_difference(self) -> float | None:
        """Return the AP of `other` less the AP of `reference`; None if the images have no labels."""
        return self.other.ap - self.reference.ap if self.reference and self.other else None

    @property
    def mask_ap_difference(self) -> float | None:
        """Return the mask AP of `other` less the mask AP of `reference`; None without labels or masks."""
        if not (self.reference and self.reference.mask and self.other and self.other.mask):
            return None
        return self.other.mask['ap'] - self.reference.mask['ap']

    def plain(self) -> dict[str, Any]:
        """Convert to plain values; None for a missing figure, and for one that is not finite: JSON cannot write it."""
        metrics = {k: m.plain() if m else None for k, m in (('reference', self.reference), ('other', self.other))}
        return _finite(
            {
                **asdict(self),
                **metrics,
                'ap_difference': self.ap_difference,
                'mask_ap_difference': self.mask_ap_difference,
            }
        )


def excess(found: dict[str, Any], limits: Limits) -> list[str]:
    """Describe each difference in the plain values of a Comparison that is beyond `limits`; empty if there is none."""
    if not found['ranks']:
        return ['neither model detects anything, so there was nothing to compare']
    said = []
    for what, gain in (('AP', found['ap_difference']), ('AP of the masks', found['mask_ap_difference'])):
        if gain is not None and abs(gain) > limits.ap:
            said.append(f'{what} differs by {abs(gain):.2g}, allowed {limits.ap:g}')
    if found['matched'] < limits.matched:
        said.append(
            f'{found["matched"]:.2%} of the top {found["top"]} detections are matched, wanted {limits.matched:.0%}'
        )
    if (found['matched_score'] or 0) > limits.score:
        said.append(f'their scores differ by {found["matched_score"]:.2g}, allowed {limits.score:g}')
    if found['matched_mask'] is not None and found['matched_mask'] < limits.mask:
        said.append(f'their masks have an IoU of {found["matched_mask"]:.3f}, wanted {limits.mask:g}')
    return said


def _finite(value: Any) -> Any:
    """Replace the numbers in plain values that are not finite by None."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Ranking:
    """Differences of the `top` detections of each image by score, compared rank by rank, and regardless of rank.

    At a rank the models disagree if the classes differ, the IoU is below SAME_OBJECT, or only one model has a detection
    there. Detections with nearly equal scores change places by rounding alone. Then two ranks disagree, though nothing
    was lost. So each detection is also looked up among all detections of the other model: one of the same class with
    IoU >= SAME_DETECTION is its match. (NMS leaves at most one match: two boxes this close to a third have an IoU above
    0.8 with each other.)
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.either, self.both, self.differ = np.zeros((3, top), int)  # images, per rank
        self.score, self.score_error, self.box_error = np.zeros((3, top))
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
        self.score_error[:both] += error[:, 4].numpy()
        self.box_error[:both] += error[:, :4].mean(1).numpy()
        agree = (error[:, 5] == 0) & (box_iou(reference[:, :4], other[:, :4]).diagonal() >= SAME_OBJECT)
        self.differ[:both] += ~agree.numpy()
        self.differ[both:either] += 1

    def _match(self, some: torch.Tensor, others: torch.Tensor, masks: Masks | None, other_masks: Masks | None) -> None:
        """Look up the top detections `some` [n, 6] of one model among all detections `others` [m, 6] of the other."""
        self.looked_for[: len(some)] += 1
        if len(others):
            iou, which = (box_iou(some[:, :4], others[:, :4]) * (some[:, None, 5] == others[:, 5])).max(1)
            found = iou >= SAME_DETECTION
            self.matched[: len(some)] += found.numpy()
            self.matched_error += (some - others[which]).abs()[found].sum(0)
            if masks is not None and other_masks is not None and found.any():
                iou = same_place_iou(masks[found.nonzero()[:, 0]].coarse(), other_masks[which[found]].coarse())
                self.mask_iou += iou.sum().item()
                self.with_masks += len(iou)

    def ranks(self) -> list[dict[str, Any]]:
        """Compute the figures of each rank that has a detection.

        The three means are over the images in which both models have a detection at this rank.

        Returns:
            One dict for each rank:
                rank: from 1.
                images: number of images in which either model has a detection at this rank.
                score: mean score of the reference.
                score_error: mean absolute difference of the scores.
                box_error: mean absolute difference of x1, y1, x2, y2, in pixels.
                disagreement: share of `images` in which the models disagree.
                unmatched: share of the detections of either model at this rank without a match in the other at any.
        """
        return [
            {
                'rank': i + 1,
                'images': int(self.either[i]),
                'score': _ratio(self.score[i], self.both[i]),
                'score_error': _ratio(self.score_error[i], self.both[i]),
                'box_error': _ratio(self.box_error[i], self.both[i]),
                'disagreement': _ratio(self.differ[i], self.either[i]),
                'unmatched': 1 - _ratio(self.matched[i], self.looked_for[i]),
            }
            for i in range(self.top)
            if self.either[i]
        ]

    def figures(self) -> dict[str, Any]:
        """Compute the figures over all ranks, under the names that they have in Comparison."""
        matched = self.matched.sum()
        return {
            'ranks': self.ranks(),
            'disagreement': _ratio(self.differ.sum(), self.either.sum()),
            'matched': _ratio(matched, self.looked_for.sum()),
            'matched_score': _ratio(self.matched_error[4], matched),
            'matched_box': _ratio(self.matched_error[:4].mean(), matched),
            'matched_mask': _ratio(self.mask_iou, self.with_masks) if self.with_masks else None,
        }


def _ratio(total: Any, count: Any) -> float:
    """Divide; NaN if there is nothing to divide by."""
    return float(total / count) if count else math.nan


class DetectionDifferences:
    """Differences of two models over batches, see Comparison."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
        self.limits = rtol, atol, top
        self.elements, self.ranking = [Elements(rtol, atol) for _ in range(4)], Ranking(top)

    def update(
        self, reference: Any, other: Any, found: Sequence[Detections], found_by_other: Sequence[Detections]
    ) -> None:
        """Add a batch: the outputs of both models, and the detections of both."""
        ours, theirs = _apart(reference), _apart(other)
        if ours is not None and theirs is not None:
            _require_same_shapes(ours, theirs)
            for element, first, second in zip(self.elements, ours, theirs):
                element.update(first, second)
        for first, second in zip(found, found_by_other):
            self.ranking.update(first, second)

    def comparison(self, images: int, reference: Metrics | None, other: Metrics | None) -> Comparison:
        """Compute the Comparison of all batches so far; images: number of them."""
        boxes, scores, coefficients, prototypes = (e.figures() for e in self.elements)
        return Comparison(
            images,
            *self.limits,
            boxes,
            scores,
            coefficients,
            prototypes,
            **self.ranking.figures(),
            reference=reference,
            other=other,
            against_reference=difference(reference.resampled, other.resampled) if reference and other else None,
        )


def _apart(output: Any) -> list[torch.Tensor] | None:
    """Return the parts of predictions, see file_model.parts; None for detections: NMS was inside the model."""
    return None if isinstance(output, list) else list(parts(output).values())


def _require_same_shapes(reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    shapes = [[list(part.shape) for part in of_one] for of_one in (reference, other)]
    if shapes[0] != shapes[1]:
        raise QatError(
            f'the models return {shapes[0]} and {shapes[1]}: only models with the same task, classes and image size '
            'can be compared'
        )


def tables(comparison: dict[str, Any], names: Sequence[str], scores: bool = True) -> str:
    """Write plain values of a Comparison as Markdown tables; `scores` adds AP, if there are labels."""

    def number(value: float | None, form: str = '.3g') -> str:
        return '-' if value is None else format(value, form)

    tolerance = f'within rtol {comparison["rtol"]:g}, atol {comparison["atol"]:g}'
    elements = [  # empty if a model has NMS inside
        (text, number(e['max']), number(e['mean']), number(e['within'], '.2%'))
        for text, e in (
            ('boxes (px)', comparison['boxes']),
            ('scores', comparison['scores']),
            ('mask coefficients', comparison['coefficients']),
            ('prototypes', comparison['prototypes']),
        )
        if e
    ]
    ranks: list[tuple[Any, ...]] = [
        (
            r['rank'],
            r['images'],
            number(r['score'], '.4f'),
            number(r['score_error']),
            number(r['box_error']),
            number(r['disagreement'], '.1%'),
            number(r['unmatched'], '.1%'),
        )
        for r in comparison['ranks']
    ]
    matched = comparison['matched']
    unmatched = None if matched is None else 1 - matched
    ranks.append(
        (f'top {comparison["top"]}', *['-'] * 4, *(number(v, '.1%') for v in (comparison['disagreement'], unmatched)))
    )
    written = [markdown_table(('all predictions', 'max difference', 'mean difference', tolerance), elements)] * bool(
        elements
    )
    written.append(
        markdown_table(
            ('rank', 'images', 'score', 'score difference', 'box difference (px)', 'disagreement', 'without a match'),
            ranks,
        )
    )
    if scores and comparison['reference']:
        written += [
            scores_table([comparison], names),
            f'the second less the first: {in_words(comparison["against_reference"])}',
        ]
    iou = f', IoU of their masks {number(comparison["matched_mask"])}' if comparison['matched_mask'] is not None else ''
    written.append(
        f'matched regardless of rank: {number(comparison["matched"], ".2%")} of the top {comparison["top"]} detections of '
        f'either model; mean difference {number(comparison["matched_score"])} of score, '
        f'{number(comparison["matched_box"])} px of box{iou}\n(nearly equal scores change places by rounding alone, and '
        'count as disagreement at both ranks)'
    )
    return '\n\n'.join(written)


def scores_table(comparisons: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Write the AP of several detectors, and the differences of each from the first in points; '' without labels."""
    first = comparisons[0]['reference']
    if not first:
        return ''
    models = [first, *(c['other'] for c in comparisons)]
    chances = [plus_minus(c['against_reference']) for c in comparisons]
    return f'{models_table(names, models, chances)}\n\n({EXPLAINED})'


def verdict(comparison: dict[str, Any]) -> str:
    """Say how far a detector is from the first, a clause. comparison: plain values of a Comparison."""
    said = []
    if comparison['against_reference']:
        said.append(in_words(comparison['against_reference']))
    if comparison['matched'] is not None:
        said.append(
            f'{comparison["matched"]:.1%} of the top {comparison["top"]} detections have their match in the other at any rank'
        )
    return '; '.join(said) or 'neither detects anything'


def limits_text(limits: Limits, found: dict[str, Any]) -> str:
    """Say what --verify allows. found: plain values of a Comparison."""
    masks = f', the IoU of their masks at least {limits.mask:g}' * (found['matched_mask'] is not None)
    return (
        f'AP within {limits.ap:g}, at least {limits.matched:.0%} matched, their scores within {limits.score:g}{masks}'
    )
