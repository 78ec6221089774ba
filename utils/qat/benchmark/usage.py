"""Memory and utilisation while something runs: NVML for a GPU, psutil for this process on a CPU.

in:  a device
out: samples (seconds since the start, MiB in use, utilisation in %), taken by a thread beside the work

A GPU's figures are of the whole device, other processes included, and NVML's utilisation is the share of its last sample
period (up to a second) in which any kernel ran. A CPU's are the resident memory of this process and its share of all cores.
"""

import importlib
import os
import threading
import time

import torch

from utils.qat.core.errors import QatError

PERIOD = 0.1  # seconds between samples
MIB = 1 << 20


def gpu_probe(device):
    """Functions () → MiB and () → % of a CUDA device. Raises QatError without NVML."""
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


def cpu_probe():
    """Functions () → MiB and () → % of this process; the % since the last call. Raises QatError without psutil."""
    try:
        psutil = importlib.import_module('psutil')
    except ImportError as e:
        raise QatError('no package psutil (./install_dependencies.sh)') from e
    process = psutil.Process()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    process.cpu_percent()  # the first call begins the period of the second
    return lambda: process.memory_info().rss / MIB, lambda: process.cpu_percent() / cores


class Usage:
    """Context: samples in a thread. `samples` is [(seconds, MiB, %), ...]; empty where nothing can be sampled."""

    def __init__(self, device, say):
        """say: takes the line that tells why there are no samples."""
        self.samples, self.start, self.over = [], time.perf_counter(), threading.Event()
        try:
            self.memory, self.percent = gpu_probe(device) if device.type == 'cuda' else cpu_probe()
        except QatError as e:
            self.memory = None
            say(f'left out: memory and utilisation: {e}')
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        if self.memory:
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        if self.memory:
            self.thread.join()

    def _sample(self):
        while not self.over.wait(PERIOD):
            self.samples.append((self.now(), self.memory(), self.percent()))

    def now(self):
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def begin(self):
        """What `since` counts from: (seconds, MiB); MiB is None where nothing can be sampled."""
        return self.now(), self.memory() if self.memory else None

    def since(self, begun, busy):
        """Of the time from `begun` (see `begin`) on: {'start', 'end': seconds, 'peak_mib', 'added_mib': the peak and how much of it
        was not there before, 'percent': mean from the second `busy` on}. None where nothing was sampled."""
        start, before = begun
        samples = [s for s in self.samples if s[0] >= start]
        working = [percent for at, _, percent in samples if at >= busy]
        if not working:
            return None
        peak = max(memory for _, memory, _ in samples)
        return {
            'start': start,
            'end': self.now(),
            'peak_mib': peak,
            'added_mib': max(0.0, peak - before),
            'percent': sum(working) / len(working),
        }
