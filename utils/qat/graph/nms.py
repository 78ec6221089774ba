"""NMS at the end of a finished detector: output0 → num_dets, det_boxes, det_scores, det_classes; of a segmentation model det_masks too.

    output0 [B, 4 + nc, N] → boxes [B, N, 4] (cxcywh), scores [B, N, nc] → NMS → the four outputs, of fixed size
    output0 [B, 4 + nc + nm, N], output1 [B, nm, h, w] → the same, and coefficients [B, N, nm] of what NMS keeps → masks

Two ways to do the last step, from the same boxes and scores to the same outputs:

- plugin: one node, EfficientNMS_TRT. Fast, only in TensorRT, deprecated since 10.12.
- standard: ONNX's NonMaxSuppression, which TensorRT maps to its INMSLayer and ONNX Runtime has as well. It returns a list of unknown
  length; its scores are scattered into zeros of the size of all scores, and a TopK over these is sorted and of fixed size. It tells
  which candidates were kept, which the plugin does not: a segmentation model takes this one.

The nodes that are there, Q and DQ among them, stay as they are: these come behind. All of it computes in the type of output0, FP32.
docs/end2end.md has what differs between the two, and the sources. Imports no torch.
"""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from utils.qat.config.export import END2END, MASKS, PLUGIN, Pooling
from utils.qat.core.errors import QatError

DOMAIN = 'TRT'  # for ONNX's checker, which knows no operator of a foreign domain; TensorRT's parser goes by the name of the node
SCOPE = 'end2end'  # of the names of what is made here


def add_nms(model, nms, pooling=Pooling()):
    """Replace the output of `model`, predictions FP32 [B, 4 + nc, N] (boxes cxcywh in pixels, scores in 0..1), by detections: num_dets
    INT32 [B, 1], det_boxes [B, K, 4] (xyxy in pixels), det_scores [B, K], det_classes INT32 [B, K]; in place. Where there are prototypes
    besides (see export_onnx), det_masks [B, K, R * R] too, in 0..1: R x R cells that divide the box, row by row.

    nms, pooling: see config; of a segmentation model, `standard`. Detections are sorted by score; the rows behind num_dets are 0. Raises
    QatError if K is more than there are candidates, or pooling.pooler_scale is not that of the prototypes.
    """
    outputs = predictions, *prototypes = list(model.graph.output)
    batch, rows, number = _dims(predictions)
    coefficients = [_dims(p)[1] for p in prototypes]  # none, or how many there are to a box
    classes = rows - 4 - sum(coefficients)
    candidates = number if nms.class_agnostic else number * classes
    if nms.topk_all > candidates:
        raise QatError(
            f'--topk-all {nms.topk_all}: at this --imgsz the model has only {candidates} candidates; give at most that'
        )
    graph = Appended(model)
    transposed = graph.node('Transpose', [predictions.name], perm=[0, 2, 1])
    boxes, scores, *coefficients = graph.node(
        'Split', [transposed, graph.constant(np.int64([4, classes, *coefficients]))], 2 + len(coefficients), axis=2
    )
    if nms.kind == 'plugin':
        plugin(graph, boxes, scores, nms)
    else:
        is_one, box = standard(graph, boxes, scores, nms, classes)
    shapes = [[1], [nms.topk_all, 4], [nms.topk_all], [nms.topk_all]]
    for p in prototypes:
        det_masks(graph, *coefficients, p, is_one, box, nms.topk_all, pooling)
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


def _dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


