"""Rows of a benchmark → benchmark.{json,md,csv} and pictures.

The pictures show latency as bars, throughput against batch, memory and utilisation over time. They take rows, see
run.Running.row. A series (model, backend, precision, image size) has one colour in all three.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.qat.benchmark.baseline import speed_conclusions, with_changes
from utils.qat.benchmark.rows import Report, Row
from utils.qat.benchmark.tables import csv_text, markdown_tables, precision_table, series, short_table, with_short_names
from utils.qat.core.files import write_document, write_json, write_picture, write_text
from utils.qat.core.machine import machine_table
from utils.qat.core.text import Markdown, escaped, image, literal
from utils.qat.evaluation.score_tables import PALE
from utils.qat.vendors.vendor import SIMULATED

WIDE_RANGE = 20  # ratio of largest to smallest value from which an axis is logarithmic
DISTURBED = 25  # per cent: if other processes use more of the CPU, times are unreliable


def label(result: Row) -> str:
    """Name the series of a result, for Matplotlib."""
    return literal(', '.join(filter(None, series(result))))


def colours(results: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """Assign a colour to each series: label → RGB in 0..1, in the order of the results."""
    labels = list(dict.fromkeys(map(label, results)))
    number = 10 if len(labels) <= 10 else 20
    return {text: colormaps[f'tab{number}'](i % number)[:3] for i, text in enumerate(labels)}


def _name_bars(axes: Axes, results: Sequence[Row], longest: float) -> None:
    """Label the horizontal bars of `axes`, one per result from the top; `longest` is the end of the axis."""
    axes.set_yticks(range(len(results)), [label(r) for r in results], fontsize=8)
    axes.set(xlim=(0, longest), ylim=(len(results) - 0.4, -0.6))
    axes.grid(axis='x', alpha=0.3)
    axes.set_axisbelow(True)


def plot_latency(path: Path, results: Sequence[Row]) -> None:
    """Draw the latency: a panel for each batch, a bar for each series.

    A bar is the median compute time, followed by the transfers in a lighter tone. A line spans the end-to-end latency from
    the minimum to the 99th percentile.
    """
    colour, batches = colours(results), sorted({r['batch'] for r in results})
    panels = [[r for r in results if r['batch'] == batch] for batch in batches]
    figure = Figure(figsize=(10, 1.2 + sum(0.5 + 0.32 * len(p) for p in panels)), layout='constrained')
    all_axes = figure.subplots(
        len(panels), 1, squeeze=False, gridspec_kw={'height_ratios': [1 + len(p) for p in panels]}
    )[:, 0]
    for axes, batch, panel in zip(all_axes, batches, panels):
        for i, r in enumerate(panel):
            whole, model, tone = r['latency'], r['compute']['median'], colour[label(r)]
            axes.barh(i, model, color=tone, height=0.7)
            axes.barh(i, max(0, whole['median'] - model), left=model, color=tone, alpha=PALE, height=0.7)
            axes.plot((whole['min'], whole['p99']), (i, i), color='0.2', linewidth=1, marker='|', markersize=6)
            axes.text(
                max(whole['p99'], whole['median']),
                i,
                f'  {whole["median"]:.3g} ms (p99 {whole["p99"]:.3g})',
                va='center',
                fontsize=8,
            )
        _name_bars(axes, panel, longest=1.3 * max(r['latency']['p99'] for r in panel))
        axes.set_title(f'batch {batch}', fontsize=9, loc='left')
    figure.supxlabel(
        'ms per query. Bar: median of the model, transfers behind it in a lighter tone. Line: min to 99th percentile',
        fontsize=9,
    )
    write_picture(figure, path)


def plot_throughput(path: Path, results: Sequence[Row]) -> None:
    """Draw the images per second against the batch, a line for each series; for a single batch a bar for each."""
    colour = colours(results)
    speeds, batches = [r['images_per_s'] for r in results], sorted({r['batch'] for r in results})
    wide = max(speeds) > WIDE_RANGE * min(speeds)
    what = 'images per second' + ' (logarithmic)' * (wide and len(batches) > 1)
    if len(batches) == 1:
        figure = Figure(figsize=(10, 1.3 + 0.32 * len(results)), layout='constrained')
        axes = figure.subplots()
        for i, r in enumerate(results):
            axes.barh(i, r['images_per_s'], color=colour[label(r)], height=0.7)
            axes.text(r['images_per_s'], i, f'  {r["images_per_s"]:.4g}', va='center', fontsize=8)
        _name_bars(axes, results, longest=1.15 * max(speeds))
        axes.set(xlabel=what, title=f'Throughput at batch {batches[0]}')
        return write_picture(figure, path)
    figure = Figure(figsize=(9, 4.5 + 0.22 * len(colour)), layout='constrained')
    axes = figure.subplots()
    for text, tone in colour.items():
        points = sorted((r['batch'], r['images_per_s']) for r in results if label(r) == text)
        axes.plot(*zip(*points), 'o-', color=tone, label=text)
    axes.set_xticks(batches)
    axes.set(xlabel='batch (images per query)', ylabel=what, title='Throughput')
    axes.set(yscale='log') if wide else axes.set_ylim(0, 1.08 * max(speeds))
    axes.grid(alpha=0.3)
    figure.legend(loc='outside lower center', fontsize=8)
    write_picture(figure, path)


def plot_usage(path: Path, report: Report) -> None:
    """Draw the samples of benchmark.json, memory and utilisation over time.

    The background colour shows the measured series, the number above it the batch.
    """
    results, samples, device = report['results'], report['usage'], report['machine']['device']
    gpu, colour = report['machine']['gpu'], colours(results)
    figure = Figure(figsize=(11, 5 + 0.22 * len(colour)), layout='constrained')
    upper, lower = figure.subplots(2, 1, sharex=True)
    seconds, memory, percent, *_ = zip(*samples)
    upper.plot(seconds, memory, color='0.15', linewidth=1)
    lower.plot(seconds, percent, color='0.15', linewidth=1)
    shown = [(r, start, end) for r in results for start, end in (r['usage'] or {}).get('turns', ())]
    for r, start, end in shown:
        for axes in (upper, lower):
            axes.axvspan(start, end, color=colour[label(r)], alpha=0.3, linewidth=0)
            axes.axvline(start, color='white', linewidth=1)
        if len(shown) <= 40:  # more would not fit beside each other
            upper.text(
                (start + end) / 2, 1.01, r['batch'], transform=upper.get_xaxis_transform(), ha='center', fontsize=8
            )
    upper.set(ylabel='memory of the GPU (MiB)' if gpu else 'memory of the process (MiB)', ylim=(0, 1.1 * max(memory)))
    upper.set_title(f'{device}; numbers: batch', fontsize=10, pad=16)
    lower.set(ylabel='GPU busy (%)' if gpu else 'CPU, of all cores (%)', ylim=(0, 105), xlabel='seconds')
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.legend(
        handles=[Patch(color=tone, alpha=0.3, label=text) for text, tone in colour.items()],
        loc='outside lower center',
        fontsize=8,
    )
    write_picture(figure, path)


def notes(results: Sequence[Row]) -> list[Markdown]:
    """Return the distinct notes on how engines ran their files."""
    return list(dict.fromkeys(escaped(f'{r["model"]}: {"; ".join(r["notes"])}') for r in results if r['notes']))


def disturbance(results: Sequence[Row]) -> str:
    """Report how much of the CPU other processes used during the measurements; '' if less than DISTURBED or unknown."""
    percents = [load['others_percent'] for r in results if (load := r['usage']) and 'others_percent' in load]
    if max(percents, default=0) < DISTURBED:
        return ''
    share = ' to '.join(dict.fromkeys(f'{percent:.0f}' for percent in (min(percents), max(percents))))
    return (
        f'other processes took {share} % of the CPU while measuring: times are too long and uneven; '
        'measure on an idle machine'
    )


def with_clock(report: Report) -> dict[str, object]:
    """Return the machine of a report, with the sampled clock during the measurements, if any: 'least to highest mean'."""
    clocks = [load['clock_mhz'] for r in report['results'] if (load := r['usage']) and 'clock_mhz' in load]
    return {
        **report['machine'],
        **({'clock_mhz': f'{min(clocks):.0f} to {max(clocks):.0f}, means of the measurements'} if clocks else {}),
    }


def parts_of(report: Report) -> list[str]:
    """Make the parts of benchmark.md, see files.write_document, from the content of benchmark.json with short names."""
    settings = report['settings']
    left_out = [f'- {escaped(line)}' for line in report['left_out']]
    results, disturbed = report['results'], disturbance(report['results'])
    made, scored = notes(results), max((r['accuracy']['images'] for r in results if r['accuracy']), default=0)
    classes = any('top1' in r['accuracy'] for r in results if r['accuracy'])
    prepared = 'their middle in' if classes else 'letterboxed to'
    return [
        f'{settings["duration"]:g} s each, after {settings["warmup"]:g} ms to warm up, the files of one batch and image size in turns. Times are medians in ms. What the figures mean and '
        'which can be compared: docs/benchmark.md of yolov9-qat.',
        '\n'.join(map(escaped, speed_conclusions(results))),
        *markdown_tables(results),
        *(['## By precision', by_precision] if (by_precision := precision_table(results)) else []),
        *([escaped(f'Disturbed: {disturbed}.')] if disturbed else []),
        *(
            [f'Accuracy: {scored} images of {escaped(settings["data"])}, {prepared} the size in the row.']
            if scored
            else []
        ),
        *(['\n'.join(f'- {line}' for line in made)] if made else []),
        *(['Left out:', '\n'.join(left_out)] if left_out else []),
        '## Machine',
        machine_table(with_clock(report)),
        image('latency', 'latency.png'),
        image('throughput', 'throughput.png'),
        *[image('memory and utilisation', 'usage.png')] * bool(report['usage']),
    ]


def write_benchmark(folder: Path, report: Report) -> list[str]:
    """Write benchmark.json, benchmark.md, benchmark.csv and the pictures; usage.png only if usage was sampled.

    Returns:
        What a terminal shows: a table, notes, and the conclusions.
    """
    report = {**report, 'results': with_changes(report['results'], report['settings']['baseline'])}
    short: Report = {**report, 'results': with_short_names(report['results'])}
    write_json(folder / 'benchmark.json', {**report, 'machine': with_clock(report)})
    write_text(folder / 'benchmark.csv', csv_text(short['results']))
    plot_latency(folder / 'latency.png', short['results'])
    plot_throughput(folder / 'throughput.png', short['results'])
    if report['usage']:
        plot_usage(folder / 'usage.png', short)
    write_document(folder / 'benchmark.md', 'Benchmark', parts_of(short))
    simulated = [r for r in short['results'] if r['types'] == SIMULATED]
    return [short_table(short['results']), '\n'.join([*notes(simulated), *speed_conclusions(short['results'])])]
