"""Time a network: a Measured in, the timed figures of its row out.

Latency and throughput are measured one after the other, each for its share of the time (trtexec measures both at once):
- Latency: queries run one at a time: inputs to the device, compute, outputs back, wait. A GPU uses CUDA events between the parts,
  a CPU the clock of the host.
- Throughput: on a GPU queries are queued, so that it never waits for the host; inputs and outputs stay on the device, as trtexec 11
  does by default. A CPU has no queue: OpenVINO answers several queries in streams, and for other backends the queries of the latency
  count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from utils.qat.benchmark.rows import Figures
from utils.qat.vendors.measured import Measured

PARTS = 'h2d', 'compute', 'd2h', 'enqueue'  # of a query
QUERIES_AHEAD = 2  # queued before the first of them is done


def statistics(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Summarize times of any unit: 'min', 'max', 'mean', 'median', 'p90', 'p95', 'p99'.

    Percentiles are interpolated, as NumPy does.
    """
    own = {name: float(getattr(np, name)(samples)) for name in ('min', 'max', 'mean', 'median')}
    return own | {f'p{p}': float(np.percentile(samples, p)) for p in (90, 95, 99)}


class HostEvent:
    """A point in time of the host, with the methods of torch.cuda.Event; work is done when it returns."""

    def record(self) -> None:
        """Take the time."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds to a later event."""
        return 1000 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        """Wait for nothing."""


def mark(measured: Measured) -> Any:
    """Record an event after the work queued so far, on the GPU or on the host."""
    event = torch.cuda.Event(enable_timing=True) if measured.stream else HostEvent()
    event.record()
    return event


def one_at_a_time(measured: Measured, seconds: float, least: int) -> tuple[dict[str, list[float]], float]:
    """Send queries one at a time, with their transfers, for some seconds, and at least `least`.

    Returns:
        'h2d', 'compute', 'd2h' and 'enqueue' → ms of each query; and the seconds of all.
    """
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    start = time.perf_counter()
    while len(samples['compute']) < least or time.perf_counter() - start < seconds:
        marks = [mark(measured)]
        measured.upload()
        marks.append(mark(measured))
        ordering = time.perf_counter()
        measured.compute()
        samples['enqueue'].append(1000 * (time.perf_counter() - ordering))
        marks.append(mark(measured))
        measured.download()
        marks.append(mark(measured))
        marks[-1].synchronize()
        for name, first, second in zip(samples, marks, marks[1:]):
            samples[name].append(first.elapsed_time(second))
    return samples, time.perf_counter() - start


def in_line(measured: Measured, seconds: float, least: int) -> tuple[list[float], float]:
    """Send queued queries, without transfers, for some seconds, and at least `least`.

    Returns:
        ms in the model of each query, and the seconds of all.
    """
    waiting: deque[tuple[Any, Any]] = deque()
    times: list[float] = []
    ordered, start, more = 0, time.perf_counter(), True
    while more or waiting:
        if more:
            first = mark(measured)
            measured.compute()
            waiting.append((first, mark(measured)))
            ordered += 1
            more = ordered < least or time.perf_counter() - start < seconds
        if len(waiting) == QUERIES_AHEAD or not more:
            first, second = waiting.popleft()
            second.synchronize()
            times.append(first.elapsed_time(second))
    return times, time.perf_counter() - start


class Timing:
    """The timed figures of a file, collected in turns.

    On a GPU the time in the model is that of queued queries, as trtexec has it: a query alone also waits for the host to start it.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {part: [] for part in PARTS}
        self.queued: list[float] = []  # ms of each queued query in the model
        self.queries, self.host_seconds, self.compute_seconds = 0, 0.0, 0.0

    def turn(self, measured: Measured, warmup: float, duration: float, least: int) -> None:
        """Take a turn. warmup: ms; duration: seconds; least: queries for the latency, and for the throughput."""
        gpu = measured.stream is not None
        with torch.cuda.stream(measured.stream):
            one_at_a_time(measured, warmup / 1000, least=1)
            samples, seconds = one_at_a_time(measured, duration / 2 if gpu or measured.several else duration, least)
            served = len(samples['compute']), seconds, sum(samples['compute']) / 1000
            if gpu:
                queued, seconds = in_line(measured, duration / 2, least)
                served = len(queued), seconds, sum(queued) / 1000
                self.queued += queued
            elif measured.several:
                served = measured.serve(duration / 2, least)
        for part, times in samples.items():
            self.samples[part] += times
        self.queries += served[0]
        self.host_seconds += served[1]
        self.compute_seconds += served[2]

    def figures(self) -> Figures:
        """Return the timed figures of a row, of all turns."""
        samples, gpu = self.samples, bool(self.queued)
        latency = np.sum([samples[part] for part in ('h2d', 'compute', 'd2h')], 0) if gpu else samples['compute']
        return {
            'queries': len(samples['compute']),
            'qps': self.queries / self.host_seconds,
            'latency': statistics(latency),
            'compute': statistics(self.queued or samples['compute']),
            'h2d': statistics(samples['h2d']) if gpu else None,
            'd2h': statistics(samples['d2h']) if gpu else None,
            'enqueue': statistics(samples['enqueue']) if gpu else None,
            'host_seconds': self.host_seconds,
            'compute_seconds': self.compute_seconds,
        }
