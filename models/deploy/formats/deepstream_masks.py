"""A segmentation model for DeepStream-Yolo-Seg (https://github.com/marcoslucianops/DeepStream-Yolo-Seg).

Its parser NvDsInferParseYoloSeg reads four outputs, by their order: the detections of NMS inside the file, and a mask over the
box of each. It has no builder of its own, so the engine has to be built beforehand.
"""

from collections.abc import Callable

from onnx import ModelProto, TensorProto, helper
from typing_extensions import override

from models.deploy.formats.deepstream import INPUT, DeepStream
from models.deploy.formats.format import Export
from models.deploy.formats.onnx_end2end import nms_of
from utils.qat.config.export import END2END, MASKS, Nms, Pooling
from utils.qat.graph.nms import GraphWriter, add_nms
from utils.qat.graph.onnx_graph import axes_of

OUTPUTS = 'boxes', 'scores', 'classes', 'masks'
PARSER = """\
network-type=3
# NMS is inside the file
cluster-mode=4
parse-bbox-instance-mask-func-name=NvDsInferParseYoloSeg
custom-lib-path=nvdsinfer_custom_impl_Yolo_seg/libnvdsinfer_custom_impl_Yolo_seg.so
output-instance-mask=1
segmentation-threshold=0.5

[class-attrs-all]
pre-cluster-threshold=0.25
topk=100
"""


def masks_layout(model: ModelProto, nms: Nms, pooling: Pooling) -> ModelProto:
    """Change a segmentation model's outputs to the layout that DeepStream-Yolo-Seg reads, in place.

    In: images [B, 3, H, W] → predictions and prototypes, see export_onnx. Out: input → boxes [B, K, 4], x1, y1, x2, y2 in pixels
    of the input; scores [B, K, 1]; classes [B, K, 1]; masks [B, K, R, R] in 0..1 over the box. All are FP32, and rows without a
    detection are 0.
    """
    add_nms(model, nms, pooling)
    [given], found = model.graph.input, {value.name: value for value in model.graph.output}
    for node in model.graph.node:
        node.input[:] = [INPUT if name == given.name else name for name in node.input]
    given.name = INPUT
    batch, rows, _ = axes_of(found[END2END[1]])
    side = pooling.mask_resolution
    graph = GraphWriter(model, 'deepstream')
    parts, shapes = (*END2END[1:], MASKS), ([rows, 4], [rows, 1], [rows, 1], [rows, side, side])
    del model.graph.output[:]
    for name, part, shape in zip(OUTPUTS, parts, shapes):
        values = graph.node('Cast', [part], to=TensorProto.FLOAT)
        graph.node('Reshape', [values, graph.constant([-1, *shape])], (name,))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *shape]))
    return model


class DeepStreamMasks(DeepStream):
    """The same files for DeepStream-Yolo-Seg."""

    folder = 'DeepStream-Yolo-Seg'
    config = 'config_infer_primary_yoloV9_seg.txt'
    parser = PARSER
    returns = 'boxes, scores, classes, masks of NMS inside'

    @override
    def layout(self, export: Export) -> Callable[[ModelProto], ModelProto]:
        nms, pooling = nms_of(export)
        return lambda model: masks_layout(model, nms, pooling)

    @override
    def require_model(self, export: Export) -> None:
        super().require_model(export)
        nms_of(export)  # its options


FORMAT = DeepStreamMasks()
