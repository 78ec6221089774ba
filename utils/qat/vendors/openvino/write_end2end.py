"""ONNX file with NMS → OpenVINO's own files: the whole runs once, and its NMS on made predictions is compared with torchvision's."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from typing_extensions import override

from models.deploy.agreement import made_images
from models.deploy.formats.format import Export, Written
from models.deploy.formats.onnx_end2end import FORMAT as ONNX_END2END
from models.deploy.formats.onnx_end2end import check_detections, made_predictions, nms_part
from utils.qat.backends.file_model import FileModel
from utils.qat.config.export import PLUGIN
from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.vendors.openvino.model import one_core
from utils.qat.vendors.openvino.session import OpenVINO
from utils.qat.vendors.openvino.write import OpenVINOFormat


class OpenVINOEnd2end(OpenVINOFormat):
    """MODEL-end2end.xml and MODEL-end2end.bin, which return detections."""

    name = 'openvino_end2end'
    source = ONNX_END2END

    @override
    def require(self, export: Export) -> None:
        config, task = export.config, export.predict.task
        if config.nms == 'plugin':
            raise QatError(f'--nms plugin: {PLUGIN}, which TensorRT alone has; OpenVINO takes --nms standard')
        if not task.boxes:
            raise QatError(f'--include {self.name}: NMS is for detectors, and {config.weights} is {task.title}')
        super().require(export)

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        return [path, path.with_suffix('.bin')]

    @override
    def write(self, export: Export, path: Path) -> Written:
        return self.converted(export, path)

    @override
    def compare(self, session: OpenVINO, export: Export, source: onnx.ModelProto) -> None:
        nms, pooling = export.nms
        outputs = onnx.load(export.written['onnx'].path, load_external_data=False).graph.output
        batch, _, *imgsz = shape_of(source.graph.input[0])
        FileModel(session)(made_images(batch, imgsz))
        made = made_predictions(nms, max(imgsz), *map(shape_of, outputs))
        names = [o.name for o in outputs]
        part = one_core().read_model(nms_part(source, names).SerializeToString())
        compiled = one_core().compile_model(part, 'CPU', session.settings)
        found = compiled(dict(zip(names, (t.numpy() for t in made))))
        check_detections([torch.from_numpy(found[port]) for port in compiled.outputs], made, nms, pooling, 'OpenVINO')


FORMAT = OpenVINOEnd2end()
