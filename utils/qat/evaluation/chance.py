"""How far chance moves AP: the images that a model is scored on are a sample, and others would have given other figures.

A resample draws as many images as there are, with replacement: it is a count for each image. All models are scored on the same
resamples, so that images which are easy or hard for all of them go out of a difference (a paired bootstrap). No match of a detection
with a label is made again.
"""

import numpy as np
from scipy.sparse import csr_array

RESAMPLES, SEED = 1000, 0
CERTAIN = 1.96  # standard deviations to either side hold 95 %
AT_ONCE = 2**20  # values of an array


def draw(number):
    """How often each of `number` images is in each resample, FP64 [number, 1 + RESAMPLES]; the first has each once. One image has no others."""
    counts = np.ones((number, 1 + RESAMPLES * (number > 1)))
    generator = np.random.default_rng(SEED)
    for column in range(1, counts.shape[1]):
        counts[:, column] = np.bincount(generator.integers(number, size=number), minlength=number)
    return counts


def resampled_ap(images):
    """AP on the images as they are and, below, on each resample (see `draw`): FP64 [1 + RESAMPLES, parts], of boxes and, if there are
    any, of masks.

    images: of each, its matches: correct [n, parts, 10], score [n], class [n]; and the classes of its labels [m]. Models are compared
    on the same images in the same order.
    """
    number = len(images)
    counts = draw(number)
    correct, score, predicted, true = map(np.concatenate, zip(*images))
    image, image_of_label = (np.repeat(np.arange(number), [len(x[i]) for x in images]) for i in (1, 3))
    order = np.argsort(-score, kind='stable')
    classes, of_class = np.unique(true, return_inverse=True)
    there = (
        csr_array((np.ones(len(true)), (of_class, image_of_label)), (len(classes), number)) @ counts
    )  # labels of each class
    total = np.zeros((counts.shape[1], correct.shape[1]))
    for c, labels in zip(classes, there):
        found = order[predicted[order] == c]
        step = 1 + AT_ONCE // (1 + correct[found].any((1, 2)).sum())
        blocks = [slice(i, i + step) for i in range(0, len(labels), step)]
        for part, hits in enumerate(np.swapaxes(correct[found], 0, 1)):
            total[:, part] += np.concatenate(
                [average_precision(hits, image[found], labels[b], counts[:, b]) for b in blocks]
            )
    return total / np.maximum((there > 0).sum(0), 1)[:, None]  # where a resample has no label at all, every model has 0


def average_precision(hits, image, labels, counts):
    """AP of a class on each resample, [R], as upstream's compute_ap has it: the mean over 101 recalls and all IoU.

    hits: bool [n, 10], whether a detection is correct at each IoU, highest score first. image: that it is in, [n]. labels: how many there
    are, [R]. counts: how often an image is drawn, [images, R].
    """
    labels, ap = np.maximum(labels, 1), np.zeros(len(labels))
    useful = hits.any(1)  # precision rises only here; what lies between two of these is only counted
    drawn = (
        csr_array((np.ones(len(image)), (np.cumsum(useful) - useful, image)), (useful.sum() + 1, len(counts))) @ counts
    )
    detections = np.maximum(np.cumsum(drawn, 0), 1)  # so far, at each of the useful ones; and all
    weights = counts[image[useful]]
    for hit in hits[useful].T[hits.any(0)]:
        right = np.cumsum(weights[hit], 0)
        precision = np.maximum.accumulate((right / detections[:-1][hit])[::-1])[::-1]
        points = np.ceil(100 * right / labels)  # recalls 0.00, 0.01, ... that lie below the one reached
        ap += precision[0] * (points[0] - 0.5) + (precision[1:] * np.diff(points, axis=0)).sum(0)
        left, missed = 100 - points[-1], 1 - right[-1] / labels
        ap += (
            right[-1] / detections[-1] * left * (left + 1) / 200 / np.maximum(missed, 1e-9)
        )  # upstream's line to (recall 1, precision 0)
    return ap / 100 / hits.shape[1]


def difference(before, after):
    """Plain values, in 0..1: by how much AP is higher `after` than `before` (of resampled_ap), and the chance in that, to either side:
    95 % of such sets of images have theirs so close to the true one. Of masks the same under 'mask'."""
    gain = after - before
    chance = CERTAIN * gain[1:].std(0) if len(gain) > 1 else np.ones(gain.shape[1])  # one image tells nothing
    boxes, *masks = ({'difference': float(d), 'chance': float(c)} for d, c in zip(gain[0], chance))
    return {**boxes, **({'mask': masks[0]} if masks else {})}


def difference_of_merit(before, after):
    """The same of figures.merit."""
    return difference(before.mean(1, keepdims=True), after.mean(1, keepdims=True))


def parts(found):
    """A `difference` → those of boxes and, if there are any, of masks."""
    return [found, found['mask']] if 'mask' in found else [found]


def within_chance(found):
    """Whether chance alone explains a difference, of boxes or of masks."""
    return abs(found['difference']) <= found['chance']


def points_lost(found):
    """Points (0.01) of AP that a `difference` loses for certain, of boxes or of masks, whichever is more; within chance nothing is lost."""
    return max(0 if within_chance(part) else -100 * part['difference'] for part in parts(found))


def points(found):
    """A `difference` of boxes, or of masks, in points."""
    return f'{100 * found["difference"]:+.2f} ± {100 * found["chance"]:.2f}'


def in_words(found):
    """A `difference` in points, and whether chance alone explains it."""
    return ', '.join(
        f'{text}{points(part)} points of AP, {"within" if within_chance(part) else "beyond"} chance'
        for text, part in zip(('', 'masks '), parts(found))
    )
