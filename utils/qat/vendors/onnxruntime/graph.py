"""Graphs for ONNX Runtime: the last pass over a file, the pass over one that it reads, and the audit's rules.

Every version of it quantizes FP16 values as ONNX specifies: x / scale, rounded half to even. In versions that truncate, FP16
x → Cast → FP32 → Q (FP32 scale) gives the same INT8 values.
"""

from functools import cache, partial

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from utils.qat.core.machine import onnx_options
from utils.qat.graph.audit_rules import SHARED, adds, numbers, open_ends
from utils.qat.graph.onnx_graph import constants, is_half, replace_nodes
from utils.qat.graph.passes import absorb_relus, averages_by_convolutions, drop_repeated_qdq, unsigned_activations

RULES = (*SHARED, partial(adds, one_scale=False), open_ends, partial(numbers, zero_points='any'))


def finish(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, into the form that ONNX Runtime computes in integers; changes no value but by the last bit of an average."""
    integers = unsigned_activations(absorb_relus(drop_repeated_qdq(model, behind_moves=False)))
    return averages_by_convolutions(integers)


@cache
def rounds_fp16() -> bool:
    """Tell whether ONNX Runtime rounds FP16 values: up to 1.29, on CPUs, it truncates; and 1.30 needs Python 3.11."""
    import onnxruntime as ort

    graph = helper.make_graph(
        [helper.make_node('QuantizeLinear', ['x', 'scale', 'zero'], ['y'])],
        'rounding',
        [helper.make_tensor_value_info('x', TensorProto.FLOAT16, [4])],
        [helper.make_tensor_value_info('y', TensorProto.INT8, [4])],
        [
            numpy_helper.from_array(np.array(1, np.float16), 'scale'),
            numpy_helper.from_array(np.array(0, np.int8), 'zero'),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 19)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), onnx_options(), providers=['CPUExecutionProvider'])
    (y,) = session.run(None, {'x': np.array([0.75, 1.5, 2.5, -1.5], np.float16)})
    return y.tolist() == [1, 2, 2, -2]


def rounding(source: str | bytes) -> str | bytes:
    """Return a model whose FP16 values ONNX Runtime rounds: `source`, unless ONNX Runtime would truncate them."""
    if rounds_fp16():
        return source
    model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    return quantize_in_fp32(model).SerializeToString() if is_half(model) else source


def quantize_in_fp32(model: ModelProto) -> ModelProto:
    """Quantize in FP32, in place: an FP16 scale that is a constant becomes FP32, and a Cast comes before its Q."""
    known = constants(model)
    nodes: list[NodeProto] = []
    made: set[str] = set()
    for node in model.graph.node:
        scale = known.get(node.input[1]) if node.op_type == 'QuantizeLinear' else None
        if scale is not None and scale.dtype == np.float16:
            value, wide = (f'{name}_to_quantize' for name in node.input[:2])
            if value not in made:
                nodes.append(helper.make_node('Cast', [node.input[0]], [value], value, to=TensorProto.FLOAT))
            if wide not in made:
                model.graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), wide))
            made |= {value, wide}
            node.input[0], node.input[1] = value, wide
        nodes.append(node)
    return replace_nodes(model, nodes)
