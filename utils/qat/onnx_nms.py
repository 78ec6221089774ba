"""NMS at the end of a finished detector: output0 → num_dets, det_boxes, det_scores, det_classes.

    output0 [B, 4 + nc, N] → boxes [B, N, 4] (cxcywh), scores [B, N, nc] → NMS → the four outputs, of fixed size

Two ways to do the last step, from the same boxes and scores to the same outputs:

- plugin: one node, EfficientNMS_TRT. Fast, only in TensorRT, deprecated since 10.12.
- standard: ONNX's NonMaxSuppression, which TensorRT maps to its INMSLayer and ONNX Runtime has as well. It returns a list of unknown
  length; its scores are scattered into zeros of the size of all scores, and a TopK over these is sorted and of fixed size.

The nodes that are there, Q and DQ among them, stay as they are: these come behind. All of it computes in the type of output0, FP32.
docs/end2end.md has what differs between the two, and the sources. Imports no torch.
"""
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from utils.qat.config import END2END, PLUGIN
from utils.qat.errors import QatError

DOMAIN = 'TRT'  # for ONNX's checker, which knows no operator of a foreign domain; TensorRT's parser goes by the name of the node
SCOPE = 'end2end'  # of the names of what is made here


def add_nms(model, nms):
    """Replace the output of `model`, predictions FP32 [B, 4 + nc, N] (boxes cxcywh in pixels, scores in 0..1), by detections: num_dets
    INT32 [B, 1], det_boxes [B, K, 4] (xyxy in pixels), det_scores [B, K], det_classes INT32 [B, K]; in place.

    nms: see config.Nms. Detections are sorted by score; the rows behind num_dets are 0. Raises QatError if K is more than there are
    candidates.
    """
    [output] = model.graph.output
    batch, rows, number = (d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim)
    classes = rows - 4
    candidates = number if nms.class_agnostic else number * classes
    if nms.topk_all > candidates:
        raise QatError(f'--topk-all {nms.topk_all}: at this --imgsz the model has only {candidates} candidates; give at most that')
    graph = Appended(model)
    transposed = graph.node('Transpose', [output.name], perm=[0, 2, 1])
    boxes, scores = graph.node('Split', [transposed, graph.constant(np.int64([4, classes]))], 2, axis=2)
    if nms.kind == 'plugin':
        plugin(graph, boxes, scores, nms)
    else:
        standard(graph, boxes, scores, nms, classes)
    model.graph.value_info.append(output)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, kind, [batch, *shape]) for name, kind, shape in zip(
        END2END, (TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT32),
        ([1], [nms.topk_all, 4], [nms.topk_all], [nms.topk_all])))
    return model


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
    graph.node(PLUGIN, [boxes, scores], END2END, domain=DOMAIN, plugin_version='1', background_class=-1, box_coding=1,
               score_activation=0, score_threshold=float(nms.conf_thres), iou_threshold=float(nms.iou_thres), max_output_boxes=nms.topk_all,
               **{'class_agnostic': 1} if nms.class_agnostic else {})
    graph.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def standard(graph, boxes, scores, nms, classes):
    """The same with operators of ONNX alone."""
    one, two, top = (graph.constant(np.int64([n])) for n in (1, 2, nms.topk_all))
    centre, size = graph.node('Split', [boxes, graph.constant(np.int64([2, 2]))], 2, axis=2)
    half = graph.node('Mul', [size, graph.constant(np.float32(0.5))])
    corners = graph.node('Concat', [graph.node('Sub', [centre, half]), graph.node('Add', [centre, half])], axis=2)  # [B, N, 4]
    if nms.class_agnostic:
        scores, best = graph.node('TopK', [scores, one], 2, axis=2)  # [B, N, 1], as if there were one class

    by_class = graph.node('Transpose', [scores], perm=[0, 2, 1])
    selected = graph.node('NonMaxSuppression', [corners, by_class, top, *(
        graph.constant(np.float32([threshold])) for threshold in (nms.iou_thres, nms.conf_thres))])  # [M, 3]: image, class, box
    at = graph.node('Gather', [selected, graph.constant(np.int64([0, 2, 1]))], axis=1)
    zeros = graph.node('ConstantOfShape', [graph.node('Shape', [scores])])
    kept = graph.node('ScatterND', [zeros, at, graph.node('GatherND', [scores, at])])  # [B, N, nc]

    # From here on sizes are fixed again. A score is above its threshold, so above 0: what is 0 is no detection.
    found, place = graph.node('TopK', [graph.node('Flatten', [kept], axis=1), top], [END2END[2], f'/{SCOPE}/place'], axis=1)  # [B, K]
    is_one = graph.node('Greater', [found, graph.constant(np.float32(0))])
    graph.node('ReduceSum', [graph.node('Cast', [is_one], to=TensorProto.INT32), one], END2END[:1])
    if nms.class_agnostic:
        box = graph.node('Unsqueeze', [place, two])  # [B, K, 1]: where to find what belongs to a detection
        label = graph.node('Squeeze', [graph.node('GatherND', [best, box], batch_dims=1), two])
    else:
        number = graph.constant(np.int64(classes))
        box = graph.node('Unsqueeze', [graph.node('Div', [place, number]), two])
        label = graph.node('Mod', [place, number])
    rows = graph.node('GatherND', [corners, box], batch_dims=1)
    graph.node('Where', [graph.node('Unsqueeze', [is_one, two]), rows, graph.constant(np.float32(0))], END2END[1:2])
    label = graph.node('Where', [is_one, label, graph.constant(np.int64(0))])
    graph.node('Cast', [label], END2END[3:], to=TensorProto.INT32)
