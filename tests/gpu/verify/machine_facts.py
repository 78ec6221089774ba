"""Facts about this machine that decide which rows can be checked: python machine_facts.py BACKEND OUT.json.

It is a process of its own, because TensorRT may crash when it is loaded.
"""

import sys

import torch

from utils.qat.core.command import run_command
from utils.qat.core.files import write_json
from utils.qat.core.machine import machine
from utils.qat.vendors.tensorrt.engine.api import find_trtexec, load_tensorrt, product, version_of


def facts(backend):
    """Product, such as 'TensorRT 10.13.3'; major version whose files are exported (TensorRT-RTX takes those of 11); name of the GPU that
    PyTorch sees; TensorRT of trtexec; and `machine` for the report. None = there is none.
    """
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


def main(argv):
    backend, out = argv
    write_json(out, facts(backend))


if __name__ == '__main__':
    sys.exit(run_command(main, sys.argv[1:]))
