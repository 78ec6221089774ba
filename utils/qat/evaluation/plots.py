"""Pictures of a run. Matplotlib without pyplot: no global state, no display needed."""
import warnings

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.core.errors import atomic


MOST = 80  # classes in a picture


def literal(text):
    """`text` for Matplotlib, which takes $ for the beginning of a formula, and leaves labels that begin with _ out of a legend."""
    text = text.replace('$', r'\$')
    return f' {text}' if text.startswith('_') else text


def _save(figure, path):
    with atomic(path) as tmp, warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing from')  # of a class name in a script that its font lacks
        figure.savefig(tmp, dpi=120)


def plot_ap(path, report):
    """AP of every fine-tuning epoch, with the float and the PTQ model as lines to compare with."""
    figure = Figure(figsize=(7, 4), layout='constrained')
    axes = figure.subplots()
    for key, label, style in (('origin', 'float', '-'), ('ptq', 'PTQ', '--')):
        if report[key] and 'ap' in report[key]:  # not with --no-eval-origin, --no-eval-ptq
            axes.axhline(report[key]['ap'], linestyle=style, color='0.4', label=f"{label} {report[key]['ap']:.4f}")
    epochs = [e['epoch'] for e in report['epochs']]
    axes.plot(epochs, [e['ap'] for e in report['epochs']], 'o-', color='tab:blue', label='QAT')
    if 'mask' in report['ptq'] or 'mask' in report['epochs'][0]:
        for key, style in (('origin', '-'), ('ptq', '--')):
            if report[key] and 'mask' in report[key]:
                axes.axhline(report[key]['mask']['ap'], linestyle=style, color='tab:orange', alpha=0.6)
        axes.plot(epochs, [e['mask']['ap'] for e in report['epochs']], 's-', color='tab:orange', label='QAT, masks (lines: float, PTQ)')
    if report['best']:
        axes.plot(report['best']['epoch'], report['best']['ap'], 'o', markersize=11, markerfacecolor='none', color='tab:green',
                  label=f"best {report['best']['ap']:.4f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel='epoch', ylabel='AP (IoU 0.50:0.95)',
             title=f"Fine-tuning with quantization, scored on {report['images'][report['chosen_on']]} images ({report['chosen_on']})")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def plot_sensitivity(path, summary):
    """Distortion of each unit as bars in the order of the network, coloured by kind; all in INT8 as a line."""
    units = summary['units']
    kinds = sorted({u['kind'] for u in units})
    colours = {kind: f'C{i}' for i, kind in enumerate(kinds)}
    figure = Figure(figsize=(max(7, 0.16 * len(units) + 2), 5), layout='constrained')
    axes = figure.subplots()
    for kind in kinds:
        places = [i for i, u in enumerate(units) if u['kind'] == kind]
        axes.bar(places, [max(units[i]['distortion'], 1e-9) for i in places], color=colours[kind], label=kind)
    axes.axhline(summary['int8']['divergence'], linestyle='--', color='0.4', label='all in INT8')
    axes.set_xticks(range(len(units)), [u['unit'].removeprefix('model.') for u in units], rotation=90, fontsize=7)
    axes.set(yscale='log', xlim=(-1, len(units)), xlabel='unit', ylabel='divergence of the detections',
             title=f"{literal(summary['weights'])}: each unit alone in INT8, {summary['images']} images")
    axes.grid(axis='y', alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    _save(figure, path)


def plot_classes(path, models):
    """AP of each class as bars, of boxes and beside them of masks, where there are some. models: name → plain metrics."""
    parts = {'boxes': lambda row: row.get('ap')}
    if any('mask' in metrics for metrics in models.values()):
        parts['masks'] = lambda row: (row.get('mask') or {}).get('ap')
    ap_of = {row['name']: row.get('ap') or 0 for metrics in models.values() for row in metrics['per_class']}  # of the last model
    worst = sorted(ap_of, key=ap_of.get)[:MOST]
    names = [name for name in ap_of if name in worst]
    figure = Figure(figsize=(4 + 3 * len(parts), 1.5 + (0.12 + 0.12 * len(models)) * len(names)), layout='constrained')
    height = 0.8 / len(models)
    for axes, (part, ap) in zip(figure.subplots(1, len(parts), sharey=True, squeeze=False)[0], parts.items()):
        for i, (model, metrics) in enumerate(models.items()):
            rows = {row['name']: ap(row) for row in metrics['per_class']}
            places = [n + (i - (len(models) - 1) / 2) * height for n in range(len(names))]
            mean = (metrics if part == 'boxes' else metrics['mask'])['ap']
            axes.barh(places, [rows.get(name) or 0 for name in names], height, color=f'C{i}', label=literal(f'{model} {mean:.4f}'))
            axes.axvline(mean, linestyle='--', color=f'C{i}', linewidth=1)
        axes.set_yticks(range(len(names)), [literal(name) for name in names])
        axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xlabel=f'AP of {part} (IoU 0.50:0.95); dashed: mean')
        axes.grid(axis='x', alpha=0.3)
        axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=len(models), frameon=False)
    if len(names) < len(ap_of):
        figure.suptitle(f'the {MOST} classes of lowest AP, of {len(ap_of)}')
    _save(figure, path)


def plot_ranks(path, comparison):
    """How far two models are apart at each rank: their scores, and how often they disagree. comparison: plain."""
    ranks = comparison['ranks']
    figure = Figure(figsize=(9, 3.5), layout='constrained')
    shown = {'score_error': 'mean difference of score', 'disagreement': 'share of images that disagree'}
    for axes, (key, what) in zip(figure.subplots(1, 2), shown.items()):
        axes.bar([r['rank'] for r in ranks], [r[key] or 0 for r in ranks])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel='rank of the detection' if 'boxes' in comparison else 'rank of the class', ylabel=what)
        axes.grid(axis='y', alpha=0.3)
    _save(figure, path)
