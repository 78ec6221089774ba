"""Evaluate a TensorRT engine, or an ONNX file in ONNX Runtime or OpenVINO, on the val images of a data YAML.

    python val_trt.py --engine-file yolov9-c-qat.engine --data data/coco.yaml --imgsz 640
    python val_trt.py --weights yolov9-c-qat.onnx --data data/coco.yaml --imgsz 640 --device cpu --backend openvino

The evaluation is the same as in `qat.py eval`. scripts/val_trt.sh exports, builds and evaluates with one command.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the patched tree; PYTHONSAFEPATH leaves it out
from utils.qat.config.qat import FileEvalConfig
from utils.qat.config.settings import read_each
from utils.qat.core.command import run_command


def parse_args(argv: Sequence[str] | None) -> list[FileEvalConfig]:
    """Parse the command line into settings, one per file of --weights."""
    return read_each(FileEvalConfig, argv, __doc__.splitlines()[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. argv: None = the words of this process."""
    configs = parse_args(argv)
    for config in configs:
        config.require_files()

    from models.deploy.load import load_model
    from utils.qat.evaluation.score_file import score_files

    score_files(configs, load_model)


if __name__ == '__main__':
    sys.exit(run_command(main))
