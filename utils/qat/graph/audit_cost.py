"""The cost of a graph, estimated from the graph alone: shapes, FLOPs, kernels launched, bytes moved.

The model of a kernel, after the fusions that NVIDIA documents (dev guide, "Types of Fusions" and "Q/DQ
Layer-Placement"):

- A convolution (or matrix product) takes along its bias, an Add directly on its output, and one activation (SiLU too).
  Not an Add behind an activation: NVIDIA/TensorRT#3861.
- A chain of elementwise operators is one kernel. Concat, Reshape and their like cost nothing: the kernels that make
  their inputs write them in place. Each output of a Slice or Split is one copy. Every other operator is one kernel.
- A Q or DQ costs nothing where a neighbour absorbs it. One kernel each costs: every further form in which a tensor is
  wanted (a second scale, a scale beside float), every other scale behind operators that only move values, and every Q
  or DQ that no kernel absorbs.
- A kernel reads its inputs and weights once (indices and shapes aside) and writes its outputs once: 1 byte per element
  in INT8, else the bytes of its type. Caches, layouts and workspaces are not modelled.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import ELEMENTWISE, FLOAT, QDQ, WEIGHTED, Graph, moved_inputs, name_of, opset

Types = dict[str, tuple[int, tuple[int, ...]]]  # tensor name → (element type of onnx.TensorProto, shape)

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
LARGEST, MOST_EVALUATED = 100, 10_000  # limits of shape arithmetic: values of a tensor, nodes
NONE = onnx.TensorProto.FLOAT, (0,)  # stands for an unknown type and shape
FREE = {'Concat', 'Flatten', 'Identity', 'Reshape', 'Squeeze', 'Unsqueeze'}
# The nodes that a kernel can take along: (its state, the role of the next node) → its new state
FUSES = {
    ('conv', 'BatchNormalization'): 'conv',
    ('conv', 'Add'): 'sum',
    ('conv', 'activation'): 'full',
    ('sum', 'activation'): 'full',
    **{('elementwise', role): 'elementwise' for role in ('activation', *ELEMENTWISE)},
}


@dataclass
class Cost:
    """The cost of one inference: kernels launched, bytes read and written."""

    kernels: int
    bytes: int


def tensor_types(model: onnx.ModelProto) -> Types:
    """Infer the types and shapes of a graph's tensors.

    An open first axis of an input counts as 1. Shape arithmetic (Shape, Gather, Div ... before a Slice) is carried out,
    on up to LARGEST values at a time; onnx.shape_inference does it only in part.

    Returns:
        The tensors whose shapes follow from the graph.

    Raises:
        QatError: shapes or types contradict each other.
    """
    types = {i.name: helper.make_tensor_type_proto(i.data_type, i.dims) for i in model.graph.initializer}
    constant = {i.name: i for i in model.graph.initializer if _count(types[i.name]) <= LARGEST}
    stored, evaluated = set(types), 0
    for given in model.graph.input:
        types.setdefault(given.name, onnx.TypeProto()).CopyFrom(given.type)
        dims = given.type.tensor_type.shape.dim
        if given.name not in stored and dims and not dims[0].HasField('dim_value'):
            types[given.name].tensor_type.shape.dim[0].dim_value = 1
    version = opset(model)
    for node in model.graph.node:
        known = [name for name in node.input if name]
        if node.domain not in ('', 'ai.onnx') or not all(name in types for name in known):
            continue  # an operator that is not ONNX's, or a node behind one
        schema = onnx.defs.get_schema(node.op_type, version, '')
        try:
            types.update(
                onnx.shape_inference.infer_node_outputs(
                    schema,
                    node,
                    {name: types[name] for name in known},
                    {name: constant[name] for name in known if name in constant},
                    opset_imports=list(model.opset_import),
                    ir_version=model.ir_version,
                )
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as e:
            raise QatError(
                f'{name_of(node)}: {str(e).strip().splitlines()[0]}; the graph cannot run, export it anew'
            ) from e
        if evaluated < MOST_EVALUATED and _is_arithmetic(node, known, types, constant):
            constant.update(_evaluate(model, node, types, constant))
            evaluated += 1
    return {name: (t.tensor_type.elem_type, shape) for name, t in types.items() if (shape := _shape(t)) is not None}


def _shape(type_: TypeProto) -> tuple[int, ...] | None:
    """Return the shape of a TypeProto, None if an axis is open."""
    dims = type_.tensor_type.shape.dim
    if not type_.tensor_type.HasField('shape') or not all(d.HasField('dim_value') and d.dim_value >= 0 for d in dims):
        return None
    return tuple(d.dim_value for d in dims)


def _count(type_: TypeProto) -> float:
    """Count the values of a TypeProto, infinite if its shape is open."""
    shape = _shape(type_)
    return math.inf if shape is None else math.prod(shape)


def _is_arithmetic(
    node: NodeProto, known: Iterable[str], types: Mapping[str, TypeProto], constant: Mapping[str, TensorProto]
) -> bool:
    """Tell whether a node computes few values from few constants."""
    if node.op_type == 'Shape':
        return _shape(types[node.input[0]]) is not None
    takes_long = any(a.type in (a.GRAPH, a.GRAPHS) or a.name in ('kernel_shape', 'pads') for a in node.attribute)
    return (
        node.op_type not in QDQ
        and not takes_long
        and all(name in constant for name in known)
        and all(_count(types[name]) <= LARGEST if name in types else not name for name in node.output)
    )


def _evaluate(
    model: onnx.ModelProto, node: NodeProto, types: Mapping[str, TypeProto], constant: Mapping[str, TensorProto]
) -> dict[str, TensorProto]:
    """Compute the outputs of a node whose inputs are constant, or of a Shape.

    Returns:
        Output name → value; empty if ONNX's reference lacks the operator.
    """
    names = [name for name in node.input if name]
    graph = helper.make_graph(
        [node],
        'one',
        [helper.make_value_info(n, types[n]) for n in names],
        [helper.make_empty_tensor_value_info(n) for n in node.output],
    )
    one = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        feeds = {
            n: numpy_helper.to_array(constant[n])
            if n in constant
            else np.broadcast_to(np.float32(0), _shape(types[n]) or ())  # a Shape's input, whose shape is known
            for n in names
        }
        with np.errstate(all='ignore'):
            values = ReferenceEvaluator(one).run(None, feeds)
        return {name: numpy_helper.from_array(np.asarray(value), name) for name, value in zip(node.output, values)}
    except NotImplementedError:
        return {}
    except Exception as e:  # the operators of the reference raise errors of every class
        raise QatError(
            f'{name_of(node)}: {(str(e).strip().splitlines() or [type(e).__name__])[0][:200]}; the graph cannot run, export it anew'
        ) from e


def flops(graph: Graph, types: Types, conv: NodeProto) -> int | None:
    """Count the floating-point operations of a convolution, two per multiply-add; None if its shapes are unknown."""
    weight = graph.values.get(graph.unquantized(conv.input[1]))
    at = types.get(conv.input[0] if conv.op_type == 'ConvTranspose' else conv.output[0])
    return None if weight is None or at is None else 2 * math.prod(at[1]) * math.prod(weight.shape[1:])


def without_qdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model, and let every reader of a DQ read the tensor in front of its Q."""
    bare = onnx.ModelProto.FromString(model.SerializeToString())
    renamed: dict[str, str] = {}
    kept: list[NodeProto] = []
    returned = {o.name for o in bare.graph.output}
    for node in bare.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        if node.op_type in QDQ and not returned & set(node.output):
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del bare.graph.node[:]
    bare.graph.node.extend(kept)
    return bare


