"""Metrics → report.json and a Markdown table. Files are whole at any moment: written aside, then renamed."""
import json
import platform
from importlib import metadata

from utils.qat.errors import atomic

COLUMNS = ('AP', 'AP50', 'P', 'R')
MASK_COLUMNS = tuple(f'mask {c}' for c in COLUMNS)


def write_text(path, text):
    """`path` with `text`, in UTF-8, whole at any moment."""
    with atomic(path) as tmp:
        tmp.write_text(text, encoding='utf-8', errors='backslashreplace')


def write_json(path, content):
    write_text(path, json.dumps(content, indent=2, default=str) + '\n')


def versions():
    """Versions of what decides the numbers."""
    return {'python': platform.python_version(),
            **{p: metadata.version(p) for p in ('torch', 'torchvision', 'numpy', 'pytorch-quantization')}}


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


def points_lost(before, after):
    """AP that plain metrics `after` lack against `before`, in 0..1: of boxes or of masks, whichever is more."""
    parts = [(before, after), *([(before['mask'], after['mask'])] if 'mask' in before else [])]
    return max(old['ap'] - new['ap'] for old, new in parts)


def markdown_table(header, rows):
    """A Markdown table whose columns also align as plain text; the first column is left-aligned, the rest right."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row):
        return '| ' + ' | '.join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) + ' |'

    rule = '|' + '|'.join('-' * (w + 1) + ('-' if i == 0 else ':') for i, w in enumerate(widths)) + '|'
    return '\n'.join([line(cells[0]), rule, *map(line, cells[1:])])


def class_table(metrics):
    """Metrics over all classes and per class."""
    titles, masks = columns(metrics)
    rows = [['all', metrics['instances'], *figures(metrics, masks)]]
    rows += [[c['name'], c['instances'], *figures(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', 'instances', *titles), rows)


def comparison_tables(comparison, names):
    """A plain Comparison of the models called `names` (reference, other): all predictions, the top detections, AP."""
    def number(value, form='.3g'):
        return '-' if value is None else format(value, form)

    tolerance = f"within rtol {comparison['rtol']:g}, atol {comparison['atol']:g}"
    elements = [(text, number(e['max']), number(e['mean']), number(e['within'], '.2%'))
                for text, e in (('boxes (px)', comparison['boxes']), ('scores', comparison['scores']),
                                ('mask coefficients', comparison['coefficients']), ('prototypes', comparison['prototypes'])) if e]  # none with NMS inside
    ranks = [(r['rank'], r['images'], number(r['score'], '.4f'), number(r['score_error']), number(r['box_error']),
              number(r['disagreement'], '.1%')) for r in comparison['ranks']]
    ranks.append((f"top {comparison['top']}", *['-'] * 4, number(comparison['disagreement'], '.1%')))
    tables = [markdown_table(('all predictions', 'max difference', 'mean difference', tolerance), elements)] * bool(elements)
    tables.append(markdown_table(('rank', 'images', 'score', 'score difference', 'box difference (px)', 'disagreement'), ranks))
    if comparison['reference']:
        titles, masks = columns(comparison['reference'])
        rows = [(name, *figures(comparison[k], masks)) for name, k in zip(names, ('reference', 'other'))]
        tables.append(markdown_table(('model', *titles), rows))
    iou = f", IoU of their masks {number(comparison['matched_mask'])}" if comparison['matched_mask'] is not None else ''
    tables.append(f"matched regardless of rank: {number(comparison['matched'], '.2%')} of the top {comparison['top']} detections of "
                  f"either model; mean difference {number(comparison['matched_score'])} of score, "
                  f"{number(comparison['matched_box'])} px of box{iou}\n(nearly equal scores change places by rounding alone, and "
                  'count as disagreement at both ranks)')
    return '\n\n'.join(tables)


def class_comparison_tables(comparison, names):
    """A plain ClassComparison of the classifiers called `names` (reference, other): all scores, the highest, accuracy."""
    e = comparison['scores']
    ranks = [(r['rank'], f"{r['score']:.4f}", f"{r['score_error']:.3g}", f"{r['disagreement']:.1%}") for r in comparison['ranks']]
    ranks.append((f"top {comparison['top']}", '-', '-', f"{comparison['disagreement']:.1%}"))
    tables = [markdown_table(('all scores', 'max difference', 'mean difference', f"within rtol {comparison['rtol']:g}, atol {comparison['atol']:g}"),
                             [('scores', f"{e['max']:.3g}", f"{e['mean']:.3g}", f"{e['within']:.2%}")]),
              markdown_table(('rank', 'score', 'score difference', 'disagreement'), ranks)]
    if comparison['reference']:
        rows = [(name, *(f'{comparison[k][top]:.4f}' for top in ('top1', 'top5'))) for name, k in zip(names, ('reference', 'other'))]
        tables.append(markdown_table(('model', 'top-1', 'top-5'), rows))
    return '\n\n'.join(tables)


def noise(metrics, parts):
    """SQNR of the `parts` of the head's outputs, in dB, of plain metrics; '-' where there is none."""
    sqnr = (metrics or {}).get('sqnr', {})
    return [f'{sqnr[part]:.1f}' if part in sqnr else '-' for part in parts]


