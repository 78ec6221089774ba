"""Tables of a benchmark, as Markdown and as CSV: times, the change against the baseline, and the models."""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from utils.qat.benchmark.baseline import POINTS
from utils.qat.benchmark.case import pixels
from utils.qat.core.files import distinct_names
from utils.qat.core.markdown import markdown_table
from utils.qat.core.printable import visible

Row = dict[str, Any]  # a plain Result
Column = tuple[str, Callable[[Row], Any]]  # title, and a value; None where there is none
PARTS = {'enqueue': 'enqueue', 'h2d': 'H2D', 'compute': 'GPU compute', 'd2h': 'D2H'}  # as trtexec names them


def with_short_names(results: Sequence[Row]) -> list[Row]:
    """Return plain Results, with 'against', whose models have the names of their files, see files.distinct_names."""
    files = list(dict.fromkeys(r['model'] for r in results))
    short = dict(zip(files, distinct_names(list(map(Path, files)))))
    return [
        {
            **r,
            'model': short[r['model']],
            'against': r['against'] and {**r['against'], 'model': short[r['against']['model']]},
        }
        for r in results
    ]


def series(result: Row) -> tuple[str, str, str, str]:
    """Return the series of a plain Result, which is measured at several batches: (model, backend, types, image size)."""
    return result['model'], result['backend'], result['types'], pixels(result['imgsz'])


def _of(key: str, inner: str, form: str = '') -> Callable[[Row], Any]:
    """Make a function that takes result[key][inner], in the format `form`; None where there is no such figure."""

    def value(result: Row) -> Any:
        found = (result.get(key) or {}).get(inner)
        return format(found, form) if form and found is not None else found

    return value


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Make a Markdown table of the columns that have a value in any row."""
    cells = [[value(row) for _, value in columns] for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] not in (None, '') for row in cells)]
    return markdown_table(
        [columns[i][0] for i in kept], [['-' if row[i] in (None, '') else row[i] for i in kept] for row in cells]
    )


SERIES: list[Column] = [
    ('model', lambda r: r['model']),
    ('backend', lambda r: r['backend']),
    ('precision', lambda r: r['types']),
    ('image', lambda r: pixels(r['imgsz'])),
]
BATCH: list[Column] = [
    ('batch', lambda r: r['batch']),
    ('batch axis', lambda r: 'open' if r['open_batch'] else 'fixed'),
]
USAGE: list[Column] = [
    ('memory (MiB)', _of('usage', 'peak_mib', '.0f')),
    ('of it added', _of('usage', 'added_mib', '.0f')),
    ('utilisation (%)', _of('usage', 'percent', '.0f')),
    ('clock (MHz)', _of('usage', 'clock_mhz', '.0f')),
]


def speed_table(results: Sequence[Row]) -> str:
    """Make the table of latency, throughput, memory, utilisation and clock: a row for each measurement.

    The parts of the latency are there on a GPU only: on a CPU the latency is the model alone.
    """

    def part(key: str) -> Callable[[Row], Any]:
        return lambda r: _of(key, 'median', '.4g')(r) if r['h2d'] else None

    return _table(
        [
            *SERIES,
            *BATCH,
            ('latency (ms)', _of('latency', 'median', '.4g')),
            *[(key, _of('latency', key, '.4g')) for key in ('mean', 'p99', 'max')],
            *[(f'{title} (ms)', part(key)) for key, title in PARTS.items()],
            ('qps', lambda r: f'{r["qps"]:.1f}'),
            ('images/s', lambda r: f'{r["images_per_s"]:.1f}'),
            *USAGE,
        ],
        results,
    )


def baseline_table(results: Sequence[Row]) -> str:
    """Make the table of changes against the baseline (baseline.with_changes); '' if no result has one but itself."""

    def against(key: str, form: str, unit: str = '') -> Callable[[Row], Any]:
        return lambda r: format(r['against'][key], form) + unit if r['against'] and not itself(r) else None

    def itself(r: Row) -> bool:
        return bool(r['against']) and all(r[key] == r['against'][key] for key in ('model', 'backend', 'types'))

    def baseline(r: Row) -> str | None:
        if not r['against']:
            return None
        return 'itself' if itself(r) else ', '.join(r['against'][key] for key in ('model', 'backend', 'types'))

    def points(key: str) -> Callable[[Row], Any]:
        return lambda r: (
            f'{r["against"]["points"][key]:+.2f}'
            if r['against'] and not itself(r) and key in (r['against']['points'] or {})
            else None
        )

    accuracy: list[Column] = []
    for key in ('ap', 'top1'):
        accuracy += [(POINTS[key], _of('accuracy', key, '.4f')), ('difference (points)', points(key))]
    if all(r['against'] is None or itself(r) for r in results):
        return ''
    return _table(
        [
            *SERIES,
            *BATCH[:1],
            ('latency (ms)', _of('latency', 'median', '.4g')),
            ('latency change', against('latency_percent', '+.1f', ' %')),
            ('speed-up', against('latency_speed_up', '.2f')),
            ('images/s', lambda r: f'{r["images_per_s"]:.1f}'),
            ('throughput change', against('images_per_s_percent', '+.1f', ' %')),
            ('its speed-up', against('images_per_s_speed_up', '.2f')),
            *accuracy,
            ('baseline', baseline),
        ],
        results,
    )


def model_table(results: Sequence[Row]) -> str:
    """Make the table of the files that ran: size, parameters, layers, accuracy, best latency and best throughput.

    A row is a series, or an engine where each batch has one.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for r in results:
        groups.setdefault((*series(r), r['size_bytes'], r['parameters'], r['layers']), []).append(r)
    best = [
        {
            **group[0],
            'batches': ', '.join(str(n) for n in sorted({r['batch'] for r in group})),
            'quick': min(group, key=lambda r: r['latency']['median']),
            'most': max(group, key=lambda r: r['images_per_s']),
        }
        for group in groups.values()
    ]
    return _table(
        [
            *SERIES,
            ('batches', lambda r: r['batches']),
            ('file (MB)', lambda r: f'{r["size_bytes"] / 1e6:.2f}'),
            ('parameters (M)', lambda r: None if r['parameters'] is None else f'{r["parameters"] / 1e6:.3f}'),
            ('layers', lambda r: r['layers']),
            *[(title, _of('accuracy', key, '.4f')) for key, title in POINTS.items()],
            ('mask AP', lambda r: _of('mask', 'ap', '.4f')(r['accuracy']) if r['accuracy'] else None),
            ('least latency (ms)', lambda r: f'{r["quick"]["latency"]["median"]:.4g}'),
            ('most images/s', lambda r: f'{r["most"]["images_per_s"]:.1f}'),
        ],
        best,
    )


