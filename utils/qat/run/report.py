"""A `quantize` run → report.json, report.md and its pictures; and the tables of --dry-run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import closing, command_words
from utils.qat.config.tables import TARGETS
from utils.qat.config.tasks import Task
from utils.qat.core.command import export_command, repeated
from utils.qat.core.files import write_document, write_json, write_picture
from utils.qat.core.machine import machine_table
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import code, escaped, image, link, markdown_table, number
from utils.qat.evaluation.interval import (
    EXPLAINED,
    Change,
    boxes_and_masks,
    in_points,
    in_words,
    points_lost,
    within_interval,
)
from utils.qat.evaluation.metrics import Metrics, finds_nothing
from utils.qat.evaluation.score_tables import Columns, plot_classes
from utils.qat.run.state import BEST, FLOAT, LAST, PTQ, Calibration, Stage, State

NARROWEST = 0.02  # of the AP axis, so that differences below two points do not look like a collapse


def plot_ap(path: Path, state: State) -> None:
    """Draw AP, or top-1, of every fine-tuning epoch (one at least), with lines for the float and the PTQ model.

    A band around the float model is as wide as the confidence interval: inside it an epoch differs from the float model no more than by the choice
    of images.
    """
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    scored, best = state.scored(), state.best
    (merit, title), masks = state.epochs[0].scores.choosing(), state.epochs[0].scores.mask

    def value(metrics: Metrics | None, part: str) -> float:  # NaN, which is not drawn, for a model without a score
        if not metrics or (part and not metrics.mask):
            return math.nan
        return metrics.mask[merit] if part and metrics.mask else getattr(metrics, merit)

    numbers = [e.epoch or 0 for e in state.epochs]
    for part, colour in (('', 'tab:blue'), *[('masks ', 'tab:orange')] * bool(masks)):
        of = {name: value(scored.get(name), part) for name in (FLOAT, PTQ)}
        against = [e.against_float for e in state.epochs if e.against_float]
        level = of[FLOAT]
        if against and not math.isnan(level):
            half_width = max((change['mask'] if part else change)['chance'] for change in against)
            label = f'{part}confidence interval around float, ± {100 * half_width:.2f} points'
            axes.axhspan(level - half_width, level + half_width, color=colour, alpha=0.12, linewidth=0, label=label)
        for name, style in ((FLOAT, '-'), (PTQ, '--')):
            if not math.isnan(of[name]):  # not with --no-eval-origin, --no-eval-ptq
                axes.axhline(of[name], linestyle=style, color=colour, alpha=0.6, label=f'{part}{name} {of[name]:.4f}')
        axes.plot(numbers, [value(e.metrics, part) for e in state.epochs], 'o-', color=colour, label=f'{part}QAT')
    if best:
        height = value(best.metrics, '')
        label = f'best {height:.4f}' + ' (PTQ)' * (not best.epoch)
        axes.plot(best.epoch or 0, height, 'o', markersize=11, markerfacecolor='none', color='tab:green', label=label)
    low, high = axes.get_ylim()
    wider = max(0, NARROWEST - (high - low)) / 2
    axes.set_ylim(low - wider, high + wider)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(
        xlabel='epoch',
        ylabel='AP (IoU 0.50:0.95)' if title == 'AP' else f'{title} accuracy',
        title=f'Fine-tuning with quantization, scored on {state.images[state.chosen_on]} images ({state.chosen_on})',
    )
    axes.grid(alpha=0.3)
    figure.legend(loc='outside right center', fontsize=8)
    write_picture(figure, path)


class RunTable:
    """The table of the models of a run: their scores, their differences from the float model, and SQNR unless it is `brief`."""

    def __init__(self, state: State, brief: bool) -> None:
        stages = [stage for _, stage in state.models()]
        self.columns = Columns(*(stage.metrics for stage in stages))
        parts = next((list(stage.sqnr) for stage in stages if stage.sqnr), ['boxes', 'classes'])
        self.parts = [] if brief else parts
        against = f'{self.columns.title} - float, points', 'mask AP - float, points'
        self.titles = (
            *self.columns.titles,
            *against[: 1 + self.columns.masks],
            *(f'{part} dB' for part in self.parts),
        )

    def against_float(self, change: Change | None) -> list[str]:
        """Format a difference of AP from the float model in points, with its interval; '-' if unknown."""
        if not change:
            return ['-'] * (1 + self.columns.masks)
        return [in_points(part) for part in boxes_and_masks(change)]

    def row(self, *stages: Stage | None, against: Change | None = None) -> list[str]:
        """Format a model, or the mean of several; `against`: its difference from the float model, where it is not the stage's own."""
        known = [stage for stage in stages if stage] or [Stage()]
        scores = map(_mean, zip(*(self.columns.values(stage.metrics) for stage in known)))
        sqnr = [_mean([(stage.sqnr or {}).get(part) for stage in known]) for part in self.parts]
        decibels = [number(value, '.1f') for value in sqnr]
        return [*map(number, scores), *self.against_float(against or known[0].against_float), *decibels]

    def difference(self, after: Stage, before: Stage) -> list[str]:
        """Format the difference of a model from the float model."""
        points = self.columns.differences(after.metrics, before.metrics)
        return [*points, *self.against_float(after.against_float), *['-'] * len(self.parts)]


