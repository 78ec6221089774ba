"""Evaluate a TensorRT engine, or an ONNX file in ONNX Runtime or OpenVINO, on the val images of a data YAML.

    python val_trt.py --engine-file yolov9-c-qat.engine --data data/coco.yaml --imgsz 640
    python val_trt.py --weights yolov9-c-qat.onnx --data data/coco.yaml --imgsz 640 --device cpu --backend openvino

The evaluation is the same as in `qat.py eval`. Images are letterboxed to the size of the file. scripts/val_trt.sh exports, builds and
evaluates with one command.
"""

import sys
from collections.abc import Sequence

from utils.qat.config.backends import CHECKPOINTS, EXPORTED
from utils.qat.config.options import read
from utils.qat.config.qat import FileEvalConfig
from utils.qat.core.command import explain_out_of_memory, require_file, run_command
from utils.qat.core.run_folder import run_folder


def parse_args(argv: Sequence[str] | None) -> FileEvalConfig:
    """Turn the command line into settings."""
    return read(FileEvalConfig, argv, __doc__.splitlines()[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    config = parse_args(argv)
    require_file(config.weights, '--weights', EXPORTED)
    require_file(config.data, '--data', ('.yaml', '.yml'))
    if config.baseline:
        require_file(config.baseline, '--baseline', CHECKPOINTS + EXPORTED)

    from models.deploy.load import load_model
    from utils.qat.core.device import select_device
    from utils.qat.evaluation.score_file import score_file
    from utils.qat.prediction.registry import open_file

    device = select_device(config.device)
    with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
        model = open_file(config.weights, device, config.backend)
        baseline = load_model(config.baseline, device) if config.baseline else None
        score_file(model, config, device, folder, baseline)


if __name__ == '__main__':
    sys.exit(run_command(main))
