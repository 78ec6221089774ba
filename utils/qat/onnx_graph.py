"""Reading an ONNX graph: who makes a tensor, who reads it, what is constant, which nodes only move values."""
import onnx
from onnx import numpy_helper

QDQ = ('QuantizeLinear', 'DequantizeLinear')
# Operations f with f(Q(x)) = Q(f(x)): they move or select values and compute none. Resize is one if it takes the nearest.
MOVES = {'Concat', 'Flatten', 'Gather', 'MaxPool', 'Reshape', 'Slice', 'Split', 'Squeeze', 'Transpose', 'Unsqueeze'}


def attribute(node, name, default=None):
    """Value of an attribute of `node`."""
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def opset(model):
    """Version of the standard operator set."""
    return next(o.version for o in model.opset_import if o.domain in ('', 'ai.onnx'))


def constants(model):
    """{tensor name: value} of every initializer and Constant node."""
    found = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == 'Constant' and node.attribute[0].name == 'value':
            found[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    return found


def producers(model):
    """{tensor name: the node that makes it}; graph inputs and initializers are not in it."""
    return {name: node for node in model.graph.node for name in node.output}


def readers(model):
    """{tensor name: [(node, which of its inputs), ...]}, in the order of the graph. Graph outputs read nothing here."""
    found = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            found.setdefault(name, []).append((node, i))
    return found


def moved_inputs(node):
    """Positions of the inputs whose values `node` moves unchanged to its outputs; empty if it computes."""
    if node.op_type == 'Concat':
        return range(len(node.input))
    if node.op_type in MOVES or (node.op_type == 'Resize' and attribute(node, 'mode', b'nearest') == b'nearest'):
        return range(1)
    return range(0)


def count_qdq(model):
    """Number of (QuantizeLinear, DequantizeLinear) nodes."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count('QuantizeLinear'), ops.count('DequantizeLinear')
