"""The ends inside a file: NMS and the masks behind a detector, normalization and softmax around a classifier.

    output0 [B, 4 + nc, N] → boxes [B, N, 4] (cxcywh), scores [B, N, nc]
        → NMS → num_dets, det_boxes, det_scores, det_classes, of fixed size
    output0 [B, 4 + nc + nm, N], output1 [B, nm, h, w]
        → the same, and coefficients [B, N, nm] of the boxes that NMS keeps → det_masks

Two kinds of NMS compute the same outputs from the same boxes and scores:

- plugin: one node, EfficientNMS_TRT. Fast, only in TensorRT, deprecated since 10.12.
- standard: ONNX's NonMaxSuppression, which TensorRT maps to its INMSLayer; ONNX Runtime has it too. It returns a list
  of unknown length, whose scores are scattered into zeros of the size of all scores; a TopK over these is sorted and of
  fixed size. Unlike the plugin it tells which candidates were kept, so a segmentation model needs this kind.

The new nodes compute in the type of output0, FP32; the model's nodes do not change. docs/end2end.md has the differences
between the two kinds, and the sources.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from utils.qat.config.export import END2END, MASKS, PLUGIN, Nms, Pooling
from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import axes_of, replace_nodes, required_inputs

# Of the plugin. ONNX's checker accepts unknown operators in a foreign domain; TensorRT's parser identifies them by name.
DOMAIN = 'TRT'
PROBABILITIES = 'probabilities'  # the output of a classifier with its ends
SCOPE = 'end2end'  # in the names of all nodes and constants that are made here


def add_nms(model: ModelProto, nms: Nms, pooling: Pooling = Pooling()) -> ModelProto:
    """Replace the predictions of a detector by detections, in place; a segmentation model takes kind `standard`.

    In: predictions FP32 [B, 4 + nc, N] (boxes cxcywh in pixels, scores in 0..1), and perhaps prototypes, see
    export_onnx. Out: num_dets INT32 [B, 1], det_boxes [B, K, 4] (xyxy in pixels), det_scores [B, K], det_classes INT32
    [B, K]; with prototypes also det_masks [B, K, R * R] in 0..1: R x R cells that divide the box, row by row.
    Detections are sorted by score; the rows after num_dets are 0.
    """
    outputs = predictions, *prototypes = list(model.graph.output)
    batch, rows, number = axes_of(predictions)
    coefficients = [axes_of(p)[1] for p in prototypes]  # empty, or the number of coefficients of a box
    classes = rows - 4 - sum(coefficients)
    candidates = number if nms.class_agnostic else number * classes
    if nms.topk_all > candidates:
        raise QatError(
            f'--topk-all {nms.topk_all}: at this --imgsz the model has only {candidates} candidates; give at most that'
        )
    graph = GraphWriter(model)
    transposed = graph.node('Transpose', [predictions.name], perm=[0, 2, 1])
    boxes, scores, *coefficients = graph.node(
        'Split', [transposed, graph.constant([4, classes, *coefficients])], 2 + len(coefficients), axis=2
    )
    if nms.kind == 'plugin':
        add_plugin(graph, boxes, scores, nms)
    else:
        is_detection, box = add_standard(graph, boxes, scores, nms, classes)
    shapes = [[1], [nms.topk_all, 4], [nms.topk_all], [nms.topk_all]]
    for p in prototypes:
        add_masks(graph, coefficients[0], p, is_detection, box, nms.topk_all, pooling)
        shapes.append([nms.topk_all, pooling.mask_resolution**2])
    model.graph.value_info.extend(outputs)
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, kind, [batch, *shape])
        for name, kind, shape in zip(
            (*END2END, MASKS),
            (TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT32, TensorProto.FLOAT),
            shapes,
        )
    )
    return model


class GraphWriter:
    """A writer that appends named nodes and constants to a model; `scope` is in their names."""

    def __init__(self, model: ModelProto, scope: str = SCOPE) -> None:
        self.model, self.scope, self.count = model, scope, 0

    def node(
        self, op: str, inputs: list[str], outputs: int | tuple[str, ...] | list[str] = 1, **attributes: Any
    ) -> Any:
        """Add a node and return the name of its output, or a list of them. outputs: their number, or names."""
        self.count += 1
        name = f'/{self.scope}/{op}_{self.count}'
        made = [f'{name}_output_{i}' for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.model.graph.node.append(helper.make_node(op, inputs, made, name, **attributes))
        return made if len(made) > 1 else made[0]

    def constant(self, value: object, dtype: type = np.int64) -> str:
        """Add an initializer, and return its name."""
        self.count += 1
        name = f'{self.scope}.constant_{self.count}'
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name


def add_plugin(graph: GraphWriter, boxes: str, scores: str, nms: Nms) -> None:
    """Add TensorRT's plugin by plugin/efficientNMSPlugin/README.md, for boxes [B, N, 4] and scores [B, N, nc]."""
    graph.node(
        PLUGIN,
        [boxes, scores],
        END2END,
        domain=DOMAIN,
        plugin_version='1',
        background_class=-1,
        box_coding=1,
        score_activation=0,
        score_threshold=float(nms.conf_thres),
        iou_threshold=float(nms.iou_thres),
        max_output_boxes=nms.topk_all,
        **{'class_agnostic': 1} if nms.class_agnostic else {},
    )
    graph.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def add_standard(graph: GraphWriter, boxes: str, scores: str, nms: Nms, classes: int) -> tuple[str, str]:
    """Add NMS by operators of ONNX alone; boxes [B, N, 4], scores [B, N, nc].

    Returns:
        Names of two tensors [B, K, 1]: whether a row is a detection, and the index of its box in 0..N - 1.
    """
    one, two, top = (graph.constant([n]) for n in (1, 2, nms.topk_all))
    centre, size = graph.node('Split', [boxes, graph.constant([2, 2])], 2, axis=2)  # [B, N, 2] each
    half = graph.node('Mul', [size, graph.constant(0.5, np.float32)])
    # [B, N, 4]
    corners = graph.node('Concat', [graph.node('Sub', [centre, half]), graph.node('Add', [centre, half])], axis=2)
    if nms.class_agnostic:
        scores, best = graph.node('TopK', [scores, one], 2, axis=2)  # [B, N, 1], as if there were one class

    by_class = graph.node('Transpose', [scores], perm=[0, 2, 1])
    selected = graph.node(
        'NonMaxSuppression',
        [
            corners,
            by_class,
            top,
            *(graph.constant([threshold], np.float32) for threshold in (nms.iou_thres, nms.conf_thres)),
        ],
    )  # [M, 3]: image, class, box
    at = graph.node('Gather', [selected, graph.constant([0, 2, 1])], axis=1)
    zeros = graph.node('ConstantOfShape', [graph.node('Shape', [scores])])
    kept = graph.node('ScatterND', [zeros, at, graph.node('GatherND', [scores, at])])  # [B, N, nc]

    # From here on sizes are fixed again. A detection's score is above its threshold, so above 0.
    chosen, flat_index = graph.node(
        'TopK', [graph.node('Flatten', [kept], axis=1), top], [END2END[2], f'/{SCOPE}/place'], axis=1
    )  # [B, K]
    is_detection = graph.node('Greater', [chosen, graph.constant(0, np.float32)])
    graph.node('ReduceSum', [graph.node('Cast', [is_detection], to=TensorProto.INT32), one], END2END[:1])
    if nms.class_agnostic:
        box = graph.node('Unsqueeze', [flat_index, two])  # [B, K, 1]: the index of a detection's box
        label = graph.node('Squeeze', [graph.node('GatherND', [best, box], batch_dims=1), two])
    else:
        number = graph.constant(classes)
        box = graph.node('Unsqueeze', [graph.node('Div', [flat_index, number]), two])
        label = graph.node('Mod', [flat_index, number])
    rows, in_row = graph.node('GatherND', [corners, box], batch_dims=1), graph.node('Unsqueeze', [is_detection, two])
    graph.node('Where', [in_row, rows, graph.constant(0, np.float32)], END2END[1:2])
    label = graph.node('Where', [is_detection, label, graph.constant(0)])
    graph.node('Cast', [label], END2END[3:], to=TensorProto.INT32)
    return in_row, box


