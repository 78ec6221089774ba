"""Plain metrics as cells of a table and as bars of a picture, and the selection metric of models."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from utils.qat.config.tasks import TASKS, Task, load_task
from utils.qat.core.files import write_picture
from utils.qat.core.text import literal, markdown_table

MOST = 80  # classes in a picture
NOTHING = 0.001  # AP or top-1 of a model that does not know the objects
FINDS_NOTHING = 'finds nothing here: check classes, image size, preprocessing'


def task_in(*metrics: dict[str, Any] | None) -> Task:
    """Find the task of plain metrics from their keys; for a model without a score, from the SQNR of its outputs."""
    keys = {key for found in metrics if found for key in (*found, *found.get('sqnr', ()))}
    return next((task for task in map(load_task, TASKS) if {task.keys[0], task.parts[0]} & keys), load_task('detect'))


def score_keys(metrics: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the keys of the metrics of a model's task; the first is the selection metric."""
    return task_in(metrics).keys


def is_scored(metrics: dict[str, Any] | None) -> bool:
    """Tell whether plain metrics have scores."""
    return metrics is not None and score_keys(metrics)[0] in metrics


def finds_nothing(metrics: dict[str, Any] | None) -> str:
    """Return the advice for plain metrics of a model to which these images mean nothing, so that no difference from it does; else ''."""
    return FINDS_NOTHING * bool(metrics and is_scored(metrics) and merit(metrics) < NOTHING)


def merit_title(*metrics: dict[str, Any] | None) -> str:
    """Return the name of the selection metric: AP or top-1."""
    return task_in(*metrics).columns[0]


def score_cells(metrics: dict[str, Any] | None, masks: bool = False) -> list[str]:
    """Format AP, AP50, P and R (or a classifier's metrics) with four digits; '-' if missing."""
    of_boxes = [f'{metrics[k]:.4f}' if metrics and k in metrics else '-' for k in score_keys(metrics)]
    return of_boxes + score_cells((metrics or {}).get('mask')) if masks else of_boxes


def difference_cells(
    metrics: dict[str, Any] | None, reference: dict[str, Any] | None, masks: bool = False, chance: str = ''
) -> list[str]:
    """Format the differences of two models in points (0.01), for the columns of `score_cells`; '-' if missing.

    `chance` belongs to the difference of AP, such as ' ± 0.58'; see chance.py.
    """
    after, before = metrics or {}, reference or {}
    points = [f'{100 * (after[k] - before[k]):+.2f}' if k in after and k in before else '-' for k in score_keys(after)]
    points = ['+0.00' if p == '-0.00' else p for p in points]
    points[0] += chance
    if not masks:
        return points
    return points + difference_cells(after.get('mask'), before.get('mask'))


def score_titles(*metrics: dict[str, Any] | None) -> tuple[tuple[str, ...], bool]:
    """Choose the column titles for `score_cells`, and tell whether any of the plain metrics has masks."""
    masks = any(m and m.get('mask') for m in metrics)
    titles = task_in(*metrics).columns
    return titles + tuple(f'mask {title}' for title in titles) * masks, masks


def models_table(names: Sequence[str], models: Sequence[dict[str, Any] | None], chances: Sequence[str]) -> str:
    """Format plain metrics of several models as a Markdown table, with the differences from the first in points."""
    titles, masks = score_titles(*models)
    rows = [(name, *score_cells(m, masks)) for name, m in zip(names, models)]
    for name, m, chance in zip(names[1:], models[1:], chances):
        rows.append((f'{name} - {names[0]}, points', *difference_cells(m, models[0], masks, chance)))
    return markdown_table(('model', *titles), rows)


def merit(metrics: dict[str, Any]) -> float:
    """Return the selection metric: AP, the mean of the AP of boxes and of masks, or top-1."""
    return task_in(metrics).merit(metrics)


