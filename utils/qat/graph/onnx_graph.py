"""Reading an ONNX graph: who makes a tensor, who reads it, what is constant, which nodes only move values."""

import re
from functools import cached_property, wraps

import onnx
from onnx import numpy_helper

from utils.qat.core.errors import QatError

ACTIVATIONS = {
    'Clip',
    'Elu',
    'HardSigmoid',
    'HardSwish',
    'LeakyRelu',
    'Mish',
    'PRelu',
    'Relu',
    'Sigmoid',
    'Softplus',
    'Swish',
    'Tanh',
}
ELEMENTWISE = {
    'Abs',
    'Add',
    'BatchNormalization',
    'Div',
    'Exp',
    'Max',
    'Min',
    'Mul',
    'Neg',
    'Pow',
    'Sqrt',
    'Sub',
    'Sum',
    *ACTIVATIONS,
}
QDQ = {'QuantizeLinear', 'DequantizeLinear'}
CONVS = {'Conv', 'ConvTranspose'}
WEIGHTED = {*CONVS, 'Gemm', 'MatMul'}  # data and weight are inputs 0 and 1
FLOAT = 'float'  # what a reader asks for that is not a Q, beside the scales of those that are
MOST_WAYS = 2_000_000  # from tensors, through operators that only move values, to where these come from and go to; YOLOv9 has some hundred
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
    stored = {i.name: i for i in model.graph.initializer}
    stored.update(
        (node.output[0], a.t)
        for node in model.graph.node
        if node.op_type == 'Constant'
        for a in node.attribute
        if a.name == 'value'
    )
    found = {}
    for name, tensor in stored.items():
        try:
            found[name] = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, MemoryError) as e:
            raise QatError(
                f'constant {name[:100]}: its values are not those of its type and shape {list(tensor.dims)}; export the graph anew'
            ) from e
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
    return node.name or f'{node.op_type} of {next(filter(None, node.output), "nothing")}'


def module_path(scopes):
    """Path of a module, as PyTorch names it, from the scopes of a name: 'model.2', 'cv2', 'cv2.0', 'cv1' is 'model.2.cv2.0.cv1', because
    the scope of a container's member repeats the container's name."""
    return '.'.join(scope for scope, inner in zip(scopes, [*scopes[1:], '']) if not inner.startswith(f'{scope}.'))


def module_of(node):
    """Path of the module that `node` was traced in: '/model.2/cv2/cv2.0/cv1/conv/Conv' is of 'model.2.cv2.0.cv1.conv'."""
    return module_path(node.name.strip('/').split('/')[:-1])


def kept_float(model):
    """Paths of modules that were left in float by choice, from the metadata of `model`; QatError if they are no list of paths."""
    text = next((p.value for p in model.metadata_props if p.key == 'kept_float'), '[]')
    if not re.fullmatch(r"\[('[\w.]+'(, '[\w.]+')*)?\]", text):  # as export writes it
        raise QatError(
            f'metadata kept_float is {text[:50]!r}, no list of names of layers; export the graph anew, or take it out'
        )
    return set(re.findall(r'[\w.]+', text))


