"""The machine: --device → torch.device, threads that sleep while they wait, and the facts on which figures depend.

By default the threads of OpenMP (PyTorch) and of ONNX Runtime spin, to start without delay. Beside any other busy process
they hold the cores that the working threads need; docs/measured.md#threads has the figures. If the user sets one of
`CHOSEN`, it stays.

Facts that the system does not tell are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from utils.qat.core.distributed import rank, world_size
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.text import counted, escaped, markdown_table

if TYPE_CHECKING:
    import onnxruntime as ort
    import torch

INSTRUCTIONS = {  # name → flag of Linux
    'AVX2': 'avx2',
    'AVX-VNNI': 'avx_vnni',
    'AVX-512': 'avx512f',
    'AVX512-VNNI': 'avx512_vnni',
    'AVX512-BF16': 'avx512_bf16',
    'AMX-INT8': 'amx_int8',
    'AMX-BF16': 'amx_bf16',
    'NEON-DOT': 'asimddp',
    'I8MM': 'i8mm',
    'SVE': 'sve',
}
VNNI = {'avx_vnni', 'avx512_vnni', 'amx_int8'}  # flags of those that add products of INT8 in 32 bits
NVML_FAILS = "NVIDIA's NVML fails"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
PACKAGES = ('torch', 'torchvision', 'numpy', 'pytorch-quantization')
ENGINES = ('torch', 'onnxruntime', 'onnxruntime-gpu', 'openvino', 'tensorrt', 'tensorrt_rtx')
SCALING = Path('/sys/devices/system/cpu/cpufreq')  # missing in most virtual machines: no current clock
ROWS = {  # key of `machine` → row of the table
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
}
# A thread spins for about the time that a wake-up takes, then sleeps. So it loses little on an idle machine, and delays
# little on a busy one. GCC's library (PyTorch's wheels) counts spins, of 0.03 to 0.05 us each.
ASLEEP = {'OMP_WAIT_POLICY': 'passive', 'GOMP_SPINCOUNT': '3000'}
ONNX_RUNTIME_SPINS = '100'  # us
CHOSEN = 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME'  # of OpenMP, of GCC's library, of LLVM's and Intel's


def exact_convolutions() -> contextlib.AbstractContextManager[None]:
    """Return a context in which a GPU's convolutions are as in the commands, see `select_device`, and the same ones each time."""
    from torch.backends import cudnn

    return cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)


def select_device(text: str, exact: bool = True) -> torch.device:
    """Select the device of --device; a GPU becomes the current device of streams and kernels.

    `exact`: convolutions do without TF32, whose 10-bit mantissa is coarser than the INT8 grid that they would simulate.
    `text` has upstream's form: 'cpu', '0', 'cuda:0', 'mps'; '' is the first GPU, or the CPU if there is none. Under
    torchrun each process takes the GPU with its own number.
    """
    import torch  # here, because `-h` must not load it

    torch.backends.cudnn.allow_tf32 = not exact
    world, gpus = world_size(), torch.cuda.device_count()
    if world != int(os.environ.get('LOCAL_WORLD_SIZE', world)):
        raise QatError('torchrun --nnodes: this runs on one machine; leave it out')
    if world > 1 and text not in ('', 'cpu'):
        raise QatError(
            f'--device {text}: the {world} processes of torchrun take GPU 0 to {world - 1}, one each; leave --device '
            "out (CUDA_VISIBLE_DEVICES chooses the GPUs), or use 'cpu'"
        )
    if world == 1 or text == 'cpu' or not torch.cuda.is_available():
        device = _one_device(text)
    elif gpus < world:
        raise QatError(
            f'torchrun --nproc_per_node {world}: this machine has {counted(gpus, "GPU")} that PyTorch can use, '
            f'and each process needs its own; start {gpus}, or use --device cpu'
        )
    else:
        device = torch.device('cuda', rank())
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    return device


def _one_device(text: str) -> torch.device:
    """Select the device of a process without torchrun."""
    import torch

    text = str(text).strip().lower().replace('cuda:', '')
    if text in ('cpu', '') and (text == 'cpu' or not torch.cuda.is_available()):
        _keep_freed_memory()
        return torch.device('cpu')
    if text == 'mps':
        if not torch.backends.mps.is_available():
            raise QatError('--device mps: not available here; use --device cpu')
        return torch.device('mps')
    index = text or '0'
    if not index.isdigit():
        raise QatError(f"--device {text}: use one GPU number (such as 0) or 'cpu'")
    if int(index) >= torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        others = {0: '', 1: ' or 0'}.get(gpus, f' or 0..{gpus - 1}')
        raise QatError(
            f'--device {text}: this machine has {gpus or "no"} GPU{"s" * (gpus != 1)} that PyTorch can use; '
            f'use --device cpu{others}'
        )
    return torch.device('cuda', int(index))


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of a freed tensor for the next one; other C libraries are not changed.

    By default it returns every large tensor to the system, which clears each page of the next one: a fifth of the time of a
    forward pass of 10 images at 640 px.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)


def describe(device: torch.device) -> str:
    """Describe a device in words; under torchrun, the device of the first process."""
    import torch

    name = f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device).upper()
    return name + (f' in the first of {world_size()} processes' if world_size() > 1 else '')


def _cpuinfo(*keys: str) -> str:
    """Return what Linux tells of this CPU under one of the keys; '' if the system does not tell."""
    try:
        text = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
    return next((line.partition(':')[2].strip() for line in text.splitlines() if line.startswith(keys)), '')


def instruction_flags() -> list[str]:
    """Return the flags of INSTRUCTIONS that Linux lists for this CPU; empty if the system does not tell."""
    flags = _cpuinfo('flags', 'Features').split()
    return [flag for flag in INSTRUCTIONS.values() if flag in flags]