def kernels(graph: Graph) -> list[list[NodeProto]]:
    """Group the nodes that are expected to run as one kernel each, without Q and DQ."""
    groups: dict[str, list[NodeProto]] = {}  # output name → the list of its node
    state: dict[int, str] = {}  # id of a list → its state in FUSES
    for node in graph.nodes:
        if node.op_type in FREE | QDQ or all(name in graph.fixed for name in node.output) or _is_gate(graph, node):
            continue
        x = graph.activation_of(node)
        gate = [graph.producer[name] for name in node.input if name != x and x is not None and name in graph.producer]
        step, role = [*gate, node], 'activation' if x else node.op_type
        for name in dict.fromkeys(node.input if x is None else [x]):
            group = groups.get(name)
            if (
                group is not None
                and (state[id(group)], role) in FUSES
                and name not in graph.outputs
                and all(any(reader is n for n in step) for reader, _ in graph.readers[name])
            ):
                state[id(group)] = FUSES[state[id(group)], role]
                break
        else:
            group = []
            state[id(group)] = (
                'conv' if node.op_type in WEIGHTED else 'elementwise' if node.op_type in ELEMENTWISE else 'full'
            )
        group += step
        groups.update((name, group) for n in step for name in n.output)
    return list({id(g): g for g in groups.values()}.values())


