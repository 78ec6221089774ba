"""Memory, utilisation and clock while something runs: NVML for a GPU, psutil for this process on a CPU.

in:  a device
out: samples (seconds since the start, MiB in use, utilisation in %, clock in MHz, utilisation by others in %), taken by a thread beside the work

A GPU's figures are of the whole device, other processes included, and NVML's utilisation is the share of its last sample
period (up to a second) in which any kernel ran. A CPU's are the resident memory of this process, its share of all cores, and
the mean clock of all cores.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from utils.qat.core.errors import QatError
from utils.qat.core.machine import clock_scales, nvml_of, usable_cores

PERIOD = 0.1  # seconds between samples
MIB = 1 << 20
Probe = Callable[[], float]


@dataclass(frozen=True)
class Probes:
    """Functions that read a device."""

    memory: Probe  # MiB in use
    percent: Probe  # utilisation since the last call, or as NVML has it
    clock: Probe | None = None  # MHz; None where the system does not tell
    everybody: Probe | None = None  # as `percent`, of all processes together; None where they may use other cores too


def gpu_probes(device: torch.device) -> Probes:
    """Make the probes of a CUDA device.

    Raises:
        QatError: NVML is missing, or does not know the device.
    """
    nvml, handle = nvml_of(device)

    def clock() -> float:
        return nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)

    try:
        nvml.nvmlDeviceGetUtilizationRates(handle)
    except nvml.NVMLError as e:
        raise QatError(f'NVML says: {e}') from e
    try:
        clock()
    except nvml.NVMLError:
        known = False
    else:
        known = True
    return Probes(
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB,
        lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        clock if known else None,
    )


def cpu_probes() -> Probes:
    """Make the probes of this process.

    Raises:
        QatError: psutil is missing.
    """
    try:
        psutil = importlib.import_module('psutil')
    except ImportError as e:
        raise QatError('no package psutil (./install_dependencies.sh)') from e
    process, cores = psutil.Process(), usable_cores()
    process.cpu_percent()  # the first call begins the period of the second
    return Probes(
        lambda: process.memory_info().rss / MIB,
        lambda: process.cpu_percent() / cores,
        (lambda: psutil.cpu_freq().current) if clock_scales() else None,
        psutil.cpu_percent if cores == psutil.cpu_count() else None,
    )


class Usage:
    """A context in which a thread takes samples.

    Attributes:
        samples: (seconds since the start, MiB in use, utilisation in %, MHz or None, utilisation by others or None) of each; empty where nothing can be
            sampled.
    """

    def __init__(self, device: torch.device, say: Callable[[str], object]) -> None:
        """Find the probes; `say` takes the line that tells why there are no samples."""
        self.samples: list[tuple[float, float, float, float | None, float | None]] = []
        self.start, self.over = time.perf_counter(), threading.Event()
        self.probes: Probes | None = None
        try:
            self.probes = gpu_probes(device) if device.type == 'cuda' else cpu_probes()
        except QatError as e:
            say(f'left out: memory and utilisation: {e}')
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Usage:
        if self.probes:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.probes:
            self.thread.join()

    def _sample(self) -> None:
        """Take samples until the context is over."""
        while self.probes and not self.over.wait(PERIOD):
            memory, percent = self.probes.memory(), self.probes.percent()
            clock = self.probes.clock() if self.probes.clock else None
            others = max(0.0, self.probes.everybody() - percent) if self.probes.everybody else None
            self.samples.append((self.now(), memory, percent, clock, others))

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start

    def begin(self) -> tuple[float, float | None]:
        """Return the point from which `since` counts: (seconds, MiB); MiB is None where nothing can be sampled."""
        return self.now(), self.probes.memory() if self.probes else None

    def since(self, begun: tuple[float, float | None], busy: float) -> dict[str, float] | None:
        """Summarize the samples from a point on, see `begin`; the device works from `busy` seconds on. None without any.

        Returns:
            'start' and 'end' (seconds since the start), 'peak_mib', 'added_mib' (how much of the peak was not there
            before), 'percent' (mean utilisation from `busy` on) and, where the system tells them, 'clock_mhz' and
            'others_percent' (mean clock, and mean utilisation of the CPU by other processes, from `busy` on).
        """
        start, before = begun
        samples = [s for s in self.samples if s[0] >= start]
        working = [figures for at, _, *figures in samples if at >= busy]
        if not working or before is None:
            return None
        peak = max(memory for _, memory, *_ in samples)
        percents, clocks, others = zip(*working)
        return {
            'start': start,
            'end': self.now(),
            'peak_mib': peak,
            'added_mib': max(0.0, peak - before),
            'percent': sum(percents) / len(percents),
            **({'clock_mhz': sum(clocks) / len(clocks)} if None not in clocks else {}),
            **({'others_percent': sum(others) / len(others)} if None not in others else {}),
        }
