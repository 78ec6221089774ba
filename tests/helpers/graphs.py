"""ONNX graphs made by hand, and running and reading graphs. Imports no torch."""

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from utils.qat.core.machine import onnx_options
from utils.qat.vendors.onnxruntime.graph import rounding

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def nodes_of(text, scale='scale', zero='zero'):
    """Nodes in ONNX's own text syntax, such as 'c = Conv(x, w) y = Relu(c)', each with the name of its first output.

    Beside ONNX's operators: QDQ(x, SCALE, ZERO) is a Q and a DQ; Int8Conv(x) has its weight `w` behind a pair with the scales `ws`;
    QConv(x, SCALE) is both; SiLU(x) is a Sigmoid and a Mul.
    """

    def qdq(given, out, of_scale=scale, of_zero=zero, **attributes):
        return pair(given, out, scale=of_scale, zero=of_zero, **attributes)

    def int8(op, given, out, axis=0):
        return [*qdq('w', f'{out} w', 'ws', 'wz', axis=axis), node(op, given, f'{out} w', out)]

    made = []
    for n in onnx.parser.parse_graph(f'by_hand () => () {{ {text} }}').node:
        given, out = list(n.input), n.output[0]
        attributes = {a.name: helper.get_attribute_value(a) for a in n.attribute}
        if n.op_type == 'QDQ':
            made += qdq(given[0], out, *given[1:], **attributes)
        elif n.op_type == 'QConv':
            made += [*qdq(given[0], f'{out}1', *given[1:]), *int8('Conv', f'{out}1', out)]
        elif n.op_type.startswith('Int8'):
            made += int8(n.op_type.removeprefix('Int8'), given[0], out, **attributes)
        elif n.op_type == 'SiLU':
            made += [node('Sigmoid', *given, f'{out} gate'), node('Mul', *given, f'{out} gate', out)]
        else:
            made.append(n)
    for n in made:
        n.name = n.output[0]
    return made


def model_of(nodes, inputs, outputs, values=(), opset=17, **metadata):
    """A model that nobody checked. nodes: a list, or a text, see nodes_of.

    inputs, outputs: name → list of the axes of a FP32 tensor, or (type, axes). values: name → array, of which those that are read are in it.
    """
    nodes = nodes_of(nodes) if isinstance(nodes, str) else nodes
    read = {name for node in nodes for name in node.input} - {name for node in nodes for name in node.output}
    given, returned = (
        [
            helper.make_tensor_value_info(name, *(of if isinstance(of, tuple) else (FLOAT, of)))
            for name, of in part.items()
        ]
        for part in (inputs, outputs)
    )
    stored = [numpy_helper.from_array(np.asarray(v), k) for k, v in dict(values).items() if k in read]
    graph = helper.make_graph(nodes, 'by hand', given, returned, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', opset)], ir_version=8)
    helper.set_model_props(model, metadata)
    return model


def graph_of(nodes, outputs=('y',), initializers=None, shape=(2, 3), returns=None, opset=17, given=FLOAT):
    """A checked model that reads `x` (`given`: its element type) and returns `outputs`, FP32 of shape `returns`."""
    values = {
        'scale': np.float32(0.1),
        'same scale': np.float32(0.1),
        'other scale': np.float32(0.2),
        'zero': np.int8(0),
        'same zero': np.int8(0),
        'weight': np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3),
        **(initializers or {}),
    }
    model = model_of(nodes, {'x': (given, shape)}, {name: list(returns or shape) for name in outputs}, values, opset)
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


RNG = np.random.default_rng(0)
FEATURES = {
    'w': RNG.normal(size=(4, 4, 1, 1)).astype(np.float32),
    'b': RNG.normal(size=4).astype(np.float32),
    'two': np.float32(2),
    'roi': np.float32([]),
    'scales': np.float32([1, 1, 2, 2]),
    'sizes': np.int64([1, 4, 8, 8]),
    'ws': np.float32([0.01, 0.02, 0.03, 0.04]),
    'wz': np.zeros(4, np.int8),
}


def nchw(nodes, opset=20, returns=(1, 4, 4, 4), **options):
    """A graph of feature maps, with the constants FEATURES."""
    return graph_of(nodes, shape=(1, 4, 4, 4), returns=returns, initializers=FEATURES, opset=opset, **options)


