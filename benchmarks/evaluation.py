"""Measure the time of an evaluation of one model: in float, with this tool's quantizers, and with stock quantizers.

Run it in a patched tree, on a float checkpoint (.pt) and a data YAML:

    cd yolov9
    python ../yolov9-qat/benchmarks/evaluation.py --weights yolov9-c-converted.pt --data data/coco.yaml --device 0

Stock quantizers are pytorch-quantization's own. Times are of `qat.py eval` on --images of val: milliseconds per image, the best
of --repeats. Loading the images is not measured.
Prints a Markdown table; --json FILE writes the same figures.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it chooses that waiting threads sleep

# isort: split
import torch

from models.quantize import checkpoint
from models.quantize.calibration.calibrate import calibrate
from models.quantize.convert import quantize_model
from models.quantize.quantizers import RoundedOnce
from models.quantize.scales import tie_scales
from stock import with_stock_quantizers
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.device import describe, select_device
from utils.qat.core.files import write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.markdown import markdown_table
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import calibration_images, val_loader
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.prediction.pytorch import TorchModel

PARTS = ('pre', 'inference', 'nms')


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt)')
    p.add_argument('--data', type=Path, required=True, help='data YAML')
    p.add_argument('--device', default='', help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
    p.add_argument('--batch-size', type=int, default=10, help='images per batch')
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--images', type=int, default=40, help='of val, at most')
    p.add_argument('--repeats', type=int, default=3)
    p.add_argument('--threads', type=int, help="PyTorch's threads on the CPU")
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures as plain values: `rows` has AP and the ms per image of each of PARTS."""
    device = select_device(args.device)
    torch.backends.cudnn.allow_tf32 = False  # as in qat.py
    config = QuantizeConfig(
        require_file(args.weights, '--weights', ('.pt', '.pth')),
        require_file(args.data, '--data', ('.yaml', '.yml')),
        batch_size=args.batch_size,
        imgsz=args.imgsz,
        calib_images=args.images,
        calib_method='mse',
    )
    with quiet_upstream():
        model = checkpoint.load_float(config.weights, device)
    stride, data = int(max(model.stride)), load_data(config.data, model.model[-1].nc)
    batches = list(val_loader(data, config, stride, square=True, limit=args.images))
    quantized = deepcopy(model)
    quantize_model(quantized)
    tie_scales(quantized)
    calibrate(quantized, calibration_images(data, config, stride, device), config)
    rows: list[dict[str, Any]] = []
    candidates = {
        'float': TorchModel(model),
        'this tool': TorchModel(quantized, context=RoundedOnce(quantized)),
        'stock': TorchModel(with_stock_quantizers(quantized)),
    }
    for name, candidate in candidates.items():
        runs = [evaluate(candidate, batches, data.names, device) for _ in range(args.repeats + (device.type == 'cuda'))]
        times = {part: min(run.ms_per_image[part] for run in runs) for part in PARTS}
        rows.append(
            {
                'model': name,
                'ap': runs[0].ap,
                **times,
                'inference_times_float': times['inference'] / (rows or [times])[0]['inference'],
            }
        )
    return {
        'weights': config.weights.name,
        'device': describe(device),
        'torch': torch.__version__,
        'threads': torch.get_num_threads(),
        'images': sum(len(b[0]) for b in batches),
        'imgsz': args.imgsz,
        'batch_size': args.batch_size,
        'rows': rows,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = measure(args)
    table = markdown_table(
        ('model', 'AP', 'pre, ms an image', 'inference', 'NMS', 'inference, x float'),
        [
            [r['model'], f'{r["ap"]:.4f}', *(f'{r[part]:.2f}' for part in PARTS), f'{r["inference_times_float"]:.2f}']
            for r in figures['rows']
        ],
    )
    print(
        '{weights}, {images} images at {imgsz}, batch {batch_size}; {device}, {threads} threads, torch {torch}\n'.format(
            **figures
        )
    )
    print(table)
    if args.json:
        write_json(args.json, figures)


if __name__ == '__main__':
    raise SystemExit(run_command(main))
