"""Export a checkpoint to ONNX for DeepStream-Yolo, with labels.txt and config_infer_primary_yoloV9.txt.

    python export_yoloV9.py -w runs/qat/exp/weights/qat_best_yolov9-c-converted.pt --dynamic

The options are those of DeepStream-Yolo's script of the same name (parser: NvDsInferParseYolo). Quantized checkpoints are exported
too. See docs/deepstream.md.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.qat.config.backends import CHECKPOINTS
from utils.qat.config.export import DeepStreamConfig
from utils.qat.config.options import read
from utils.qat.config.settings import require_multiples
from utils.qat.core.command import require_file, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, bar, finish, quiet_upstream


def parse_args(argv: Sequence[str] | None) -> DeepStreamConfig:
    """Turn the command line into settings."""
    return read(
        DeepStreamConfig,
        argv,
        __doc__.splitlines()[0],
        'Writes WEIGHTS.onnx beside the checkpoint, and labels.txt and config_infer_primary_yoloV9.txt to the current folder. '
        'Files with these names are replaced.',
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)
    require_file(config.weights, '--weights', CHECKPOINTS)

    from models.deploy.onnx_export import export_onnx
    from models.quantize.checkpoint import load_any
    from models.quantize.head_outputs import head_of
    from models.quantize.quantizers import has_zero_points
    from utils.qat.core.files import write_text
    from utils.qat.graph.deepstream import CONFIG, LABELS, deepstream_config, deepstream_layout
    from utils.qat.prediction.pytorch import classifies
    from utils.qat.targets.target import target_of_recipe

    with quiet_upstream():
        model, quant = load_any(config.weights)
        head = type(head_of(model)).__name__
        if classifies(model):
            raise QatError(
                f'--weights {config.weights}: a classifier; DeepStream-Yolo reads detections only; use: python export_qat.py'
            )
        if hasattr(model.model[-1], 'nm'):  # number of mask coefficients
            raise QatError(
                f'--weights {config.weights}: the head is {head}; DeepStream-Yolo reads detections only, no masks'
            )
        target = target_of_recipe(quant['recipe'] if quant else None)
        target.require_tensorrt(f'--weights {config.weights}', has_zero_points(model))
        require_multiples(config.size, int(max(model.stride)), '--size')
        LOGGER.info(f'{config.weights}: YOLOv9 {"INT8" if quant else "float"}, head {head}')
        path, half = config.weights.with_name(f'{config.weights.name}.onnx'), config.trt == 11
        done = export_onnx(
            model,
            path,
            config.size,
            config.batch,
            config.dynamic,
            config.simplify,
            config.onnx_opset,
            half=half,
            kept_float=quant['recipe'].get('kept_float', ()) if quant else (),
            layout=deepstream_layout,
            progress=lambda steps: bar(steps, 'exporting', unit='steps'),
        )
    names = [str(name) for name in model.names.values()]
    write_text(Path(LABELS), ''.join(f'{name}\n' for name in names))
    write_text(Path(CONFIG), deepstream_config(path.name, len(names), config.batch, bool(quant)))
    LOGGER.info(
        f'input [{"batch" if config.dynamic else config.batch}, 3, {config.size[0]}, {config.size[1]}] -> output [B, N, 6], opset {done.opset}, '
        f'{path.stat().st_size / 1e6:.1f} MB, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}{", FP16 outside them" * half}\n'
        f'ONNX Runtime against PyTorch: boxes {done.boxes:.3%} (at most {done.boxes_max:.3g} px), scores {done.scores:.3%} '
        f'(at most {done.scores_max:.3g}); allowed {done.limit:.1%}'
    )
    finish(shlex.join(['cp', str(path), LABELS, CONFIG, 'DeepStream-Yolo/']), onnx=path, labels=LABELS, config=CONFIG)


if __name__ == '__main__':
    sys.exit(run_command(main))
