"""Scores as columns of a table and as bars of a picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.qat.core.files import write_picture
from utils.qat.core.text import literal, markdown_table, number
from utils.qat.evaluation.interval import UNKNOWN, Change, boxes_and_masks, plus_minus, points
from utils.qat.evaluation.metrics import DetectionMetrics, Metrics

MOST = 80  # classes in a picture
PALE = 0.55  # opacity of the lighter part of a bar
FEW = 5  # labels of a class: with fewer, resamples tell no interval


class Columns:
    """The columns of a table of models: the scores of their task, and those of masks if a model has masks."""

    def __init__(self, *models: Metrics | None) -> None:
        """Choose the columns for models, of which None has no scores."""
        kind = next((type(m) for m in models if m), DetectionMetrics)
        _, self.title = kind.choosing()
        self.names, self.masks = tuple(kind.columns), any(m and m.mask for m in models)
        titles = tuple(kind.columns.values())
        self.titles = titles + tuple(f'mask {title}' for title in titles) * self.masks

    def values(self, scores: Metrics | Mapping[str, Any] | None) -> list[float | None]:
        """Return the scores of a model, or of a class of Metrics.per_class; None for a missing one."""
        values = vars(scores) if isinstance(scores, Metrics) else scores or {}
        parts = [values, values.get('mask') or {}][: 1 + self.masks]
        return [part.get(name) for part in parts for name in self.names]

    def cells(self, scores: Metrics | Mapping[str, object] | None) -> list[str]:
        """Format scores with four digits; '-' if missing."""
        return list(map(number, self.values(scores)))

    def differences(self, after: Metrics | None, before: Metrics | None, change: Change | None = None) -> list[str]:
        """Format the differences of two models in points (0.01), that of `change` with its interval; '-' if missing."""
        pairs = zip(self.values(after), self.values(before))
        cells = ['-' if a is None or b is None else points(a - b) for a, b in pairs]
        for i, part in zip(range(0, len(cells), len(self.names)), boxes_and_masks(change) if change else ()):
            cells[i] += plus_minus(part)
        return cells


def models_table(names: Sequence[str], models: Sequence[Metrics | None], changes: Sequence[Change | None]) -> str:
    """Format the scores of several models as a Markdown table, with the differences from the first in points."""
    columns = Columns(*models)
    rows = [(name, *columns.cells(m)) for name, m in zip(names, models)]
    for name, m, change in zip(names[1:], models[1:], changes):
        rows.append((f'{name} - {names[0]}, points', *columns.differences(m, models[0], change)))
    return markdown_table(('model', *columns.titles), rows)


def class_table(metrics: Metrics) -> str:
    """Format scores as a Markdown table: all classes together, then each class."""
    columns, counted = Columns(metrics), metrics.counted
    rows = [['all', getattr(metrics, counted), *columns.cells(metrics)]]
    rows += [[c['name'], c[counted], *columns.cells(c)] for c in metrics.per_class]
    return markdown_table(('class', counted, *columns.titles), rows)


def interval_table(models: Mapping[str, Metrics]) -> str:
    """Format AP, or top-1, of each class by each model, with its interval; the first model has all classes."""
    first = next(iter(models.values()))
    (key, title), counted = first.choosing(), first.counted

    def cell(row: Mapping[str, Any]) -> str:
        half_width = row.get('chance', UNKNOWN) if row.get(counted, 0) >= FEW else UNKNOWN
        half_width = '?' if half_width == UNKNOWN else f'{half_width:.4f}'
        return f'{row[key]:.4f} ± {half_width}' if row else '-'

    of_class = [{row['class']: row for row in metrics.per_class} for metrics in models.values()]
    rows = [(r['name'], r[counted], *(cell(of.get(r['class'], {})) for of in of_class)) for r in first.per_class]
    return markdown_table(('class', counted, *(f'{title}, {name}' for name in models)), rows)


def bar_places(positions: Iterable[float], model: int, models: int) -> tuple[list[float], float]:
    """Return the centres of one model's bars at each of `positions`, which are 1 apart, and the width of a bar."""
    width = 0.8 / models
    return [position + (model - (models - 1) / 2) * width for position in positions], width