def _is_gate(graph: Graph, node: NodeProto) -> bool:
    """Tell whether `node` is the Sigmoid inside a SiLU."""
    readers = [n for name in node.output for n, _ in graph.readers.get(name, ())]
    return (
        node.op_type == 'Sigmoid'
        and len(readers) == 1
        and readers[0].op_type == 'Mul'
        and graph.activation_of(readers[0]) == node.input[0]
    )


def further_forms(graph: Graph) -> Iterator[str]:
    """Find the kernels that only bring a tensor into another form.

    Another form is a second scale, a scale beside float, or, behind operators that only move values, a scale other than
    the tensor's own.

    Yields:
        The name of the tensor, once for each such kernel.
    """
    for name in [*graph.inputs, *graph.producer]:
        node = graph.producer.get(name)
        if name in graph.fixed or (node is not None and (node.op_type == 'QuantizeLinear' or moved_inputs(node))):
            continue
        asked = set(graph.asked(name))
        own = graph.scale(node) if node is not None and node.op_type == 'DequantizeLinear' else None
        scales = asked - {FLOAT, own}
        free = 1 if own is None and FLOAT not in asked else 0  # the form that its maker writes
        yield from [name] * (len(scales) - free)


def estimate(
    graph: Graph, types: Types, unabsorbed: Collection[NodeProto] = (), float_bytes: int | None = None
) -> Cost:
    """Estimate the cost of a graph.

    Args:
        graph: the graph.
        types: see `tensor_types`; a tensor of unknown shape counts 0 bytes.
        unabsorbed: Q and DQ nodes that run as kernels of their own.
        float_bytes: bytes of a float value; None = as typed in the graph.
    """

    def size(name: str, width: int | None = None) -> int:
        kind, shape = types.get(name, NONE)
        itemsize = helper.tensor_dtype_to_np_dtype(kind).itemsize
        return math.prod(shape) * (width or (float_bytes if kind in FLOATS and float_bytes else itemsize))

    def stored(name: str) -> int:
        asked = graph.asked(name)
        int8 = graph.dequantized(name) or (bool(asked) and FLOAT not in asked)
        return size(name, 1 if int8 else None)

    count, total = 0, 0
    for nodes in kernels(graph):
        made, inside = {name for n in nodes for name in n.output}, {id(n) for n in nodes}
        read = {name for n in nodes for name in n.input if name not in made and types.get(name, NONE)[0] in FLOATS}
        left = {
            name
            for name in made
            if name in graph.outputs or any(id(reader) not in inside for reader, _ in graph.readers.get(name, ()))
        }
        copies = nodes[0].op_type in ('Slice', 'Split')
        count += len(left) if copies else 1
        total += sum(map(stored, left)) * 2 if copies else sum(map(stored, read | left))
    for name in further_forms(graph):
        count, total = count + 1, total + stored(name) + size(name, 1)
    for node in unabsorbed:
        count, total = count + 1, total + size(node.input[0]) + size(node.output[0])
    return Cost(count, total)
