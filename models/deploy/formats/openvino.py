"""ONNX file → OpenVINO's own files, MODEL.xml and MODEL.bin, renamed into place after a check in OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.agreement import made_images, require_agreement, traceable_copy
from models.deploy.formats.format import Export, Format, Written, size_of
from models.deploy.formats.onnx import typed_half
from models.deploy.openvino_pair import atomic_pair
from models.quantize.convert import is_quantized
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.openvino import OVERFLOW, OpenVINO
from utils.qat.backends.pytorch import task_of
from utils.qat.config.export import ExportConfig
from utils.qat.core.log import LOGGER
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.graph.openvino_model import load_openvino, write_ir

CPU = torch.device('cpu')


def export_openvino(source: Path, path: Path, model: nn.Module, typing: str = 'FP32') -> list[str]:
    """Convert an .onnx file to OpenVINO's files, and return notes on how OpenVINO runs it.

    Args:
        source: a file of export_onnx.
        path: the .xml; the .bin is written beside it.
        model: of the file, fused; float or quantized.
        typing: of the file, see `require_agreement`.

    Raises:
        QatError: OpenVINO is missing, cannot read the graph, or computes something else. No file is written.
    """
    return write_checked(source, path, lambda session: _compare(session, source, model, typing))


def write_checked(source: Path, path: Path, check: Callable[[OpenVINO], None]) -> list[str]:
    """Convert `source` to `path` if `check` accepts a session of the new files. Returns the session's notes."""
    with atomic_pair(path) as tmp:
        write_ir(onnx.load(source), tmp)
        session = OpenVINO(tmp, CPU)
        check(session)
    return list(session.notes)


@torch.no_grad()
def _compare(session: OpenVINO, source: Path, model: nn.Module, typing: str) -> None:
    """Compare the outputs on made images with PyTorch's."""
    batch, _, *imgsz = shape_of(onnx.load(source, load_external_data=False).graph.input[0])
    images = task_of(model).normalized(made_images(batch, imgsz))
    found, traced = FileModel(session)(images), traceable_copy(model).to(CPU)
    if session.saturates:
        LOGGER.warning(f'{OVERFLOW}; so the file is written without a comparison with PyTorch')
        return
    require_agreement(traced, images, found, traced(images), 'OpenVINO', typing, is_quantized(model))


class OpenVINOFormat(Format):
    """MODEL.xml and MODEL.bin, which return predictions."""

    name = 'openvino'
    source = 'onnx'

    @override
    def require(self, config: ExportConfig, device: torch.device) -> None:
        load_openvino(f'--include {self.name}')

    @override
    def write(self, export: Export, path: Path) -> Written:
        graph = export.made('onnx')
        return self.report(
            export,
            path,
            export_openvino(graph.path, path, export.predict.model, 'FP16' if typed_half(export) else 'FP32'),
        )

    def report(self, export: Export, path: Path, made: list[str]) -> Written:
        """Report the files. made: notes on how OpenVINO runs them."""
        config, task, target, weights = export.config, export.predict.task, export.target, path.with_suffix('.bin')
        takes = 'any batch' if config.dynamic else f'batch {config.batch_size} only; any with --dynamic'
        lines = [f'-> {path} and {weights.name}, {size_of(path, weights)}, {takes}', *made]
        loses = target.in_openvino if task.boxes else target.in_openvino_classes
        if export.int8 and loses:
            lines.append(f'quantized for {target.title}: {loses} (--target openvino)')
        return Written({self.name: path}, lines)

    @override
    def backend(self, export: Export) -> str | None:
        return 'openvino'


FORMAT = OpenVINOFormat()
