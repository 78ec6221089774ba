"""Query an ONNX graph: the producer and the readers of a tensor, the constants, the nodes that only move values."""

import re
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph.moves import MOVES

ACTIVATIONS = set('Clip Elu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Sigmoid Softplus Swish Tanh'.split())
ELEMENTWISE = ACTIVATIONS | set('Abs Add BatchNormalization Div Exp Max Min Mul Neg Pow Sqrt Sub Sum'.split())
QDQ = {'QuantizeLinear', 'DequantizeLinear'}
CONVS = {'Conv', 'ConvTranspose'}
WEIGHTED = {*CONVS, 'Gemm', 'MatMul'}  # data and weight are inputs 0 and 1
QUANTIZABLE = {'Add', 'AveragePool', 'GlobalAveragePool'}  # run in INT8 if their inputs and outputs are quantized
IN_THE_WAY = {'Cast', 'Identity'}  # of Q/DQ and the kernel that absorbs it
FLOAT = 'float'  # the form that a reader needs, unless it is a Q, which needs its scale
# Paths from tensors, through operators that only move values, to their sources and uses. YOLOv9 has some hundred.
MOST_WAYS = 2_000_000

C = TypeVar('C', bound=Collection)
Use = tuple[NodeProto | None, int]  # (reader, position among its inputs); (None, 0): the graph returns the tensor


def attribute(node: NodeProto, name: str, default: object = None) -> Any:
    """Return the value of an attribute of a node."""
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def opset(model: ModelProto) -> int:
    """Return the version of the standard operator set."""
    return next(o.version for o in model.opset_import if o.domain in ('', 'ai.onnx'))


def constants(model: ModelProto) -> dict[str, np.ndarray]:
    """Return {tensor name: value} of every initializer and Constant node."""
    stored = {i.name: i for i in model.graph.initializer}
    stored.update(
        (node.output[0], a.t)
        for node in model.graph.node
        if node.op_type == 'Constant'
        for a in node.attribute
        if a.name == 'value'
    )
    values = {}
    for name, tensor in stored.items():
        try:
            values[name] = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, MemoryError) as e:
            raise QatError(
                f'constant {name[:100]}: its values are not those of its type and shape {list(tensor.dims)}; export the graph anew'
            ) from e
    return values


def producers(model: ModelProto) -> dict[str, NodeProto]:
    """Return {tensor name: the node that produces it}, without graph inputs and initializers."""
    return {name: node for node in model.graph.node for name in node.output}


def readers(model: ModelProto) -> dict[str, list[tuple[NodeProto, int]]]:
    """Return {tensor name: [(node, position among its inputs), ...]} in the order of the graph, without its outputs."""
    by_name: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            by_name.setdefault(name, []).append((node, i))
    return by_name


def moved_inputs(node: NodeProto) -> range:
    """Return the positions of the inputs whose values a node moves unchanged to its outputs; empty if it computes new ones."""
    if node.op_type == 'Concat':
        return range(len(node.input))
    moves = node.op_type in MOVES and (node.op_type != 'Resize' or attribute(node, 'mode', b'nearest') == b'nearest')
    return range(moves)


