"""The outputs of two runs of exported files on the same images: python raw_outputs.py A B DATA BACKEND OUT.json.

A and B are .onnx or .engine files with one input. Where they are the same engine, the second run is a CUDA graph. It serves the
files that an evaluation does not take, such as DeepStream's, and asks what no AP can show: whether a CUDA graph gives the same bits.
"""

import math
import sys
from pathlib import Path

import torch

from utils.qat.config.common import LoaderConfig
from utils.qat.core.command import run_command
from utils.qat.core.files import write_json
from utils.qat.core.machine import select_device
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.vendors.load import session_of
from utils.qat.vendors.tensorrt.session import TensorRT

IMAGES = 8  # real ones: noise has no detections


def open_session(file, device, backend, cuda_graph):
    if file.suffix == '.engine':
        return TensorRT(file, device, backend, cuda_graph=cuda_graph)
    return session_of('onnxruntime').open(file, device, 'onnxruntime')


def images_for(session, data, device):
    """IMAGES of the val images of a data YAML, FP32 [N, 3, H, W] in 0..1, letterboxed to the fixed size of a file."""
    ((height, width),) = (shape[2:] for shape in session.signature().inputs.values())
    settings = LoaderConfig(batch_size=1, imgsz=(height, width), workers=0, device=str(device))
    loader = Loaders(load_data(data), settings, 32).scored(square=True, limit=IMAGES)
    return torch.cat([batch[0] for batch in loader]).float().to(device) / 255


def compare(first, second, images):
    """'equal': all bits; 'sqnr': ratio of the outputs of `first` to the difference, in dB, the smallest of all outputs; None if equal."""
    signal, noise, equal = {}, {}, True
    ((name, shape),) = first.signature().inputs.items()
    batch = shape[0] if isinstance(shape[0], int) else 1
    for image in images:
        tensors = {name: image.expand(batch, -1, -1, -1).contiguous()}
        found, other = (
            {key: value.double().cpu().clone() for key, value in session.run(tensors).items()}
            for session in (first, second)
        )
        for key, value in found.items():
            equal &= torch.equal(value, other[key])
            signal[key] = signal.get(key, 0.0) + value.square().sum().item()
            noise[key] = noise.get(key, 0.0) + (value - other[key]).square().sum().item()
    worst = min((signal[key] / noise[key] for key in signal if noise[key]), default=None)
    return {'equal': equal, 'sqnr': 10 * math.log10(worst) if worst else None}


def main(argv):
    a, b, data, backend, out = argv
    device = select_device('')
    with (
        open_session(Path(a), device, backend, False) as first,
        open_session(Path(b), device, backend, a == b) as second,
    ):
        write_json(out, compare(first, second, images_for(first, data, device)))


if __name__ == '__main__':
    sys.exit(run_command(main, sys.argv[1:]))
