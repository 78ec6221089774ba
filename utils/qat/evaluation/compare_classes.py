"""Compare classifiers: the differences of their scores, rank by rank, and their accuracy."""

from collections.abc import Sequence

import numpy as np
import torch

from utils.qat.config.export import Limits
from utils.qat.core.errors import QatError
from utils.qat.core.text import markdown_table, number
from utils.qat.evaluation.compare import NUMPY_TOLERANCE, Comparison, ElementDifferences, ranks_tables, tolerance_title
from utils.qat.evaluation.interval import points
from utils.qat.evaluation.metrics import ClassMetrics


class Differences:
    """Differences of a classifier from the reference, over batches; at a rank they disagree if their classes differ."""

    def __init__(self, rtol: float, atol: float, top: int) -> None:
        self.settings = {'rtol': rtol, 'atol': atol, 'top': top}
        self.scores, self.top = ElementDifferences(rtol, atol), top
        self.rank_sums: dict[str, torch.Tensor] = {}  # over the images, a number for each rank

    def update(self, reference: torch.Tensor, other: torch.Tensor, *_: object) -> None:
        """Add the scores [B, C] of a batch, of both classifiers."""
        if reference.shape != other.shape:
            raise QatError(
                f'the models return {list(reference.shape)} and {list(other.shape)}: only models with the same classes can be compared'
            )
        reference, other = reference.cpu().double(), other.cpu().double()
        self.scores.update(reference, other)
        top = min(self.top, reference.shape[1])
        (first, classes), (second, other_classes) = reference.topk(top, 1), other.topk(top, 1)
        of_batch = {
            'score': first,
            'other_score': second,
            'score_error': (second - first).abs(),
            'disagreement': (classes != other_classes).double(),
        }
        for key, values in of_batch.items():
            self.rank_sums[key] = self.rank_sums.get(key, 0) + values.sum(0)

    def comparison(self, images: int, reference: ClassMetrics | None, other: ClassMetrics | None) -> Comparison:
        """Compute the comparison over all batches so far, as plain values. The metrics are None if the images have no labels."""
        means = {key: (total / images).tolist() for key, total in self.rank_sums.items()}
        ranks = [{'rank': i + 1, **{k: v[i] for k, v in means.items()}} for i in range(len(means['score']))]
        first, second = (m.to_json() if m else None for m in (reference, other))
        return {
            'images': images,
            **self.settings,
            'scores': self.scores.summary(),  # of all classes
            'ranks': ranks,  # of the highest scores: rank (from 1), and the means over the images
            'disagreement': float(np.mean(means['disagreement'])),  # over all ranks
            'reference': first,
            'other': second,
            'against_reference': other.against(reference) if reference and other else None,
        }


def same_class(comparison: Comparison) -> float:
    """Return the share of the images on which both classifiers have the same best class."""
    return 1 - comparison['ranks'][0]['disagreement']


def beyond_limits(comparison: Comparison, limits: Limits) -> list[str]:
    """Describe each difference in a comparison that is beyond `limits`; empty if there is none."""
    beyond, first, other = [], comparison['reference'], comparison['other']
    if first and other and abs(gain := other['top1'] - first['top1']) > limits.ap:
        beyond.append(f'top-1 differs by {abs(gain):.2g}, allowed {limits.ap:g}')
    if (same := same_class(comparison)) < limits.matched:
        beyond.append(f'the best class is the same in {same:.2%} of the images, wanted {limits.matched:.0%}')
    return beyond


def details(comparisons: Sequence[Comparison], names: Sequence[str]) -> list[str]:
    """Format differences of all scores, and rank by rank, as Markdown tables. names: of the first model, then the others."""
    rows = [
        (name, *(number(c['scores'][key], '.3g') for key in ('max', 'mean'))) for name, c in zip(names[1:], comparisons)
    ]
    columns = {'disagreement': ('another class at this rank', '.1%')}
    return [
        f'{markdown_table(("all scores", "max difference", "mean difference"), rows)}\n\n{NUMPY_TOLERANCE}',
        *ranks_tables(comparisons, names, columns),
    ]


def scores_table(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """Format the accuracies of classifiers, if there are labels, and the distance of each from the first."""
    first, settings = comparisons[0]['reference'], comparisons[0]
    keys = ('top1', 'top5') if first else ()
    rows: list[tuple[str, ...]] = [(names[0], *(f'{first[key]:.4f}' for key in keys), *['-'] * 4)]
    for name, c in zip(names[1:], comparisons):
        e = c['scores']
        distance = f'{e["within"]:.2%}', f'{e["mean"]:.3g}', f'{same_class(c):.1%}', f'{c["disagreement"]:.1%}'
        rows.append((name, *(f'{c["other"][key]:.4f}' for key in keys), *distance))
    for name, c in zip(names[1:], comparisons if first else ()):
        gains = (points(c['other'][key] - first[key]) for key in keys)
        rows.append((f'{name} - {names[0]}, points', *gains, *['-'] * 4))
    titles = (
        f'scores {tolerance_title(settings)}',
        'mean difference',
        'same best class',
        f'other class at a rank of the top {settings["top"]}',
    )
    return markdown_table(('model', *(['top-1', 'top-5'] if first else []), *titles), rows)


def in_a_clause(comparison: Comparison) -> str:
    """Describe the distance of a classifier from the first in a clause."""
    return f'the best class is the same in {same_class(comparison):.1%} of the images'


def limits_text(limits: Limits, comparison: Comparison) -> str:
    """Describe the limits of --verify."""
    return f'top-1 within {limits.ap:g}, the best class the same in at least {limits.matched:.0%}'
