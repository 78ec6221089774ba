"""Evaluate a TensorRT engine, or an ONNX file in ONNX Runtime, on the val images of a data YAML.

    python val_trt.py --engine-file yolov9-c-qat.engine --data data/coco.yaml --imgsz 640
    python val_trt.py --weights yolov9-c-qat.onnx --data data/coco.yaml --imgsz 640 --device cpu

The evaluator is the one of `qat.py eval`. Images are letterboxed to the size of the file. scripts/val_trt.sh exports, builds and evaluates
in one go.
"""

import sys
from pathlib import Path

from utils.qat.config.backends import ENGINES
from utils.qat.config.options import add_mask_options
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import Parser, explain_out_of_memory, require_file, run_command
from utils.qat.core.run_folder import run_folder


def parse_args(argv):
    """Read the command line into (EvalConfig, backend)."""
    c, p = EvalConfig, Parser(description=__doc__.splitlines()[0])
    p.add_argument(
        '--weights', '--engine-file', type=Path, required=True, metavar='FILE', help='MODEL.engine or MODEL.onnx'
    )
    p.add_argument('--data', type=Path, default=Path('data/coco.yaml'), help='data YAML: train, val, names')
    p.add_argument(
        '--batch-size',
        type=int,
        default=c.batch_size,
        help='images read at once; the file gets them in parts of its own batch',
    )
    p.add_argument(
        '--imgsz',
        '--img',
        '--img-size',
        type=int,
        default=c.imgsz,
        help='image size in pixels; it must be the size of the file',
    )
    p.add_argument(
        '--conf-thres',
        type=float,
        default=c.conf_thres,
        help='lowest score that counts; no effect with NMS inside the file',
    )
    p.add_argument(
        '--iou-thres',
        type=float,
        default=c.iou_thres,
        help='IoU above which NMS drops a box; no effect with NMS inside the file',
    )
    p.add_argument(
        '--device', default=c.device, help="GPU number, or 'cpu' for ONNX; default: the first GPU, else the CPU"
    )
    p.add_argument(
        '--save-json', action='store_true', help="write the detections to predictions.json, in COCO's result format"
    )
    p.add_argument('--workers', type=int, default=c.workers, help='data loading processes')
    p.add_argument('--project', type=Path, default=Path('runs/val_trt'), help='results go to PROJECT/NAME')
    p.add_argument('--name', default=c.name, help='results go to PROJECT/NAME')
    p.add_argument('--exist-ok', action='store_true', help='write into PROJECT/NAME even if it exists')
    p.add_argument(
        '--backend', choices=ENGINES, default='tensorrt', help='library for engines: TensorRT or TensorRT-RTX'
    )
    add_mask_options(p, c)
    args = vars(p.parse_args(argv))
    backend = args.pop('backend')
    return EvalConfig(**args), backend


def main(argv=None):
    config, backend = parse_args(argv)
    require_file(config.weights, '--weights', ('.engine', '.onnx'))
    require_file(config.data, '--data', ('.yaml', '.yml'))

    from utils.qat.core.device import select_device
    from utils.qat.evaluation.score_file import score_file
    from utils.qat.prediction.registry import open_file

    device = select_device(config.device)
    with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
        score_file(open_file(config.weights, device, backend), config, device, folder, backend)


if __name__ == '__main__':
    sys.exit(run_command(main))
