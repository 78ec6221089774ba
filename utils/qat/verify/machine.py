"""Facts about this machine, found by a process of its own: python -m utils.qat.verify.machine BACKEND OUT.json.

TensorRT may crash when it is loaded, and the process that checks the rows must live on.
"""

from __future__ import annotations

import sys
from typing import Any

from utils.qat.core.command import run_command
from utils.qat.core.files import write_json
from utils.qat.core.machine import machine
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.trtexec import find_trtexec, version_of


def facts(backend: str) -> dict[str, Any]:
    """Find the facts of bench.Machine.

    Raises:
        QatError: no TensorRT of the backend is installed.
    """
    import torch

    trt = load_tensorrt(backend, f'--backend {backend}')
    trtexec = find_trtexec() if backend == 'tensorrt' else None
    found = f'TensorRT {".".join(map(str, version_of(trtexec)))}' if trtexec else None
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    described = machine(device)
    return {
        'product': product(trt),
        'major': int(trt.__version__.split('.')[0]) if backend == 'tensorrt' else 11,
        'gpu': torch.cuda.get_device_name(device) if described['gpu'] else None,
        'trtexec': found,
        'described': {**described, 'versions': {**described['versions'], 'trtexec': found or 'none'}},
    }


def main() -> None:
    """Write the facts to a JSON file."""
    backend, out = sys.argv[1:]
    write_json(out, facts(backend))


if __name__ == '__main__':
    sys.exit(run_command(lambda _: main()))
