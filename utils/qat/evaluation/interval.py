"""The confidence interval of AP: other images would give another AP. A paired bootstrap estimates it.

A resample draws as many images as there are, with replacement; it is a count for each image. All models are scored on
the same resamples, so images that are easy or hard for all of them do not change their difference. The matches of
detections with labels are not computed again.
"""

from collections.abc import MutableMapping, Sequence

import numpy as np
from scipy.sparse import csr_array
from typing_extensions import NotRequired, TypedDict  # typing has both from Python 3.11

RESAMPLES, SEED = 1000, 0
CERTAIN = 1.96  # standard deviations; 95 % of a normal distribution lie within this distance of the mean
EXPLAINED = f'± holds 95 % of what other images of this kind would give, by {RESAMPLES} resamples of these'
UNKNOWN = 1.0  # half width of an interval that holds every difference of AP
AT_ONCE = 2**20  # most values of a temporary array


class Part(TypedDict):
    """AP of one model minus AP of another, of boxes or of masks, in 0..1."""

    difference: float
    chance: float  # half the width of the 95 % confidence interval


class Change(Part):
    """The same of boxes, and if there are any of masks."""

    mask: NotRequired[Part]


def draw_resamples(number: int) -> np.ndarray:
    """Draw resamples of `number` images: FP64 [number, 1 + RESAMPLES], the count of each image in each resample.

    The first column has every image once. For a single image it is the only column.
    """
    counts = np.ones((number, 1 + RESAMPLES * (number > 1)))
    generator = np.random.default_rng(SEED)
    for column in range(1, counts.shape[1]):
        counts[:, column] = np.bincount(generator.integers(number, size=number), minlength=number)
    return counts


def resampled_ap(
    images: Sequence[tuple[np.ndarray, ...]], by_class: MutableMapping[int, np.ndarray] | None = None
) -> np.ndarray:
    """Compute AP (0..1) on the images and on each resample of them: FP64 [1 + RESAMPLES, parts].

    The first row is for the images themselves. The parts are boxes and, if there are any, masks. To compare models, pass
    the same images in the same order for each.

    Args:
        images: four arrays for each image. Of its n detections: correct, bool [n, parts, 10], whether each is correct
            at each IoU; score [n]; class [n]. Of its m labels: class [m].
        by_class: gets the same of each class, NaN for resamples without its labels; None = not wanted.
    """
    number = len(images)
    counts = draw_resamples(number)
    correct, score, predicted, true = map(np.concatenate, zip(*images))
    image, image_of_label = (np.repeat(np.arange(number), [len(x[i]) for x in images]) for i in (1, 3))
    order = np.argsort(-score, kind='stable')
    classes, of_class = np.unique(true, return_inverse=True)
    # labels of each class in each resample
    there = csr_array((np.ones(len(true)), (of_class, image_of_label)), (len(classes), number)) @ counts
    total = np.zeros((counts.shape[1], correct.shape[1]))
    for c, labels in zip(classes, there):
        own = order[predicted[order] == c]
        step = 1 + AT_ONCE // (1 + correct[own].any((1, 2)).sum())
        blocks = [slice(i, i + step) for i in range(0, len(labels), step)]
        for part, hits in enumerate(np.swapaxes(correct[own], 0, 1)):
            ap = np.concatenate([average_precision(hits, image[own], labels[b], counts[:, b]) for b in blocks])
            total[:, part] += ap
            if by_class is not None:
                by_class.setdefault(int(c), np.empty_like(total))[:, part] = np.where(labels > 0, ap, np.nan)
    return total / np.maximum((there > 0).sum(0), 1)[:, None]  # on a resample without labels AP is 0