def run_table(report):
    """One row per stage of a `quantize` run: float, PTQ, every epoch, best. dB: models/quantize/sqnr.py. With --val-split two tables, on which images each."""
    stages = [report['origin'], report['ptq'], *report['epochs']]
    titles, masks = columns(*stages)
    parts = next((list(s['sqnr']) for s in stages if s and 'sqnr' in s), ['boxes', 'classes'])

    def row(what, metrics, *loss):
        return [what, *loss, *figures(metrics, masks), *noise(metrics, parts)]

    rows = [row('float', report['origin'], ''), row('PTQ', report['ptq'], '')]
    rows += [row(f"QAT epoch {e['epoch']}", e, f"{e['loss']:.3g}") for e in report['epochs']]
    if report['best']:
        which = f"epoch {report['best']['epoch']}" if report['best']['epoch'] else 'PTQ'
        rows.append(row(f'best ({which})', report['best'], ''))
    titles = (*titles, *(f'{part} dB' for part in parts))
    table = markdown_table(('model', 'loss', *titles), rows)
    if report['chosen_on'] == 'val':
        return table
    on_val = [row(what, (report['val'] or {}).get(key)) for key, what in (('origin', 'float'), ('ptq', 'PTQ'), ('best', 'best'))]
    return (f"on {report['images']['held out']} images held out of train, which choose the best epoch and name the files:\n\n{table}\n\n"
            f"on the {report['images']['val']} images of val, which chose nothing:\n\n{markdown_table(('model', *titles), on_val)}")


def write_report(folder, report):
    """report.json and report.md of a `quantize` run."""
    write_json(folder / 'report.json', report)
    write_text(folder / 'report.md', f"# {report['settings']['weights']}\n\n{run_table(report)}\n\n![AP per epoch](ap.png)\n")


def plan(layers, swapped, kept_float, groups):
    """What `quantize --dry-run` prints: every layer of the network, what stays float, and which quantizers share a scale.

    layers: (index, class) of the network's layers. swapped: path → kind of block quantized. kept_float: path → reason.
    groups: lists of quantizer paths.
    """
    def inside(index, paths):
        return [p for p in paths if p.split('.')[1] == str(index)]

    def counted(kinds):
        return ', '.join(f'{kinds.count(k)} {k}' for k in sorted(set(kinds))) or '-'

    rows = [[f'{i} {name}', counted([swapped[p] for p in inside(i, swapped)]), len(inside(i, kept_float)) or '-'] for i, name in layers]
    shared = [[number, len(group), '  '.join(group)] for number, group in enumerate(groups, 1) if len(group) > 1]
    return '\n\n'.join((
        markdown_table(('layer', 'INT8', 'float convolutions'), rows),
        markdown_table(('stays float', 'reason'), kept_float.items()),
        f'quantizers that share a scale ({len(groups) - len(shared)} more have one of their own):\n'
        + ('\n'.join(f'  scale {n} ({size}): {paths}' for n, size, paths in shared) or '  none')))