class Appended:
    """Adds nodes and constants behind those of `model`, and names them."""

    def __init__(self, model):
        self.model, self.count = model, 0

    def node(self, op, inputs, outputs=1, **attributes):
        """Add a node; outputs: how many, or their names. Returns the name of its output, or a list if there are more."""
        self.count += 1
        name = f'/{SCOPE}/{op}_{self.count}'
        made = [f'{name}_output_{i}' for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self.model.graph.node.append(helper.make_node(op, inputs, made, name, **attributes))
        return made if len(made) > 1 else made[0]

    def constant(self, value):
        """Add an initializer; returns its name."""
        self.count += 1
        name = f'{SCOPE}.constant_{self.count}'
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def plugin(graph, boxes, scores, nms):
    """One node, with the attributes that TensorRT documents (plugin/efficientNMSPlugin/README.md)."""
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


def standard(graph, boxes, scores, nms, classes):
    """The same with operators of ONNX alone. Returns the names of two tensors [B, K, 1]: whether a row is a detection, and which of the
    N boxes it is."""
    one, two, top = (graph.constant(np.int64([n])) for n in (1, 2, nms.topk_all))
    centre, size = graph.node('Split', [boxes, graph.constant(np.int64([2, 2]))], 2, axis=2)
    half = graph.node('Mul', [size, graph.constant(np.float32(0.5))])
    corners = graph.node(
        'Concat', [graph.node('Sub', [centre, half]), graph.node('Add', [centre, half])], axis=2
    )  # [B, N, 4]
    if nms.class_agnostic:
        scores, best = graph.node('TopK', [scores, one], 2, axis=2)  # [B, N, 1], as if there were one class

    by_class = graph.node('Transpose', [scores], perm=[0, 2, 1])
    selected = graph.node(
        'NonMaxSuppression',
        [
            corners,
            by_class,
            top,
            *(graph.constant(np.float32([threshold])) for threshold in (nms.iou_thres, nms.conf_thres)),
        ],
    )  # [M, 3]: image, class, box
    at = graph.node('Gather', [selected, graph.constant(np.int64([0, 2, 1]))], axis=1)
    zeros = graph.node('ConstantOfShape', [graph.node('Shape', [scores])])
    kept = graph.node('ScatterND', [zeros, at, graph.node('GatherND', [scores, at])])  # [B, N, nc]

    # From here on sizes are fixed again. A score is above its threshold, so above 0: what is 0 is no detection.
    found, place = graph.node(
        'TopK', [graph.node('Flatten', [kept], axis=1), top], [END2END[2], f'/{SCOPE}/place'], axis=1
    )  # [B, K]
    is_one = graph.node('Greater', [found, graph.constant(np.float32(0))])
    graph.node('ReduceSum', [graph.node('Cast', [is_one], to=TensorProto.INT32), one], END2END[:1])
    if nms.class_agnostic:
        box = graph.node('Unsqueeze', [place, two])  # [B, K, 1]: where to find what belongs to a detection
        label = graph.node('Squeeze', [graph.node('GatherND', [best, box], batch_dims=1), two])
    else:
        number = graph.constant(np.int64(classes))
        box = graph.node('Unsqueeze', [graph.node('Div', [place, number]), two])
        label = graph.node('Mod', [place, number])
    rows, in_row = graph.node('GatherND', [corners, box], batch_dims=1), graph.node('Unsqueeze', [is_one, two])
    graph.node('Where', [in_row, rows, graph.constant(np.float32(0))], END2END[1:2])
    label = graph.node('Where', [is_one, label, graph.constant(np.int64(0))])
    graph.node('Cast', [label], END2END[3:], to=TensorProto.INT32)
    return in_row, box


def det_masks(graph, coefficients, prototypes, is_one, box, top, pooling):
    """The masks of the detections: of each, the sigmoid of its coefficients times the prototypes, over its box.

    RoiAlign, which cuts out a box and brings it to R x R, takes means of its input. It is linear, and so is the product with the
    coefficients: they may change places. With the product first, one channel of each detection is cut out, not nm prototypes of each.
    """
    imgsz, sides = _dims(graph.model.graph.input[0])[2:], _dims(prototypes)[2:]
    scales = {side / whole for side, whole in zip(sides, imgsz)}
    if scales != {pooling.pooler_scale}:
        raise QatError(
            f'--pooler-scale {pooling.pooler_scale}: the prototypes of this model are {" x ".join(map(str, sides))} for images of '
            f'{" x ".join(map(str, imgsz))}; give {" or ".join(map(str, scales))}'
        )
    own = graph.node('GatherND', [coefficients, box], batch_dims=1)  # [B, K, nm]
    flat = graph.node('Reshape', [prototypes.name, graph.constant(np.int64([0, 0, -1]))])
    maps = graph.node(
        'Reshape', [graph.node('MatMul', [own, flat]), graph.constant(np.int64([-1, 1, *sides]))]
    )  # [B * K, 1, h, w]
    boxes = graph.node('Reshape', [END2END[1], graph.constant(np.int64([-1, 4]))])
    zero, one = graph.constant(np.int64(0)), graph.constant(np.int64(1))
    each = graph.node(
        'Range', [zero, graph.node('Gather', [graph.node('Shape', [boxes]), zero]), one]
    )  # a box is cut out of its own map
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
    made = graph.node(
        'Reshape', [graph.node('Sigmoid', [cut]), graph.constant(np.int64([-1, top, pooling.mask_resolution**2]))]
    )
    graph.node('Where', [is_one, made, graph.constant(np.float32(0))], [MASKS])
