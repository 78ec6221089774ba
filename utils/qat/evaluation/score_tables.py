"""Plain metrics as cells of a table, and the selection metric of models."""

from collections.abc import Sequence
from typing import Any

from utils.qat.config.tasks import TASKS, Task, load_task
from utils.qat.core.text import markdown_table


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
