"""Scores of a classifier → top-1, top-5 and mean class accuracy, as in classify/val.py, and its distance from another classifier."""

from collections.abc import Mapping

import numpy as np
import torch

from utils.qat.backends.detections import ClassTruth
from utils.qat.evaluation.interval import draw_resamples, half_width_of_share
from utils.qat.evaluation.metrics import ClassMetrics

TOP = 5


def divergence(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Compute the Kullback-Leibler divergence of softmax(scores) from softmax(wanted), both [B, C]: FP64 [B]."""
    mine, reference = scores.double().log_softmax(1), wanted.double().log_softmax(1)
    return (reference.exp() * (reference - mine)).sum(1)


def agreement(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Tell for which images two classifiers have the same best class: FP64 [B], 0 or 1."""
    return (scores.argmax(1) == wanted.argmax(1)).double()


def distance(scores: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Compare the scores [n, C] of two classifiers on the same images: the means of `agreement` and `divergence`."""
    return {
        'agreement': agreement(scores, wanted).mean().item(),
        'divergence': divergence(scores, wanted).mean().item(),
    }


class ClassScorer:
    """Scores of a classifier, collected batch by batch, and their metrics."""

    rows = None  # a classifier has no detections

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        # path of each image, class, and the scores, of each batch
        self.batches: list[tuple[list[str], torch.Tensor, torch.Tensor]] = []

    def update(self, scores: torch.Tensor, truth: ClassTruth) -> None:
        """Add the scores [B, C] of a batch, and the true classes."""
        self.batches.append((list(truth.paths), truth.labels.cpu(), scores.float().cpu()))

    def metrics(self, resample: bool = False) -> ClassMetrics:
        """Score all images so far. resample: compute top-1 on resamples as well."""
        paths = [path for of_batch, *_ in self.batches for path in of_batch]
        order = torch.tensor(sorted(range(len(paths)), key=paths.__getitem__))
        labels, scores = (torch.cat(parts)[order] for parts in zip(*((y, s) for _, y, s in self.batches)))
        ranked = scores.argsort(1, descending=True)[:, :TOP] == labels[:, None]
        hits = torch.stack((ranked[:, 0], ranked.any(1)), 1).double().numpy()
        true = labels.numpy()
        per_class = [
            {
                'class': c,
                'name': self.names[c],
                'images': int((true == c).sum()),
                **dict(zip(('top1', 'top5'), hits[true == c].mean(0).tolist())),
                'chance': half_width_of_share(hits[true == c, 0]),
            }
            for c in np.unique(true).tolist()
        ]
        top1, top5 = hits.mean(0).tolist()
        return ClassMetrics(
            top1=top1,
            top5=top5,
            mean_class=float(np.mean([row['top1'] for row in per_class])),
            images=len(true),
            per_class=per_class,
            resampled=(hits[:, 0] @ draw_resamples(len(true)) / len(true))[:, None] if resample else None,
            scores=scores,
        )
