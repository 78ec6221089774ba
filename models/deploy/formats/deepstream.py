"""A detector or segmentation model for DeepStream-Yolo or DeepStream-Yolo-Seg, the plugins of marcoslucianops (from November 2024 on).

https://github.com/marcoslucianops/DeepStream-Yolo: its parser NvDsInferParseYolo reads one output [B, N, 6], and DeepStream runs NMS on
these boxes (cluster-mode=2). DeepStream-Yolo-Seg's parser NvDsInferParseYoloSeg reads four outputs, by their order: the detections of
NMS inside the file, and a mask over the box of each. It has no builder of its own, so the engine has to be built beforehand.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper
from typing_extensions import override

from models.deploy.formats.format import Export, Format, Written, size_of
from models.deploy.formats.onnx import write_onnx
from models.quantize.network import head_of
from utils.qat.config.export import END2END, MASKS, Nms, Pooling
from utils.qat.core.errors import QatError
from utils.qat.core.files import require_own, write_text
from utils.qat.core.log import LOGGER
from utils.qat.graph.ends import GraphWriter, add_nms
from utils.qat.graph.onnx_graph import axes_of
from utils.qat.graph.passes import set_output_shapes

INPUT, OUTPUT = 'input', 'output'  # names that DeepStream-Yolo's library expects
MASK_OUTPUTS = 'boxes', 'scores', 'classes', 'masks'
LABELS = 'labels.txt'


@dataclass(frozen=True)
class Plugin:
    """A plugin of DeepStream."""

    folder: str  # to which the files go
    config: str  # name of the configuration of nvinfer, the element that runs an ONNX file
    returns: str  # outputs of the file, in words
    parser: str  # settings that belong to its parser


YOLO = Plugin(
    'DeepStream-Yolo',
    'config_infer_primary_yoloV9.txt',
    'output [B, N, 6]',
    """\
network-type=0
# NMS
cluster-mode=2
parse-bbox-func-name=NvDsInferParseYolo
custom-lib-path=nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so
engine-create-func-name=NvDsInferYoloCudaEngineGet

[class-attrs-all]
nms-iou-threshold=0.45
pre-cluster-threshold=0.25
topk=300
""",
)
YOLO_SEG = Plugin(
    'DeepStream-Yolo-Seg',
    'config_infer_primary_yoloV9_seg.txt',
    'boxes, scores, classes, masks of NMS inside',
    """\
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
""",
)


def _rename_input(model: ModelProto) -> None:
    """Call the images INPUT, in place."""
    [given] = model.graph.input
    for node in model.graph.node:
        node.input[:] = [INPUT if name == given.name else name for name in node.input]
    given.name = INPUT


def deepstream_layout(model: ModelProto) -> ModelProto:
    """Change a detector's output to the layout that DeepStream-Yolo reads, in place.

    In: images [B, 3, H, W] → output0 [B, 4 + nc, N], xywh in pixels, then the scores of all classes. Out: input →
    output FP32 [B, N, 6], x1, y1, x2, y2 in pixels of the input, the best class's score and its index.

    The new nodes follow output0, and all others stay. They compute in FP32 even if the features are FP16, because FP16 is
    too coarse for boxes. They are the same in opsets 13 to 23.
    """
    _rename_input(model)
    [predictions], graph = model.graph.output, GraphWriter(model, 'deepstream')
    batch, rows, anchors = axes_of(predictions)
    parts = graph.constant([2, 2, rows - 4])
    centre, size, scores = graph.node('Split', [predictions.name, parts], 3, axis=1)
    half = graph.node('Mul', [size, graph.constant(0.5, np.float32)])
    corners = graph.node('Sub', [centre, half]), graph.node('Add', [centre, half])
    score, best = graph.node('TopK', [scores, graph.constant([1])], 2, axis=1)
    number = graph.node('Cast', [best], to=TensorProto.FLOAT)
    graph.node('Transpose', [graph.node('Concat', [*corners, score, number], axis=1)], (OUTPUT,), perm=[0, 2, 1])
    predictions.name = OUTPUT
    set_output_shapes(model, (batch, anchors, 6))
    return model


def masks_layout(model: ModelProto, nms: Nms, pooling: Pooling) -> ModelProto:
    """Change a segmentation model's outputs to the layout that DeepStream-Yolo-Seg reads, in place.

    In: images [B, 3, H, W] → predictions and prototypes, see export_onnx. Out: input → boxes [B, K, 4], x1, y1, x2, y2 in pixels
    of the input; scores [B, K, 1]; classes [B, K, 1]; masks [B, K, R, R] in 0..1 over the box. All are FP32, and rows without a
    detection are 0.
    """
    add_nms(model, nms, pooling)
    _rename_input(model)
    batch, rows, _ = axes_of(next(value for value in model.graph.output if value.name == END2END[1]))
    side = pooling.mask_resolution
    graph = GraphWriter(model, 'deepstream')
    parts, shapes = (*END2END[1:], MASKS), ([rows, 4], [rows, 1], [rows, 1], [rows, side, side])
    del model.graph.output[:]
    for name, part, shape in zip(MASK_OUTPUTS, parts, shapes):
        values = graph.node('Cast', [part], to=TensorProto.FLOAT)
        graph.node('Reshape', [values, graph.constant([-1, *shape])], (name,))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *shape]))
    return model


def deepstream_config(
    onnx: str, classes: int, batch: int = 1, int8: bool = False, plugin: Plugin = YOLO, builds: bool = True
) -> str:
    """Write the configuration of nvinfer for an ONNX file.

    A batch above 1 needs a file that takes it. With int8 (Q/DQ) there is no calibration and no calibration table;
    else nvinfer builds an FP16 engine. builds: whether DeepStream can build the engine.
    """
    engine = (
        'built at the first start, unless it is there' if builds else 'to build beforehand: DeepStream cannot build it'
    )
    return f"""\
