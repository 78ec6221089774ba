"""The command that follows a good score of a file. It starts on this machine."""

from collections.abc import Iterable
from pathlib import Path

from utils.qat.config.tables import EXPORTED
from utils.qat.core.command import command, export_command
from utils.qat.vendors.tensorrt.engine.api import can_build


def after_scoring(model: Path, imgsz: Iterable[int], backend: str | None = None) -> str:
    """Make the command that follows a good score.

    .pt → export; .onnx → build the engine, or audit it where nothing builds engines; any other exported file → benchmark.
    `backend` is the key of BACKENDS that scored the file. A file that OpenVINO ran needs no engine.
    """
    if model.suffix == '.onnx' and backend != 'openvino':
        return command('scripts/build_engine.py' if can_build() else 'scripts/audit_onnx.py', model)
    if model.suffix in EXPORTED:
        by = [] if backend in (None, 'tensorrt', 'onnxruntime') else ['--backend', backend]
        return command('benchmark_trt.py', model, *by)
    return export_command(model, imgsz)
