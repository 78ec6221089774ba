"""The result of `qat.py sensitive`, summary-sensitive-analysis.json, from which `quantize` chooses float layers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from matplotlib.figure import Figure

from utils.qat.config.qat import LEARNT, SensitiveConfig
from utils.qat.config.settings import closing
from utils.qat.config.tables import DEFAULT_TARGET, TARGETS
from utils.qat.config.tasks import Task
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import require_file, write_document, write_json, write_picture
from utils.qat.core.machine import PACKAGES
from utils.qat.core.text import escaped, image, literal, markdown_table, visible
from utils.qat.evaluation.interval import RESAMPLES, in_points, in_words, points_lost
from utils.qat.evaluation.metrics import METRICS, DetectionMetrics
from utils.qat.run.resume import json_kinds
from utils.qat.run.state import Calibration
from utils.qat.untrusted.json_schema import (
    AGAINST,
    CALIBRATION,
    CHANCE,
    COUNT,
    INDEX,
    NONE,
    NUMBER,
    SECONDS,
    SHARE,
    SQNR,
    anything,
    first_wrong,
    misfit,
    read_json,
)
from utils.qat.vendors.vendor import Target

BUDGET = 0.2  # points of AP
DIVERGENCE = (
    'Divergence of the results from the float model, without a unit, 0 = the same: estimated, then of ten units measured, '
    'alone and with all units but this one.'
)
FILE, KIND, VERSION = 'summary-sensitive-analysis.json', 'yolov9-qat sensitivity', 2  # since 2 with --activation
MEASURED = {
    'divergence': NUMBER,
    'sqnr': SQNR,
    **{f'{name}?': SHARE for kind in METRICS for name in kind.columns},
    'mask?': dict.fromkeys(DetectionMetrics.columns, SHARE),
    'against_float?': AGAINST,
    'against_int8?': CHANCE,
}
UNIT = {
    'unit': str,
    'kind': str,
    'convolutions': INDEX,
    'flops': INDEX,
    'parameters': INDEX,
    'estimated': {'only': NUMBER, 'without': NUMBER},
    'measured': (NONE, {'only': MEASURED, 'without': MEASURED}),
    'distortion': NUMBER,
    'twins': [str],
    'ranges': {str: (NUMBER, [NUMBER])},
}
SUMMARY = {  # see json_schema.misfit
    'kind': str,
    'version': INDEX,
    'weights': str,
    'weights_sha256': str,
    'settings': json_kinds(SensitiveConfig),
    'versions': dict.fromkeys(('python', *PACKAGES), str),
    'device': str,
    'images': COUNT,
    'calibration': CALIBRATION,
    'times': {str: SECONDS},
    'float': MEASURED,
    'int8': MEASURED,
    'flops': COUNT,
    'units': [UNIT],
}


class Unit(TypedDict):
    """A layer, block or convolution, and what it costs."""

    unit: str  # its path
    kind: str
    convolutions: int
    flops: int
    parameters: int
    estimated: dict[str, float]  # 'only' with it in INT8, 'without' it alone in float → divergence
    measured: dict[str, dict[str, Any]] | None  # likewise → figures, see MEASURED; None if it was not measured
    distortion: float
    twins: list[str]  # paths of its blocks
    ranges: dict[str, float | list[float]]


class Costs(TypedDict):
    """The costs that `analyse` measures: figures (see MEASURED) of the float model and of the INT8 model, and those of each unit."""

    float: dict[str, Any]
    int8: dict[str, Any]
    flops: int
    units: list[Unit]


class Summary(Costs):
    """The content of FILE, beside its kind and version."""

    weights: str
    weights_sha256: str
    settings: dict[str, Any]  # see SensitiveConfig.plain
    versions: dict[str, str]
    device: str
    images: int
    calibration: Calibration
    times: dict[str, float]  # seconds


def plot_sensitivity(path: Path, summary: Summary, task: Task) -> None:
    """Draw the distortion of each unit as bars in the order of the network, coloured by kind, and of all in INT8 as a line."""
    units = summary['units']
    kinds = sorted({u['kind'] for u in units})
    colours = {kind: f'C{i}' for i, kind in enumerate(kinds)}
    figure = Figure(figsize=(max(7, 0.16 * len(units) + 2), 5), layout='constrained')
    axes = figure.subplots()
    for kind in kinds:
        positions = [i for i, u in enumerate(units) if u['kind'] == kind]
        axes.bar(positions, [max(units[i]['distortion'], 1e-9) for i in positions], color=colours[kind], label=kind)
    axes.axhline(summary['int8']['divergence'], linestyle='--', color='0.4', label=f'all {change_in(summary)}')
    axes.set_xticks(range(len(units)), [u['unit'].removeprefix('model.') for u in units], rotation=90, fontsize=7)
    axes.set(
        yscale='log',
        xlim=(-1, len(units)),
        xlabel='unit',
        ylabel=f'divergence of the {task.results}',
        title=f'{literal(summary["weights"])}: each unit alone {change_in(summary)}, {summary["images"]} images',
    )
    axes.grid(axis='y', alpha=0.3)
    figure.legend(loc='outside right center', fontsize=8)
    write_picture(figure, path)


def _contradiction(summary: Summary) -> str | None:
    """Find an entry of a valid summary that contradicts another; None if there is none."""
    units = summary['units']
    names, twins = [u['unit'] for u in units], [path for u in units for path in u['twins']]
    entries = {
        'units': not units or len(set(names)) < len(names),
        'twins': len(set(twins)) < len(twins) or not all(u['twins'] for u in units),
        'settings.target': summary['settings']['target'] not in TARGETS,
        'flops': sum(u['flops'] for u in units) > summary['flops'],
    }
    return first_wrong(entries)


def read_summary(
    path: Path,
    source: str,
    twins: Iterable[str],
    target: Target,
    activation: str = 'keep',
    functions: Iterable[str] = (),
) -> Summary:
    """Read and check the summary of --sensitive, for the content see SUMMARY.

    `source` is the SHA-256 of the float checkpoint, `twins` are paths of the blocks in it that can be quantized. The summary may be
    made for the `activation` of this run; `functions` are paths of the functions that it exchanges. Raises QatError if the file is
    no summary, belongs to another checkpoint or placement, or has a unit that the model lacks.
    """
    again = f'write it with: python qat.py sensitive{f" --target {target.name}" * (target.name != DEFAULT_TARGET)}'
    if activation in LEARNT:
        again += f' --activation {activation}'
    require_file(path, '--sensitive', ('.json',))
    with reporting(f'--sensitive {path}: no summary of a sensitivity analysis', ValueError, remedy=again, most=100):
        summary = read_json(path)
        if wrong := misfit(summary, {'kind': str, 'version': INDEX, str: anything}):
            raise ValueError(wrong)
        if (summary['kind'], summary['version']) != (KIND, VERSION):
            raise QatError(f'--sensitive {path}: a summary of another kind or version; {again}')
        if wrong := misfit(summary, SUMMARY) or _contradiction(summary):
            raise ValueError(f'{wrong} is not what it writes')
    made_for = TARGETS[summary['settings']['target']]
    if not made_for.places_as(target):
        raise QatError(
            f'--sensitive {path}: made for {made_for.title}, and --target is {target.name}, whose placement differs; {again}'
        )
    ranked = summary['settings']['activation']
    if ranked not in ('keep', activation):
        raise QatError(
            f'--sensitive {path}: made with --activation {visible(ranked)[:20]}, and this run has {activation}; {again}'
        )
    paths = set(twins if ranked == 'keep' else functions)
    unknown = [u['unit'] for u in summary['units'] if set(u['twins']) - paths or visible(u['unit']) != u['unit']]
    if unknown:
        raise QatError(
            f'--sensitive {path}: the model has no unit {unknown[0]} to quantize; it is of another model; {again}'
        )
    if summary['weights_sha256'] != source:
        raise QatError(
            f'--sensitive {path}: of another checkpoint ({summary["weights"]}; its SHA-256 differs); {again}'
        )
    return summary


def change_in(summary: Summary) -> str:
    """Name what a unit's cost is the cost of: 'in INT8', or such as 'with relu'."""
    activation = summary['settings']['activation']
    return 'in INT8' if activation == 'keep' else f'with {activation}'


