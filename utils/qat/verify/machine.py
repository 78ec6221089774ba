"""Facts about this machine, found by a process of its own: python -m utils.qat.verify.machine BACKEND OUT.json.

TensorRT may crash when it is loaded, and the process that checks the rows must live on.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from utils.qat.core.command import run_command
from utils.qat.core.device import instruction_sets
from utils.qat.core.files import write_json
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.trtexec import find_trtexec, version_of

MIB = 1 << 20


def gpu_table() -> dict[str, str]:
    """Describe the first GPU; empty if PyTorch sees none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    table = {
        'GPU': properties.name,
        'compute capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': str(properties.multi_processor_count),
        'memory': f'{properties.total_memory // MIB} MiB',
        'CUDA of PyTorch': str(torch.version.cuda),
    }
    try:
        import pynvml
    except ImportError:
        return table
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f'GPU-{properties.uuid}'.encode())
    clocks = {'SM': pynvml.NVML_CLOCK_SM, 'memory': pynvml.NVML_CLOCK_MEM}
    return {
        **table,
        'driver': str(pynvml.nvmlSystemGetDriverVersion()),
        'highest clocks': ', '.join(
            f'{name} {pynvml.nvmlDeviceGetMaxClockInfo(handle, which)} MHz' for name, which in clocks.items()
        ),
    }


def cpu_table() -> dict[str, str]:
    """Describe the CPU and the versions of the packages."""
    linux = Path('/proc/cpuinfo')
    lines = linux.read_text(encoding='utf-8', errors='replace').splitlines() if linux.exists() else []
    name = next((line.split(':')[1].strip() for line in lines if line.startswith('model name')), platform.machine())
    installed = {d.name: d.version for d in metadata.distributions()}
    versions = (f'{p} {installed[p]}' for p in ('torch', 'onnx', 'onnxruntime', 'onnxruntime-gpu') if p in installed)
    return {
        'CPU': name,
        'its instructions': ', '.join(instruction_sets()),
        'system': platform.platform(),
        'packages': ', '.join((f'Python {platform.python_version()}', *versions)),
    }


def facts(backend: str) -> dict[str, Any]:
    """Find the facts of bench.Machine.

    Raises:
        QatError: no TensorRT of the backend is installed.
    """
    trt = load_tensorrt(backend, f'--backend {backend}')
    trtexec = find_trtexec() if backend == 'tensorrt' else None
    found = f'TensorRT {".".join(map(str, version_of(trtexec)))}' if trtexec else None
    gpu = gpu_table()
    return {
        'product': product(trt),
        'major': int(trt.__version__.split('.')[0]) if backend == 'tensorrt' else 11,
        'gpu': gpu.get('GPU'),
        'trtexec': found,
        'table': {'TensorRT': product(trt), 'trtexec': found or 'none', **(gpu or {'GPU': 'none'}), **cpu_table()},
    }


def main() -> None:
    """Write the facts to a JSON file."""
    backend, out = sys.argv[1:]
    write_json(out, facts(backend))


if __name__ == '__main__':
    sys.exit(run_command(lambda _: main()))