def required_inputs(model: ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that a caller must pass; old files list their weights among the inputs as well."""
    weights = {i.name for i in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in weights]


def axes_of(value: onnx.ValueInfoProto) -> list[Any]:
    """Return the axes of a graph's input or output: numbers, or the name of an open axis."""
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def shape_of(value: onnx.ValueInfoProto) -> list[int]:
    """Read the shape of a graph's input or output; 3 for an open batch axis."""
    return [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]


def replace_nodes(model: ModelProto, nodes: Sequence[NodeProto]) -> ModelProto:
    """Replace the nodes of a graph, in place."""
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def is_half(model: ModelProto) -> bool:
    """Tell whether there is FP16 inside a model."""
    return any(i.data_type == onnx.TensorProto.FLOAT16 for i in model.graph.initializer)


def count_qdq(model: ModelProto) -> tuple[int, int]:
    """Count the QuantizeLinear and the DequantizeLinear nodes."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count('QuantizeLinear'), ops.count('DequantizeLinear')


def name_of(node: NodeProto) -> str:
    """Name a node for a message: its name, or its output if it has none."""
    return node.name or f'{node.op_type} of {next(filter(None, node.output), "nothing")}'


def module_path(scopes: Sequence[str]) -> str:
    """Join the scopes of a name to the path of a module in PyTorch.

    'model.2', 'cv2', 'cv2.0', 'cv1' → 'model.2.cv2.0.cv1', because the scope of a container's member repeats the
    container's name.
    """
    return '.'.join(scope for scope, inner in zip(scopes, [*scopes[1:], '']) if not inner.startswith(f'{scope}.'))


def module_of(node: NodeProto) -> str:
    """Return the path of the module in which a node was traced.

    '/model.2/cv2/cv2.0/cv1/conv/Conv' → 'model.2.cv2.0.cv1.conv'.
    """
    return module_path(node.name.strip('/').split('/')[:-1])


def has_zero_points(model: ModelProto) -> bool:
    """Tell whether an activation has unsigned integers, or a zero point other than 0."""
    values, made = constants(model), producers(model)
    zeros = [
        values[node.input[2]]
        for node in model.graph.node
        if node.op_type == 'QuantizeLinear' and len(node.input) > 2 and node.input[2] in values
        if node.input[0] in made
    ]
    return any(zero.dtype != np.int8 or zero.any() for zero in zeros)


def metadata_value(model: ModelProto, key: str, default: str = '') -> str:
    """Return the text of a key of the model's metadata; `default` without the key."""
    return next((p.value for p in model.metadata_props if p.key == key), default)


def kept_float(model: ModelProto) -> set[str]:
    """Return the paths of modules that were left in float by choice, from the model's metadata."""
    text = metadata_value(model, 'kept_float', '[]')
    if not re.fullmatch(r"\[('[\w.-]+'(, '[\w.-]+')*)?\]", text):  # the form of our exports
        raise QatError(
            f'metadata kept_float is {text[:50]!r}, no list of names of layers; export the graph anew, or take it out'
        )
    return set(re.findall(r'[\w.-]+', text))


class Graph:
    """A model with precomputed tables, and queries of a Q/DQ graph.

    Attributes:
        inputs: names of the tensors that a caller passes.
        values: see `constants`.
        fixed: names of tensors that do not depend on the image: weights after Q and DQ, shapes, and everything computed from
            these.
        kept_float: paths of modules that were left in float by choice, from the file's metadata.
    """

    def __init__(self, model: ModelProto) -> None:
        self.nodes, self.values = list(model.graph.node), constants(model)
        self.producer, self.readers = producers(model), readers(model)
        self.inputs = [i.name for i in required_inputs(model)]
        self.outputs = {o.name for o in model.graph.output}
        self.kept_float = kept_float(model)
        self.producer.pop('', None)  # '' stands for an input or output left out
        self.readers.pop('', None)
        self.fixed = {'', *self.values}
        for node in self.nodes:
            inside = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)  # an inner graph may read any tensor
            if node.op_type in ('Shape', 'Size') or (not inside and all(name in self.fixed for name in node.input)):
                self.fixed.update(node.output)
        self._ways = 0
        for name in ('sources', 'uses', 'asked', '_scale', 'dequantized', 'unquantized'):
            setattr(self, name, cache(getattr(self, name)))  # of this graph alone, and as long as it
        # In the order of the graph, then against it: each answer needs only earlier ones.
        for node in self.nodes:
            for name in node.output:
                self.sources(name)
                self.unquantized(name)
        for node in reversed(self.nodes):
            for name in node.output:
                self.uses(name)

    def _count(self, counted: C) -> C:
        """Return `counted`; QatError if there are too many paths."""
        self._ways += len(counted)
        if self._ways > MOST_WAYS:
            raise QatError(
                f'more than {MOST_WAYS} ways through operators that only move values; no network is like that'
            )
        return counted

    def op(self, tensor: str) -> str | None:
        """Return the operator that produces a tensor; None for an input or a constant."""
        return self.producer[tensor].op_type if tensor in self.producer else None

    def only_reader(self, tensor: str) -> NodeProto | None:
        """Return the only reader of a tensor; None if there are several, or the graph returns it."""
        readers = self.readers.get(tensor, ())
        return readers[0][0] if len(readers) == 1 and tensor not in self.outputs else None

    def sources(self, tensor: str) -> frozenset[str]:
        """Return the names of the tensors from which a tensor's values come, through nodes that only move values.

        Constants among activations do not count.
        """
        moved = moved_inputs(self.producer[tensor]) if tensor in self.producer else ()
        given = list(dict.fromkeys(self.producer[tensor].input[i] for i in moved))
        if tensor not in self.fixed:
            given = [name for name in given if name not in self.fixed]
        sources = [self._count(self.sources(name)) for name in given]
        return sources[0] if len(sources) == 1 else frozenset().union(*sources) or frozenset((tensor,))

    def uses(self, tensor: str) -> list[Use]:
        """Return the readers that get the values of a tensor, each once, through nodes that only move values.

        (None, 0) is the caller, for a graph output. Shape and Size are left out: they read no values.
        """
        uses: dict[tuple[int, int], Use] = {(0, 0): (None, 0)} if tensor in self.outputs else {}
        walked: set[int] = set()
        for node, i in self.readers.get(tensor, ()):
            if i in moved_inputs(node):
                for name in node.output if id(node) not in walked else ():
                    uses.update(((id(n) if n else 0, j), (n, j)) for n, j in self._count(self.uses(name)))
                walked.add(id(node))
            elif node.op_type not in ('Shape', 'Size'):
                uses[id(node), i] = node, i
        return list(uses.values())

    def by_choice(self, node: NodeProto | None) -> bool:
        """Tell whether `node` (None: the caller) is in float because the user left it so."""
        return node is not None and module_of(node) in self.kept_float

    def asked(self, tensor: str) -> dict[object, list[str]]:
        """Return the forms in which readers need the values of a tensor: {scale or FLOAT: names of the readers}.

        A reader that is in float by choice does not count.
        """
        by_use: dict[object, list[str]] = {}
        for node, _ in self.uses(tensor):
            scale = self.scale(node) if node is not None and node.op_type == 'QuantizeLinear' else None
            if scale is None and self.by_choice(node):
                continue
            form = FLOAT if scale is None else scale
            by_use.setdefault(form, []).append(name_of(node) if node else 'graph output')
        return by_use

    def scale(self, node: NodeProto) -> object:
        """Return the scale of a Q or DQ: a number, a tuple per channel, or the tensor's name if it is no constant."""
        return self._scale(node.input[1])

    def _scale(self, tensor: str) -> object:
        value = self.values.get(tensor)
        if value is None:
            return tensor
        return value.item() if value.size == 1 else tuple(value.ravel().tolist())

    def grid(self, node: NodeProto) -> tuple[object, ...]:
        """Return the scale and the zero point of a Q or DQ: two with the same ones represent the same values."""
        zero = (self.values[name].tobytes() for name in node.input[2:3] if name in self.values)
        return self.scale(node), *zero

    def dequantized(self, tensor: str) -> bool:
        """Tell whether all values of a tensor come out of DQ nodes, through nodes that only move values."""
        return all(self.op(o) == 'DequantizeLinear' for o in self.sources(tensor))

    def unquantized(self, tensor: str) -> str:
        """Return the tensor before the Q and DQ that produce `tensor`; without them, `tensor` itself."""
        return self.unquantized(self.producer[tensor].input[0]) if self.op(tensor) in QDQ else tensor

    def is_dfl(self, node: NodeProto) -> bool:
        """Tell whether a convolution is the DFL: its input is the output of a Softmax, through nodes that only move values."""
        return all(self.op(o) == 'Softmax' for o in self.sources(node.input[0]))

    @cached_property
    def ends(self) -> set[str]:
        """Names of the tensors that neither a Q nor a convolution (except DFL) follows."""
        ends = {''}
        for node in reversed(self.nodes):
            for name in node.output:
                behind = [n for n, _ in self.readers.get(name, ())]
                if all(
                    n.op_type != 'QuantizeLinear'
                    and (n.op_type not in CONVS or self.is_dfl(n))
                    and ends.issuperset(n.output)
                    for n in behind
                ):
                    ends.add(name)
        return ends

    @cached_property
    def quantized_behind(self) -> set[int]:
        """Ids of the nodes whose first output is quantized, or would be if its reader were not in float by choice.

        Adds in between count as one sum, together with their activation.
        """
        quantizers: set[int] = set()
        for node in reversed(self.nodes):
            behind = [n for n, _ in self.uses(node.output[0]) if n is not None]
            between = {'Add', *ACTIVATIONS} if node.op_type == 'Add' else {'Add'}
            if any(
                n.op_type == 'QuantizeLinear' or self.by_choice(n) or (n.op_type in between and id(n) in quantizers)
                for n in behind
            ):
                quantizers.add(id(node))
        return quantizers

    def activation_of(self, node: NodeProto) -> str | None:
        """Return the tensor x if a node ends an activation function of x, such as SiLU, x * Sigmoid(x); else None."""
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
