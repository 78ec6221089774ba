"""The command that follows a good score of a file. It starts on this machine."""

from collections.abc import Iterable
from pathlib import Path

from utils.qat.config.tables import BACKENDS, DEFAULT_TARGET, EXPORTED
from utils.qat.core.command import command, export_command
from utils.qat.vendors.tensorrt.engine.api import can_build
from utils.qat.vendors.vendor import Target


def after_scoring(model: Path, imgsz: Iterable[int], target: Target, backend: str | None = None) -> str:
    """Make the command that follows a good score.

    .pt → export; .onnx → what its target runs: an engine, which is built, or audited where nothing builds engines; the file itself →
    benchmark; another file → export. Any other exported file → benchmark.
    `backend` is the key of BACKENDS that scored the file. A file that OpenVINO ran needs no engine.
    """
    if model.suffix == '.onnx' and backend != 'openvino':
        if target.name == DEFAULT_TARGET:
            return command('scripts/build_engine.py' if can_build() else 'scripts/audit_onnx.py', model)
        backend = target.name
        if model.suffix not in BACKENDS[backend].measures:
            model = model.with_name(f'{model.stem.removesuffix("-end2end")}.pt')
    if model.suffix in EXPORTED:
        by = [] if backend in (None, 'tensorrt') else ['--backend', backend]
        return command('benchmark_trt.py', model, *by)
    return export_command(model, imgsz, target.include)
