"""Tables of a benchmark, as Markdown and as CSV: times, the change against the baseline, and the models.

A table is a list of columns, and a column names the figure of a row that it shows. `with_shown` adds derived figures, such as
MB or the words 'open' and 'fixed'.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.qat.benchmark.baseline import ACCURACIES, FLOATS
from utils.qat.benchmark.rows import Row, Shown
from utils.qat.core.files import distinct_names
from utils.qat.core.text import markdown_table, pixels, visible
from utils.qat.vendors.vendor import SIMULATED

PARTS = {'enqueue': 'enqueue', 'h2d': 'H2D', 'gpu_compute': 'GPU compute', 'd2h': 'D2H'}  # as trtexec names them


class Column(NamedTuple):
    """A column of a table."""

    title: str
    path: str  # keys of the figure in a row, such as 'latency.median'
    form: str = '{}'  # of the figure in Markdown; CSV has all its digits

    def figure(self, row: Shown) -> Any:
        """Return the figure of a row; None if there is none."""
        figure: Any = row
        for key in self.path.split('.'):
            figure = (figure or {}).get(key)
        return None if figure == '' else figure


SERIES = [
    Column('model', 'model'),
    Column('backend', 'backend'),
    Column('precision', 'types'),
    Column('image', 'image'),
]
BATCH = Column('batch', 'batch')
BATCH_AXIS = Column('batch axis', 'batch_axis')
LATENCY = Column('latency (ms)', 'latency.median', '{:.4g}')
IMAGES_PER_S = Column('images/s', 'images_per_s', '{:.1f}')
SPREAD = Column('min to p90', 'spread')
LATENCY_SPEED_UP = Column('latency speed-up', 'change.latency_speed_up', '{:.2f}')
RATE_SPEED_UP = Column('images/s speed-up', 'change.images_per_s_speed_up', '{:.2f}')
AP, TOP1 = Column('AP', 'accuracy.ap', '{:.4f}'), Column('top-1', 'accuracy.top1', '{:.4f}')
SPEED_TABLE = [  # only a GPU has parts of the latency: on a CPU it is the model alone
    *SERIES,
    BATCH,
    BATCH_AXIS,
    LATENCY,
    SPREAD,
    *[Column(key, f'latency.{key}', '{:.4g}') for key in ('mean', 'p99', 'max')],
    *[Column(f'{title} (ms)', f'{part}.median', '{:.4g}') for part, title in PARTS.items()],
    Column('qps', 'qps', '{:.1f}'),
    IMAGES_PER_S,
    Column('memory (MiB)', 'usage.peak_mib', '{:.0f}'),
    Column('of it added', 'usage.added_mib', '{:.0f}'),
    Column('utilisation (%)', 'usage.percent', '{:.0f}'),
    Column('clock (MHz)', 'usage.clock_mhz', '{:.0f}'),
]
SHORT_TABLE = [  # of the terminal
    *SERIES,
    BATCH,
    LATENCY,
    SPREAD,
    LATENCY_SPEED_UP,
    IMAGES_PER_S,
    AP,
    TOP1,
]
BASELINE_TABLE = [
    *SERIES,
    BATCH,
    LATENCY,
    SPREAD,
    LATENCY_SPEED_UP,
    IMAGES_PER_S,
    RATE_SPEED_UP,
    AP,
    Column('difference (points)', 'change.points.ap', '{:+.2f}'),
    TOP1,
    Column('difference (points)', 'change.points.top1', '{:+.2f}'),
    Column('baseline', 'baseline'),
]
MODEL_TABLE = [
    *SERIES,
    Column('batches', 'batches'),
    Column('file (MB)', 'megabytes', '{:.2f}'),
    Column('parameters (M)', 'million_parameters', '{:.3f}'),
    Column('layers', 'layers'),
    *[Column(title, f'accuracy.{key}', '{:.4f}') for key, title in ACCURACIES.items()],
    Column('mask AP', 'accuracy.mask.ap', '{:.4f}'),
    Column('least latency (ms)', 'least_latency'),
    Column('most images/s', 'most_images_per_s'),
]
CSV = [
    *SERIES[:3],
    Column('height', 'height'),
    Column('width', 'width'),
    BATCH,
    BATCH_AXIS,
    *[Column(f'latency {key} (ms)', f'latency.{key}') for key in ('min', 'mean', 'median', 'max', 'p90', 'p95', 'p99')],
    *[Column(f'{title} median (ms)', f'{part}.median') for part, title in PARTS.items()],
    Column('queries', 'queries'),
    Column('qps', 'qps'),
    IMAGES_PER_S,
    Column('baseline', 'against.model'),
    Column('baseline backend', 'against.backend'),
    Column('baseline precision', 'against.types'),
    Column('latency change (%)', 'against.latency_percent'),
    Column(LATENCY_SPEED_UP.title, 'against.latency_speed_up'),
    Column('images/s change (%)', 'against.images_per_s_percent'),
    Column(RATE_SPEED_UP.title, 'against.images_per_s_speed_up'),
    *[Column(title, f'accuracy.{key}') for key, title in ACCURACIES.items()],
    Column('images scored', 'accuracy.images'),
    Column('file (bytes)', 'size_bytes'),
    Column('parameters', 'parameters'),
    Column('layers', 'layers'),
    Column('memory (MiB)', 'usage.peak_mib'),
    Column('memory added (MiB)', 'usage.added_mib'),
    Column('utilisation (%)', 'usage.percent'),
    Column('clock (MHz)', 'usage.clock_mhz'),
]


def with_short_names(results: Sequence[Row]) -> list[Row]:
    """Return rows whose models are short, distinct names, see files.distinct_names."""
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


def series(result: Row | Shown) -> tuple[str, str, str, str]:
    """Return the series of a row, its key over all batches: (model, backend, types, image size)."""
    return result['model'], result['backend'], result['types'], pixels(result['imgsz'])


def with_shown(row: Row) -> Shown:
    """Return a row with the derived figures of the tables; 'change' is None for a row against itself."""
    against, (height, width), parameters = row['against'], row['imgsz'] or (None, None), row['parameters']
    names = [against[key] for key in ('model', 'backend', 'types')] if against else []
    itself = names == [row[key] for key in ('model', 'backend', 'types')]
    return {
        **row,
        'image': pixels(row['imgsz']),
        'height': height,
        'width': width,
        'batch_axis': 'open' if row['open_batch'] else 'fixed',
        'spread': '{min:.3g} to {p90:.3g}'.format(**row['latency']),
        'gpu_compute': row['compute'] if row['h2d'] else None,
        'change': None if itself else against,
        'baseline': 'itself' if itself else ', '.join(names),
        'megabytes': row['size_bytes'] / 1e6,
        'million_parameters': None if parameters is None else parameters / 1e6,
    }


def models_of(rows: Sequence[Shown]) -> list[Shown]:
    """Return a row for each file that ran (a series, or the engine of one batch), with the best of its batches."""
    groups: dict[tuple[object, ...], list[Shown]] = {}
    for row in rows:
        groups.setdefault((*series(row), row['size_bytes'], row['parameters'], row['layers']), []).append(row)
    return [
        {
            **group[0],
            'batches': ', '.join(map(str, sorted({row['batch'] for row in group}))),
            'least_latency': _best(LATENCY, min(group, key=LATENCY.figure)),
            'most_images_per_s': _best(IMAGES_PER_S, max(group, key=IMAGES_PER_S.figure)),
        }
        for group in groups.values()
    ]


def _best(column: Column, row: Shown) -> str:
    return f'{column.form.format(column.figure(row))} (batch {row["batch"]})'


def figures_table(columns: Sequence[Column], rows: Sequence[Shown]) -> str:
    """Make a Markdown table of the columns that are not empty."""
    shown = [column for column in columns if any(column.figure(row) is not None for row in rows)]
    cells = [[(column.form, column.figure(row)) for column in shown] for row in rows]
    return markdown_table(
        [column.title for column in shown],
        [['-' if figure is None else form.format(figure) for form, figure in row] for row in cells],
    )


def short_table(results: Sequence[Row]) -> str:
    """Make the table of the terminal, of rows with short names: no column that is the same in all rows but the model's."""
    rows = [with_shown(r) for r in results]
    varied = [c for c in SHORT_TABLE if c not in SERIES[2:] or len({c.figure(row) for row in rows}) > 1]
    return figures_table(varied, rows)


