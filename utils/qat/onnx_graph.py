"""Reading an ONNX graph: who makes a tensor, who reads it, what is constant, which nodes only move values."""
import ast

import onnx
from onnx import numpy_helper

ACTIVATIONS = {'Clip', 'Elu', 'HardSigmoid', 'HardSwish', 'LeakyRelu', 'Mish', 'PRelu', 'Relu', 'Sigmoid', 'Softplus', 'Swish', 'Tanh'}
ELEMENTWISE = {'Abs', 'Add', 'BatchNormalization', 'Div', 'Exp', 'Max', 'Min', 'Mul', 'Neg', 'Pow', 'Sqrt', 'Sub', 'Sum', *ACTIVATIONS}
QDQ = {'QuantizeLinear', 'DequantizeLinear'}
CONVS = {'Conv', 'ConvTranspose'}
WEIGHTED = {*CONVS, 'Gemm', 'MatMul'}  # data and weight are inputs 0 and 1
FLOAT = 'float'  # what a reader asks for that is not a Q, beside the scales of those that are
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


def given(model):
    """The inputs that whoever runs `model` has to give; old files list their weights among the inputs as well."""
    weights = {i.name for i in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in weights]


def is_half(model):
    """Whether there is FP16 inside `model`."""
    return any(i.data_type == onnx.TensorProto.FLOAT16 for i in model.graph.initializer)


def count_qdq(model):
    """Number of (QuantizeLinear, DequantizeLinear) nodes."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count('QuantizeLinear'), ops.count('DequantizeLinear')


def name_of(node):
    """What to call `node` in a message: its name, or what it makes if it has none."""
    return node.name or f'{node.op_type} of {node.output[0]}'


def module_path(scopes):
    """Path of a module, as PyTorch names it, from the scopes of a name: 'model.2', 'cv2', 'cv2.0', 'cv1' is 'model.2.cv2.0.cv1', because
    the scope of a container's member repeats the container's name."""
    return '.'.join(scope for scope, inner in zip(scopes, [*scopes[1:], '']) if not inner.startswith(f'{scope}.'))


def module_of(node):
    """Path of the module that `node` was traced in: '/model.2/cv2/cv2.0/cv1/conv/Conv' is of 'model.2.cv2.0.cv1.conv'."""
    return module_path(node.name.strip('/').split('/')[:-1])


class Graph:
    """A model with the tables above made once, and the questions one asks of a Q/DQ graph.

    nodes; inputs and outputs: names of the tensors given and returned; values, producer and readers: see `constants`,
    `producers`, `readers`. fixed: names of tensors that no image changes: weights on their way through Q and DQ, shapes,
    and what is computed from them. kept_float: paths of modules that were left in float by choice, from the file's metadata.
    """

    def __init__(self, model):
        self.nodes, self.values = list(model.graph.node), constants(model)
        self.producer, self.readers = producers(model), readers(model)
        self.inputs = [i.name for i in model.graph.input if i.name not in self.values]
        self.outputs = {o.name for o in model.graph.output}
        self.kept_float = set(next((ast.literal_eval(p.value) for p in model.metadata_props if p.key == 'kept_float'), ()))
        self.fixed = {'', *self.values}  # '' stands for an input left out
        for node in self.nodes:
            if node.op_type in ('Shape', 'Size') or all(name in self.fixed for name in node.input):
                self.fixed.update(node.output)

    def op(self, tensor):
        """Operator that makes `tensor`, or None: it is given or constant."""
        return self.producer[tensor].op_type if tensor in self.producer else None

    def origins(self, tensor):
        """Names of the tensors whose values `tensor` consists of, seen through nodes that only move values. Constants among
        activations do not count."""
        moved = moved_inputs(self.producer[tensor]) if tensor in self.producer else ()
        given = [self.producer[tensor].input[i] for i in moved]
        if tensor not in self.fixed:
            given = [name for name in given if name not in self.fixed]
        return {o for name in given for o in self.origins(name)} or {tensor}

    def uses(self, tensor):
        """[(node, which of its inputs), ...] that get the values of `tensor`, seen through nodes that only move them; (None, 0)
        is the caller, who gets a graph output. Who only asks for the shape is left out."""
        found = [(None, 0)] if tensor in self.outputs else []
        for node, i in self.readers.get(tensor, ()):
            if i in moved_inputs(node):
                found += [use for name in node.output for use in self.uses(name)]
            elif node.op_type not in ('Shape', 'Size'):
                found.append((node, i))
        return found

    def by_choice(self, node):
        """Whether `node` (None: the caller) is in float because the user left it so."""
        return node is not None and module_of(node) in self.kept_float

    def asked(self, tensor):
        """{scale or FLOAT: [names of who asks]}: the forms in which the values of `tensor` are wanted. What is in float by choice does
        not ask."""
        found = {}
        for node, _ in self.uses(tensor):
            quantizes = node is not None and node.op_type == 'QuantizeLinear'
            if not quantizes and self.by_choice(node):
                continue
            found.setdefault(self.scale(node) if quantizes else FLOAT, []).append(name_of(node) if node else 'graph output')
        return found

    def scale(self, node):
        """Scale of a Q or DQ: a number, or a tuple per channel, or the tensor's name if it is no constant."""
        value = self.values.get(node.input[1])
        if value is None:
            return node.input[1]
        return value.item() if value.size == 1 else tuple(value.ravel().tolist())

    def dequantized(self, tensor):
        """Whether all values of `tensor` come out of DQ nodes, seen through nodes that only move values."""
        return all(self.op(o) == 'DequantizeLinear' for o in self.origins(tensor))

    def unquantized(self, tensor):
        """Name of the tensor in front of the Q and DQ that make `tensor`, if they do."""
        while self.op(tensor) in QDQ:
            tensor = self.producer[tensor].input[0]
        return tensor

    def activation_of(self, node):
        """The tensor x if `node` ends an activation function of x, else None. SiLU is x * Sigmoid(x)."""
        if node.op_type == 'Mul':
            return next((x for x, gate in (node.input, reversed(node.input))
                         if self.op(gate) == 'Sigmoid' and self.producer[gate].input[0] == x), None)
        return node.input[0] if node.op_type in ACTIVATIONS else None
