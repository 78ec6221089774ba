"""A `quantize` run → report.json, report.md and its pictures; and the tables of --dry-run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import closing, typed_words
from utils.qat.config.tables import TARGETS
from utils.qat.core.command import export_command, repeated
from utils.qat.core.files import write_document, write_json, write_picture
from utils.qat.core.machine import machine_table
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import code, escaped, image, link, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, boxes_and_masks, in_points, in_words, points_lost, within_chance
from utils.qat.evaluation.score_tables import (
    difference_cells,
    finds_nothing,
    is_scored,
    merit_title,
    plot_classes,
    score_cells,
    score_keys,
    score_titles,
    task_in,
)
from utils.qat.run.state import LAST

NARROWEST = 0.02  # of the AP axis, so that differences below two points do not look like a collapse


def plot_ap(path: Path, report: dict[str, Any]) -> None:
    """Draw AP, or top-1, of every fine-tuning epoch (one at least), with lines for the float and the PTQ model.

    A band around the float model is as wide as chance: inside it an epoch differs from the float model no more than by the choice
    of images.
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


def sqnr_cells(metrics: dict[str, Any] | None, parts: Iterable[str]) -> list[str]:
    """Format the SQNR of each of the `parts` of the head's outputs, in dB; '-' for a part without SQNR."""
    sqnr = (metrics or {}).get('sqnr', {})
    return [f'{sqnr[part]:.1f}' if part in sqnr else '-' for part in parts]


def against_float_cells(metrics: dict[str, Any] | None, masks: bool) -> list[str]:
    """Format a model's AP difference from the float model in points, with chance; '-' if unknown. masks: for two columns."""
    found = (metrics or {}).get('against_float')
    return [in_points(part) for part in (found, found.get('mask')) if part] if found else ['-'] * (1 + masks)


