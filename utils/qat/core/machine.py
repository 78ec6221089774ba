"""The machine on which figures were measured: package versions, GPU and CPU. Facts that the system does not tell are left out."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.qat.core.device import describe, instruction_sets
from utils.qat.core.errors import QatError
from utils.qat.core.markdown import escaped, markdown_table

if TYPE_CHECKING:
    import torch

PACKAGES = ('torch', 'torchvision', 'numpy', 'pytorch-quantization')
ENGINES = ('torch', 'onnxruntime', 'onnxruntime-gpu', 'openvino', 'tensorrt', 'tensorrt_rtx')
SCALING = Path('/sys/devices/system/cpu/cpufreq')  # missing in most virtual machines: no current clock
ROWS = {
    'device': 'device',
    'compute_capability': 'compute capability',
    'multiprocessors': 'multiprocessors (SMs)',
    'gpu_memory_mib': 'memory of the GPU (MiB)',
    'gpu_clock_max_mhz': 'largest clock of the GPU (MHz)',
    'gpu_memory_clock_max_mhz': 'largest clock of its memory (MHz)',
    'clock_mhz': 'clock while measuring (MHz)',
    'driver': 'driver',
    'driver_cuda': 'newest CUDA of the driver',
    'cpu': 'CPU',
    'instructions': 'its instructions for INT8, BF16 and vectors',
    'cpu_clock_max_mhz': 'its largest clock (MHz)',
    'cores': 'CPU cores that this process may use',
    'threads': 'CPU threads used',
    'memory_mib': 'memory (MiB)',
    'system': 'system',
    'versions': 'versions',
}  # key of `machine` → row of the table


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES: name → version."""
    return {'python': platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def nvml_of(device: torch.device) -> tuple[Any, Any]:
    """Find a CUDA device in NVML: the module pynvml, initialized, and its handle of the device."""
    import torch

    try:
        nvml = importlib.import_module('pynvml')
    except ImportError as e:
        raise QatError('no package nvidia-ml-py (pip install nvidia-ml-py)') from e
    try:
        nvml.nvmlInit()
        # by UUID: NVML counts all GPUs, PyTorch only those of CUDA_VISIBLE_DEVICES
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}'.encode())
    except nvml.NVMLError as e:
        raise QatError(f'NVML says: {e}') from e


def usable_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def clock_scales() -> bool:
    """Tell whether the system tells the current and the largest clock of the CPU."""
    return SCALING.is_dir() and any(SCALING.iterdir())


def cpu_name() -> str:
    """Return the model of the CPU; 'unknown' where the system does not tell."""
    linux = Path('/proc/cpuinfo')  # where platform.processor() knows nothing
    lines = linux.read_text(encoding='utf-8', errors='replace').splitlines() if linux.exists() else []
    told = next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), '')
    return told or platform.processor() or 'unknown'


def _gpu(device: torch.device) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        'compute_capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': properties.multi_processor_count,
        'gpu_memory_mib': properties.total_memory >> 20,
    }
    try:
        nvml, handle = nvml_of(device)
    except QatError:
        return found

    def cuda(version: int) -> str:
        return f'{version // 1000}.{version % 1000 // 10}'

    for key, read in (
        ('gpu_clock_max_mhz', lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ('gpu_memory_clock_max_mhz', lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        ('driver', lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        ('driver_cuda', lambda: cuda(nvml.nvmlSystemGetCudaDriverVersion())),
    ):
        with contextlib.suppress(nvml.NVMLError):  # not every GPU tells everything
            found[key] = read()
    return found


def _text(value: str | bytes) -> str:
    """Decode what older versions of pynvml return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu_clock_and_memory() -> dict[str, int]:
    """Return the largest clock of the CPU and the memory of the machine, as far as known."""
    try:
        psutil = importlib.import_module('psutil')
    except ImportError:
        return {}
    clock = psutil.cpu_freq() if clock_scales() else None
    return {
        **({'cpu_clock_max_mhz': round(clock.max)} if clock and clock.max else {}),
        'memory_mib': psutil.virtual_memory().total >> 20,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine, on which figures depend; unknown facts are left out.

    The keys are those of ROWS without 'clock_mhz', and besides 'gpu' (whether `device` is a GPU) and 'tf32' (whether
    PyTorch's convolutions compute in TF32 on a GPU).
    """
    import torch

    installed = {d.name: d.version for d in metadata.distributions()}
    gpu, cpu = device.type == 'cuda', cpu_name()
    return {
        'device': describe(device) if gpu else f'CPU {cpu}',
        'gpu': gpu,
        **(_gpu(device) if gpu else {}),
        'cpu': cpu,
        'instructions': ', '.join(instruction_sets()),
        'cores': usable_cores(),
        'threads': torch.get_num_threads(),
        **_cpu_clock_and_memory(),
        'system': f'{platform.system()} {platform.machine()}, Python {platform.python_version()}',
        'versions': {
            **{p: installed[p] for p in ENGINES if p in installed},
            **({'CUDA': torch.version.cuda} if gpu else {}),
        },
        'tf32': torch.backends.cudnn.allow_tf32,
    }


def machine_table(found: dict[str, Any]) -> str:
    """Format a `machine`, which may have 'clock_mhz', as a Markdown table with a row for each fact."""
    twice = set() if found.get('gpu') else {'cpu'}  # the device is the CPU
    facts = {title: found[key] for key, title in ROWS.items() if found.get(key) and key not in twice}
    return markdown_table(
        ('machine', ''),
        [
            (title, escaped(', '.join(f'{k} {v}' for k, v in fact.items())) if isinstance(fact, dict) else fact)
            for title, fact in facts.items()
        ],
        right=False,
    )
