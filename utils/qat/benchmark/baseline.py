"""Compare the rows of a benchmark: each with its baseline, another row, and INT8 with the fastest float precision."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from utils.qat.benchmark.rows import Against, Row
from utils.qat.config.tables import BACKENDS
from utils.qat.vendors.vendor import SIMULATED

FLOATS = ('fp32', 'fp16', 'bf16')  # the first that was measured is the baseline
NOTICEABLE = 1.05  # times as fast
ACCURACIES = {'ap': 'AP', 'ap50': 'AP50', 'precision': 'P', 'recall': 'R', 'top1': 'top-1', 'top5': 'top-5'}


def baseline_of(result: Row, results: Sequence[Row], wanted: str | None = None) -> Row | None:
    """Find the baseline of a row: another at the same batch and image size.

    `wanted` is the value of --baseline. None: the same file in FP32 (or FP16, BF16), else the float file with as many
    outputs, in the same backend. A file: this file in the same backend, or in the only backend that ran it. A backend: the same file in FP32
    there, else the float file. If no row or several rows qualify, no baseline is chosen.
    """
    there = [r for r in results if (r['batch'], r['imgsz']) == (result['batch'], result['imgsz'])]
    if wanted is None or wanted in BACKENDS:
        backend = BACKENDS[wanted].title if wanted else result['backend']
        there = [r for r in there if r['precision'] in FLOATS and r['backend'] == backend]
        there = [r for r in there if wanted or r['outputs'] == result['outputs']]
        there = [r for r in there if r['given'] == result['given']] or there
    else:
        there = [r for r in there if wanted in (r['given'], Path(r['given']).name)]
        if len({r['backend'] for r in there}) > 1:
            there = [r for r in there if r['backend'] == result['backend']]
    return _first_precision(there)


def _first_precision(there: Sequence[Row]) -> Row | None:
    """Return the result in the first measured precision of FLOATS, or the only result; None if several qualify."""
    for precision in (*FLOATS, 'int8', ''):
        rows = [r for r in there if r['precision'] == precision]
        if rows:
            return rows[0] if len(rows) == 1 else None
    return None


def change(result: Row, baseline: Row) -> Against:
    """Compare a result with its baseline, by median latency and throughput; without points if one of the two has no accuracy."""
    latency = [r['latency']['median'] for r in (baseline, result)]
    rate = [r['images_per_s'] for r in (baseline, result)]
    before, after = baseline['accuracy'], result['accuracy']
    return {
        'model': baseline['model'],
        'backend': baseline['backend'],
        'types': baseline['types'],
        'latency_percent': 100 * (latency[1] / latency[0] - 1),
        'latency_speed_up': latency[0] / latency[1],
        'images_per_s_percent': 100 * (rate[1] / rate[0] - 1),
        'images_per_s_speed_up': rate[1] / rate[0],
        'points': {k: 100 * (after[k] - before[k]) for k in ACCURACIES if k in before and k in after}
        if before and after
        else None,
    }


def with_changes(results: Sequence[Row], wanted: str | None = None) -> list[Row]:
    """Return rows with 'against': the `change` against the baseline, see `baseline_of`; None without one."""
    rows: list[Row] = []
    for result in results:
        baseline = baseline_of(result, results, wanted)
        rows.append({**result, 'against': change(result, baseline) if baseline else None})
    return rows


class Gain(NamedTuple):
    """An INT8 file against the fastest float precision of the same backend, at one image size and batch."""

    file: str  # '' if there is one INT8 file only
    backend: str
    image: str  # '' if all results have one size
    batch: int
    precision: str  # the float one, in capitals
    times: float  # as fast, by median latency

    def __str__(self) -> str:
        return f'{self.times:.2f} times as fast as {self.precision}'


def int8_gains(results: Sequence[Row]) -> Iterator[Gain]:
    """Compare each INT8 file with the fastest float precision of a file with as many outputs (NMS inside has more).

    In each backend and image size, at each batch that has both.
    """

    def place(result: Row) -> tuple[str, list[int], int]:
        return result['backend'], list(result['imgsz'] or ()), result['batch']

    several = len({tuple(r['imgsz'] or ()) for r in results}) > 1
    files = dict.fromkeys(r['model'] for r in results if is_int8(r))
    for (backend, imgsz, batch), group in groupby(sorted(results, key=place), place):
        rows = sorted(group, key=lambda r: r['latency']['median'])
        image = ' x '.join(map(str, imgsz)) if several else ''
        for row in filter(is_int8, rows):
            floats = (r for r in rows if r['precision'] in FLOATS and r['outputs'] == row['outputs'])
            if not (fastest := next(floats, None)):
                continue
            times = fastest['latency']['median'] / row['latency']['median']
            name = row['model'] if len(files) > 1 else ''
            yield Gain(name, backend, image, batch, fastest['precision'].upper(), times)


def is_int8(result: Row) -> bool:
    """Tell whether a row computed in INT8, and did not simulate it."""
    return result['precision'] == 'int8' and result['types'] != SIMULATED


def speed_conclusions(results: Sequence[Row]) -> list[str]:
    """Sum up rows with short names in a sentence for each INT8 file in each backend, and one about the fastest files."""
    said: list[str] = []
    gains_of: dict[str, list[str]] = {}
    for gain in int8_gains(results):
        where = f'{gain.backend}, {gain.image} pixels' if gain.image else gain.backend
        slower = '' if gain.times >= NOTICEABLE else f' (not faster: ship {gain.precision})'
        what = f'In {where}, {gain.file or "INT8"} against'
        gains_of.setdefault(what, []).append(f'{gain} at batch {gain.batch}{slower}')
    for what, gains in gains_of.items():
        said.append(f'{what} the fastest float precision: {", ".join(gains)}.')

    def named(result: Row) -> str:
        return f'at batch {result["batch"]}: {result["model"]} in {result["backend"]}, {result["types"]}'

    soonest = min(results, key=lambda r: r['latency']['median'])
    most = max(results, key=lambda r: r['images_per_s'])
    said.append(
        f'Least latency {soonest["latency"]["median"]:.4g} ms {named(soonest)}. Most images/s {most["images_per_s"]:.1f} {named(most)}.'
    )
    return said