def _mean(values: Sequence[float | None]) -> float | None:
    """Compute the mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def run_table(state: State, brief: bool = False) -> str:
    """Format the models of a `quantize` run as a Markdown table: float, PTQ, every epoch, the mean of the last, best; '' if none is scored.

    brief: without the columns in dB, for which see models/quantize/calibration/divergence.py. With --val-split there are two tables, each
    with its images.
    """
    if not state.scored():
        return ''
    table, best, adapted = RunTable(state, brief), state.best, state.adapted

    def loss(stage: Stage) -> str:
        return '' if stage.loss is None else f'{stage.loss:.3g}'

    rows = [['float', '', *table.row(state.origin)]]
    if adapted:
        rows.append([adapted_title(state), loss(adapted), *table.row(adapted)])
    rows.append(['PTQ', '', *table.row(state.ptq)])
    rows += [[f'QAT epoch {e.epoch}', loss(e), *table.row(e)] for e in state.epochs]
    if len(state.epochs) >= LAST:
        mean = table.row(*state.epochs[-LAST:], against=state.last_epochs)
        rows.append([f'mean of the last {LAST} epochs', '', *mean])
    if best:
        rows.append([f'best ({f"epoch {best.epoch}" if best.epoch else "PTQ"})', '', *table.row(best)])
    for name, stage in (('PTQ', state.ptq), ('best', best)):
        if state.origin and stage and stage.metrics:
            rows.append([f'{name} - float, points', '', *table.difference(stage, state.origin)])
    first = markdown_table(('model', 'loss', *table.titles), rows)
    if state.chosen_on == 'val':
        return first
    val = state.val or {}
    on_val = [[what, *table.row(val.get(key))] for key, what in (('origin', 'float'), ('ptq', 'PTQ'), ('best', 'best'))]
    if 'best' in val and 'origin' in val:
        on_val.append(['best - float, points', *table.difference(val['best'], val['origin'])])
    return (
        f'on {state.images["held out"]} images held out of train, which choose the best epoch and name the files:\n\n{first}\n\n'
        f'on the {state.images["val"]} images of val, which chose nothing:\n\n{markdown_table(("model", *table.titles), on_val)}'
    )


def headline(state: State) -> str:
    """State in one sentence what INT8 costs, beside the model that was quantized, and which file is delivered."""
    if not state.ptq:
        return 'The run is not over: no model is calibrated yet.'
    _, stage, images = state.delivered()
    metrics, file = stage.metrics, f'{DELIVERED} is the model to export'
    if not metrics:
        return f'The INT8 model was not scored; {file}.'
    if nothing := finds_nothing(state.scored().get(FLOAT)):
        return f'The float model {nothing}; what INT8 costs is not known.'
    name, title = metrics.choosing()
    ap = f'{title} {getattr(metrics, name):.4f}' + (f' (masks {metrics.mask[name]:.4f})' if metrics.mask else '')
    what, against, beside = 'INT8', stage.against_float, ''
    if state.adapted and state.against_adapted:
        against, beside = state.against_adapted, f'against {adapted_title(state)} '
    elif state.adapted:
        what = f'INT8 with {state.settings["activation"]}'
    if not against:
        return f'The INT8 model has {ap} on {state.images[images]} images, and the float model was not scored; {file}.'
    if all(map(within_interval, boxes_and_masks(against))):
        cost = f'{what} costs nothing that these images show'
    elif points_lost(against) > 0:
        cost = f'{what} costs {points_lost(against):.2f} points of {title}, beyond the confidence interval'
    else:
        cost = f'{what} scores higher than {adapted_title(state) if beside else FLOAT}'
    return f'{cost}: {ap}, {beside}{in_words(against, title)}, on {state.images[images]} images; {file}.'


def adapted_title(state: State) -> str:
    """Name the float model with other activation functions."""
    return f'float with {state.settings["activation"]}'


def conclusions(state: State) -> list[str]:
    """State how much INT8 and fine-tuning change AP, whether beyond the confidence interval, and how the best was chosen."""
    scored, best, gain = state.scored(), state.best, state.gain
    if finds_nothing(scored.get(FLOAT)):
        return [headline(state)]
    _, stage, images = state.delivered()
    against, title, differences = stage.against_float, Columns(*scored.values()).title, {}
    if adapted := (state.val or {}).get('adapted', state.adapted):
        differences[f'{adapted_title(state)} against float'.capitalize()] = adapted.against_float
        differences[f'INT8 against {adapted_title(state)}'] = state.against_adapted
    said = [
        f'{what}: {in_words(change, title)} on these {state.images[images]} images.'
        for what, change in {'INT8 against float': against, **differences}.items()
        if change
    ]
    if best and not best.epoch:
        said.append('Fine-tuning did not help: no epoch scores higher than PTQ, which is delivered.')
    elif gain:
        unclear = ': whether it helped is not known' if within_interval(gain) else ''
        merit = f'the mean {title} of boxes and masks' if against and 'mask' in against else title
        said.append(f'Fine-tuning against PTQ: {in_words(gain, merit)}{unclear}.')
    if best:
        said.append(
            f'The best is the highest of {len(state.epochs) + (PTQ in scored)} on the {state.images[state.chosen_on]} images '
            f'({state.chosen_on}), so it is higher there than on others.'
        )
    return [*said, f'({EXPLAINED}.)'] if against or gain else said


def export_of_run(folder: Path, state: State) -> str:
    """Make the command that exports the checkpoint of a finished run to the file of its target."""
    return export_command(folder / DELIVERED, state.settings['imgsz'], TARGETS[state.settings['target']].include)


def calibration_text(calibration: Calibration) -> str:
    """State how the ranges were chosen, with a table of the compared divergences."""
    divergences, method = calibration['divergence'], calibration['method']
    on = f' on {calibration["images"]} images' if 'images' in calibration else ''
    chosen = f'Ranges of activations by {method}{on}, {"no bias corrected" if calibration["biases"] == "none" else "biases corrected"}'
    if not divergences:
        return escaped(f'{chosen}.')
    kept = min(divergences, key=divergences.__getitem__)
    rows = [(name, f'{value:.5f}', 'chosen' if name == kept else '') for name, value in divergences.items()]
    return (
        f'{escaped(chosen)}: of the compared calibrations the one whose outputs are closest to those of the float model '
        f'(divergence 0: the same), on calibration images that neither fisher nor the biases were fitted to:\n\n{markdown_table(("calibration", "divergence", ""), rows)}'
    )


def _pictures(folder: Path, state: State) -> list[str]:
    """Draw the pictures for which there is data, and return the Markdown that shows them."""
    shown, scored, best = [], state.scored(), state.best
    if state.epochs:
        name, title = state.epochs[0].scores.choosing()
        plot_ap(folder / f'{name}.png', state)  # ap.png or top1.png
        shown.append(image(f'{title} of every epoch', f'{name}.png'))
    stages = {name: scored[name] for name in (FLOAT, PTQ) if name in scored}
    if best and best.epoch:  # else it is PTQ
        stages[BEST] = best.scores
    models = {name: metrics for name, metrics in stages.items() if metrics.per_class}
    if models:
        plot_classes(folder / 'classes.png', models)
        shown.append(image(f'{Columns(*models.values()).title} of each class', 'classes.png'))
    return shown


def write_report(folder: Path, state: State, task: Task, finished: bool = True) -> None:
    """Write report.json and report.md, and for a finished run its pictures; that of an unfinished one says so, and how to go on."""
    settings, scored, best = state.settings, state.scored(), state.best
    write_json(folder / 'report.json', {**state.report(), 'finished': finished})
    following = export_of_run(folder, state) if finished else repeated('qat.py', 'quantize', '--resume', folder)
    seen = f'; scored {task.seen_as(settings["imgsz"], False)}' if scored else ''
    images = ', '.join(f'{n} of {name}' for name, n in state.images.items())
    made = [state.best_file] * bool(best) + [stage.file for _, stage in state.models() if stage.file]
    files = [DELIVERED, *made] if made else []
    paragraphs = [
        f'**{escaped(("" if finished else "Interrupted, or not over yet. ") + headline(state))}**',
        escaped(f'Images: {images}{seen}. Computed on {state.device}.'),
    ]
    if state.ptq and scored:
        paragraphs += [run_table(state), escaped(' '.join(conclusions(state)))]
    if finished:
        paragraphs += _pictures(folder, state)
    if state.calibration:
        paragraphs += ['## Calibration', calibration_text(state.calibration)]
    for what, paths in (
        ('Left in float', state.kept_float),
        ('Activation functions that stayed', state.kept_activations),
    ):
        paragraphs += [escaped(f'{what}: {", ".join(paths)}.')] if paths else []
    if files:
        paragraphs += ['## Files', '\n'.join(f'- {link(file)}' for file in files)]
    times = escaped(', '.join(f'{what} {seconds:.1f} s' for what, seconds in state.times.items()) or '-')
    paragraphs += ['## Times', times, '## Machine', machine_table(state.machine)]
    paragraphs += ['## Made by', code(repeated('qat.py', 'quantize', *command_words(settings, QuantizeConfig)))]
    paragraphs += closing(settings, QuantizeConfig, state.versions, following if made else None)
    write_document(folder / 'report.md', f'{Path(settings["weights"]).name} in INT8', paragraphs)


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
