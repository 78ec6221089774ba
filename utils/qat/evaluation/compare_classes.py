"""Classifiers side by side: the differences of their scores, rank by rank, and their accuracy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.core.markdown import markdown_table
from utils.qat.evaluation.classes import ClassMetrics
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


def excess(found: dict[str, Any], limits: Limits) -> list[str]:
    """Describe each difference in the plain values of a ClassComparison that is beyond `limits`; empty if there is none."""
    said, first, other = [], found['reference'], found['other']
    if first and other and abs(gain := other['top1'] - first['top1']) > limits.ap:
        said.append(f'top-1 differs by {abs(gain):.2g}, allowed {limits.ap:g}')
    if (same := 1 - found['ranks'][0]['disagreement']) < limits.matched:
        said.append(f'the best class is the same in {same:.2%} of the images, wanted {limits.matched:.0%}')
    return said


class Ranks:
    """Differences of the scores of two classifiers, element by element and rank by rank."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
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


class ClassDifferences:
    """Differences of two classifiers over batches; at a rank they disagree if they have different classes there."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
        self.limits, self.ranks = (rtol, atol, top), Ranks(rtol, atol, top)

    def update(self, reference: torch.Tensor, other: torch.Tensor, *_: Any) -> None:
        """Add the scores [B, C] of a batch, of both classifiers."""
        if reference.shape != other.shape:
            raise QatError(
                f'the models return {list(reference.shape)} and {list(other.shape)}: only models with the same classes can be compared'
            )
        self.ranks.update(reference.cpu().double(), other.cpu().double())

    def comparison(self, images: int, reference: ClassMetrics | None, other: ClassMetrics | None) -> ClassComparison:
        """Compute the ClassComparison of all batches so far; images: number of them."""
        table = self.ranks.ranks(images)
        disagreement = float(np.mean([r['disagreement'] for r in table]))
        accuracies = ({'top1': m.top1, 'top5': m.top5} if m else None for m in (reference, other))
        return ClassComparison(images, *self.limits, self.ranks.scores.figures(), table, disagreement, *accuracies)


def tables(comparison: dict[str, Any], names: Sequence[str], scores: bool = True) -> str:
    """Write plain values of a ClassComparison as Markdown tables; `scores` adds accuracy, if there are labels."""
    e = comparison['scores']
    ranks = [
        (r['rank'], f'{r["score"]:.4f}', f'{r["score_error"]:.3g}', f'{r["disagreement"]:.1%}')
        for r in comparison['ranks']
    ]
    ranks.append((f'top {comparison["top"]}', '-', '-', f'{comparison["disagreement"]:.1%}'))
    tolerance = f'within rtol {comparison["rtol"]:g}, atol {comparison["atol"]:g}'
    written = [
        markdown_table(
            ('all scores', 'max difference', 'mean difference', tolerance),
            [('scores', f'{e["max"]:.3g}', f'{e["mean"]:.3g}', f'{e["within"]:.2%}')],
        ),
        markdown_table(('rank', 'score', 'score difference', 'disagreement'), ranks),
    ]
    if scores and comparison['reference']:
        written.append(scores_table([comparison], names))
    return '\n\n'.join(written)


def scores_table(comparisons: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Write accuracies of classifiers, if there are labels, and how far each is from the first."""
    first, settings = comparisons[0]['reference'], comparisons[0]
    keys = ('top1', 'top5') if first else ()
    rows: list[tuple[str, ...]] = [(names[0], *(f'{first[key]:.4f}' for key in keys), *['-'] * 4)]
    for name, c in zip(names[1:], comparisons):
        e, same = c['scores'], 1 - c['ranks'][0]['disagreement']
        distance = f'{e["within"]:.2%}', f'{e["mean"]:.3g}', f'{same:.1%}', f'{c["disagreement"]:.1%}'
        rows.append((name, *(f'{c["other"][key]:.4f}' for key in keys), *distance))
    for name, c in zip(names[1:], comparisons if first else ()):
        points = (f'{100 * (c["other"][key] - first[key]):+.2f}' for key in keys)
        rows.append((f'{name} - {names[0]}, points', *points, *['-'] * 4))
    within = f'scores within rtol {settings["rtol"]:g}, atol {settings["atol"]:g}'
    titles = within, 'mean difference', 'same best class', f'other class at a rank of the top {settings["top"]}'
    return markdown_table(('model', *(['top-1', 'top-5'] if first else []), *titles), rows)


def verdict(comparison: dict[str, Any]) -> str:
    """Say how far a classifier is from the first, a clause. comparison: plain values of a ClassComparison."""
    return f'the best class is the same in {1 - comparison["ranks"][0]["disagreement"]:.1%} of the images'


def limits_text(limits: Limits, found: dict[str, Any]) -> str:
    """Say what --verify allows."""
    return f'top-1 within {limits.ap:g}, the best class the same in at least {limits.matched:.0%}'
