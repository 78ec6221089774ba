"""Pictures of an evaluation: AP of each class, and the agreement of models rank by rank."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.core.picture import literal, save

MOST = 80  # classes in a picture


def plot_classes(path: Path, models: dict[str, dict[str, Any]]) -> None:
    """Draw the AP of each class as bars, of boxes and, if there are any, of masks; and beside it what the first model has more or less.

    Args:
        path: the picture to write.
        models: name of each model → its plain metrics.
    """
    parts = {'boxes': lambda row: row.get('ap')}
    if any('mask' in metrics for metrics in models.values()):
        parts['masks'] = lambda row: (row.get('mask') or {}).get('ap')
    # of the last model that has the class
    ap_of = {row['name']: row.get('ap') or 0 for metrics in models.values() for row in metrics['per_class']}
    worst = sorted(ap_of, key=ap_of.__getitem__)[:MOST]
    names = [name for name in ap_of if name in worst]
    panels = len(parts) * (1 + (len(models) > 1))
    figure = Figure(figsize=(4 + 3 * panels, 1.5 + (0.12 + 0.12 * len(models)) * len(names)), layout='constrained')
    row_of_axes = iter(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    height, (first, *others) = 0.8 / len(models), models
    for part, ap in parts.items():
        axes = next(row_of_axes)
        found = {
            model: {row['name']: ap(row) or 0 for row in metrics['per_class']} for model, metrics in models.items()
        }
        for i, (model, metrics) in enumerate(models.items()):
            places = [n + (i - (len(models) - 1) / 2) * height for n in range(len(names))]
            mean = (metrics if part == 'boxes' else metrics['mask'])['ap']
            bars, label = [found[model].get(name, 0) for name in names], literal(f'{model} {mean:.4f}')
            axes.barh(places, bars, height, color=f'C{i}', label=label)
            axes.axvline(mean, linestyle='--', color=f'C{i}', linewidth=1)
        axes.set(xlim=(0, 1), xlabel=f'AP of {part} (IoU 0.50:0.95); dashed: mean')
        axes.legend(
            loc='lower left',
            bbox_to_anchor=(-0.1, 1),
            ncols=len(models),
            frameon=False,
            fontsize=8,
            handlelength=1,
            columnspacing=1,
        )
        panel = [axes]
        if others:
            panel.append(next(row_of_axes))
            for i, model in enumerate(others, 1):
                places = [n + (i - len(others) / 2 - 0.5) * 0.8 / len(others) for n in range(len(names))]
                points = [100 * (found[model].get(name, 0) - found[first].get(name, 0)) for name in names]
                panel[1].barh(places, points, 0.8 / len(others), color=f'C{i}')
            widest = max(1.0, *map(abs, panel[1].get_xlim()))
            panel[1].set(xlim=(-widest, widest), xlabel=literal(f'AP of {part} less that of {first}, points'))
            panel[1].xaxis.set_major_locator(MaxNLocator(5))
            panel[1].axvline(0, color='0.4', linewidth=1)
        for each in panel:
            each.set_yticks(range(len(names)), [literal(name) for name in names])
            each.set_ylim(len(names) - 0.5, -0.5)
            each.grid(axis='x', alpha=0.3)
            each.set_axisbelow(True)
    if len(names) < len(ap_of):
        figure.suptitle(f'the {MOST} classes of lowest AP, of {len(ap_of)}')
    save(figure, path)


def plot_ranks(path: Path, comparisons: dict[str, dict[str, Any]]) -> None:
    """Draw the differences of models from the first: of scores at each rank, how often they disagree there, and what matches.

    Of detectors the third panel has the share of detections that have a match at any rank: nearly equal scores change places by
    rounding alone.

    Args:
        path: the picture to write.
        comparisons: name of each other model → plain values of a Comparison or a ClassComparison, with ranks.
    """
    detectors = all('boxes' in c for c in comparisons.values())
    figure = Figure(figsize=(13 if detectors else 9, 3.8), layout='constrained')
    panels = figure.subplots(1, 3 if detectors else 2, width_ratios=[2, 2, 1.4][: 3 if detectors else 2])
    shown = {'score_error': 'mean difference of score', 'disagreement': 'share of images that disagree'}
    width = 0.8 / len(comparisons)
    for axes, (key, what) in zip(panels, shown.items()):
        for i, (name, comparison) in enumerate(comparisons.items()):
            places = [r['rank'] + (i - (len(comparisons) - 1) / 2) * width for r in comparison['ranks']]
            axes.bar(places, [r[key] or 0 for r in comparison['ranks']], width, label=literal(name))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel='rank of the detection' if detectors else 'rank of the class', ylabel=what)
        axes.grid(axis='y', alpha=0.3)
        axes.set_axisbelow(True)
    panels[1].set_ylim(0, 1)
    if detectors:
        axes = panels[2]
        for i, (name, comparison) in enumerate(comparisons.items()):
            share = comparison['matched'] or 0
            axes.bar(i, share, color=f'C{i}')
            axes.text(i, share, f'{share:.1%}', ha='center', va='bottom', fontsize=8)
        axes.set_xticks([])
        axes.set(ylim=(0, 1.1), ylabel='share with a match at any rank', xlabel='same class, IoU at least 0.9')
        axes.grid(axis='y', alpha=0.3)
        axes.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper center', ncols=min(4, len(labels)), fontsize=8)
    save(figure, path)