def worst(summary: Summary) -> list[Unit]:
    """Sort the units of a summary by their distortion, largest first."""
    return sorted(summary['units'], key=lambda u: -u['distortion'])


def options_for(summary: Summary) -> list[object]:
    """Choose the options of `quantize` with which units stay, or none: [] if the images show no loss, or if none can stay."""
    if TARGETS[summary['settings']['target']].integers:
        return []
    whole = summary['int8'].get('against_float')
    if whole is None:  # without AP there is no budget
        return ['--sensitive', FILE, '--keep-float', 1]
    lost = points_lost(whole)
    return ['--sensitive', FILE, '--max-drop', min(BUDGET, int(50 * lost) / 100)] if lost > 0 else []


def nothing_lost(summary: Summary) -> str:
    """Say that no unit can stay, or has to; '' if one has, or if AP was not measured."""
    if TARGETS[summary['settings']['target']].integers:
        return f'None can stay: --target {summary["settings"]["target"]} computes integers alone.'
    needed = options_for(summary)
    return (
        ''
        if needed
        else f'On these images all units {change_in(summary)} lose nothing beyond the confidence interval: none has to stay.'
    )


def summary_table(summary: Summary, task: Task, limit: int | None = None) -> str:
    """Format the units of the largest distortion, at most `limit`, the measured ones first, as a Markdown table."""
    in_int8 = change_in(summary) == 'in INT8'

    def gain(unit: Unit) -> str:
        change = (unit['measured'] or {}).get('without', {}).get('against_int8')
        return in_points(change) if change else '-'

    def measured(unit: Unit, way: str) -> str:
        return f'{unit["measured"][way]["divergence"]:.2g}' if unit['measured'] else '-'

    rows = [
        [
            u['unit'],
            u['kind'],
            f'{100 * u["flops"] / summary["flops"]:.1f}',
            f'{u["estimated"]["only"]:.2g}',
            measured(u, 'only'),
            measured(u, 'without'),
            gain(u),
        ]
        for u in sorted(worst(summary), key=lambda u: limit is not None and not u['measured'])[:limit]
    ]
    titles = (
        'unit',
        'kind',
        f'{"FLOPs" if in_int8 else "values"} (%)',
        f'divergence, only it {change_in(summary)}',
        'measured',
        'all but it',
        f'{task.metrics.choosing()[1]} if {"float" if in_int8 else "as it was"} (points)',
    )
    return f'{markdown_table(titles, rows)}\n\n{DIVERGENCE}'


