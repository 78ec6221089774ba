"""Score ways to calibrate on images that no way has seen: every method of ranges, with and without corrected biases.

Run it in a patched tree, on a float checkpoint of one branch (.pt) and a data YAML:

    cd yolov9
    python ../yolov9-qat/benchmarks/calibration_ways.py --weights yolov9-c-converted.pt --data data/coco.yaml --device 0

The ways are fitted to the training images as `qat.py quantize` fits them. The divergence and AP are those of val. Prints a Markdown
table; --json FILE writes the same figures.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
from utils.qat.core.machine import set_environment

set_environment()  # before torch: waiting threads sleep

# isort: split
import torch

from models.quantize import checkpoint
from models.quantize.calibration.bias_correction import biases_of, correct_biases, own_shifts
from models.quantize.calibration.calibrate import calibrate_weights, collect_histograms, over, set_ranges
from models.quantize.calibration.divergence import HeadOutputs, typical_divergence
from models.quantize.calibration.ptq import COMPARED, CORRECTED, every_third, prepare, ranges_by
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import CALIB_METHODS, QuantizeConfig
from utils.qat.core.command import Parser, run_command
from utils.qat.core.files import require_file, write_json
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import describe, select_device
from utils.qat.core.text import markdown_table
from utils.qat.core.upstream import Network
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.evaluate import evaluate

METHODS = [method for method in CALIB_METHODS if method != 'auto']


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; None = the arguments of this process."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--weights', type=Path, required=True, help='float checkpoint (.pt) of one branch')
    p.add_argument('--data', type=Path, required=True, help='data YAML')
    p.add_argument('--device', default='', help="GPU number, or 'cpu'; default: the first GPU, else the CPU")
    p.add_argument('--imgsz', type=int, default=640, help='image size in pixels')
    p.add_argument('--calib-images', type=int, default=512, help='training images to calibrate on, at most')
    p.add_argument('--methods', nargs='+', choices=METHODS, default=METHODS)
    p.add_argument('--json', type=Path, help='write the figures there')
    return p.parse_args(argv)


@torch.no_grad()
def ways(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of the float model, then of each way: name, divergence (None for float), AP, mask AP or None."""
    device = select_device(args.device)
    config = QuantizeConfig(
        require_file(args.weights, '--weights', ('.pt', '.pth')),
        require_file(args.data, '--data', ('.yaml', '.yml')),
        imgsz=args.imgsz,
        calib_images=args.calib_images,
        device=args.device,
        workers=0,
    )
    with quiet_upstream():
        reference = checkpoint.CheckpointFile(config.weights).load_float(device)
    predict = TorchModel(reference)
    data = load_data(config.data, predict.nc, masks=predict.task.masks)
    val = list(Loaders(data, config, predict.stride).scored())
    shown = [batch[0].to(device).float() / 255 for batch in val]
    wanted = [HeadOutputs.of(reference.eval()(images)) for images in shown]

    def scored(name: str, model: Network) -> dict[str, Any]:
        scores = evaluate(TorchModel(model), val, data.names, device).to_json()
        divergence = None if model is reference else typical_divergence(model, shown, wanted)
        mask_ap = scores.get('mask', {}).get('ap')
        return {'way': name, 'divergence': divergence, 'ap': scores['ap'], 'mask_ap': mask_ap}

    yield scored('float', reference)
    model = deepcopy(reference)
    prepare(model, config)
    images = Loaders(data, config, predict.stride, device).calibration()
    histograms = collect_histograms(model, over(images))
    fitted, _ = every_third(list(images.spread(COMPARED)))
    calibrate_weights(model)
    biases = {path: bias.detach().clone() for path, bias in biases_of(model).items()}
    for method in args.methods:
        correct_biases(model, biases, {})
        set_ranges(model, ranges_by(method, model, histograms, fitted, config), histograms)
        yield scored(method, model)
        correct_biases(model, biases, own_shifts(model, fitted))
        yield scored(method + CORRECTED, model)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    args = parse_args(argv)
    rows = []
    for row in ways(args):
        rows.append(row)
        print(row['way'], 'done', file=sys.stderr)
    masks = rows[0]['mask_ap'] is not None

    def change_of(row: dict[str, Any], key: str) -> str:
        return f'{100 * (row[key] - rows[0][key]):+.2f}'

    print(f'{args.weights.name}, {args.imgsz} px, {describe(select_device(args.device))}, torch {torch.__version__}\n')
    print(
        markdown_table(
            ('calibration', 'divergence', 'AP', 'points', *['mask AP', 'points'] * masks),
            [
                [
                    row['way'],
                    '' if row['divergence'] is None else f'{row["divergence"]:.4f}',
                    *(
                        cell
                        for key in ('ap', 'mask_ap')[: 1 + masks]
                        for cell in (f'{row[key]:.4f}', change_of(row, key))
                    ),
                ]
                for row in rows
            ],
        )
    )
    if args.json:
        write_json(args.json, rows)


if __name__ == '__main__':
    sys.exit(run_command(main))
