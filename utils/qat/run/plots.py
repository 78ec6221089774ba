"""Pictures of a run: AP of every epoch, distortion of every unit."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.core.picture import literal, save


def plot_ap(path: Path, report: dict[str, Any]) -> None:
    """Draw AP of every fine-tuning epoch, with lines for the float and the PTQ model.

    Args:
        path: the picture to write.
        report: report of a `quantize` run with at least one epoch.
    """
    figure = Figure(figsize=(7, 4), layout='constrained')
    axes = figure.subplots()
    for key, label, style in (('origin', 'float', '-'), ('ptq', 'PTQ', '--')):
        if report[key] and 'ap' in report[key]:  # not with --no-eval-origin, --no-eval-ptq
            axes.axhline(report[key]['ap'], linestyle=style, color='0.4', label=f'{label} {report[key]["ap"]:.4f}')
    epochs = [e['epoch'] for e in report['epochs']]
    axes.plot(epochs, [e['ap'] for e in report['epochs']], 'o-', color='tab:blue', label='QAT')
    if 'mask' in report['ptq'] or 'mask' in report['epochs'][0]:
        for key, style in (('origin', '-'), ('ptq', '--')):
            if report[key] and 'mask' in report[key]:
                axes.axhline(report[key]['mask']['ap'], linestyle=style, color='tab:orange', alpha=0.6)
        axes.plot(
            epochs,
            [e['mask']['ap'] for e in report['epochs']],
            's-',
            color='tab:orange',
            label='QAT, masks (lines: float, PTQ)',
        )
    if report['best']:
        axes.plot(
            report['best']['epoch'],
            report['best']['ap'],
            'o',
            markersize=11,
            markerfacecolor='none',
            color='tab:green',
            label=f'best {report["best"]["ap"]:.4f}',
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel='epoch',
        ylabel='AP (IoU 0.50:0.95)',
        title=f'Fine-tuning with quantization, scored on {report["images"][report["chosen_on"]]} images ({report["chosen_on"]})',
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def plot_sensitivity(path: Path, summary: dict[str, Any]) -> None:
    """Draw the distortion of each unit as bars in the order of the network, coloured by kind; all in INT8 is a line.

    Args:
        path: the picture to write.
        summary: a sensitivity summary, see sensitivity_summary.py.
    """
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
    axes.set(
        yscale='log',
        xlim=(-1, len(units)),
        xlabel='unit',
        ylabel='divergence of the detections',
        title=f'{literal(summary["weights"])}: each unit alone in INT8, {summary["images"]} images',
    )
    axes.grid(axis='y', alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    save(figure, path)