def average_precision(hits: np.ndarray, image: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Compute AP (0..1) of one class on each of R resamples, as upstream's compute_ap does: the mean over 101 recalls and all IoU.

    `hits`, bool [n, 10], has whether a detection is correct at each IoU, highest score first, and `image` [n] the index of its image.
    `labels`, FP64 [R], is the number of labels in each resample, `counts`, FP64 [images, R], how often each image is in it.
    """
    labels, ap = np.maximum(labels, 1), np.zeros(len(labels))
    useful = hits.any(1)  # precision rises only at these detections; the others are only counted
    drawn = (
        csr_array((np.ones(len(image)), (np.cumsum(useful) - useful, image)), (useful.sum() + 1, len(counts))) @ counts
    )
    detections = np.maximum(np.cumsum(drawn, 0), 1)  # up to each useful detection; the last row counts all
    weights = counts[image[useful]]
    for hit in hits[useful].T[hits.any(0)]:
        right = np.cumsum(weights[hit], 0)
        precision = np.maximum.accumulate((right / detections[:-1][hit])[::-1])[::-1]
        recalls = np.ceil(100 * right / labels)  # number of the recalls 0.00, 0.01, ... below the one reached
        ap += precision[0] * (recalls[0] - 0.5) + (precision[1:] * np.diff(recalls, axis=0)).sum(0)
        left, missed = 100 - recalls[-1], 1 - right[-1] / labels
        # upstream continues the curve by a line to (recall 1, precision 0)
        ap += right[-1] / detections[-1] * left * (left + 1) / 200 / np.maximum(missed, 1e-9)
    return ap / 100 / hits.shape[1]


def half_widths(resampled: np.ndarray) -> list[float]:
    """Compute half the width of the 95 % confidence interval of each column of `resampled_ap`, or of its class."""
    if len(resampled) == 1:  # from one image
        return [UNKNOWN] * resampled.shape[1]
    return [float(half_width) for half_width in CERTAIN * np.nanstd(resampled[1:], 0)]


def half_width_of_share(hits: np.ndarray) -> float:
    """Compute half the width of the 95 % confidence interval of the mean of 0 and 1; a bootstrap tends to it."""
    return CERTAIN * float(hits.std()) / len(hits) ** 0.5 if len(hits) > 1 else UNKNOWN


def difference(before: np.ndarray, after: np.ndarray) -> Change:
    """Compare two `resampled_ap` of the same images: AP `after` minus AP `before`."""
    gain = after[:, : before.shape[1]] - before[:, : after.shape[1]]  # one may have no masks
    boxes, *masks = (Part(difference=float(d), chance=c) for d, c in zip(gain[0], half_widths(gain)))
    return Change(**boxes, mask=masks[0]) if masks else Change(**boxes)


def difference_of_merit(before: np.ndarray, after: np.ndarray) -> Change:
    """Compare two models as `difference` does, by Metrics.merit: AP, or the mean AP of boxes and masks."""
    return difference(before.mean(1, keepdims=True), after.mean(1, keepdims=True))


def boxes_and_masks(change: Change) -> list[Part]:
    """Split a `difference` into a list: of boxes and, if there are any, of masks."""
    return [change, change['mask']] if 'mask' in change else [change]


def within_interval(part: Part) -> bool:
    """Tell whether a difference, of boxes or of masks, is no larger than half the width of its interval."""
    return abs(part['difference']) <= part['chance']


def points_lost(change: Change) -> float:
    """Compute the points (0.01) of AP that are lost, of boxes or of masks, the larger; a loss within its interval counts as 0."""
    return max(0 if within_interval(part) else -100 * part['difference'] for part in boxes_and_masks(change))


def points(difference: float) -> str:
    """Format a difference in points (0.01): '-0.31'."""
    return f'{round(100 * difference, 2) + 0.0:+.2f}'  # + 0.0: no -0.00


def in_points(part: Part) -> str:
    """Format a difference of boxes, or of masks, in points with its interval: '-0.31 ± 0.12'."""
    return points(part['difference']) + plus_minus(part)


def plus_minus(part: Part) -> str:
    """Format the interval of a difference in points: ' ± 0.12'; ' ± ?' if it is not known."""
    return ' ± ?' if part['chance'] == UNKNOWN else f' ± {100 * part["chance"]:.2f}'


def _how_sure(part: Part) -> str:
    if part['chance'] == UNKNOWN:
        return 'and one image has no confidence interval'
    return f'{"within" if within_interval(part) else "beyond"} the confidence interval'


def in_words(change: Change, title: str = 'AP') -> str:
    """Format a `difference` in points, and state whether it lies within the confidence interval. title: see Metrics.choosing."""
    return ', '.join(
        f'{text}{in_points(part)} points of {title}, {_how_sure(part)}'
        for text, part in zip(('', 'masks '), boxes_and_masks(change))
    )
