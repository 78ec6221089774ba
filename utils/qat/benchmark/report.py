"""Results of a benchmark → the summary of each in trtexec's layout, and benchmark.json, benchmark.md and pictures of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.qat.benchmark.plots import plot_latency, plot_throughput, plot_usage
from utils.qat.core.files import write_json, write_text
from utils.qat.core.markdown import Markdown, code, escaped, markdown_table


def with_short_names(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return plain Results whose model is the file's name, or its path where two files share a name."""
    files = {r['model'] for r in results}
    names = [Path(f).name for f in files]
    return [
        {**r, 'model': Path(r['model']).name if names.count(Path(r['model']).name) == 1 else r['model']}
        for r in results
    ]


def series(result: dict[str, Any]) -> tuple[str, str, str]:
    """Return the series of a plain Result, which is measured at several batches: (model, backend, types)."""
    return result['model'], result['backend'], result['types']


def summary(result: dict[str, Any]) -> str:
    """Lay out a plain Result as trtexec prints it."""

    def line(name: str, times: dict[str, float]) -> str:
        parts = [f'{key} = {times[key]:.5g} ms' for key in ('min', 'max', 'mean', 'median')]
        return f'{name}: {", ".join(parts + [f"percentile({p}%) = {times[key]:.5g} ms" for p, key in ((90, "p90"), (95, "p95"), (99, "p99"))])}'

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


def _number(value: float | None, form: str = '.4g') -> str:
    """Format a number; '-' for None."""
    return '-' if value is None else format(value, form)


def model_table(results: Sequence[dict[str, Any]]) -> str:
    """Make the table of the files that ran: size, parameters and layers.

    A row is a series, or an engine where each batch has one.

    Args:
        results: plain Results.

    Returns:
        Markdown.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for r in results:
        parameters = None if r['parameters'] is None else r['parameters'] / 1e6
        row = *series(r), f'{r["size_bytes"] / 1e6:.2f}', _number(parameters, '.3f'), _number(r['layers'], 'd')
        rows.setdefault(row, []).append(r['batch'])
    return markdown_table(
        ('model', 'backend', 'precision', 'batches', 'file (MB)', 'parameters (M)', 'layers'),
        [(*row[:3], ', '.join(map(str, sorted(batches))), *row[3:]) for row, batches in rows.items()],
    )


def speed_up(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> float | None:
    """Compute how many times as fast as FP32 a result is, in the same backend and at the same batch.

    The time is the median of the model.

    Args:
        result: a plain Result.
        results: plain Results, with the FP32 among them.

    Returns:
        FP32 by `result`; None where `results` have no FP32 there, or the FP32 of several models.
    """
    floats = [r for r in results if r['precision'] == 'fp32' and all(r[k] == result[k] for k in ('backend', 'batch'))]
    return floats[0]['compute']['median'] / result['compute']['median'] if len(floats) == 1 else None


def result_table(results: Sequence[dict[str, Any]]) -> str:
    """Make the table of times, throughput, memory and utilisation: a row for each measurement.

    Args:
        results: plain Results.

    Returns:
        Markdown.
    """
    rows = []
    for r in results:
        usage = r['usage'] or {}
        model = [f'{r["compute"][key]:.4g}' for key in ('median', 'p99')]
        rows.append(
            (
                *series(r),
                r['batch'],
                *model,
                _number(speed_up(r, results), '.2f'),
                _number(r['h2d'] and r['latency']['median']),
                f'{r["qps"]:.1f}',
                f'{r["images_per_s"]:.1f}',
                _number(usage.get('peak_mib'), '.0f'),
                _number(usage.get('added_mib'), '.0f'),
                _number(usage.get('percent'), '.0f'),
            )
        )
    return markdown_table(
        (
            'model',
            'backend',
            'precision',
            'batch',
            'model median (ms)',
            'p99',
            'times FP32',
            'end to end (ms)',
            'qps',
            'images/s',
            'memory (MiB)',
            'of it added',
            'utilisation (%)',
        ),
        rows,
    )


def notes(results: Sequence[dict[str, Any]]) -> list[Markdown]:
    """Return lines about what engines made of their files, each once."""
    return list(dict.fromkeys(escaped(f'{r["model"]}: {"; ".join(r["notes"])}') for r in results if r['notes']))


def markdown(report: dict[str, Any]) -> str:
    """Make the content of benchmark.md. report: content of benchmark.json, with short names."""
    machine = report['machine']
    left_out = [f'- {escaped(line)}' for line in report['left_out']]
    able, made = machine['instructions'], notes(report['results'])
    parts = [
        '# Benchmark',
        escaped(
            f'{machine["device"]}{able and f" ({able})"}, {machine["threads"]} CPU threads; '
            + ', '.join(f'{k} {v}' for k, v in machine['versions'].items())
            + '.'
        ),
        f'{report["settings"]["duration"]:g} s each, after {report["settings"]["warmup"]:g} ms to warm up. What the figures mean and which can be '
        'compared: docs/benchmark.md of yolov9-qat.',
        result_table(report['results']),
        *(['\n'.join(f'- {line}' for line in made)] if made else []),
        model_table(report['results']),
        *(['Left out:', '\n'.join(left_out)] if left_out else []),
        '![latency](latency.png)',
        '![throughput](throughput.png)',
        *['![memory and utilisation](usage.png)'] * bool(report['usage']),
        '## As trtexec says it',
        *[
            f'{escaped(r["model"])}, {r["backend"]}, {r["types"]}, batch {r["batch"]}\n\n{code(*summary(r).splitlines())}'
            for r in report['results']
        ],
    ]
    return '\n\n'.join(parts) + '\n'


def write_benchmark(folder: Path, report: dict[str, Any]) -> None:
    """Write benchmark.json, benchmark.md, latency.png, throughput.png and, where something was sampled, usage.png.

    Args:
        folder: where to write.
        report: 'settings', 'machine', 'left_out' (lines), 'results' (plain Results) and 'usage' (samples of a Usage).
    """
    write_json(folder / 'benchmark.json', report)
    report = {**report, 'results': with_short_names(report['results'])}
    write_text(folder / 'benchmark.md', markdown(report))
    plot_latency(folder / 'latency.png', report['results'])
    plot_throughput(folder / 'throughput.png', report['results'])
    if report['usage']:
        plot_usage(folder / 'usage.png', report)