def precision_table(results: Sequence[Row]) -> str:
    """Make a table with columns for the precisions and the speed-up of INT8 against the fastest float one; '' for one precision.

    A row is an image size, backend and batch, and an INT8 file if there are several. Latency is that of the fastest float file, and so
    are images/s. Simulated INT8 is left out.
    """
    rows = [with_shown(r) for r in results if r['types'] != SIMULATED]
    precisions = [p for p in (*FLOATS, 'int8') if any(row['precision'] == p for row in rows)]
    files = list(dict.fromkeys(row['model'] for row in rows if row['precision'] == 'int8'))
    lines = []
    for key in dict.fromkeys((row['image'], row['backend'], row['batch']) for row in rows):
        there = [row for row in rows if (row['image'], row['backend'], row['batch']) == key]
        own = dict.fromkeys(row['model'] for row in there if row['precision'] == 'int8')
        for file in own or ['-']:
            compared = [row for row in there if row['precision'] != 'int8' or row['model'] == file]
            cells = [*_by_precision(LATENCY, min, precisions, compared)]
            cells += _by_precision(IMAGES_PER_S, max, precisions, compared)
            lines.append([*key, *[file] * (len(files) > 1), *cells])
    names = [p.upper() for p in precisions]
    latency, rate = [f'{name} (ms)' for name in names], [f'{name} (images/s)' for name in names]
    titles = *latency, LATENCY_SPEED_UP.title, *rate, RATE_SPEED_UP.title
    header = 'image', 'backend', 'batch', *['INT8 file'] * (len(files) > 1), *titles
    return markdown_table(header, lines) if len(precisions) > 1 else ''


