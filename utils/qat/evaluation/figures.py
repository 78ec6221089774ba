"""Plain metrics as figures in a table, and as the one number that models are chosen by."""

from utils.qat.core.markdown import markdown_table

COLUMNS = ('AP', 'AP50', 'P', 'R')
MASK_COLUMNS = tuple(f'mask {c}' for c in COLUMNS)


def figures(metrics, masks=False):
    """AP, AP50, P and R of plain metrics, to four digits; '-' where there are none. With `masks` those of masks as well."""
    of_boxes = [f'{metrics[k]:.4f}' if metrics and k in metrics else '-' for k in ('ap', 'ap50', 'precision', 'recall')]
    return of_boxes + figures((metrics or {}).get('mask')) if masks else of_boxes


def columns(*metrics):
    """(titles of the columns of `figures`, whether some of the plain metrics have masks)."""
    masks = any(m and m.get('mask') for m in metrics)
    return COLUMNS + MASK_COLUMNS * masks, masks


def merit(metrics):
    """What models are chosen by: AP of plain metrics, of a segmentation model the mean of that of boxes and of masks."""
    return (metrics['ap'] + metrics['mask']['ap']) / 2 if 'mask' in metrics else metrics['ap']


def class_table(metrics):
    """Metrics over all classes and per class."""
    titles, masks = columns(metrics)
    rows = [['all', metrics['instances'], *figures(metrics, masks)]]
    rows += [[c['name'], c['instances'], *figures(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', 'instances', *titles), rows)
