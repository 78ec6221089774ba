"""Results of a benchmark → the summary of each in trtexec's layout, and benchmark.json, benchmark.md and pictures of all."""

from pathlib import Path

from utils.qat.benchmark.plots import plot_latency, plot_throughput, plot_usage
from utils.qat.core.files import write_json, write_text
from utils.qat.core.markdown import code, escaped, markdown_table


def with_short_names(results):
    """Plain Results whose model is the file's name, or its path where two files share a name."""
    files = {r['model'] for r in results}
    names = [Path(f).name for f in files]
    return [
        {**r, 'model': Path(r['model']).name if names.count(Path(r['model']).name) == 1 else r['model']}
        for r in results
    ]


def series(result):
    """What is measured at several batches: (model, backend, types)."""
    return result['model'], result['backend'], result['types']


def summary(result):
    """A plain Result as trtexec prints it."""

    def line(name, times):
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


def _number(value, form='.4g'):
    return '-' if value is None else format(value, form)


def model_table(results):
    """Size, parameters and layers of what ran: a row per model, backend and types, and per engine where each batch has one."""
    rows = {}
    for r in results:
        parameters = None if r['parameters'] is None else r['parameters'] / 1e6
        row = *series(r), f'{r["size_bytes"] / 1e6:.2f}', _number(parameters, '.3f'), _number(r['layers'], 'd')
        rows.setdefault(row, []).append(r['batch'])
    return markdown_table(
        ('model', 'backend', 'precision', 'batches', 'file (MB)', 'parameters (M)', 'layers'),
        [(*row[:3], ', '.join(map(str, sorted(batches))), *row[3:]) for row, batches in rows.items()],
    )


def speed_up(result, results):
    """How many times as fast as FP32 a result is, by the median of the model: in the same backend, at the same batch.

    None where `results` have no FP32 there, or that of several models.
    """
    floats = [r for r in results if r['precision'] == 'fp32' and all(r[k] == result[k] for k in ('backend', 'batch'))]
    return floats[0]['compute']['median'] / result['compute']['median'] if len(floats) == 1 else None


def result_table(results):
    """Times, throughput, memory and utilisation: a row per measurement."""
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


def notes(results):
    """Lines about what engines made of their files, each once, as Markdown."""
    return list(dict.fromkeys(escaped(f'{r["model"]}: {"; ".join(r["notes"])}') for r in results if r['notes']))


def markdown(report):
    """benchmark.md."""
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


def write_benchmark(folder, report):
    """benchmark.json, benchmark.md, latency.png, throughput.png and, where something was sampled, usage.png."""
    write_json(folder / 'benchmark.json', report)
    report = {**report, 'results': with_short_names(report['results'])}
    write_text(folder / 'benchmark.md', markdown(report))
    plot_latency(folder / 'latency.png', report['results'])
    plot_throughput(folder / 'throughput.png', report['results'])
    if report['usage']:
        plot_usage(folder / 'usage.png', report)
