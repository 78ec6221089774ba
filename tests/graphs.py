"""ONNX graphs made by hand, and running and reading graphs. Imports no torch."""
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def graph_of(nodes, outputs=('y',), initializers=None, shape=(2, 3), returns=None, opset=17, given=FLOAT):
    """A checked model that reads `x` (`given`: its element type) and returns `outputs`, FP32 of shape `returns`."""
    values = {'scale': np.float32(0.1), 'same scale': np.float32(0.1), 'other scale': np.float32(0.2), 'zero': np.int8(0),
              'same zero': np.int8(0), 'weight': np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3), **(initializers or {})}
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(nodes, 'by hand', [helper.make_tensor_value_info('x', given, shape)],
                              [helper.make_tensor_value_info(name, FLOAT, returns or shape) for name in outputs],
                              [numpy_helper.from_array(np.asarray(v), k) for k, v in values.items() if k in used])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def q(given, out, scale='scale', zero='zero', **attributes):
    return helper.make_node('QuantizeLinear', [given, scale, zero], [out], **attributes)


def dq(given, out, scale='scale', zero='zero', **attributes):
    return helper.make_node('DequantizeLinear', [given, scale, zero], [out], **attributes)


def node(op, *names, **attributes):
    return helper.make_node(op, list(names[:-1]), [names[-1]], **attributes)


def pair(given, out, **options):
    return [q(given, f'{out} int8', **options), dq(f'{out} int8', out, **options)]


def copy(model):
    return onnx.ModelProto.FromString(model.SerializeToString())


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def run_onnx(model, feeds):
    """Outputs of an ONNX model (or file) in ONNX Runtime, nothing optimized away: what the graph says, node by node."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if not isinstance(model, onnx.ModelProto) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=['CPUExecutionProvider']).run(None, feeds)
