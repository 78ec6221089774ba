"""Two classifiers side by side on the same images: how close their scores are, rank by rank, and in top-1 and top-5 accuracy.

What compare.py is for detectors. A model is a callable: images [B, 3, H, W] → scores [B, C].
"""

from dataclasses import asdict, dataclass

import numpy as np
import torch

from utils.qat.core.errors import QatError
from utils.qat.evaluation.compare import Elements


@dataclass
class ClassComparison:
    """How `other` differs from `reference`. Accuracies are in 0..1."""

    images: int
    rtol: float
    atol: float
    top: int
    scores: dict  # of all classes: see Elements.figures
    ranks: list  # of the highest scores: rank (from 1), score and score_error (means, the latter absolute), disagreement (share of images)
    disagreement: float  # over all ranks
    reference: dict  # top1, top5; None if the images have no labels
    other: dict

    def plain(self):
        return asdict(self)


class Accuracy:
    """Share of images whose class is among the first, or the first five."""

    def __init__(self):
        self.hits, self.images = np.zeros(2), 0

    def update(self, ranked, labels):
        """ranked: classes, highest score first [B, k]. labels: [B]."""
        hit = ranked == labels[:, None]
        self.hits += [hit[:, :1].any(1).sum(), hit[:, :5].any(1).sum()]
        self.images += len(labels)

    def figures(self):
        return dict(zip(('top1', 'top5'), (self.hits / self.images).tolist())) if self.images else None


@torch.inference_mode()
def compare_classes(reference, other, batches, device, rtol=1e-3, atol=1e-3, top=10):
    """Run both models over `batches` of (images FP32, labels [B] or None); returns a ClassComparison.

    At a rank the models disagree where they have different classes there. Raises QatError if the scores are of different shapes.
    """
    scores, accuracies, seen = Elements(rtol, atol), (Accuracy(), Accuracy()), 0
    totals = {}
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