def mean_of(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute the mean of each metric over several models."""
    return {
        key: mean_of([stage[key] for stage in stages])
        if type(value) is dict
        else sum(stage[key] for stage in stages) / len(stages)
        for key, value in stages[0].items()
        if type(value) in (int, float, dict)
    }


def run_table(report: dict[str, Any], brief: bool = False) -> str:
    """Format the models of a `quantize` run as a Markdown table: float, PTQ, every epoch, the mean of the last, best; '' if none is scored.

    brief: without the columns in dB, for which see models/quantize/calibration/divergence.py. With --val-split there are two tables, each
    with its images.
    """
    stages = [report['origin'], report.get('adapted'), report['ptq'], *report['epochs']]
    if not any(map(is_scored, stages)):
        return ''
    titles, masks = score_titles(*stages)
    title = merit_title(*stages)
    outputs = [] if brief else next((list(s['sqnr']) for s in stages if s and 'sqnr' in s), ['boxes', 'classes'])

    def row(what: str, metrics: dict[str, Any] | None, *loss: str) -> list[str]:
        return [
            what,
            *loss,
            *score_cells(metrics, masks),
            *against_float_cells(metrics, masks),
            *sqnr_cells(metrics, outputs),
        ]

    rows = [row('float', report['origin'], ''), row('PTQ', report['ptq'], '')]
    if report.get('adapted'):
        exchanged, loss = f'float with {report["settings"]["activation"]}', report['adapted']['loss']
        rows.insert(1, row(exchanged, report['adapted'], '' if loss is None else f'{loss:.3g}'))
    rows += [row(f'QAT epoch {e["epoch"]}', e, f'{e["loss"]:.3g}') for e in report['epochs']]
    if len(report['epochs']) >= LAST:
        last = {**mean_of(report['epochs'][-LAST:]), 'against_float': report['last_epochs']}
        rows.append(row(f'mean of the last {LAST} epochs', last, ''))
    if report['best']:
        which = f'epoch {report["best"]["epoch"]}' if report['best']['epoch'] else 'PTQ'
        rows.append(row(f'best ({which})', report['best'], ''))

    def difference(what: str, metrics: dict[str, Any], origin: dict[str, Any], *loss: str) -> list[str]:
        cells = difference_cells(metrics, origin, masks)
        return [f'{what} - float, points', *loss, *cells, *against_float_cells(metrics, masks), *['-'] * len(outputs)]

    for name, metrics in (('PTQ', report['ptq']), ('best', report['best'])):
        if report['origin'] and is_scored(metrics):
            rows.append(difference(name, metrics, report['origin'], ''))
    titles = (
        *titles,
        *(f'{title} - float, points', 'mask AP - float, points')[: 1 + masks],
        *(f'{part} dB' for part in outputs),
    )
    table = markdown_table(('model', 'loss', *titles), rows)
    if report['chosen_on'] == 'val':
        return table
    on_val = [
        row(what, (report['val'] or {}).get(key))
        for key, what in (('origin', 'float'), ('ptq', 'PTQ'), ('best', 'best'))
    ]
    val = report['val'] or {}
    if val.get('best') and val.get('origin'):
        on_val.append(difference('best', val['best'], val['origin']))
    return (
        f'on {report["images"]["held out"]} images held out of train, which choose the best epoch and name the files:\n\n{table}\n\n'
        f'on the {report["images"]["val"]} images of val, which chose nothing:\n\n{markdown_table(("model", *titles), on_val)}'
    )


def headline(report: dict[str, Any]) -> str:
    """State in one sentence what INT8 costs and which file is delivered."""
    if not report['ptq']:
        return 'The run is not over: no model is calibrated yet.'
    on_val = (report['val'] or {}).get('best')
    chosen = report['best'] or report['ptq']
    metrics, images = (on_val, 'val') if on_val else (chosen, report['chosen_on'])
    file = f'{DELIVERED} is the model to export'
    if not is_scored(metrics):
        return f'The INT8 model was not scored; {file}.'
    if nothing := finds_nothing(report.get('origin')):
        return f'The float model {nothing}; what INT8 costs is not known.'
    title = merit_title(metrics)
    ap = f'{title} {score_cells(metrics)[0]}' + (f' (masks {metrics["mask"]["ap"]:.4f})' if 'mask' in metrics else '')
    if 'against_float' not in metrics:
        return (
            f'The INT8 model has {ap} on {report["images"][images]} images, and the float model was not scored; {file}.'
        )
    against = metrics['against_float']
    if all(map(within_chance, boxes_and_masks(against))):
        cost = 'INT8 costs nothing that these images show'
    elif points_lost(against) > 0:
        cost = f'INT8 costs {points_lost(against):.2f} points of {title} beyond chance'
    else:
        cost = 'INT8 scores higher than float'
    return f'{cost}: {ap}, {in_words(against, title)}, on {report["images"][images]} images; {file}.'


def conclusions(report: dict[str, Any]) -> list[str]:
    """State how much INT8 and fine-tuning change AP, whether chance explains it, and how the best was chosen."""
    if finds_nothing(report.get('origin')):
        return [headline(report)]
    best = report['best']
    on_val = (report['val'] or {}).get('best')
    against, gain = (on_val or best or report['ptq']).get('against_float'), report['gain']
    images = report['images']['val' if on_val else report['chosen_on']]
    title = merit_title(report['ptq'])
    said = [f'INT8 against float: {in_words(against, title)} on these {images} images.'] if against else []
    if best and not best['epoch']:
        said.append('Fine-tuning did not help: no epoch scores higher than PTQ, which is delivered.')
    elif gain:
        unclear = ': whether it helped is not known' if within_chance(gain) else ''
        said.append(f'Fine-tuning against PTQ: {in_words(gain, title)}{unclear}.')
    if best:
        models = [*report['epochs'], *([report['ptq']] if is_scored(report['ptq']) else [])]
        said.append(
            f'The best is the highest of {len(models)} on the {report["images"][report["chosen_on"]]} images '
            f'({report["chosen_on"]}), so it is higher there than on others.'
        )
    return [*said, f'({EXPLAINED}.)'] if against or gain else said


def export_of_run(folder: Path, report: dict[str, Any]) -> str:
    """Make the command that exports the checkpoint of a finished run to the file of its target."""
    settings = report['settings']
    return export_command(folder / DELIVERED, settings['imgsz'], TARGETS[settings['target']].include)


def calibration_text(calibration: dict[str, Any]) -> str:
    """State how the ranges were chosen, with a table of the compared divergences."""
    found, method = calibration['divergence'], calibration['method']
    chosen = f'Ranges of activations by {method}, {"no bias corrected" if calibration["biases"] == "none" else "biases corrected"}'
    if not found:
        return escaped(f'{chosen}.')
    kept = min(found, key=found.get)
    rows = [(name, f'{value:.5f}', 'chosen' if name == kept else '') for name, value in found.items()]
    return (
        f'{escaped(chosen)}: of the compared calibrations the one whose outputs are closest to those of the float model '
        f'(divergence 0: the same), on images that nothing was fitted to:\n\n{markdown_table(("calibration", "divergence", ""), rows)}'
    )


def _pictures(folder: Path, report: dict[str, Any]) -> list[str]:
    """Draw the pictures for which there is data, and return the Markdown that shows them."""
    shown = []
    if report['epochs']:
        name = f'{score_keys(report["epochs"][0])[0]}.png'  # ap.png or top1.png
        plot_ap(folder / name, report)
        shown.append(image(f'{merit_title(*report["epochs"])} of every epoch', name))
    best = report['best'] if report['best'] and report['best']['epoch'] else None  # else it is PTQ
    stages = {'float': report['origin'], 'PTQ': report['ptq'], 'best': best}
    models = {name: metrics for name, metrics in stages.items() if metrics and metrics.get('per_class')}
    if models:
        plot_classes(folder / 'classes.png', models)
        shown.append(image(f'{merit_title(*models.values())} of each class', 'classes.png'))
    return shown


def write_report(folder: Path, report: dict[str, Any], finished: bool = True) -> None:
    """Write report.json and report.md, and for a finished run its pictures; that of an unfinished one says so, and how to go on."""
    write_json(folder / 'report.json', {**report, 'finished': finished})
    following = export_of_run(folder, report) if finished else repeated('qat.py', 'quantize', '--resume', folder)
    settings = report['settings']
    scored = any(map(is_scored, (report['origin'], report['ptq'], *report['epochs'])))
    seen = f'; scored {task_in(report["origin"], report["ptq"]).seen_as(settings["imgsz"], False)}' if scored else ''
    images = ', '.join(f'{n} of {name}' for name, n in report['images'].items())
    made = [c['file'] for c in (report['best'], report.get('adapted'), report['ptq'], *report['epochs']) if c]
    files = [DELIVERED, *made] if made else []
    write_document(
        folder / 'report.md',
        f'{Path(settings["weights"]).name} in INT8',
        [
            f'**{escaped(("" if finished else "Interrupted, or not over yet. ") + headline(report))}**',
            escaped(f'Images: {images}{seen}. Computed on {report["device"]}.'),
            *([run_table(report), escaped(' '.join(conclusions(report)))] if report['ptq'] and scored else []),
            *(_pictures(folder, report) if finished else []),
            *(['## Calibration', calibration_text(report['calibration'])] if report['calibration'] else []),
            *[escaped(f'Left in float: {", ".join(report["kept_float"])}.')] * bool(report['kept_float']),
            *[escaped(f'Activation functions that stayed: {", ".join(report["kept_activations"])}.')]
            * bool(report.get('kept_activations')),
            *(['## Files', '\n'.join(f'- {link(file)}' for file in files)] if files else []),
            '## Times',
            escaped(', '.join(f'{what} {seconds:.1f} s' for what, seconds in report['times'].items()) or '-'),
            *(['## Machine', machine_table(report['machine'])] if 'machine' in report else []),
            '## Made by',
            code(repeated('qat.py', 'quantize', *typed_words(settings, QuantizeConfig))),
            *closing(settings, QuantizeConfig, report['versions'], following if made else None),
        ],
    )


def dry_run_tables(
    layers: Mapping[str, str],
    swapped: Mapping[str, str],
    kept_float: Mapping[str, str],
    groups: Sequence[Sequence[str]],
) -> tuple[str, str]:
    """Describe a quantization as `quantize --dry-run` prints it.

    `layers` maps path → class, of each layer of the network, `swapped` path → kind, of each quantized block, `kept_float` path →
    reason, of each convolution that stays float. `groups` are quantizers (paths) with one scale. Returns all layers, the float
    convolutions and the number of shared scales; and for --verbose the members of each group.
    """

    def inside(layer: str, paths: Iterable[str]) -> list[str]:
        return [p for p in paths if p == layer or p.startswith(f'{layer}.')]

    def counted(kinds: list[str]) -> str:
        return ', '.join(f'{kinds.count(k)} {k}' for k in sorted(set(kinds))) or '-'

    rows = [
        [
            f'{layer.removeprefix("model.")} {name}',
            counted([swapped[p] for p in inside(layer, swapped)]),
            len(inside(layer, kept_float)) or '-',
        ]
        for layer, name in layers.items()
    ]
    shared = [(number, len(group), '  '.join(group)) for number, group in enumerate(groups, 1) if len(group) > 1]
    tables = (
        markdown_table(('layer', 'INT8', 'float convolutions'), rows),
        markdown_table(('stays float', 'reason'), kept_float.items()),
        f'{sum(size for _, size, _ in shared)} quantizers share {len(shared)} scales, {len(groups) - len(shared)} have one of their own '
        '(--verbose lists them)',
    )
    return '\n\n'.join(tables), '\n'.join(f'  scale {n} ({size}): {paths}' for n, size, paths in shared)
