"""Sample memory, utilisation and clock in a thread beside the work: NVML for a GPU, psutil for this process on a CPU.

A GPU's figures are of the whole device, other processes included, and NVML's utilisation is the share of its last sample
period (up to a second) in which any kernel ran. A CPU's are the resident memory of this process, its share of all cores, and
the mean clock of all cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import psutil
import torch

from utils.qat.benchmark.rows import Load
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import NVML_FAILS, clock_scales, nvml_of, usable_cores

PERIOD = 0.1  # seconds between samples
MIB = 1 << 20


class Sample(NamedTuple):
    """Readings of a device at one time; None for one that the system does not give."""

    seconds: float  # since the start
    memory: float  # MiB in use
    percent: float  # utilisation since the last sample, or NVML's
    clock: float | None  # MHz
    others: float | None  # utilisation by other processes, in per cent; None if they may use other cores too


Probe = Callable[[], tuple[float, float, float | None, float | None]]  # reads all of a Sample but the time


def gpu_probe(device: torch.device) -> Probe:
    """Make the probe of a CUDA device. Raises QatError if NVML is missing, or does not know the device."""
    nvml, handle = nvml_of(device)

    def clock() -> float | None:
        try:
            return nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        except nvml.NVMLError:
            return None

    def read() -> tuple[float, float, float | None, None]:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB
        return memory, nvml.nvmlDeviceGetUtilizationRates(handle).gpu, clock(), None

    with reporting(NVML_FAILS, nvml.NVMLError):
        read()
    return read


def cpu_probe() -> Probe:
    """Make the probe of this process."""
    process, cores, scales = psutil.Process(), usable_cores(), clock_scales()
    whole = cores == psutil.cpu_count()

    def read() -> tuple[float, float, float | None, float | None]:
        percent = process.cpu_percent() / cores
        clock = psutil.cpu_freq().current if scales else None
        others = max(0.0, psutil.cpu_percent() - percent) if whole else None
        return process.memory_info().rss / MIB, percent, clock, others

    read()  # the first call begins the period of the second
    return read


class Usage:
    """Context in which a thread takes `samples`; they stay empty if nothing can be sampled."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[Sample] = []
        self.start, self.over = time.perf_counter(), threading.Event()
        self.probe: Probe | None = None
        try:
            self.probe = gpu_probe(device) if device.type == 'cuda' else cpu_probe()
        except QatError as e:
            LOGGER.info(f'left out: memory and utilisation: {e}')
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Usage:
        if self.probe:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.probe:
            self.thread.join()

    def _sample(self) -> None:
        """Take samples until the context is over."""
        while not self.over.wait(PERIOD):
            self._take()

    def _take(self) -> Sample:
        """Take a sample."""
        assert self.probe
        sample = Sample(self.now(), *self.probe())
        self.samples.append(sample)
        return sample

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start

    def begin(self) -> tuple[float, float | None]:
        """Return the start for `added`: (seconds, MiB); MiB is None if nothing can be sampled."""
        return self.now(), self._take().memory if self.probe else None

    def added(self, begun: tuple[float, float | None]) -> Load:
        """Return 'peak_mib' and 'added_mib' (peak less the memory at the start) since `begun`, see `begin`; empty if not sampled."""
        start, before = begun
        if before is None:
            return {}
        self._take()
        peak = max(s.memory for s in self.samples if s.seconds >= start)
        return {'peak_mib': peak, 'added_mib': max(0.0, peak - before)}

    def during(self, turns: Sequence[tuple[float, float]]) -> Load:
        """Average the samples in turns, each from and to some seconds since the start; empty if none fell into a turn."""
        samples = [s for s in self.samples if any(start <= s.seconds <= end for start, end in turns)]
        if not samples:
            return {}
        load = Load(percent=fmean(s.percent for s in samples))
        clocks = [s.clock for s in samples if s.clock is not None]
        others = [s.others for s in samples if s.others is not None]
        if len(clocks) == len(samples):
            load['clock_mhz'] = fmean(clocks)
        if len(others) == len(samples):
            load['others_percent'] = fmean(others)
        return load
