"""Checkpoint → ONNX, with Q/DQ where the checkpoint is quantized.

    python export_qat.py --weights runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --include onnx --dynamic --simplify
"""
import sys
from pathlib import Path

from utils.qat.config import ExportConfig
from utils.qat.errors import Parser, explain_out_of_memory, require_file, run_command
from utils.qat.log import LOGGER, quiet_upstream


def parse_args(argv):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', type=Path, required=True, help='quantized or float checkpoint (.pt)')
    parser.add_argument('--include', nargs='+', default=['onnx'], help='what to write: onnx')
    parser.add_argument('--imgsz', '--img', '--img-size', nargs='+', type=int, default=[640, 640], help='height and width in pixels')
    parser.add_argument('--batch-size', type=int, default=1, help='images per run of a graph with a fixed batch')
    parser.add_argument('--dynamic', action='store_true', help='leave the batch axis open')
    parser.add_argument('--simplify', action='store_true', help='simplify the graph (onnxslim)')
    parser.add_argument('--inplace', action='store_true', help="set the head's inplace flag, as upstream's export does")
    parser.add_argument('--opset', type=int, default=ExportConfig.opset, help='ONNX opset, 13 to 20')
    parser.add_argument('--device', default='cpu', help="where to trace: 'cpu' or a GPU number")
    return ExportConfig(**vars(parser.parse_args(argv)))


def main(argv=None):
    config = parse_args(argv)
    require_file(config.weights, '--weights', ('.pt', '.pth'))

    from models.deploy.onnx_export import export_onnx
    from models.quantize.checkpoint import load_any
    from utils.general import check_img_size
    from utils.qat.backends import select_device

    with quiet_upstream(), explain_out_of_memory(config.batch_size):
        model, quant = load_any(config.weights, select_device(config.device))
        imgsz = check_img_size(config.imgsz, int(max(model.stride)))
        path = config.weights.with_suffix('.onnx')
        done = export_onnx(model, path, imgsz, config.batch_size, config.dynamic, config.simplify, config.opset, config.inplace)
    LOGGER.info(f"{config.weights} ({'INT8' if quant else 'float'}) -> {path}\n"
                f"images [{'batch' if config.dynamic else config.batch_size}, 3, {imgsz[0]}, {imgsz[1]}] -> output0, "
                f'opset {config.opset}, {path.stat().st_size / 1e6:.1f} MB, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}\n'
                f'ONNX Runtime against PyTorch: boxes {done.boxes:.3%} (at most {done.boxes_max:.3g} px), '
                f'scores {done.scores:.3%} (at most {done.scores_max:.3g}); allowed {done.limit:.1%}')
    if quant:
        LOGGER.info(f'next: python qat.py eval --weights {path} --data DATA.yaml --imgsz {imgsz[0]}')


if __name__ == '__main__':
    sys.exit(run_command(main))
