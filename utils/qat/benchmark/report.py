"""Results of a benchmark → a summary of each in trtexec's layout, and benchmark.{json,md,csv} and pictures for all."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from utils.qat.benchmark.baseline import SIMULATED, conclusions, with_changes
from utils.qat.benchmark.plots import plot_latency, plot_throughput, plot_usage
from utils.qat.benchmark.tables import (
    csv_text,
    markdown_tables,
    precision_tables,
    series,
    short_table,
    with_short_names,
)
from utils.qat.config.deploy import REPORTS
from utils.qat.core.files import write_json, write_text
from utils.qat.core.machine import machine_table
from utils.qat.core.text import Markdown, code, escaped

DISTURBED = 25  # per cent: if other processes use more of the CPU, times are unreliable
PICTURES = {'latency.png': 'latency', 'throughput.png': 'throughput', 'usage.png': 'memory and utilisation'}


def summary(result: dict[str, Any]) -> str:
    """Format a plain Result as trtexec does."""

    def line(name: str, times: dict[str, float]) -> str:
        parts = [f'{key} = {times[key]:.5g} ms' for key in ('min', 'max', 'mean', 'median')]
        parts += [f'percentile({p}%) = {times[f"p{p}"]:.5g} ms' for p in (90, 95, 99)]
        return f'{name}: {", ".join(parts)}'

    what = 'GPU Compute Time' if result['h2d'] else 'Compute Time'
    timed = (
        ('Latency', 'latency'),
        ('Enqueue Time', 'enqueue'),
        ('H2D Latency', 'h2d'),
        (what, 'compute'),
        ('D2H Latency', 'd2h'),
    )
    return '\n'.join(
        [
            '=== Performance summary ===',
            f'Throughput: {result["qps"]:.6g} qps ({result["images_per_s"]:.6g} images/s)',
            *[line(name, result[key]) for name, key in timed if result[key]],
            f'Total Host Walltime: {result["host_seconds"]:.6g} s',
            f'Total {what}: {result["compute_seconds"]:.6g} s',
            *([f'Throughput in streams: {result["streams"]}'] if result['streams'] else []),
            *result['notes'],
        ]
    )


def notes(results: Sequence[dict[str, Any]]) -> list[Markdown]:
    """Return the distinct notes on how engines ran their files."""
    return list(dict.fromkeys(escaped(f'{r["model"]}: {"; ".join(r["notes"])}') for r in results if r['notes']))


def disturbance(results: Sequence[dict[str, Any]]) -> str:
    """Report how much of the CPU other processes used during the measurements; '' if less than DISTURBED or unknown."""
    found = [r['usage']['others_percent'] for r in results if 'others_percent' in (r['usage'] or {})]
    if max(found, default=0) < DISTURBED:
        return ''
    share = ' to '.join(dict.fromkeys(f'{percent:.0f}' for percent in (min(found), max(found))))
    return (
        f'other processes took {share} % of the CPU while measuring: times are too long and uneven; '
        'measure on an idle machine'
    )


def with_clock(report: dict[str, Any]) -> dict[str, Any]:
    """Return the machine of a report, with the sampled clock during the measurements, if any: 'least to highest mean'."""
    clocks = [r['usage']['clock_mhz'] for r in report['results'] if 'clock_mhz' in (r['usage'] or {})]
    return {
        **report['machine'],
        **({'clock_mhz': f'{min(clocks):.0f} to {max(clocks):.0f}, means of the measurements'} if clocks else {}),
    }


def markdown(report: dict[str, Any], pictures: Collection[str]) -> str:
    """Make benchmark.md from the content of benchmark.json, with short names. pictures: names of the files beside it."""
    settings = report['settings']
    left_out = [f'- {escaped(line)}' for line in report['left_out']]
    results, disturbed = report['results'], disturbance(report['results'])
    made, scored = notes(results), max((r['accuracy']['images'] for r in results if r['accuracy']), default=0)
    classes = any('top1' in r['accuracy'] for r in results if r['accuracy'])
    seen = 'their middle in' if classes else 'letterboxed to'
    parts = [
        '# Benchmark',
        f'{settings["duration"]:g} s each, after {settings["warmup"]:g} ms to warm up, the files of one batch and image size in turns. Times are medians in ms. What the figures mean and '
        'which can be compared: docs/benchmark.md of yolov9-qat.',
        '\n'.join(map(escaped, conclusions(results))),
        *markdown_tables(results),
        *(['## By precision', *by_precision] if (by_precision := precision_tables(results)) else []),
        *([escaped(f'Disturbed: {disturbed}.')] if disturbed else []),
        *([f'Accuracy: {scored} images of {escaped(settings["data"])}, {seen} the size in the row.'] if scored else []),
        *(['\n'.join(f'- {line}' for line in made)] if made else []),
        *(['Left out:', '\n'.join(left_out)] if left_out else []),
        '## Machine',
        machine_table(with_clock(report)),
        *[f'![{text}]({file})' for file, text in PICTURES.items() if file in pictures],
        '## As trtexec says it',
        *[
            f'{escaped(", ".join(filter(None, series(r))))}, batch {r["batch"]}\n\n{code(*summary(r).splitlines())}'
            for r in results
        ],
    ]
    return '\n\n'.join(parts) + '\n'


def write_benchmark(folder: Path, report: dict[str, Any], formats: Collection[str] = REPORTS) -> list[str]:
    """Write benchmark.json, benchmark.md, benchmark.csv, latency.png, throughput.png and, if usage was sampled, usage.png.

    Args:
        folder: where to write.
        report: 'settings', 'machine', 'left_out' (lines), 'results' (plain Results) and 'usage' (samples of a Usage).
        formats: of REPORTS; others are not written.

    Returns:
        What a terminal shows: a table, notes, and the conclusions.
    """
    report = {**report, 'results': with_changes(report['results'], report['settings']['baseline'])}
    short = {**report, 'results': with_short_names(report['results'])}
    pictures = []
    if 'json' in formats:
        write_json(folder / 'benchmark.json', {**report, 'machine': with_clock(report)})
    if 'csv' in formats:
        write_text(folder / 'benchmark.csv', csv_text(short['results']))
    if 'png' in formats:
        plot_latency(folder / 'latency.png', short['results'])
        plot_throughput(folder / 'throughput.png', short['results'])
        if report['usage']:
            plot_usage(folder / 'usage.png', short)
        pictures = [name for name in PICTURES if name != 'usage.png' or report['usage']]
    if 'md' in formats:
        write_text(folder / 'benchmark.md', markdown(short, pictures))
    simulated = [r for r in short['results'] if r['types'] == SIMULATED]
    return [short_table(short['results']), '\n'.join([*notes(simulated), *conclusions(short['results'])])]
