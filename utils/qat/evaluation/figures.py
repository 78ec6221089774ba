"""Plain metrics as figures of a table, and as the one number by which models are chosen."""

from typing import Any

from utils.qat.core.markdown import markdown_table

COLUMNS = ('AP', 'AP50', 'P', 'R')
KEYS = 'ap', 'ap50', 'precision', 'recall'  # of plain metrics, in this order
MASK_COLUMNS = tuple(f'mask {c}' for c in COLUMNS)


def figures(metrics: dict[str, Any] | None, masks: bool = False) -> list[str]:
    """Write AP, AP50, P and R of plain metrics with four digits; '-' for a missing figure.

    Args:
        metrics: plain metrics of boxes, with the metrics of masks under 'mask'.
        masks: add AP, AP50, P and R of masks.
    """
    of_boxes = [f'{metrics[k]:.4f}' if metrics and k in metrics else '-' for k in KEYS]
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
    points = [f'{100 * (after[k] - before[k]):+.2f}' if k in after and k in before else '-' for k in KEYS]
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
    return COLUMNS + MASK_COLUMNS * masks, masks


def merit(metrics: dict[str, Any]) -> float:
    """Compute the number by which models are chosen: AP, or the mean of the AP of boxes and of masks."""
    return (metrics['ap'] + metrics['mask']['ap']) / 2 if 'mask' in metrics else metrics['ap']


def class_table(metrics: dict[str, Any]) -> str:
    """Write plain metrics as a Markdown table: all classes together, then each class."""
    titles, masks = columns(metrics)
    rows = [['all', metrics['instances'], *figures(metrics, masks)]]
    rows += [[c['name'], c['instances'], *figures(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', 'instances', *titles), rows)
