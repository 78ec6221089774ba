"""Time a network: a Measured in, a Result out.

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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from utils.qat.benchmark.measured import Measured

LEAST_QUERIES = 10  # of a measurement, however long they take; trtexec's --iterations
QUERIES_AHEAD = 2  # queued before the first of them is done


def statistics(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Summarize times of any unit: 'min', 'max', 'mean', 'median', 'p90', 'p95', 'p99'.

    Percentiles are interpolated, as NumPy does.
    """
    p90, p95, p99 = np.percentile(samples, (90, 95, 99)).tolist()
    return {
        'min': float(np.min(samples)),
        'max': float(np.max(samples)),
        'mean': float(np.mean(samples)),
        'median': float(np.median(samples)),
        'p90': p90,
        'p95': p95,
        'p99': p99,
    }


@dataclass
class Result:
    """One measurement. Times are in ms, see `statistics`, unless said otherwise."""

    model: str  # file that ran, or from which the engine was built
    given: str  # file that the command line names: the .onnx file, if its checkpoint ran
    backend: str
    types: str  # of the computation, in words
    precision: str  # requested, of MEASURED; '' if unknown
    imgsz: tuple[int, ...] | None  # height and width in pixels; None for a network without images
    batch: int  # images per query
    open_batch: bool  # whether the file that ran takes other batches too
    queries: int  # one at a time
    qps: float  # queries per second: on a GPU queued, in OpenVINO in streams
    images_per_s: float
    latency: dict[str, float]  # end to end: h2d + compute + d2h of each query
    compute: dict[str, float]  # of the model alone
    h2d: dict[str, float] | None  # inputs to the GPU; None on a CPU
    d2h: dict[str, float] | None  # outputs from the GPU, likewise
    enqueue: dict[str, float] | None  # until the host has queued a query; None on a CPU
    host_seconds: float  # duration of the throughput measurement
    compute_seconds: float  # of these, in the model; with several streams their sum
    size_bytes: int  # of the file that ran
    parameters: int | None  # their number; None if unknown
    layers: int | None  # likewise
    # number of streams that answered queries at once, for the throughput; None if queries ran one after the other
    streams: int | None = None
    notes: list[str] = field(default_factory=list)  # on how the engine ran the file
    usage: dict[str, float] | None = None  # see Usage.since
    accuracy: dict[str, Any] | None = None  # see accuracy.accuracy_of; set after all measurements


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


def one_at_a_time(
    measured: Measured, seconds: float, least: int = LEAST_QUERIES
) -> tuple[dict[str, list[float]], float]:
    """Send queries one at a time, with their transfers, for some seconds, and at least `least`.

    Returns:
        'h2d', 'compute', 'd2h' and 'enqueue' → ms of each query; and the seconds of all.
    """
    samples: dict[str, list[float]] = {'h2d': [], 'compute': [], 'd2h': [], 'enqueue': []}
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


def in_line(measured: Measured, seconds: float) -> tuple[int, float, float]:
    """Send queued queries, without transfers, for some seconds, and at least LEAST_QUERIES.

    Returns:
        Number of queries, seconds they took, and seconds of these in the model.
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
            more = ordered < LEAST_QUERIES or time.perf_counter() - start < seconds
        if len(waiting) == QUERIES_AHEAD or not more:
            first, second = waiting.popleft()
            second.synchronize()
            times.append(first.elapsed_time(second))
    return ordered, time.perf_counter() - start, sum(times) / 1000


def measure(measured: Measured, warmup: float, duration: float) -> dict[str, Any]:
    """Time a prepared Measured: return the timed figures of Result but images_per_s. warmup: ms; duration: seconds."""
    gpu = measured.stream is not None
    with torch.cuda.stream(measured.stream):
        one_at_a_time(measured, warmup / 1000, least=1)
        samples, seconds = one_at_a_time(measured, duration / 2 if gpu or measured.several else duration)
        queries = len(samples['compute'])
        served = queries, seconds, sum(samples['compute']) / 1000
        if gpu:
            served = in_line(measured, duration / 2)
        elif measured.several:
            served = measured.serve(duration / 2, LEAST_QUERIES)
    latency = np.sum([samples[part] for part in ('h2d', 'compute', 'd2h')], 0) if gpu else samples['compute']
    return {
        'queries': queries,
        'qps': served[0] / served[1],
        'host_seconds': served[1],
        'compute_seconds': served[2],
        'latency': statistics(latency),
        'compute': statistics(samples['compute']),
        **{part: statistics(samples[part]) if gpu else None for part in ('h2d', 'd2h', 'enqueue')},
    }
