"""Choose the baseline of each row of a benchmark, another row, and compute the change against it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.qat.config.tables import BACKENDS

FLOATS = ('fp32', 'fp16', 'bf16')  # the first that was measured is the baseline
ACCURACIES = {'ap': 'AP', 'ap50': 'AP50', 'precision': 'P', 'recall': 'R', 'top1': 'top-1', 'top5': 'top-5'}


def baseline_of(
    result: dict[str, Any], results: Sequence[dict[str, Any]], wanted: str | None = None
) -> dict[str, Any] | None:
    """Find the baseline of a plain Result: another at the same batch and image size.

    `wanted` is the value of --baseline. None: the same file in FP32 (or FP16, BF16), else the float file, in the same
    backend. A file: this file in the same backend, or in the only backend that ran it. A backend: the same file in FP32
    there, else the float file. If no row or several rows qualify, no baseline is chosen.
    """
    there = [r for r in results if (r['batch'], r['imgsz']) == (result['batch'], result['imgsz'])]
    if wanted is None or wanted in BACKENDS:
        backend = BACKENDS[wanted].title if wanted else result['backend']
        there = [r for r in there if r['precision'] in FLOATS and r['backend'] == backend]
        there = [r for r in there if r['given'] == result['given']] or there
    else:
        there = [r for r in there if wanted in (r['given'], Path(r['given']).name)]
        if len({r['backend'] for r in there}) > 1:
            there = [r for r in there if r['backend'] == result['backend']]
    return _first_precision(there)


def _first_precision(there: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the result in the first measured precision of FLOATS, or the only result; None if several qualify."""
    for precision in (*FLOATS, 'int8', ''):
        found = [r for r in there if r['precision'] == precision]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def change(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Compare a result with its baseline.

    Returns:
        'model', 'backend' and 'types' of the baseline; 'latency_percent' and 'images_per_s_percent', the change of the median
        latency and of the throughput; 'latency_speed_up' and 'images_per_s_speed_up', how many times as fast; 'points', the
        difference of each accuracy metric in points (0.01), None if one of the two lacks it.
    """
    latency = [r['latency']['median'] for r in (baseline, result)]
    rate = [r['images_per_s'] for r in (baseline, result)]
    before, after = baseline['accuracy'], result['accuracy']
    return {
        **{key: baseline[key] for key in ('model', 'backend', 'types')},
        'latency_percent': 100 * (latency[1] / latency[0] - 1),
        'latency_speed_up': latency[0] / latency[1],
        'images_per_s_percent': 100 * (rate[1] / rate[0] - 1),
        'images_per_s_speed_up': rate[1] / rate[0],
        'points': {k: 100 * (after[k] - before[k]) for k in ACCURACIES if k in before and k in after}
        if before and after
        else None,
    }


def with_changes(results: Sequence[dict[str, Any]], wanted: str | None = None) -> list[dict[str, Any]]:
    """Return plain Results with 'against': the `change` against the baseline, see `baseline_of`; None without one."""
    found = []
    for result in results:
        baseline = baseline_of(result, results, wanted)
        found.append({**result, 'against': change(result, baseline) if baseline else None})
    return found
