"""What DeepStream-Yolo (https://github.com/marcoslucianops/DeepStream-Yolo, from November 2024 on) wants of a detector: one output
[B, N, 6], which its parser NvDsInferParseYolo reads, and a configuration of the nvinfer element that runs it.

in:  a finished graph, images [B, 3, H, W] → output0 [B, 4 + nc, N]
out: the same graph, its Q/DQ and types untouched, with that output; and the text of config_infer_primary_yoloV9.txt

Which boxes stay is decided behind the graph, where DeepStream clusters them (NMS, cluster-mode=2). Imports no torch.
"""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from utils.qat.graph.passes import set_output_shapes

INPUT, OUTPUT = 'input', 'output'  # the names that DeepStream-Yolo's library asks for
LABELS, CONFIG = 'labels.txt', 'config_infer_primary_yoloV9.txt'


def deepstream_layout(model):
    """Let `model` return boxes as DeepStream-Yolo reads them, in place: images [B, 3, H, W] → output0 [B, 4 + nc, N] (xywh, scores of
    all classes) becomes input → output [B, N, 6] FP32: x1, y1, x2, y2 in pixels of the input, the best class's score and its index.

    Adds nodes behind output0 and changes none before it. They compute in FP32 also where the features are FP16, as boxes do not
    fit FP16, and are written alike in opsets 13 to 23.
    """
    graph = model.graph
    [given], [predictions] = graph.input, graph.output
    for node in graph.node:
        node.input[:] = [INPUT if name == given.name else name for name in node.input]
    given.name = INPUT
    batch, rows, anchors = (d.dim_param or d.dim_value for d in predictions.type.tensor_type.shape.dim)

    def tensor(name, values):
        graph.initializer.append(numpy_helper.from_array(values, f'deepstream/{name}'))
        return f'deepstream/{name}'

    def add(op, inputs, *outputs, **attributes):
        outputs = [name if name == OUTPUT else f'deepstream/{name}' for name in outputs]
        graph.node.append(
            helper.make_node(op, inputs, outputs, f'deepstream/{op}_{outputs[0].split("/")[-1]}', **attributes)
        )
        return outputs if len(outputs) > 1 else outputs[0]

    parts = tensor('parts', np.int64([2, 2, rows - 4]))
    centre, size, scores = add('Split', [predictions.name, parts], 'centre', 'size', 'scores', axis=1)
    half = add('Mul', [size, tensor('0.5', np.float32(0.5))], 'half')
    corners = add('Sub', [centre, half], 'top_left'), add('Add', [centre, half], 'bottom_right')
    score, best = add('TopK', [scores, tensor('1', np.int64([1]))], 'score', 'best', axis=1)
    number = add('Cast', [best], 'class', to=TensorProto.FLOAT)
    add('Transpose', [add('Concat', [*corners, score, number], 'columns', axis=1)], OUTPUT, perm=[0, 2, 1])
    predictions.name = OUTPUT
    set_output_shapes(model, (batch, anchors, 6))
    return model


def deepstream_config(onnx, classes, batch=1, int8=False):
    """Text of a configuration of nvinfer, for DeepStream-Yolo's folder.

    onnx: name of the file. classes: how many the model has. batch: images per run; more than 1 only where the file takes it.
    int8: the file has Q/DQ. Then nothing is calibrated and there is no calibration table; else nvinfer builds an FP16 engine.
    """
    return f"""\
# {onnx} in DeepStream-Yolo: put both files and {LABELS} into its folder. Paths are relative to this file.
[property]
gpu-id=0
gie-unique-id=1
process-mode=1
network-type=0
interval=0
onnx-file={onnx}
# built at the first start, unless it is there: docs/deepstream.md of yolov9-qat tells how to build it beforehand
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
# NMS
cluster-mode=2
parse-bbox-func-name=NvDsInferParseYolo
custom-lib-path=nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so
engine-create-func-name=NvDsInferYoloCudaEngineGet

[class-attrs-all]
nms-iou-threshold=0.45
pre-cluster-threshold=0.25
topk=300
"""
