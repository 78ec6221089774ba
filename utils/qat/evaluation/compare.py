"""Models side by side on the same images: the differences of their outputs from the first, rank by rank, and of their AP.

A model is a callable images → predictions (see file_model.py), so any backends can be compared. Each model runs once per
batch, and its NMS runs once, for both the ranks and the AP.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from utils.metrics import box_iou

from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.data.masks import Masks, same_place_iou
from utils.qat.evaluation.chance import difference
from utils.qat.evaluation.evaluate import Metrics, Scorer
from utils.qat.prediction.detections import Detections, detect, prepared
from utils.qat.prediction.outputs import parts

SAME_OBJECT = 0.5  # IoU from which two detections of one class are of the same object
SAME_DETECTION = 0.9  # IoU from which they count as the same detection


@dataclass
class Comparison:
    """Differences of the model `other` from the model `reference`.

    Boxes are in pixels of the model's input, scores in 0..1.
    """

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


class Elements:
    """Differences of tensors, element by element, over batches."""

    def __init__(self, rtol: float, atol: float) -> None:
        """Start without elements; for rtol and atol see `figures`."""
        self.rtol, self.atol = rtol, atol
        self.count, self.close, self.total, self.largest = 0, 0, 0.0, torch.zeros((), dtype=torch.float64)

    def update(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Add two tensors of one shape."""
        reference, other = reference.cpu().double(), other.cpu().double()
        difference = (other - reference).abs()
        self.count += difference.numel()
        self.close += int(torch.isclose(other, reference, self.rtol, self.atol).sum())
        self.total += difference.sum().item()
        self.largest = torch.maximum(self.largest, difference.max())  # unlike max(), it keeps NaN

    def figures(self) -> dict[str, float] | None:
        """Compute the figures of all elements so far.

        Returns:
            'max' and 'mean' of the absolute difference, and 'within': the share of elements with |other - reference| <= atol +
            rtol |reference|, as in numpy.isclose. None if there are no elements.
        """
        if not self.count:
            return None
        return {'max': self.largest.item(), 'mean': self.total / self.count, 'within': self.close / self.count}


class Ranking:
    """Differences of the `top` detections of each image by score, compared rank by rank, and regardless of rank.

    At a rank the models disagree if the classes differ, the IoU is below SAME_OBJECT, or only one model has a detection there.
    Detections with nearly equal scores change places by rounding alone. Then two ranks disagree, though nothing was lost. So
    each detection is also looked up among all detections of the other model: one of the same class with IoU >= SAME_DETECTION is
    its match. (NMS leaves at most one match: two boxes this close to a third have an IoU above 0.8 with each other.)
    """

    def __init__(self, top: int) -> None:
        """Start without images."""
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

        Returns:
            One dict for each rank:
                rank: number of the rank, from 1.
                images: number of images in which either model has a detection at this rank.
                score: mean score of the reference.
                score_error: mean absolute difference of the scores.
                box_error: mean absolute difference of x1, y1, x2, y2, in pixels.
                disagreement: share of `images` in which the models disagree.
                unmatched: share of the detections of either model at this rank that have no match in the other at any rank.
            The three means are over the images in which both models have a detection at this rank.
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


@torch.inference_mode()
def compare_all(
    reference: Callable[[torch.Tensor], Any],
    others: Sequence[Callable[[torch.Tensor], Any]],
    loader: Iterable[Any],
    device: torch.device,
    names: Mapping[int, str] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    top: int = 10,
    progress: Callable[..., Iterable[Any]] | None = None,
    look: Callable[[torch.Tensor, str, list[torch.Tensor]], object] | None = None,
) -> list[Comparison]:
    """Compare models with one of them on the images of `loader`. Each model runs once.

    Args:
        reference: images FP32 [B, 3, H, W] in 0..1 on `device` → predictions, see file_model.py.
        others: images → predictions, of each other model.
        loader: batches, see loaders.val_loader.
        device: where the images are given to the models.
        names: class index → name, to score the models; None if the images have no labels.
        rtol: relative tolerance, as in numpy.isclose.
        atol: absolute tolerance, as in numpy.isclose.
        top: number of ranks to compare.
        progress: wraps the loader, to show progress.
        look: takes each image, FP32 [3, H, W] in 0..1, its path, and the detections [n, 6] of each model in it, the
            reference first.

    Returns:
        A Comparison with the reference for each of `others`.

    Raises:
        QatError: the predictions of the models have different shapes.
    """
    differences = [([Elements(rtol, atol) for _ in range(4)], Ranking(top)) for _ in others]  # see outputs.parts
    scorers, images_seen = [Scorer(names) for _ in (reference, *others)] if names else [], 0
    for batch in progress(loader) if progress else loader:
        images, truth = prepared(batch, device)
        outputs = [predict(images) for predict in (reference, *others)]
        apart = [_apart(out) for out in outputs]
        detections = [detect(out, truth.shape) for out in outputs]
        for (elements, ranking), parts_of_one, found in zip(differences, apart[1:], detections[1:]):
            if apart[0] is not None and parts_of_one is not None:
                _require_same_shapes(apart[0], parts_of_one)
                for element, *pair in zip(elements, apart[0], parts_of_one):
                    element.update(*pair)
            for first, second in zip(detections[0], found):
                ranking.update(first, second)
        for scorer, found in zip(scorers, detections):
            scorer.update(found, truth)
        if look:
            for image, path, *of_image in zip(images, truth.paths, *detections):
                look(image.cpu(), path, [one.rows.cpu() for one in of_image])
        images_seen += len(images)
    metrics: list[Any] = [scorer.metrics(resample=True) for scorer in scorers] or [None] * (1 + len(others))
    comparisons = []
    for (elements, ranking), other in zip(differences, metrics[1:]):
        boxes, scores, coefficients, prototypes = (e.figures() for e in elements)
        against = difference(metrics[0].resampled, other.resampled) if names else None
        comparisons.append(
            Comparison(
                images_seen,
                rtol,
                atol,
                top,
                boxes,
                scores,
                coefficients,
                prototypes,
                **ranking.figures(),
                reference=metrics[0],
                other=other,
                against_reference=against,
            )
        )
    return comparisons


def compare(
    reference: Callable[[torch.Tensor], Any], other: Callable[[torch.Tensor], Any], *where: Any, **how: Any
) -> Comparison:
    """Compare two models; see `compare_all` for the other arguments."""
    return compare_all(reference, [other], *where, **how)[0]


def _apart(output: Any) -> list[torch.Tensor] | None:
    """Return the parts of predictions, see outputs.parts; None for detections: NMS was inside the model."""
    return None if isinstance(output, list) else list(parts(output).values())


def _require_same_shapes(reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    """Require that two models return tensors of the same shapes."""
    shapes = [[list(part.shape) for part in of_one] for of_one in (reference, other)]
    if shapes[0] != shapes[1]:
        raise QatError(
            f'the models return {shapes[0]} and {shapes[1]}: only models with the same task, classes and image size '
            'can be compared'
        )