# {onnx} in {plugin.folder}, by yolov9-qat: put both files and {LABELS} into its folder. Paths are relative to this file.
[property]
gpu-id=0
gie-unique-id=1
process-mode=1
interval=0
onnx-file={onnx}
# {engine}; docs/deploy.md of yolov9-qat tells how
model-engine-file=model_b{batch}_gpu0_{'int8' if int8 else 'fp16'}.engine
labelfile-path={LABELS}
batch-size={batch}
# {'1: INT8; the scales are in the file, so that there is no int8-calib-file' if int8 else '2: FP16'}
network-mode={1 if int8 else 2}
num-detected-classes={classes}
# RGB, 0 to 255 divided by 255, the whole image with equal borders on both sides
net-scale-factor=0.0039215697906911373
model-color-format=0
maintain-aspect-ratio=1
symmetric-padding=1
{plugin.parser}"""


class DeepStream(Format):
    """MODEL.pt.onnx, labels.txt and the configuration, beside the checkpoint or in --project."""

    name = 'deepstream'

    def plugin(self, export: Export) -> Plugin:
        """Return the plugin that reads the outputs of a model."""
        return YOLO_SEG if export.predict.task.masks else YOLO

    def layout(self, export: Export) -> Callable[[ModelProto], ModelProto]:
        """Return the function that changes the outputs of a plain graph to those that the parser reads."""
        if not export.predict.task.masks:
            return deepstream_layout
        return lambda model: masks_layout(model, *export.nms)

    @override
    def require(self, export: Export) -> None:
        weights, task = f'--weights {export.config.weights}', export.predict.task
        if not task.boxes:
            raise QatError(
                f'{weights}: {task.title}, {export.predict.kind}; {YOLO.folder} reads detections only; use: python export_qat.py'
            )
        export.target.require_tensorrt(weights, export.zero_points)
        self.layout(export)  # its options

    @override
    def write(self, export: Export, path: Path) -> Written:
        plugin, config, model, half = self.plugin(export), export.config, export.predict.model, export.config.trt == 11
        LOGGER.info(
            f'{config.weights}: YOLOv9 {"INT8" if export.int8 else "float"}, head {type(head_of(model)).__name__}'
        )
        names = [str(name) for name in model.names.values()]
        builds = not half and not (export.int8 and export.predict.task.masks)
        texts = {
            LABELS: ''.join(f'{name}\n' for name in names),
            plugin.config: deepstream_config(path.name, len(names), config.batch_size, export.int8, plugin, builds),
        }
        folder = path.parent
        for file, text in texts.items():
            require_own(folder / file, text)
        done = write_onnx(export, path, half, self.layout(export))
        for file, text in texts.items():
            write_text(folder / file, text)
        height, width = config.imgsz
        return Written(
            {'onnx': path, 'labels': folder / LABELS, 'config': folder / plugin.config},
            [
                f'input [{"batch" if config.dynamic else config.batch_size}, 3, {height}, {width}] -> {plugin.returns}, opset {done.opset}, '
                f'{size_of(path)}, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}{", FP16 outside them" * half}',
                f'ONNX Runtime against PyTorch: {done}',
                *([str(done.padding)] if done.padding else []),
            ],
        )

    @override
    def next_commands(self, export: Export, written: Written, data: str) -> list[str]:
        return [shlex.join(['cp', *map(str, written.files.values()), f'{self.plugin(export).folder}/'])]


FORMAT = DeepStream()