def plot_classes(path: Path, models: dict[str, Metrics]) -> None:
    """Draw the AP (for a classifier the top-1 accuracy) of each class and model, and the first model's difference."""
    from matplotlib.figure import Figure  # here, because tables need no matplotlib
    from matplotlib.ticker import MaxNLocator

    key, title = next(iter(models.values())).choosing()
    whole = 'AP of boxes (IoU 0.50:0.95)' if key == 'ap' else 'top-1 accuracy'
    parts = {whole: lambda scores: scores}  # of a class or of all
    if all(metrics.mask for metrics in models.values()):
        parts['AP of masks (IoU 0.50:0.95)'] = lambda scores: scores.get('mask') or {}
    # of the last model that has the class
    ap_of = {row['name']: row.get(key) or 0 for metrics in models.values() for row in metrics.per_class}
    worst = sorted(ap_of, key=ap_of.__getitem__)[:MOST]
    names = [name for name in ap_of if name in worst]
    panels = len(parts) * (1 + (len(models) > 1))
    figure = Figure(figsize=(4 + 3 * panels, 1.5 + (0.12 + 0.12 * len(models)) * len(names)), layout='constrained')
    row_of_axes = iter(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    first, *others = models
    for part, scores_of in parts.items():
        axes = next(row_of_axes)
        rows = {model: {row['name']: scores_of(row) for row in metrics.per_class} for model, metrics in models.items()}
        figures = {model: {name: row.get(key) or 0 for name, row in named.items()} for model, named in rows.items()}
        for i, (model, metrics) in enumerate(models.items()):
            positions, height = bar_places(range(len(names)), i, len(models))
            mean = scores_of(vars(metrics))[key]
            bars, label = [figures[model].get(name, 0) for name in names], literal(f'{model} {mean:.4f}')
            widths = [rows[model].get(name, {}).get('chance', 0) for name in names]
            intervals = {'xerr': widths, 'ecolor': '0.3', 'error_kw': {'linewidth': 1}} if any(widths) else {}
            axes.barh(positions, bars, height, color=f'C{i}', label=label, **intervals)
            axes.axvline(mean, linestyle='--', color=f'C{i}', linewidth=1)
        axes.set(xlim=(0, 1), xlabel=f'{part}; dashed: {"mean" if key == "ap" else "all images"}')
        small = {'frameon': False, 'fontsize': 8, 'handlelength': 1, 'columnspacing': 1}
        axes.legend(loc='lower left', bbox_to_anchor=(-0.1, 1), ncols=min(3, len(models)), **small)
        panel = [axes]
        if others:
            panel.append(next(row_of_axes))
            for i, model in enumerate(others):
                positions, height = bar_places(range(len(names)), i, len(others))
                gains = [100 * (figures[model].get(name, 0) - figures[first].get(name, 0)) for name in names]
                panel[1].barh(positions, gains, height, color=f'C{i + 1}')
            widest = max(1.0, *map(abs, panel[1].get_xlim()))
            panel[1].set(
                xlim=(-widest, widest), xlabel=literal(f'{part.partition(" (")[0]} less that of {first}, points')
            )
            panel[1].xaxis.set_major_locator(MaxNLocator(5))
            panel[1].axvline(0, color='0.4', linewidth=1)
        for each in panel:
            each.set_yticks(range(len(names)), [literal(name) for name in names])
            each.set_ylim(len(names) - 0.5, -0.5)
            each.grid(axis='x', alpha=0.3)
            each.set_axisbelow(True)
    if len(names) < len(ap_of):
        figure.suptitle(f'the {MOST} classes of lowest {title}, of {len(ap_of)}')
    write_picture(figure, path)
