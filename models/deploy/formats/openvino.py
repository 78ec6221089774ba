"""ONNX file → OpenVINO's own files, MODEL.xml and MODEL.bin, renamed into place after a check in OpenVINO.

OpenVINO looks for the weights under the name of the .xml. Two files cannot be renamed at once, so the old .xml is deleted first and the
new one renamed last: a process that is killed leaves a pair that fits, or no .xml.

MODEL_openvino_model/ has a copy of them, and metadata.yaml: the form that Ultralytics' package loads.
"""

from __future__ import annotations

import ast
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import torch
import yaml
from typing_extensions import override

from models.deploy.agreement import Reference
from models.deploy.formats.format import Export, Format, Written, size_of
from models.deploy.formats.onnx import typed_half
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.openvino import OVERFLOW, OpenVINO
from utils.qat.core.files import atomic, require_own, write_text
from utils.qat.core.log import LOGGER
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.graph.openvino_model import load_openvino, write_ir

CPU = torch.device('cpu')
METADATA = 'metadata.yaml'


@contextlib.contextmanager
def atomic_pair(path: Path) -> Iterator[Path]:
    """Yield a temporary .xml path; if the block succeeds, rename its .xml and .bin to their final names, those of `path`.

    After an error of the block the old pair stays.
    """
    with atomic(path) as new, atomic(path.with_suffix('.bin')) as weights:  # which is renamed first
        yield new
        for written in (new, weights):
            written.stat()
        path.unlink(missing_ok=True)


def write_folder(path: Path, metadata: str) -> Path:
    """Copy an .xml and its .bin into MODEL_openvino_model/ beside them, with metadata.yaml; return the folder.

    metadata: text of metadata.yaml.
    """
    folder = folder_of(path)
    folder.mkdir(exist_ok=True)
    with atomic_pair(folder / path.name) as tmp:
        for suffix in ('.xml', '.bin'):
            shutil.copy(path.with_suffix(suffix), tmp.with_suffix(suffix))
    write_text(folder / METADATA, metadata)
    return folder


def folder_of(path: Path) -> Path:
    """Return the folder beside an .xml."""
    return path.with_name(f'{path.stem}_openvino_model')


def metadata_yaml(source: Path, model: str) -> str:
    """Write the metadata of an .onnx file as YAML; the first line tells whose file it is, by the name of the model."""

    def value(text: str) -> object:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text

    found = onnx.load(source, load_external_data=False).metadata_props
    return f'# {model}, by yolov9-qat\n' + yaml.safe_dump({p.key: value(p.value) for p in found}, allow_unicode=True)


class OpenVINOFormat(Format):
    """MODEL.xml and MODEL.bin, which return predictions."""

    name = 'openvino'
    source: str = 'onnx'
    runs_in = 'openvino'

    @override
    def require(self, export: Export) -> None:
        load_openvino(f'--include {self.name}')

    @override
    def write(self, export: Export, path: Path) -> Written:
        metadata = metadata_yaml(export.written['onnx'].path, path.stem)
        require_own(folder_of(path) / METADATA, metadata)
        written = self.converted(export, path)
        images = '' if export.predict.task.boxes else ', which normalizes no images: for it take onnx_end2end'
        line = f'-> {write_folder(path, metadata)}, the same for Ultralytics{images}'
        return replace(written, lines=[*written.lines, line])

    def converted(self, export: Export, path: Path) -> Written:
        """Write the .xml and .bin of the ONNX file that is their source, if OpenVINO computes what it shall."""
        config, target = export.config, export.target
        weights, source = path.with_suffix('.bin'), export.written[self.source]
        graph = onnx.load(source.path)
        with atomic_pair(path) as tmp:
            write_ir(graph, tmp)  # which rewrites its Q/DQ; inputs, and NMS behind the predictions, stay
            session = OpenVINO(tmp, CPU)
            self.compare(session, export, graph)
        takes = 'any batch' if config.dynamic else f'batch {config.batch_size} only; any with --dynamic'
        lines = [f'-> {path} and {weights.name}, {size_of(path, weights)}, {takes}', *session.notes]
        loses = target.in_openvino if export.predict.task.boxes else target.in_openvino_classes
        if export.int8 and loses:
            lines.append(f'quantized for {target.title}: {loses} (--target openvino)')
        return Written({self.name: path}, lines, low_scores=source.low_scores)

    def compare(self, session: OpenVINO, export: Export, source: onnx.ModelProto) -> None:
        """Raise QatError unless the outputs of the new files are PyTorch's, on made images. source: the ONNX graph."""
        batch, _, *imgsz = shape_of(source.graph.input[0])
        reference = Reference(export.predict.model, batch, imgsz)
        found = FileModel(session)(reference.images)
        if session.saturates:
            LOGGER.warning(f'{OVERFLOW}; so the file is written without a comparison with PyTorch')
            return
        reference.require_agreement(found, 'OpenVINO', 'FP16' if typed_half(export) else 'FP32')


FORMAT = OpenVINOFormat()