WEIGHT = pair('w', 'dw', scale='ws', zero='wz', axis=0)
INT8_BLOCK = nchw(
    [
        *pair('x', 'a'),
        *WEIGHT,
        node('Conv', 'a', 'dw', 'b', 'c'),
        node('Sigmoid', 'c', 's'),
        node('Mul', 'c', 's', 'm'),
        *pair('m', 'n'),
        *pair('x', 'k'),
        node('Add', 'n', 'k', 'o'),
        node('Conv', 'o', 'w', 'd'),
        node('Relu', 'd', 'y'),
    ]
)


def with_values(model, **values):
    """A copy of `model` with other values in its initializers."""
    model = copy(model)
    for i in model.graph.initializer:
        if i.name in values:
            i.CopyFrom(numpy_helper.from_array(np.full_like(numpy_helper.to_array(i), values[i.name]), i.name))
    return model


def between_quantized(nodes, dq='DequantizeLinear', q='QuantizeLinear'):
    """Those of `nodes` (ONNX's or alike, in topological order) that read, through others, what a `dq` makes, and whose
    values reach a `q`."""
    after, before = set(), set()
    for n in nodes:
        if n.op_type == dq or after.intersection(n.input):
            after.update(n.output)
    for n in reversed(nodes):
        if n.op_type == q or before.intersection(n.output):
            before.update(n.input)
    return [n for n in nodes if after.intersection(n.output) and before.intersection(n.output)]


def dims(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def unread(model):
    """The initializers that no node reads; ONNX Runtime prints a line for each."""
    return {i.name for i in model.graph.initializer} - {name for node in model.graph.node for name in node.input}


def metadata(model):
    return {p.key: p.value for p in model.metadata_props}


def types_of(model):
    """{tensor: element type} of a graph without value_info, by ONNX's strict type inference."""
    bare = copy(model)
    del bare.graph.value_info[:]
    graph = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True).graph
    return {
        **{v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)},
        **{i.name: i.data_type for i in graph.initializer},
    }


def casts(model):
    """[(tensor, type)] of every Cast to or from FP16."""
    types = types_of(model)
    return [
        (n.input[0], types[n.output[0]])
        for n in model.graph.node
        if n.op_type == 'Cast' and HALF in (types[n.input[0]], types[n.output[0]])
    ]


def run_onnx(model, feeds):
    """Outputs of an ONNX model (or file) in ONNX Runtime, nothing optimized away: what the graph says, node by node."""
    options = onnx_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if not isinstance(model, onnx.ModelProto) else model.SerializeToString()
    return onnxruntime.InferenceSession(rounding(source), options, providers=['CPUExecutionProvider']).run(None, feeds)


def assert_same_outputs(ours, theirs, feeds):
    """Two models return the same bits."""
    pairs = zip(run_onnx(ours, feeds), run_onnx(theirs, feeds), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def averages(model):
    """The number of convolutions that were average poolings, by their names."""
    return sum(n.op_type == 'Conv' and 'AveragePool' in n.name for n in model.graph.node)


def in_onnxruntime(file, folder):
    """How often each operator stands in the graph that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / 'optimized.onnx'), 3
    onnxruntime.InferenceSession(file, options, providers=['CPUExecutionProvider'])
    return Counter(node.op_type for node in onnx.load(folder / 'optimized.onnx').graph.node)


def behind_functions(model, node, calls, depth):
    """Put a Relu behind the first output of a node, in place, inside `depth` functions that call each other `calls` times, 1 or 2."""
    sets = [helper.make_opsetid('', 17), helper.make_opsetid('f', 1)]
    for i in range(depth):
        inner, domain = (f'f{i - 1}', 'f') if i else ('Relu', '')
        ways = [('x', 'y')] if calls == 1 else [('x', 'm'), ('m', 'y')]
        nodes = [helper.make_node(inner, [a], [b], domain=domain) for a, b in ways]
        model.functions.append(helper.make_function('f', f'f{i}', ['x'], ['y'], nodes, sets))
    model.opset_import.append(sets[1])
    name, node.output[0] = node.output[0], 'before'
    at = [*model.graph.node].index(node)
    model.graph.node.insert(at + 1, helper.make_node(f'f{depth - 1}', ['before'], [name], domain='f'))
    return model
