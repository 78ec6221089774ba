"""Memory and utilisation while something runs: NVML for a GPU, psutil for this process on a CPU.

in:  a device
out: samples (seconds since the start, MiB in use, utilisation in %), taken by a thread beside the work

A GPU's figures are of the whole device, other processes included, and NVML's utilisation is the share of its last sample
period (up to a second) in which any kernel ran. A CPU's are the resident memory of this process and its share of all cores.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable

import torch

from utils.qat.core.errors import QatError

PERIOD = 0.1  # seconds between samples
MIB = 1 << 20
Probe = Callable[[], float]


def gpu_probe(device: torch.device) -> tuple[Probe, Probe]:
    """Make the probes of a CUDA device.

    Returns:
        Functions that read the memory in use (MiB) and the utilisation (%).

    Raises:
        QatError: NVML is missing, or does not know the device.
    """
    try:
        nvml = importlib.import_module('pynvml')
    except ImportError as e:
        raise QatError('no package nvidia-ml-py (pip install nvidia-ml-py)') from e
    try:
        nvml.nvmlInit()
        # by UUID: NVML counts all GPUs, PyTorch those that CUDA_VISIBLE_DEVICES leaves
        handle = nvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}'.encode())
        nvml.nvmlDeviceGetUtilizationRates(handle)
    except nvml.NVMLError as e:
        raise QatError(f'NVML says: {e}') from e
    return (
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB,
        lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    )


def cpu_probe() -> tuple[Probe, Probe]:
    """Make the probes of this process.

    Returns:
        Functions that read its resident memory (MiB), and its share of all cores since the last call (%).

    Raises:
        QatError: psutil is missing.
    """
    try:
        psutil = importlib.import_module('psutil')
    except ImportError as e:
        raise QatError('no package psutil (./install_dependencies.sh)') from e
    process = psutil.Process()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    process.cpu_percent()  # the first call begins the period of the second
    return lambda: process.memory_info().rss / MIB, lambda: process.cpu_percent() / cores


class Usage:
    """A context in which a thread takes samples.

    Attributes:
        samples: (seconds since the start, MiB in use, utilisation in %) of each; empty where nothing can be sampled.
    """

    def __init__(self, device: torch.device, say: Callable[[str], object]) -> None:
        """Find the probes.

        Args:
            device: the device to look at.
            say: takes the line that tells why there are no samples.
        """
        self.samples: list[tuple[float, float, float]] = []
        self.start, self.over = time.perf_counter(), threading.Event()
        self.memory: Probe | None = None
        try:
            self.memory, self.percent = gpu_probe(device) if device.type == 'cuda' else cpu_probe()
        except QatError as e:
            say(f'left out: memory and utilisation: {e}')
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Usage:
        if self.memory:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.memory:
            self.thread.join()

    def _sample(self) -> None:
        """Take samples until the context is over."""
        while self.memory and not self.over.wait(PERIOD):
            self.samples.append((self.now(), self.memory(), self.percent()))

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start

    def begin(self) -> tuple[float, float | None]:
        """Return the point from which `since` counts: (seconds, MiB); MiB is None where nothing can be sampled."""
        return self.now(), self.memory() if self.memory else None

    def since(self, begun: tuple[float, float | None], busy: float) -> dict[str, float] | None:
        """Summarize the samples from a point on.

        Args:
            begun: the point, see `begin`.
            busy: seconds since the start, from which the device works.

        Returns:
            'start' and 'end' (seconds since the start), 'peak_mib', 'added_mib' (how much of the peak was not there
            before), and 'percent' (mean utilisation from `busy` on). None where nothing was sampled.
        """
        start, before = begun
        samples = [s for s in self.samples if s[0] >= start]
        working = [percent for at, _, percent in samples if at >= busy]
        if not working or before is None:
            return None
        peak = max(memory for _, memory, _ in samples)
        return {
            'start': start,
            'end': self.now(),
            'peak_mib': peak,
            'added_mib': max(0.0, peak - before),
            'percent': sum(working) / len(working),
        }