def _by_precision(
    column: Column, best: Callable[..., float], precisions: Sequence[str], rows: Sequence[Shown]
) -> Iterator[str]:
    """Yield the best figure of each precision, and the speed-up of INT8 against the best float one; '-' for what is missing."""
    figures = {p: best(column.figure(r) for r in rows if r['precision'] == p) for p in {r['precision'] for r in rows}}
    for precision in precisions:
        yield column.form.format(figures[precision]) if precision in figures else '-'
    floats = [figure for precision, figure in figures.items() if precision != 'int8']
    gain = best(floats) / figures['int8'] if floats and 'int8' in figures else None
    yield '-' if gain is None else f'{gain if best is min else 1 / gain:.2f}'


def markdown_tables(results: Sequence[Row]) -> list[str]:
    """Make the tables of times, changes (if any row has another row as baseline) and models, of rows with short names."""
    rows = [with_shown(r) for r in results]
    changes = [figures_table(BASELINE_TABLE, rows)] if any(row['change'] for row in rows) else []
    return [figures_table(SPEED_TABLE, rows), *changes, figures_table(MODEL_TABLE, models_of(rows))]


def csv_text(results: Sequence[Row]) -> str:
    """Write rows with short names as CSV: a row for each measurement, times in ms, all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow([column.title for column in CSV])
    for row in map(with_shown, results):
        figures = [column.figure(row) for column in CSV]
        writer.writerow([visible(figure) if isinstance(figure, str) else figure for figure in figures])
    return text.getvalue()
