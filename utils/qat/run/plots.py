"""Pictures of a run: AP or top-1 of every epoch, distortion of every unit."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.core.files import write_picture
from utils.qat.core.text import literal
from utils.qat.evaluation.score_tables import merit_title, score_keys, task_in

NARROWEST = 0.02  # of the AP axis, so that differences below two points do not look like a collapse


def plot_ap(path: Path, report: dict[str, Any]) -> None:
    """Draw AP, or top-1, of every fine-tuning epoch, with lines for the float and the PTQ model.

    A band around the float model is as wide as chance: inside it an epoch differs from the float model no more than by the choice
    of images.

    Args:
        path: the picture to write.
        report: report of a `quantize` run with at least one epoch.
    """
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    epochs, best = report['epochs'], report['best']
    merit, title = score_keys(epochs[0])[0], merit_title(epochs[0])
    parts = {
        '': ('tab:blue', lambda metrics: metrics),
        'masks ': ('tab:orange', lambda metrics: metrics.get('mask', {})),
    }
    for text, (colour, part) in parts.items():
        of = {key: part(report[key]).get(merit) for key in ('origin', 'ptq') if report[key]}
        if not all(merit in part(e) for e in epochs):
            continue
        if of.get('origin') is not None and 'against_float' in epochs[0]:
            chance = max(part(e['against_float'])['chance'] for e in epochs)
            label = f'{text}within chance of float, ± {100 * chance:.2f} points'
            axes.axhspan(
                of['origin'] - chance, of['origin'] + chance, color=colour, alpha=0.12, linewidth=0, label=label
            )
        for key, name, style in (('origin', 'float', '-'), ('ptq', 'PTQ', '--')):
            if of.get(key) is not None:  # not with --no-eval-origin, --no-eval-ptq
                axes.axhline(of[key], linestyle=style, color=colour, alpha=0.6, label=f'{text}{name} {of[key]:.4f}')
        axes.plot(
            [e['epoch'] for e in epochs], [part(e)[merit] for e in epochs], 'o-', color=colour, label=f'{text}QAT'
        )
    if best:
        axes.plot(
            best['epoch'],
            best[merit],
            'o',
            markersize=11,
            markerfacecolor='none',
            color='tab:green',
            label=f'best {best[merit]:.4f}' + ' (PTQ)' * (not best['epoch']),
        )
    low, high = axes.get_ylim()
    wider = max(0, NARROWEST - (high - low)) / 2
    axes.set_ylim(low - wider, high + wider)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel='epoch',
        ylabel='AP (IoU 0.50:0.95)' if title == 'AP' else f'{title} accuracy',
        title=f'Fine-tuning with quantization, scored on {report["images"][report["chosen_on"]]} images ({report["chosen_on"]})',
    )
    axes.grid(alpha=0.3)
    figure.legend(loc='outside right center', fontsize=8)
    write_picture(figure, path)


def plot_sensitivity(path: Path, summary: dict[str, Any]) -> None:
    """Draw the distortion of each unit as bars in the order of the network, coloured by kind, and of all in INT8 as a line.

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
        ylabel=f'divergence of the {task_in(summary["int8"]).found}',
        title=f'{literal(summary["weights"])}: each unit alone in INT8, {summary["images"]} images',
    )
    axes.grid(axis='y', alpha=0.3)
    figure.legend(loc='outside right center', fontsize=8)
    write_picture(figure, path)
