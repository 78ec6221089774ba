"""Compare models on the same images: the differences of their outputs from the first model's, and their scores.

A model is a callable images → predictions (see file_model.py), so all backends can be compared. Each model and its NMS run
once per batch, for both the ranks and the AP.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from utils.qat.backends.detections import prepared
from utils.qat.config.tasks import Task, load_task
from utils.qat.core.text import markdown_table, number
from utils.qat.evaluation.metrics import Metrics

Comparison = dict[str, Any]  # of two models, as plain values; see the comparison() of Differences
NUMPY_TOLERANCE = '(within: |difference| <= atol + rtol |value|, as in numpy.isclose, whose defaults are rtol 1e-05 and atol 1e-08; here 0.001)'


def tolerance_title(settings: Mapping[str, object]) -> str:
    """Name the tolerance of a comparison, for the title of a column."""
    return f'within rtol {settings["rtol"]:g}, atol {settings["atol"]:g}'


def ranks_tables(
    comparisons: Sequence[Comparison], names: Sequence[str], columns: Mapping[str, tuple[str, str]]
) -> list[str]:
    """Make a table of mean scores with all models side by side, and one of the differences of each model from the first.

    `comparisons` have the figures in 'ranks'; `names` are those of the first model, then of the others; `columns` are further keys of
    a rank → (title, format).
    """
    differences = {'score_error': ('score difference', '.3g'), **columns}
    first = max((c['ranks'] for c in comparisons), key=len)
    scores = [
        (rank['rank'], number(rank['score']))
        + tuple(number(c['ranks'][i]['other_score']) if i < len(c['ranks']) else '-' for c in comparisons)
        for i, rank in enumerate(first)
    ]
    rows = [
        (name, rank['rank'], *(number(rank[key], form) for key, (_, form) in differences.items()))
        for name, c in zip(names[1:], comparisons)
        for rank in c['ranks']
    ]
    titles = 'model', 'rank', *(title for title, _ in differences.values())
    return [markdown_table(('rank', *names), scores), markdown_table(titles, rows)] if first else []


class ElementDifferences:
    """Differences of tensors, element by element, over batches."""

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.count, self.close, self.total, self.largest = 0, 0, 0.0, torch.zeros((), dtype=torch.float64)

    def update(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Add two tensors of one shape."""
        reference, other = reference.cpu().double(), other.cpu().double()
        difference = (other - reference).abs()
        self.count += difference.numel()
        self.close += int(torch.isclose(other, reference, self.rtol, self.atol).sum())
        self.total += difference.sum().item()
        self.largest = torch.maximum(self.largest, difference.max())  # keeps NaN, unlike max()

    def summary(self) -> dict[str, float] | None:
        """Compute 'max' and 'mean' of the absolute difference, and 'within', over all elements so far; None without any.

        'within' is the share with |other - reference| <= atol + rtol |reference|, as in numpy.isclose.
        """
        if not self.count:
            return None
        return {'max': self.largest.item(), 'mean': self.total / self.count, 'within': self.close / self.count}


@torch.inference_mode()
def compare_models(
    reference: Callable[[torch.Tensor], object],
    others: Sequence[Callable[[torch.Tensor], object]],
    loader: Iterable[tuple],
    device: torch.device,
    names: Mapping[int, str] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    top: int = 10,
    look: Callable[[torch.Tensor, str, list[torch.Tensor]], object] | None = None,
    task: Task = load_task('detect'),
) -> list[Comparison]:
    """Compare models of one task with a reference, and return the comparison of each of `others` as plain values.

    Models take images FP32 [B, 3, H, W] in 0..1 on `device`, and their predictions have the same shape. With `names`, class index →
    name, they are scored too. `rtol` and `atol` are those of numpy.isclose, `top` is the number of ranks. `look` takes each image,
    FP32 [3, H, W], its path, and the detections [n, 6] or the scores [C] of each model, the reference first. For the result see compare_detections.Differences.comparison, and compare_classes for classifiers.
    """
    differences = [task.comparing().Differences(rtol, atol, top) for _ in others]
    scorers, count = [task.scorer(names) for _ in (reference, *others)] if names else [], 0
    for batch in loader:
        images, truth = prepared(batch, device)
        outputs = [predict(images) for predict in (reference, *others)]
        results = [task.postprocess(out, truth.shape) for out in outputs]
        for difference, output, of_one in zip(differences, outputs[1:], results[1:]):
            difference.update(outputs[0], output, results[0], of_one)
        for scorer, of_one in zip(scorers, results):
            scorer.update(of_one, truth)
        if look:
            for image, path, *of_image in zip(images, truth.paths, *results):
                look(image.cpu(), path, [getattr(one, 'rows', one).cpu() for one in of_image])
        count += len(images)
    metrics: list[Metrics | None] = [scorer.metrics(resample=True) for scorer in scorers] or [None] * (1 + len(others))
    return [difference.comparison(count, metrics[0], other) for difference, other in zip(differences, metrics[1:])]