def add_masks(
    graph: GraphWriter,
    coefficients: str,
    prototypes: ValueInfoProto,
    is_detection: str,
    box: str,
    top: int,
    pooling: Pooling,
) -> None:
    """Add the masks: the sigmoid of coefficients [B, N, nm] times prototypes [B, nm, h, w], over each box.

    RoiAlign crops a box and averages it to R x R. It is linear, as is the product with the coefficients, so their order does
    not matter. With the product first, it crops one channel for each detection instead of nm prototypes. For is_detection
    and box see `add_standard`; top is K.
    """
    imgsz, sides = axes_of(graph.model.graph.input[0])[2:], axes_of(prototypes)[2:]
    scales = {side / whole for side, whole in zip(sides, imgsz)}
    if scales != {pooling.pooler_scale}:
        raise QatError(
            f'the prototypes of this model are {" x ".join(map(str, sides))} for images of {" x ".join(map(str, imgsz))}, and masks '
            f'inside a file need {pooling.pooler_scale:g} of each side; use --include onnx'
        )
    own = graph.node('GatherND', [coefficients, box], batch_dims=1)  # [B, K, nm]
    flat = graph.node('Reshape', [prototypes.name, graph.constant([0, 0, -1])])
    # [B * K, 1, h, w]
    maps = graph.node('Reshape', [graph.node('MatMul', [own, flat]), graph.constant([-1, 1, *sides])])
    boxes = graph.node('Reshape', [END2END[1], graph.constant([-1, 4])])
    zero, one = graph.constant(0), graph.constant(1)
    # Each box is cropped from its own map.
    each = graph.node('Range', [zero, graph.node('Gather', [graph.node('Shape', [boxes]), zero]), one])
    cut = graph.node(
        'RoiAlign',
        [maps, boxes, each],
        mode='avg',
        output_height=pooling.mask_resolution,
        output_width=pooling.mask_resolution,
        spatial_scale=float(pooling.pooler_scale),
        sampling_ratio=pooling.sampling_ratio,
        coordinate_transformation_mode='half_pixel',
    )
    made = graph.node('Reshape', [graph.node('Sigmoid', [cut]), graph.constant([-1, top, pooling.mask_resolution**2])])
    graph.node('Where', [is_detection, made, graph.constant(0, np.float32)], [MASKS])


def add_class_ends(model: ModelProto, mean: Sequence[float], std: Sequence[float]) -> ModelProto:
    """Make a classifier take images in 0..1 and return probabilities FP32 [B, nc], in place.

    Before, it took images that are less `mean` and divided by `std`, of RGB, and returned logits, see export_onnx. Its own nodes
    do not change.
    """
    [images], [logits] = required_inputs(model), model.graph.output
    network, graph = list(model.graph.node), GraphWriter(model)
    by_channel = [graph.constant(np.reshape(value, (3, 1, 1)), np.float32) for value in (mean, std)]
    centred = graph.node('Sub', [images.name, by_channel[0]])
    normalized = graph.node('Div', [centred, by_channel[1]])
    before = list(model.graph.node)[len(network) :]
    for node in network:
        node.input[:] = [normalized if name == images.name else name for name in node.input]
    replace_nodes(model, [*before, *network])
    graph.node('Softmax', [logits.name], (PROBABILITIES,), axis=1)
    output = helper.make_tensor_value_info(PROBABILITIES, TensorProto.FLOAT, axes_of(logits))
    del model.graph.output[:]
    model.graph.output.append(output)
    return model
