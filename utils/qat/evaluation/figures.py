"""Plain metrics as figures of a table, and as the one number by which models are chosen."""

from collections.abc import Sequence
from typing import Any

from utils.qat.core.markdown import markdown_table

COLUMNS = ('AP', 'AP50', 'P', 'R')
KEYS = 'ap', 'ap50', 'precision', 'recall'  # of plain metrics, in this order
CLASS_COLUMNS = ('top-1', 'top-5', 'mean of classes', 'agreement')
CLASS_KEYS = 'top1', 'top5', 'mean_class', 'agreement'  # likewise, of a classifier
MASK_COLUMNS = tuple(f'mask {c}' for c in COLUMNS)


def keys_of(metrics: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the keys of the figures of a model's task, four of each; the first one decides."""
    found = metrics or {}
    # of a model that was not scored, the SQNR of its outputs tells the task
    return CLASS_KEYS if 'top1' in found or 'scores' in found.get('sqnr', {}) else KEYS


def is_scored(metrics: dict[str, Any] | None) -> bool:
    """Tell whether plain metrics have figures."""
    return metrics is not None and keys_of(metrics)[0] in metrics


def title_of(*metrics: dict[str, Any] | None) -> str:
    """Name the figure by which models of this task are chosen, in words: AP or top-1."""
    return CLASS_COLUMNS[0] if any(keys_of(m) == CLASS_KEYS for m in metrics) else COLUMNS[0]


def found_by(*metrics: dict[str, Any] | None) -> str:
    """Name the outputs of a model of this task, in words: detections or scores."""
    return 'detections' if title_of(*metrics) == COLUMNS[0] else 'scores'


def figures(metrics: dict[str, Any] | None, masks: bool = False) -> list[str]:
    """Write AP, AP50, P and R of plain metrics, or the figures of a classifier, with four digits; '-' for a missing figure.

    Args:
        metrics: plain metrics of boxes, with the metrics of masks under 'mask'.
        masks: add AP, AP50, P and R of masks.
    """
    of_boxes = [f'{metrics[k]:.4f}' if metrics and k in metrics else '-' for k in keys_of(metrics)]
    return of_boxes + figures((metrics or {}).get('mask')) if masks else of_boxes


def differences(
    metrics: dict[str, Any] | None, reference: dict[str, Any] | None, masks: bool = False, chance: str = ''
) -> list[str]:
    """Write the differences of two models in points (0.01), under the columns of `figures`; '-' for a missing figure.

    Args:
        metrics: plain metrics of a model.
        reference: plain metrics of the model that it is compared with.
        masks: add the figures of masks.
        chance: of the difference of AP, such as ' ± 0.58'; see chance.py.
    """
    after, before = metrics or {}, reference or {}
    points = [f'{100 * (after[k] - before[k]):+.2f}' if k in after and k in before else '-' for k in keys_of(after)]
    points = ['+0.00' if p == '-0.00' else p for p in points]
    points[0] += chance
    if not masks:
        return points
    return points + differences(after.get('mask'), before.get('mask'))


def columns(*metrics: dict[str, Any] | None) -> tuple[tuple[str, ...], bool]:
    """Choose the columns of a table of `figures`.

    Returns:
        The titles of the columns, and whether any of the plain metrics has masks.
    """
    masks = any(m and m.get('mask') for m in metrics)
    if any(keys_of(m) == CLASS_KEYS for m in metrics):
        return CLASS_COLUMNS, False
    return COLUMNS + MASK_COLUMNS * masks, masks


def models_table(names: Sequence[str], models: Sequence[dict[str, Any] | None], chances: Sequence[str]) -> str:
    """Write plain metrics of several models as a Markdown table, and the differences of each from the first in points.

    Args:
        names: of the models.
        models: plain metrics of each.
        chances: chance of the difference of AP, of each but the first; see `differences`.
    """
    titles, masks = columns(*models)
    rows = [(name, *figures(m, masks)) for name, m in zip(names, models)]
    for name, m, chance in zip(names[1:], models[1:], chances):
        rows.append((f'{name} - {names[0]}, points', *differences(m, models[0], masks, chance)))
    return markdown_table(('model', *titles), rows)


def merit(metrics: dict[str, Any]) -> float:
    """Compute the number by which models are chosen: AP, the mean of the AP of boxes and of masks, or top-1."""
    first = metrics[keys_of(metrics)[0]]
    return (first + metrics['mask']['ap']) / 2 if 'mask' in metrics else first


def class_table(metrics: dict[str, Any]) -> str:
    """Write plain metrics as a Markdown table: all classes together, then each class."""
    titles, masks = columns(metrics)
    if keys_of(metrics) == CLASS_KEYS:
        rows = [['all', metrics['images'], *figures(metrics)]]
        rows += [[c['name'], c['images'], *figures(c)] for c in metrics['per_class']]
        return markdown_table(('class', 'images', *titles), rows)
    rows = [['all', metrics['instances'], *figures(metrics, masks)]]
    rows += [[c['name'], c['instances'], *figures(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', 'instances', *titles), rows)
