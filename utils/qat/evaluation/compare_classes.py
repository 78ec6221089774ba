"""Two classifiers side by side on the same images: the differences of their scores, rank by rank, and accuracies.

For detectors there is compare.py. A model is a callable: images [B, 3, H, W] → scores [B, C].
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

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
    for images, labels in batches:
        scores = predict(images.to(device)).cpu()
        found.update(scores.topk(min(5, scores.shape[1]), 1).indices, labels)
    return {'images': found.images, **(found.figures() or {})}


@torch.inference_mode()
def compare_classes(
    reference: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    device: torch.device,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    top: int = 10,
) -> ClassComparison:
    """Compare two classifiers; at a rank they disagree if they have different classes there.

    Args:
        reference: images FP32 [B, 3, H, W] on `device` → scores [B, C].
        other: images → scores, of the other classifier.
        batches: (images FP32 [B, 3, H, W], labels [B]) of each batch; None for images without labels.
        device: where the images are given to the classifiers.
        rtol: relative tolerance, as in numpy.isclose.
        atol: absolute tolerance, as in numpy.isclose.
        top: number of ranks to compare.

    Raises:
        QatError: the scores of the classifiers have different shapes.
    """
    scores, accuracies, seen = Elements(rtol, atol), (Accuracy(), Accuracy()), 0
    totals: dict[str, torch.Tensor] = {}
    for images, labels in batches:
        first, second = (predict(images.to(device)).cpu().double() for predict in (reference, other))
        if first.shape != second.shape:
            raise QatError(
                f'the models return {list(first.shape)} and {list(second.shape)}: only models with the same classes can be compared'
            )
        scores.update(first, second)
        depth = min(max(top, 5), first.shape[1])
        ranked = [t.topk(depth, 1) for t in (first, second)]
        (one, own), (two, others) = ranked
        for key, values in (
            ('score', one),
            ('score_error', (two - one).abs()),
            ('disagreement', (own != others).double()),
        ):
            totals[key] = totals.get(key, 0) + values[:, :top].sum(0)
        if labels is not None:
            for accuracy, (_, classes) in zip(accuracies, ranked):
                accuracy.update(classes, labels)
        seen += len(images)
    means = {key: (total / seen).tolist() for key, total in totals.items()}
    ranks = [{'rank': i + 1, **{key: values[i] for key, values in means.items()}} for i in range(len(means['score']))]
    return ClassComparison(
        seen,
        rtol,
        atol,
        top,
        scores.figures(),
        ranks,
        float(np.mean(means['disagreement'])),
        *(accuracy.figures() for accuracy in accuracies),
    )
