"""How long a network takes: a Session in, a Result out.

Two questions are asked one after the other, each for its share of the time (trtexec asks both at once):
- How long does one query take? Queries go one at a time: inputs to the device, compute, outputs back, wait. CUDA events
  between the parts on a GPU, the clock of the host on a CPU.
- How many can be served? On a GPU queries wait in line, so that it never waits for the host; inputs and outputs stay on it, as
  trtexec 11 has it by default. On a CPU there is nothing to put in line: OpenVINO answers several in streams, and of the others the
  queries of the first question count.
"""

import time
from collections import deque
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

LEAST = 10  # queries of a measurement, however long they take; trtexec's --iterations
IN_LINE = 2  # queries ordered ahead


def statistics(samples):
    """min, max, mean, median and the percentiles 90, 95 and 99 (interpolated, as numpy does) of some times."""
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

    model: str
    backend: str
    types: str  # that it computed in, in words
    precision: str  # that was asked for: fp32, fp16 or int8; '' if nothing tells
    batch: int  # images per query
    queries: int  # one at a time
    qps: float  # queries per second: on a GPU those in line, in OpenVINO those in streams
    images_per_s: float
    latency: dict  # end to end: h2d + compute + d2h of each query
    compute: dict  # of the model alone
    h2d: dict  # inputs to the GPU; None on a CPU
    d2h: dict
    enqueue: dict  # until the host is done with ordering a query; None on a CPU
    host_seconds: float  # that the throughput was measured for
    compute_seconds: float  # of that, in the model; of several streams their sum
    size_bytes: int  # of the file that ran
    parameters: int
    layers: int
    streams: int = (
        None  # that answered several queries at once, for the throughput; None where one was answered after the other
    )
    notes: list = field(default_factory=list)  # lines about what the engine made of the file
    usage: dict = None  # see Usage.since

    def plain(self):
        return asdict(self)


class HostClock:
    """Marks in time that the host takes; work is done when it returns."""

    mark = staticmethod(time.perf_counter)

    @staticmethod
    def ms(first, second):
        return 1000 * (second - first)

    @staticmethod
    def wait(mark):
        """Until what was ordered before `mark` is done."""


class DeviceClock:
    """Marks that the GPU takes when it comes to them, on the current stream."""

    @staticmethod
    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def ms(first, second):
        return first.elapsed_time(second)

    @staticmethod
    def wait(mark):
        mark.synchronize()


def one_at_a_time(session, clock, seconds, least=LEAST):
    """{'h2d', 'compute', 'd2h', 'enqueue': ms of each query}, and the seconds it took."""
    samples, start = {'h2d': [], 'compute': [], 'd2h': [], 'enqueue': []}, time.perf_counter()
    while len(samples['compute']) < least or time.perf_counter() - start < seconds:
        marks = [clock.mark()]
        session.upload()
        marks.append(clock.mark())
        ordering = time.perf_counter()
        session.compute()
        samples['enqueue'].append(1000 * (time.perf_counter() - ordering))
        marks.append(clock.mark())
        session.download()
        marks.append(clock.mark())
        clock.wait(marks[-1])
        for name, first, second in zip(samples, marks, marks[1:]):
            samples[name].append(clock.ms(first, second))
    return samples, time.perf_counter() - start


def in_line(session, clock, seconds):
    """(queries, seconds they took, seconds of them in the model), without transfers."""
    waiting, times, ordered, start, more = deque(), [], 0, time.perf_counter(), True
    while more or waiting:
        if more:
            first = clock.mark()
            session.compute()
            waiting.append((first, clock.mark()))
            ordered += 1
            more = ordered < LEAST or time.perf_counter() - start < seconds
        if len(waiting) == IN_LINE or not more:
            first, second = waiting.popleft()
            clock.wait(second)
            times.append(clock.ms(first, second))
    return ordered, time.perf_counter() - start, sum(times) / 1000


def measure(session, warmup, duration):
    """Figures of Result, the timed ones, of a Session that is prepared. warmup: milliseconds. duration: seconds."""
    gpu = session.stream is not None
    clock = DeviceClock if gpu else HostClock
    with torch.cuda.stream(session.stream):
        one_at_a_time(session, clock, warmup / 1000, least=1)
        samples, seconds = one_at_a_time(session, clock, duration / 2 if gpu or session.serves else duration)
        queries = len(samples['compute'])
        served = queries, seconds, sum(samples['compute']) / 1000
        if gpu or session.serves:
            served = in_line(session, clock, duration / 2) if gpu else session.serve(duration / 2, LEAST)
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
