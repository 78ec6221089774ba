"""Pictures of an evaluation: AP of each class, and the agreement of models rank by rank."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.core.files import write_picture
from utils.qat.core.text import literal
from utils.qat.evaluation.score_tables import merit_title, score_keys

MOST = 80  # classes in a picture


def bar_places(places: Iterable[float], model: int, models: int) -> tuple[list[float], float]:
    """Return the centres of one model's bars at each of `places`, which are 1 apart, and the width of a bar."""
    width = 0.8 / models
    return [place + (model - (models - 1) / 2) * width for place in places], width


def plot_classes(path: Path, models: dict[str, dict[str, Any]]) -> None:
    """Draw the AP (for a classifier the top-1 accuracy) of each class and model, and the first model's difference."""
    key, *_ = score_keys(next(iter(models.values())))
    of = {'boxes': 'AP of boxes (IoU 0.50:0.95)', 'masks': 'AP of masks (IoU 0.50:0.95)', 'classes': 'top-1 accuracy'}
    whole = 'boxes' if key == 'ap' else 'classes'
    parts = {whole: lambda row: row.get(key)}
    if any('mask' in metrics for metrics in models.values()):
        parts['masks'] = lambda row: (row.get('mask') or {}).get('ap')
    # of the last model that has the class
    ap_of = {row['name']: row.get(key) or 0 for metrics in models.values() for row in metrics['per_class']}
    worst = sorted(ap_of, key=ap_of.__getitem__)[:MOST]
    names = [name for name in ap_of if name in worst]
    panels = len(parts) * (1 + (len(models) > 1))
    figure = Figure(figsize=(4 + 3 * panels, 1.5 + (0.12 + 0.12 * len(models)) * len(names)), layout='constrained')
    row_of_axes = iter(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    first, *others = models
    for part, ap in parts.items():
        axes = next(row_of_axes)
        found = {
            model: {row['name']: ap(row) or 0 for row in metrics['per_class']} for model, metrics in models.items()
        }
        for i, (model, metrics) in enumerate(models.items()):
            places, height = bar_places(range(len(names)), i, len(models))
            mean = (metrics if part == whole else metrics['mask'])[key]
            bars, label = [found[model].get(name, 0) for name in names], literal(f'{model} {mean:.4f}')
            axes.barh(places, bars, height, color=f'C{i}', label=label)
            axes.axvline(mean, linestyle='--', color=f'C{i}', linewidth=1)
        axes.set(xlim=(0, 1), xlabel=f'{of[part]}; dashed: {"mean" if key == "ap" else "all images"}')
        small = {'frameon': False, 'fontsize': 8, 'handlelength': 1, 'columnspacing': 1}
        axes.legend(loc='lower left', bbox_to_anchor=(-0.1, 1), ncols=len(models), **small)
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


def plot_ranks(path: Path, comparisons: dict[str, dict[str, Any]]) -> None:
    """Draw the differences of models from the first at each rank: score errors, and how often the models disagree.

    For detectors the full colour of a bar is the share without a match at any rank. The rest swapped ranks with a nearly
    equal score.
    """
    detectors = all('boxes' in c for c in comparisons.values())
    what = 'detection' if detectors else 'class'
    figure = Figure(figsize=(11, 3.8), layout='constrained')
    left, right = figure.subplots(1, 2)
    for i, (name, comparison) in enumerate(comparisons.items()):
        ranks, top = comparison['ranks'], comparison['top']
        places, width = bar_places([r['rank'] for r in ranks], i, len(comparisons))
        label = literal(name)
        if detectors:
            label += f': {comparison["matched"] or 0:.1%} of the top {top} have their match at any rank'
        left.bar(places, [r['score_error'] or 0 for r in ranks], width, color=f'C{i}', label=label)
        right.bar(places, [r['disagreement'] or 0 for r in ranks], width, color=f'C{i}', alpha=0.35 if detectors else 1)
        if detectors:
            right.bar(places, [r['unmatched'] or 0 for r in ranks], width, color=f'C{i}')
    left.set_ylabel('mean difference of score')
    right.set(ylim=(0, 1), ylabel=f'share of images with another {what}' if not detectors else 'share')
    if detectors:
        right.set_title('pale: another detection at this rank; full: no match at any rank', fontsize=9)
    for axes in (left, right):
        axes.set_xlabel(f'rank of the {what}')
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis='y', alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(loc='outside upper center', ncols=1 if detectors else 4, fontsize=8)
    write_picture(figure, path)
