"""Compare calibration with pytorch-quantization's stock HistogramCalibrator: same model, same images, one process.

Run it in a patched tree, on a float checkpoint (.pt) and a data YAML:

    cd yolov9
    python ../yolov9-qat/benchmarks/calibration.py --weights yolov9-c-converted.pt --data data/coco.yaml --device 0

The collection of histograms is measured per image, with and without its forward pass. The search is measured for all activation
quantizers together. The stock search takes up to seconds for each quantizer: it is measured on --sample of them, evenly spread,
and scaled up. Prints a Markdown table; --json FILE writes the same figures.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, os.getcwd())
import utils.qat  # noqa: F401  before torch: it chooses that waiting threads sleep

# isort: split
import torch
from pytorch_quantization.calib import HistogramCalibrator

from models.quantize import checkpoint
from models.quantize.calibration.amax_search import SEARCH
from models.quantize.calibration.calibrate import Histogram, calibrate_weights, collect, histogram_amax
from models.quantize.convert import quantize_model
from models.quantize.quantizers import named_quantizers, quantizers_off
from models.quantize.scales import tie_scales
from utils.qat.config.qat import SCALE_POLICIES, WEIGHT_METHODS, QuantizeConfig
from utils.qat.core.command import Parser, require_file, run_command
from utils.qat.core.device import describe, select_device
from utils.qat.core.files import write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import calibration_images

STOCK = 'mse', 'entropy', 'percentile'  # methods of the stock calibrator


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt)')
    p.add_argument('--data', type=Path, required=True, help='data YAML')
    p.add_argument('--device', default='', help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
    p.add_argument('--batch-size', type=int, default=10, help='images per batch')
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--images', type=int, default=20, help='images to collect from, at most')
    p.add_argument(
        '--scale-policy', choices=SCALE_POLICIES, default='free', help='as of qat.py; free has the most quantizers'
    )
    p.add_argument('--sample', type=int, default=8, help='quantizers whose stock search is timed')
    p.add_argument('--threads', type=int, help="PyTorch's threads on the CPU")
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


def seconds(device: torch.device, function: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """Measure the shortest of `repeat` calls in seconds, until the device is done; return it with the last result."""
    shortest = float('inf')
    for _ in range(repeat):
        _wait(device)
        start = time.perf_counter()
        result = function()
        _wait(device)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest, result


def _wait(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def forward(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Run the float model on all batches."""
    with torch.no_grad(), quantizers_off(model):
        for images in batches:
            model(images)


def on_cpu() -> AbstractContextManager[Any]:
    """Make `tensor.cuda()` return the tensor itself, in a context: the stock MSE search calls it, but needs no GPU."""
    return mock.patch.object(torch.Tensor, 'cuda', lambda self: self)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures as plain values: times in seconds, of the forward pass and the collection per image."""
    device = select_device(args.device)
    config = QuantizeConfig(
        require_file(args.weights, '--weights', ('.pt', '.pth')),
        require_file(args.data, '--data', ('.yaml', '.yml')),
        batch_size=args.batch_size,
        imgsz=args.imgsz,
        calib_images=args.images,
    )
    with quiet_upstream():
        model = checkpoint.load_float(config.weights, device)
    batches = list(
        calibration_images(load_data(config.data, model.model[-1].nc), config, int(max(model.stride)), device)
    )
    images = sum(map(len, batches))
    quantize_model(model)
    if args.scale_policy == 'tied':
        tie_scales(model)
    names = [name for name, q in named_quantizers(model) if q._axis is None]

    def collected(new: Callable[[], Any]) -> dict[str, Any]:
        """Collect from `batches` with new calibrators."""
        calibrators = {name: new() for name in names}
        collect(model, batches, calibrators)
        return calibrators

    forward(model, batches[:1])
    float_time, _ = seconds(device, lambda: forward(model, batches), 2)
    ours_time, ours = seconds(device, lambda: collected(lambda: Histogram(device)), 2)
    stock_time, stock = seconds(device, lambda: collected(lambda: HistogramCalibrator(8, None, False)), 2)
    sample = [stock[names[i * len(names) // args.sample]] for i in range(args.sample)]
    figures = {
        'device': describe(device),
        'threads': torch.get_num_threads(),
        'torch': torch.__version__,
        'model': config.weights.name,
        'quantizers': len(names),
        'images': images,
        'batch_size': args.batch_size,
        'imgsz': config.imgsz,
        'sample': args.sample,
        'forward': {'float': float_time / images, 'ours': ours_time / images, 'stock': stock_time / images},
        'search': {},
        'weights': {},
    }
    for method in SEARCH:
        ours_time, _ = seconds(device, lambda: histogram_amax(ours, method, config), 3)
        figures['search'][method] = {'ours': ours_time, 'stock': None}
        if method in STOCK:
            with on_cpu() if device.type == 'cpu' else nullcontext():
                stock_time, _ = seconds(device, lambda: [calibrator.compute_amax(method) for calibrator in sample])
            figures['search'][method]['stock'] = stock_time * len(names) / args.sample
    for method in WEIGHT_METHODS:
        figures['weights'][method] = {
            'ours': seconds(device, lambda: calibrate_weights(model, method), 2)[0],
            'stock': None,
        }
    return figures


def table(figures: dict[str, Any]) -> str:
    """Write the figures as a Markdown table."""

    def row(what: str, ours: float, stock: float | None, unit: int = 1, digits: int = 2) -> str:
        ratio = f'{stock / ours:.1f}' if stock else ''
        return f'| {what} | {ours * unit:.{digits}f} | {f"{stock * unit:.{digits}f}" if stock else ""} | {ratio} |'

    f = figures['forward']
    return '\n'.join(
        [
            '{model}, {images} images at {imgsz}, batch {batch_size}, {quantizers} activation quantizers; {device}, {threads} threads, '
            'torch {torch}\n'.format(**figures),
            '| | this tool | stock | ratio |\n|---|--:|--:|--:|',
            row('forward pass alone, ms an image', f['float'], None, 1000, 1),
            row('forward pass and histograms, ms an image', f['ours'], f['stock'], 1000, 1),
            row('histograms alone, ms an image', f['ours'] - f['float'], f['stock'] - f['float'], 1000, 1),
            *(
                row(f'search {method}, all quantizers, s', t['ours'], t['stock'], 1, 3)
                for method, t in figures['search'].items()
            ),
            *(row(f'weights {method}, s', t['ours'], None, 1, 3) for method, t in figures['weights'].items()),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = measure(args)
    print(table(figures))
    if args.json:
        write_json(args.json, figures)


if __name__ == '__main__':
    raise SystemExit(run_command(main))
