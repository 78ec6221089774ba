"""Graphs for OpenVINO: the last pass over a file that it reads itself, the passes when a file is opened or written here, and the audit's rules."""

from functools import partial

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from utils.qat.graph.audit_rules import SHARED, adds, not_absorbed, numbers
from utils.qat.graph.decoding import boxes_by_rows, decode_apart
from utils.qat.graph.onnx_graph import (
    attribute,
    constants,
    count_qdq,
    is_half,
    producers,
    readers,
    replace_nodes,
)
from utils.qat.graph.passes import (
    absorb_relus,
    averages_by_convolutions,
    drop_repeated_qdq,
    keep_nodes,
    unsigned_activations,
)

OPENVINO = 'org.openvinotoolkit'  # domain of its own operators in an ONNX graph
RULES = (*SHARED, partial(adds, one_scale=False), not_absorbed, partial(numbers, zero_points='unsigned'))


def finish(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, so that OpenVINO's own reader of ONNX finds integers that it computes with; changes no value.

    On a CPU with AMX it computes a convolution in float if its input has a zero point other than 0.
    """
    return unsigned_activations(model, all_of_them=False)


def for_openvino(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, into the form that OpenVINO computes correctly and fast; values of Q/DQ change only by rounding."""
    model = decode_apart(model)
    if not any(count_qdq(model)):
        return model
    return fake_quantize(absorb_relus(drop_repeated_qdq(averages_by_convolutions(boxes_by_rows(model)))))


def fake_quantize(model: ModelProto) -> ModelProto:
    """Replace each Q/DQ of an activation by one FakeQuantize, an operator of OpenVINO, in place; changes no value.

    OpenVINO (2025.2 to 2026.4) reads Q and DQ as several operators, and on CPUs without AMX it then rounds some
    activations with a scale of 1: docs/cpu.md. Its own tools write this one operator, which it computes correctly.
    """
    values, made, half = constants(model), producers(model), is_half(model)
    stored, nodes = set(values), []

    def is_plain(node: NodeProto) -> bool:
        """Whether a Q or DQ has one scale and one zero point, both constant."""
        return len(node.input) == 3 and all(name in values and values[name].ndim == 0 for name in node.input[1:])

    def limit(node: NodeProto, end: int) -> str:
        """Return the name of a constant with the value of the integer `end`, by the scale and zero point of a Q or DQ."""
        value = np.float32(end - int(values[node.input[2]])) * values[node.input[1]].astype(np.float32)
        name = f'limit {value!r}'
        if name not in stored:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
            stored.add(name)
        return name

    for dq in model.graph.node:
        q = made.get(dq.input[0]) if dq.op_type == 'DequantizeLinear' else None
        if q is None or q.op_type != 'QuantizeLinear' or q.input[0] in values or not (is_plain(q) and is_plain(dq)):
            nodes.append(dq)
            continue
        kept = np.iinfo(values[q.input[2]].dtype)
        ends = [limit(node, end) for node in (q, dq) for end in (kept.min, kept.max)]  # of inputs and outputs
        source, result = q.input[0], dq.output[0]
        if half:  # for FP16 data the limits would be FP16 too, and inexact
            nodes.append(
                onnx.helper.make_node('Cast', [source], [f'{result} in'], f'{q.name} in', to=onnx.TensorProto.FLOAT)
            )
            source, result = f'{result} in', f'{result} out'
        nodes.append(
            onnx.helper.make_node(
                'FakeQuantize',
                [source, *ends],
                [result],
                q.name,
                domain=OPENVINO,
                levels=1 + kept.max - kept.min,
            )
        )
        if half:
            kind = attribute(dq, 'output_dtype') or onnx.helper.np_dtype_to_tensor_dtype(values[dq.input[1]].dtype)
            nodes.append(onnx.helper.make_node('Cast', [result], [dq.output[0]], f'{q.name} out', to=kind))
    replace_nodes(model, nodes)
    model.opset_import.append(onnx.helper.make_opsetid(OPENVINO, 1))
    read = readers(model)
    return keep_nodes(model, lambda node: node.op_type != 'QuantizeLinear' or node.output[0] in read, {})