def remembered(method):
    """A method of a Graph that is asked about a tensor, and works out each answer once."""

    @wraps(method)
    def ask(self, tensor):
        known = self._known.setdefault(method.__name__, {})
        if tensor not in known:
            known[tensor] = method(self, tensor)
        return known[tensor]

    return ask


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
        self.kept_float = kept_float(model)
        self.producer.pop('', None)  # '' stands for an input or output left out
        self.readers.pop('', None)
        self.fixed = {'', *self.values}
        for node in self.nodes:
            inside = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)  # which may read anything
            if node.op_type in ('Shape', 'Size') or (not inside and all(name in self.fixed for name in node.input)):
                self.fixed.update(node.output)
        self._known, self._ways = {}, 0
        for node in self.nodes:  # in the order of the graph, and against it: each answer needs only those before
            for name in node.output:
                self.origins(name)
                self.unquantized(name)
        for node in reversed(self.nodes):
            for name in node.output:
                self.uses(name)

    def _count(self, found):
        self._ways += len(found)
        if self._ways > MOST_WAYS:
            raise QatError(
                f'more than {MOST_WAYS} ways through operators that only move values; no network is like that'
            )
        return found

    def op(self, tensor):
        """Operator that makes `tensor`, or None: it is given or constant."""
        return self.producer[tensor].op_type if tensor in self.producer else None

    @remembered
    def origins(self, tensor):
        """Names of the tensors whose values `tensor` consists of, seen through nodes that only move values. Constants among
        activations do not count."""
        moved = moved_inputs(self.producer[tensor]) if tensor in self.producer else ()
        given = dict.fromkeys(self.producer[tensor].input[i] for i in moved)
        if tensor not in self.fixed:
            given = [name for name in given if name not in self.fixed]
        found = [self._count(self.origins(name)) for name in given]
        return found[0] if len(found) == 1 else frozenset().union(*found) or frozenset((tensor,))

    @remembered
    def uses(self, tensor):
        """[(node, which of its inputs), ...] that get the values of `tensor`, each once, seen through nodes that only move them;
        (None, 0) is the caller, who gets a graph output. Who only asks for the shape is left out."""
        found = {(0, 0): (None, 0)} if tensor in self.outputs else {}
        walked = set()
        for node, i in self.readers.get(tensor, ()):
            if i in moved_inputs(node):
                for name in node.output if id(node) not in walked else ():
                    found.update(((id(n) if n else 0, j), (n, j)) for n, j in self._count(self.uses(name)))
                walked.add(id(node))
            elif node.op_type not in ('Shape', 'Size'):
                found[id(node), i] = node, i
        return list(found.values())

    def by_choice(self, node):
        """Whether `node` (None: the caller) is in float because the user left it so."""
        return node is not None and module_of(node) in self.kept_float

    @remembered
    def asked(self, tensor):
        """{scale or FLOAT: [names of who asks]}: the forms in which the values of `tensor` are wanted. What is in float by choice does
        not ask."""
        found = {}
        for node, _ in self.uses(tensor):
            quantizes = node is not None and node.op_type == 'QuantizeLinear'
            if not quantizes and self.by_choice(node):
                continue
            found.setdefault(self.scale(node) if quantizes else FLOAT, []).append(
                name_of(node) if node else 'graph output'
            )
        return found

    def scale(self, node):
        """Scale of a Q or DQ: a number, or a tuple per channel, or the tensor's name if it is no constant."""
        return self._scale(node.input[1])

    @remembered
    def _scale(self, tensor):
        value = self.values.get(tensor)
        if value is None:
            return tensor
        return value.item() if value.size == 1 else tuple(value.ravel().tolist())

    @remembered
    def dequantized(self, tensor):
        """Whether all values of `tensor` come out of DQ nodes, seen through nodes that only move values."""
        return all(self.op(o) == 'DequantizeLinear' for o in self.origins(tensor))

    @remembered
    def unquantized(self, tensor):
        """Name of the tensor in front of the Q and DQ that make `tensor`, if they do."""
        return self.unquantized(self.producer[tensor].input[0]) if self.op(tensor) in QDQ else tensor

    def is_dfl(self, node):
        """Whether a convolution sums up probabilities: what it reads was a Softmax, and was only moved since."""
        return all(self.op(o) == 'Softmax' for o in self.origins(node.input[0]))

    @cached_property
    def ends(self):
        """Names of the tensors behind which nothing is quantized, nor a convolution (DFL aside)."""
        found = {''}
        for node in reversed(self.nodes):
            for name in node.output:
                behind = [n for n, _ in self.readers.get(name, ())]
                if all(
                    n.op_type != 'QuantizeLinear'
                    and (n.op_type not in CONVS or self.is_dfl(n))
                    and found.issuperset(n.output)
                    for n in behind
                ):
                    found.add(name)
        return found

    @cached_property
    def quantized_behind(self):
        """Ids of the nodes whose first output is quantized, Adds in between taken as one sum."""
        found = set()
        for node in reversed(self.nodes):
            behind = [n for n, _ in self.uses(node.output[0]) if n is not None]
            if any(n.op_type == 'QuantizeLinear' or (n.op_type == 'Add' and id(n) in found) for n in behind):
                found.add(id(node))
        return found

    def activation_of(self, node):
        """The tensor x if `node` ends an activation function of x, else None. SiLU is x * Sigmoid(x)."""
        if node.op_type == 'Mul':
            return next(
                (
                    x
                    for x, gate in (node.input, reversed(node.input))
                    if self.op(gate) == 'Sigmoid' and self.producer[gate].input[0] == x
                ),
                None,
            )
        return node.input[0] if node.op_type in ACTIVATIONS else None
