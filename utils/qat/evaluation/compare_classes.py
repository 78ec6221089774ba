"""Classifiers side by side on the same images: the differences of their scores from the first, rank by rank, and accuracies.

For detectors there is compare.py. A model is a callable: images [B, 3, H, W] → scores [B, C].
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.evaluation.compare import Elements


@dataclass
class ClassComparison:
    """Differences of the classifier `other` from the classifier `reference`; accuracies are in 0..1."""

    images: int
    rtol: float
    atol: float
    top: int
    scores: dict[str, float] | None  # differences of the scores of all classes, see Elements.figures
    # of the highest scores: rank (from 1), mean score of the reference, score_error (mean absolute difference), and disagreement
    # (share of the images)
    ranks: list[dict[str, Any]]
    disagreement: float  # over all ranks
    reference: dict[str, float] | None  # top1, top5; None if the images have no labels
    other: dict[str, float] | None

    def plain(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


def excess_of_classes(found: dict[str, Any], limits: Limits) -> list[str]:
    """Describe each difference in the plain values of a ClassComparison that is beyond `limits`; empty if there is none."""
    said, first, other = [], found['reference'], found['other']
    if first and other and abs(gain := other['top1'] - first['top1']) > limits.ap:
        said.append(f'top-1 differs by {abs(gain):.2g}, allowed {limits.ap:g}')
    if (same := 1 - found['ranks'][0]['disagreement']) < limits.matched:
        said.append(f'the best class is the same in {same:.2%} of the images, wanted {limits.matched:.0%}')
    return said


class Accuracy:
    """Top-1 and top-5 accuracy: the share of images whose class has the highest score, or one of the highest five."""

    def __init__(self) -> None:
        """Start without images."""
        self.hits, self.images = np.zeros(2), 0

    def update(self, ranked: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch.

        Args:
            ranked: [B, k], classes of each image, highest score first.
            labels: [B], the true classes.
        """
        hit = ranked == labels[:, None]
        self.hits += [hit[:, :1].any(1).sum(), hit[:, :5].any(1).sum()]
        self.images += len(labels)

    def figures(self) -> dict[str, float] | None:
        """Compute {'top1', 'top5'} in 0..1; None without images."""
        return dict(zip(('top1', 'top5'), (self.hits / self.images).tolist())) if self.images else None


@torch.inference_mode()
def accuracy_of(
    predict: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> dict[str, Any]:
    """Score one classifier.

    Args:
        predict: images FP32 [B, 3, H, W] on `device` → scores [B, C].
        batches: (images FP32 [B, 3, H, W], labels [B]) of each batch.
        device: where the images are given to the classifier.

    Returns:
        'top1' and 'top5' in 0..1, and 'images', the number of them.
    """
    found = Accuracy()
    for images, labels, *_ in batches:
        scores = predict(images.to(device)).cpu()
        found.update(scores.topk(min(5, scores.shape[1]), 1).indices, labels)
    return {'images': found.images, **(found.figures() or {})}


class Ranks:
    """Differences of the scores of two classifiers, element by element and rank by rank."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
        """Start without images; see `compare_classes`."""
        self.scores, self.top = Elements(rtol, atol), top
        self.totals: dict[str, torch.Tensor] = {}

    def update(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add the scores [B, C] of a batch, of the reference and of the other classifier."""
        self.scores.update(first, second)
        (one, own), (two, others) = (scores.topk(min(self.top, scores.shape[1]), 1) for scores in (first, second))
        for key, values in (
            ('score', one),
            ('score_error', (two - one).abs()),
            ('disagreement', (own != others).double()),
        ):
            self.totals[key] = self.totals.get(key, 0) + values.sum(0)

    def ranks(self, images: int) -> list[dict[str, Any]]:
        """Compute the mean of each rank over `images`; see ClassComparison.ranks."""
        means = {key: (total / images).tolist() for key, total in self.totals.items()}
        return [{'rank': i + 1, **{k: v[i] for k, v in means.items()}} for i in range(len(means['score']))]


@torch.inference_mode()
def compare_classes(
    reference: Callable[[torch.Tensor], torch.Tensor],
    others: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    device: torch.device,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    top: int = 10,
    look: Callable[[torch.Tensor, str, list[torch.Tensor]], object] | None = None,
) -> list[ClassComparison]:
    """Compare classifiers with one of them; at a rank two disagree if they have different classes there.

    Args:
        reference: images FP32 [B, 3, H, W] on `device` → scores [B, C].
        others: images → scores, of each other classifier.
        batches: (images FP32 [B, 3, H, W], labels [B]) of each batch; None for images without labels.
        device: where the images are given to the classifiers.
        rtol: relative tolerance, as in numpy.isclose.
        atol: absolute tolerance, as in numpy.isclose.
        top: number of ranks to compare.
        look: takes each image, FP32 [3, H, W] as the classifiers see it, '' for its path, and the scores [C] of each
            classifier, the reference first.

    Returns:
        A ClassComparison with the reference for each of `others`.

    Raises:
        QatError: the scores of the classifiers have different shapes.
    """
    ranks, accuracies, seen = [Ranks(rtol, atol, top) for _ in others], [Accuracy() for _ in (reference, *others)], 0
    for images, labels, *_ in batches:
        scores = [predict(images.to(device)).cpu().double() for predict in (reference, *others)]
        for of_one, other in zip(ranks, scores[1:]):
            if scores[0].shape != other.shape:
                raise QatError(
                    f'the models return {list(scores[0].shape)} and {list(other.shape)}: only models with the same classes can be compared'
                )
            of_one.update(scores[0], other)
        if labels is not None:
            for accuracy, found in zip(accuracies, scores):
                accuracy.update(found.topk(min(5, found.shape[1]), 1).indices, labels)
        if look:
            for image, *of_image in zip(images, *scores):
                look(image, '', of_image)
        seen += len(images)
    comparisons = []
    for of_one, accuracy in zip(ranks, accuracies[1:]):
        table = of_one.ranks(seen)
        disagreement = float(np.mean([r['disagreement'] for r in table]))
        figures = of_one.scores.figures(), table, disagreement, accuracies[0].figures(), accuracy.figures()
        comparisons.append(ClassComparison(seen, rtol, atol, top, *figures))
    return comparisons