def csv_text(results: Sequence[Row]) -> str:
    """Write plain Results with 'against' as CSV: a row for each measurement, times in ms, as many digits as there are."""
    columns: list[Column] = [
        ('model', lambda r: visible(r['model'])),
        ('backend', lambda r: r['backend']),
        ('precision', lambda r: r['types']),
        ('height', lambda r: r['imgsz'] and r['imgsz'][0]),
        ('width', lambda r: r['imgsz'] and r['imgsz'][1]),
        *BATCH,
        *[
            (f'latency {key} (ms)', _of('latency', key))
            for key in ('min', 'mean', 'median', 'max', 'p90', 'p95', 'p99')
        ],
        *[(f'{title} median (ms)', lambda r, k=key: r['h2d'] and r[k]['median']) for key, title in PARTS.items()],
        ('queries', lambda r: r['queries']),
        ('qps', lambda r: r['qps']),
        ('images/s', lambda r: r['images_per_s']),
        ('baseline', lambda r: r['against'] and visible(r['against']['model'])),
        ('baseline backend', _of('against', 'backend')),
        ('baseline precision', _of('against', 'types')),
        ('latency change (%)', _of('against', 'latency_percent')),
        ('latency speed-up', _of('against', 'latency_speed_up')),
        ('images/s change (%)', _of('against', 'images_per_s_percent')),
        ('images/s speed-up', _of('against', 'images_per_s_speed_up')),
        *[(title, _of('accuracy', key)) for key, title in POINTS.items()],
        ('images scored', _of('accuracy', 'images')),
        ('file (bytes)', lambda r: r['size_bytes']),
        ('parameters', lambda r: r['parameters']),
        ('layers', lambda r: r['layers']),
        ('memory (MiB)', _of('usage', 'peak_mib')),
        ('memory added (MiB)', _of('usage', 'added_mib')),
        ('utilisation (%)', _of('usage', 'percent')),
        ('clock (MHz)', _of('usage', 'clock_mhz')),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow([title for title, _ in columns])
    writer.writerows([['' if (v := value(r)) is None else v for _, value in columns] for r in results])
    return text.getvalue()
