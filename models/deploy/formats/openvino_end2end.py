"""ONNX file with NMS → OpenVINO's own files. Its NMS in OpenVINO is compared with torchvision's."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from typing_extensions import override

from models.deploy.agreement import made_images
from models.deploy.formats.format import Export, Written
from models.deploy.formats.onnx_end2end import check_detections, made_predictions, nms_of, nms_part
from models.deploy.formats.openvino import OpenVINOFormat, write_checked
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.openvino import OpenVINO
from utils.qat.config.export import PLUGIN, ExportConfig, Nms, Pooling
from utils.qat.core.errors import check
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.graph.openvino_model import one_core


def export_openvino_end2end(source: Path, plain: Path, path: Path, nms: Nms, pooling: Pooling = Pooling()) -> list[str]:
    """Convert `source`, a file of export_end2end with NMS of the kind `standard`, to OpenVINO's files; see `export_openvino`.

    `plain` is the file of export_onnx that `source` was made from; `nms` and `pooling` are the settings inside.
    """
    return write_checked(source, path, lambda session: _compare_nms(session, source, plain, nms, pooling))


def _compare_nms(session: OpenVINO, source: Path, plain: Path, nms: Nms, pooling: Pooling) -> None:
    """Run the whole file once, and compare its NMS on made predictions with torchvision's."""
    model, outputs = onnx.load(source), list(onnx.load(plain).graph.output)
    batch, _, *imgsz = shape_of(model.graph.input[0])
    FileModel(session)(made_images(batch, imgsz))
    made = made_predictions(nms, max(imgsz), *map(shape_of, outputs))
    names = [o.name for o in outputs]
    part = one_core().read_model(nms_part(model, names).SerializeToString())
    compiled = one_core().compile_model(part, 'CPU', session.settings)
    found = compiled(dict(zip(names, (t.numpy() for t in made))))
    check_detections([torch.from_numpy(found[port]) for port in compiled.outputs], made, nms, pooling, 'OpenVINO')


class OpenVINOEnd2end(OpenVINOFormat):
    """MODEL-end2end.xml and MODEL-end2end.bin, which return detections."""

    name = 'openvino_end2end'
    source = 'onnx_end2end'

    @override
    def require(self, config: ExportConfig, device: torch.device) -> None:
        check(
            [
                (
                    config.nms == 'plugin',
                    f'--nms plugin: {PLUGIN}, which TensorRT alone has; OpenVINO takes --nms standard',
                )
            ]
        )
        super().require(config, device)

    @override
    def write(self, export: Export, path: Path) -> Written:
        source, plain = export.made('onnx_end2end').path, export.made('onnx').path
        return self.report(export, path, export_openvino_end2end(source, plain, path, *nms_of(export)))


FORMAT = OpenVINOEnd2end()