def write_summary(folder: Path, summary: Summary, task: Task, following: str) -> None:
    """Write a summary as JSON, and as a report: a picture, all units in a table, what the figures mean, and the next command."""
    write_json(folder / FILE, {'kind': KIND, 'version': VERSION, **summary})
    plot_sensitivity(folder / 'sensitivity.png', summary, task)
    (key, title), settings = task.metrics.choosing(), summary['settings']
    lines = [
        f'{len(summary["units"])} units ({settings["granularity"]}), {summary["images"]} images '
        f'{task.seen_as(settings["imgsz"], True)}. Divergence of the {task.results} from '
        f"the float model's with all {change_in(summary)}: {summary['int8']['divergence']:.2g}."
    ]
    if key in summary['int8']:
        masks = 'mask' in summary['int8']
        ap = {
            model: f'{summary[model][key]:.4f}' + (f' (masks {summary[model]["mask"][key]:.4f})' if masks else '')
            for model in ('float', 'int8')
        }
        lines.append(
            f'{title}: float {ap["float"]}, all {change_in(summary)} {ap["int8"]}: {in_words(summary["int8"]["against_float"], title)}. The last column is what '
            f'leaving the unit in float would add, in points (0.01){", the mean of boxes and masks" * masks}. ± holds 95 % of what other '
            f'images of this kind would give, by {RESAMPLES} resamples of these: what is no larger than that shows nothing.'
        )
    first, whole = worst(summary)[0], summary['int8']
    cost = (
        f', and all units {change_in(summary)} {in_words(whole["against_float"], title)}'
        if 'against_float' in whole
        else ''
    )
    headline = (
        f'{first["unit"]} costs most: alone {change_in(summary)} it changes the {task.results} by {first["distortion"]:.2g}, all units together by '
        f'{whole["divergence"]:.2g}{cost}.'
    )
    write_document(
        folder / 'sensitivity.md',
        f'Sensitivity of {summary["weights"]}',
        [
            f'**{escaped(" ".join(filter(None, (headline, nothing_lost(summary)))))}**',
            '\n'.join(lines),
            summary_table(summary, task),
            image('distortion of each unit', 'sensitivity.png'),
            '## Times',
            escaped(', '.join(f'{what} {seconds:.1f} s' for what, seconds in summary['times'].items())),
            *closing(summary['settings'], SensitiveConfig, summary['versions'], following),
        ],
    )