def int8_sums_overflow() -> bool:
    """Tell whether this is an x86 CPU on which PyTorch adds two products of INT8 in 16 bits; False if the system does not tell."""
    flags = {*instruction_flags()}
    return 'avx2' in flags and not flags & VNNI


def instruction_sets() -> list[str]:
    """Name the instructions of this CPU that speed up INT8 and BF16; empty if the system does not tell."""
    flags = instruction_flags()
    return [name for name, flag in INSTRUCTIONS.items() if flag in flags]


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES: name → version."""
    return {'python': platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def nvml_of(device: torch.device) -> tuple[ModuleType, object]:
    """Find a CUDA device in NVML: the module pynvml, initialized, and its handle of the device."""
    import torch

    with reporting('no package nvidia-ml-py', ImportError, remedy='pip install nvidia-ml-py'):
        nvml = importlib.import_module('pynvml')
    with reporting(NVML_FAILS, nvml.NVMLError):
        nvml.nvmlInit()
        # by UUID: NVML counts all GPUs, PyTorch only those of CUDA_VISIBLE_DEVICES
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}'.encode())


def usable_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def clock_scales() -> bool:
    """Tell whether the system tells the current and the largest clock of the CPU."""
    return SCALING.is_dir() and any(SCALING.iterdir())


def _gpu(device: torch.device) -> dict[str, object]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, object] = {
        'compute_capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': properties.multi_processor_count,
        'gpu_memory_mib': properties.total_memory >> 20,
    }
    try:
        nvml, handle = nvml_of(device)
    except QatError:
        return facts

    for key, read in (
        ('gpu_clock_max_mhz', lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ('gpu_memory_clock_max_mhz', lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        ('driver', nvml.nvmlSystemGetDriverVersion),
        ('driver_cuda', lambda: '{}.{}'.format(*divmod(nvml.nvmlSystemGetCudaDriverVersion() // 10, 100))),
    ):
        with contextlib.suppress(nvml.NVMLError):  # not every GPU tells everything
            facts[key] = read()
    return facts


def machine(device: torch.device) -> dict[str, object]:
    """Describe the machine, on which figures depend; unknown facts are left out.

    The keys are those of ROWS without 'clock_mhz', and besides 'gpu' (whether `device` is a GPU) and 'tf32' (whether
    PyTorch's convolutions compute in TF32 on a GPU).
    """
    import psutil  # here, because `-h` must not load them
    import torch

    gpu, cpu = device.type == 'cuda', _cpuinfo('model name') or platform.processor() or 'unknown'
    clock = psutil.cpu_freq() if clock_scales() else None
    return {
        'device': describe(device) if gpu else f'CPU {cpu}',
        'gpu': gpu,
        **(_gpu(device) if gpu else {}),
        'cpu': cpu,
        'instructions': ', '.join(instruction_sets()),
        'cores': usable_cores(),
        'threads': torch.get_num_threads(),
        **({'cpu_clock_max_mhz': round(clock.max)} if clock and clock.max else {}),
        'memory_mib': psutil.virtual_memory().total >> 20,
        'system': f'{platform.system()} {platform.machine()}, Python {platform.python_version()}',
        'versions': {
            **{name: version for name in ENGINES if (version := _version(name))},
            **({'CUDA': torch.version.cuda} if gpu else {}),
        },
        'tf32': torch.backends.cudnn.allow_tf32,
    }


def machine_table(known: dict[str, object]) -> str:
    """Format a `machine`, which may have 'clock_mhz', as a Markdown table with a row for each fact."""
    twice = set() if known.get('gpu') else {'cpu'}  # the device is the CPU
    facts = {title: known[key] for key, title in ROWS.items() if known.get(key) and key not in twice}
    return markdown_table(
        ('machine', ''),
        [
            (title, escaped(', '.join(f'{k} {v}' for k, v in fact.items())) if isinstance(fact, dict) else fact)
            for title, fact in facts.items()
        ],
        right=False,
    )


def set_environment() -> None:
    """Set what libraries read from the environment of a command and its children, before they are loaded.

    Only commands call this: the process of a user who imports the toolkit keeps its own.
    """
    if not any(name in os.environ for name in CHOSEN):
        os.environ.update(ASLEEP)  # OpenMP reads it once, when torch is loaded
    # ONNX Runtime 1.31 sends telemetry and keeps an identifier in ~/.cache/Microsoft. It reads this variable at its import; its own
    # disable_telemetry_events() comes too late for the identifier. Set the variable to 0 to allow telemetry.
    os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')
    # Pictures go to files. The import of Matplotlib fails if the variable names a backend that it does not know.
    os.environ['MPLBACKEND'] = 'Agg'


def onnx_options(entries: Mapping[str, str] | None = None) -> ort.SessionOptions:
    """Make ONNX Runtime's options for any session: it logs errors only, and its threads sleep.

    With OMP_WAIT_POLICY=active the threads spin by ONNX Runtime's default. `entries` go to the session's configuration.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    waits = {}
    if os.environ.get('OMP_WAIT_POLICY', '').strip().lower() != 'active':
        # 1.26 is the first that bounds the time. Before, threads spin for 50 ms and more, or not at all.
        bounded = tuple(int(n) for n in ort.__version__.split('.')[:2]) >= (1, 26)
        key, value = ('spin_duration_us', ONNX_RUNTIME_SPINS) if bounded else ('allow_spinning', '0')
        waits = {f'session.intra_op.{key}': value, 'session.inter_op.allow_spinning': '0'}
    for key, value in {**waits, **(entries or {})}.items():
        options.add_session_config_entry(key, value)
    return options