def class_table(metrics: dict[str, Any]) -> str:
    """Format plain metrics as a Markdown table: all classes together, then each class."""
    titles, masks = score_titles(metrics)
    counted = 'instances' if 'instances' in metrics else 'images'
    rows = [['all', metrics[counted], *score_cells(metrics, masks)]]
    rows += [[c['name'], c[counted], *score_cells(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', counted, *titles), rows)


def bar_places(places: Iterable[float], model: int, models: int) -> tuple[list[float], float]:
    """Return the centres of one model's bars at each of `places`, which are 1 apart, and the width of a bar."""
    width = 0.8 / models
    return [place + (model - (models - 1) / 2) * width for place in places], width


def plot_classes(path: Path, models: dict[str, dict[str, Any]]) -> None:
    """Draw the AP (for a classifier the top-1 accuracy) of each class and model, and the first model's difference."""
    from matplotlib.figure import Figure  # here, because tables need no matplotlib
    from matplotlib.ticker import MaxNLocator

    key, *_ = score_keys(next(iter(models.values())))
    of = {'boxes': 'AP of boxes (IoU 0.50:0.95)', 'masks': 'AP of masks (IoU 0.50:0.95)', 'classes': 'top-1 accuracy'}
    whole = 'boxes' if key == 'ap' else 'classes'
    parts = {whole: lambda row: row}
    if all('mask' in metrics for metrics in models.values()):
        parts['masks'] = lambda row: row.get('mask') or {}
    # of the last model that has the class
    ap_of = {row['name']: row.get(key) or 0 for metrics in models.values() for row in metrics['per_class']}
    worst = sorted(ap_of, key=ap_of.__getitem__)[:MOST]
    names = [name for name in ap_of if name in worst]
    panels = len(parts) * (1 + (len(models) > 1))
    figure = Figure(figsize=(4 + 3 * panels, 1.5 + (0.12 + 0.12 * len(models)) * len(names)), layout='constrained')
    row_of_axes = iter(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    first, *others = models
    for part, of_row in parts.items():
        axes = next(row_of_axes)
        rows = {model: {row['name']: of_row(row) for row in metrics['per_class']} for model, metrics in models.items()}
        part_key = 'ap' if part == 'masks' else key
        found = {model: {n: row.get(part_key) or 0 for n, row in named.items()} for model, named in rows.items()}
        for i, (model, metrics) in enumerate(models.items()):
            places, height = bar_places(range(len(names)), i, len(models))
            mean = (metrics if part == whole else metrics['mask'])[key]
            bars, label = [found[model].get(name, 0) for name in names], literal(f'{model} {mean:.4f}')
            chances = [rows[model].get(name, {}).get('chance', 0) for name in names]
            intervals = {'xerr': chances, 'ecolor': '0.3', 'error_kw': {'linewidth': 1}} if any(chances) else {}
            axes.barh(places, bars, height, color=f'C{i}', label=label, **intervals)
            axes.axvline(mean, linestyle='--', color=f'C{i}', linewidth=1)
        axes.set(xlim=(0, 1), xlabel=f'{of[part]}; dashed: {"mean" if key == "ap" else "all images"}')
        small = {'frameon': False, 'fontsize': 8, 'handlelength': 1, 'columnspacing': 1}
        axes.legend(loc='lower left', bbox_to_anchor=(-0.1, 1), ncols=min(3, len(models)), **small)
        panel = [axes]
        if others:
            panel.append(next(row_of_axes))
            for i, model in enumerate(others):
                places, height = bar_places(range(len(names)), i, len(others))
                points = [100 * (found[model].get(name, 0) - found[first].get(name, 0)) for name in names]
                panel[1].barh(places, points, height, color=f'C{i + 1}')
            widest = max(1.0, *map(abs, panel[1].get_xlim()))
            panel[1].set(
                xlim=(-widest, widest), xlabel=literal(f'{of[part].partition(" (")[0]} less that of {first}, points')
            )
            panel[1].xaxis.set_major_locator(MaxNLocator(5))
            panel[1].axvline(0, color='0.4', linewidth=1)
        for each in panel:
            each.set_yticks(range(len(names)), [literal(name) for name in names])
            each.set_ylim(len(names) - 0.5, -0.5)
            each.grid(axis='x', alpha=0.3)
            each.set_axisbelow(True)
    if len(names) < len(ap_of):
        figure.suptitle(f'the {MOST} classes of lowest {merit_title(*models.values())}, of {len(ap_of)}')
    write_picture(figure, path)
