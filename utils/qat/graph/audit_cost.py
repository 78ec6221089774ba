"""What a graph costs, estimated from the graph alone: shapes, FLOPs, kernels launched, bytes moved.

The model of a kernel, after the fusions that NVIDIA documents (dev guide, "Types of Fusions" and "Q/DQ Layer-Placement"):

- A convolution (or matrix product) takes along its bias, an Add directly on its output, and one activation (SiLU too).
  Not an Add behind an activation: NVIDIA/TensorRT#3861.
- Chains of elementwise operators are one kernel. Concat, Reshape and their like cost nothing: who makes the inputs writes
  them in place. Every output of a Slice or Split is one copy. Every other operator is one kernel.
- A Q or DQ costs nothing where a neighbour absorbs it. One kernel each costs: every further form in which a tensor is wanted
  (a second scale, a scale beside float), every other scale behind operators that only move values, and every Q or DQ that no
  kernel absorbs.
- A kernel reads its inputs and weights once (indices and shapes aside) and writes its outputs once: 1 byte per element in
  INT8, else what its type has. Caches, layouts and workspaces are not modelled.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import ELEMENTWISE, FLOAT, QDQ, WEIGHTED, moved_inputs, name_of, opset

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
LARGEST, MOST_EVALUATED = 100, 10_000  # values of a tensor, nodes: what shape arithmetic takes
NONE = onnx.TensorProto.FLOAT, (0,)  # in place of a type that is not known
FREE = {'Concat', 'Flatten', 'Identity', 'Reshape', 'Squeeze', 'Unsqueeze'}
# What a kernel can still take along: (its state, the role of the next node) → its state then.
FUSES = {
    ('conv', 'BatchNormalization'): 'conv',
    ('conv', 'Add'): 'sum',
    ('conv', 'activation'): 'full',
    ('sum', 'activation'): 'full',
    **{('elementwise', role): 'elementwise' for role in ('activation', *ELEMENTWISE)},
}


@dataclass
class Cost:
    """One inference."""

    kernels: int
    bytes: int


def tensor_types(model):
    """{tensor name: (element type of onnx.TensorProto, shape)}; a tensor whose shape does not follow from the graph is not in it.

    An open first axis of an input counts as 1. Shape arithmetic (Shape, Gather, Div ... in front of a Slice) is carried out, which
    onnx.shape_inference does in part only: on up to LARGEST values at a time. Raises QatError where shapes or types contradict each other.
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
            continue  # an operator of somebody else's, or what follows from it
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
    return {name: (t.tensor_type.elem_type, _shape(t)) for name, t in types.items() if _shape(t) is not None}


def _shape(type_):
    """Shape in a TypeProto as a tuple of ints, or None if an axis is open."""
    dims = type_.tensor_type.shape.dim
    if not type_.tensor_type.HasField('shape') or not all(d.HasField('dim_value') and d.dim_value >= 0 for d in dims):
        return None
    return tuple(d.dim_value for d in dims)


def _count(type_):
    """Number of values of a TypeProto, infinite if its shape is open."""
    shape = _shape(type_)
    return math.inf if shape is None else math.prod(shape)


def _is_arithmetic(node, known, types, constant):
    """Whether a node computes few values of few constants."""
    if node.op_type == 'Shape':
        return _shape(types[node.input[0]]) is not None
    takes_long = any(a.type in (a.GRAPH, a.GRAPHS) or a.name in ('kernel_shape', 'pads') for a in node.attribute)
    return (
        node.op_type not in QDQ
        and not takes_long
        and all(name in constant for name in known)
        and all(_count(types[name]) <= LARGEST if name in types else not name for name in node.output)
    )


def _evaluate(model, node, types, constant):
    """{output name: TensorProto} of a node whose inputs are constant, or of a Shape; empty if ONNX's reference has no such operator."""
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
            n: numpy_helper.to_array(constant[n]) if n in constant else np.broadcast_to(np.float32(0), _shape(types[n]))
            for n in names
        }
        with np.errstate(all='ignore'):
            values = ReferenceEvaluator(one).run(None, feeds)
        return {name: numpy_helper.from_array(np.asarray(value), name) for name, value in zip(node.output, values)}
    except NotImplementedError:
        return {}
    except Exception as e:  # the operators of the reference raise whatever they meet
        raise QatError(
            f'{name_of(node)}: {(str(e).strip().splitlines() or [type(e).__name__])[0][:200]}; the graph cannot run, export it anew'
        ) from e


def flops(graph, types, conv):
    """Floating-point operations of a convolution, two per multiply-add; None if its shapes are not known."""
    weight = graph.values.get(graph.unquantized(conv.input[1]))
    at = types.get(conv.input[0] if conv.op_type == 'ConvTranspose' else conv.output[0])
    return None if weight is None or at is None else 2 * math.prod(at[1]) * math.prod(weight.shape[1:])


def without_qdq(model):
    """A copy of `model` in which every reader of a DQ reads what was in front of its Q."""
    bare, renamed, kept = onnx.ModelProto.FromString(model.SerializeToString()), {}, []
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


def kernels(graph):
    """Lists of nodes: what is expected to run as one kernel each. Q and DQ are in none."""
    groups, state = {}, {}  # output name → the list of its node; id of a list → what else it can take along
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


def _is_gate(graph, node):
    """Whether `node` is the Sigmoid inside a SiLU."""
    readers = [n for name in node.output for n, _ in graph.readers.get(name, ())]
    return (
        node.op_type == 'Sigmoid'
        and len(readers) == 1
        and readers[0].op_type == 'Mul'
        and graph.activation_of(readers[0]) == node.input[0]
    )


def further_forms(graph):
    """Names of tensors, each once for every kernel that only brings it into another form: a second scale, or a scale beside
    float; behind operators that only move values, a scale other than the one it comes with."""
    for name in [*graph.inputs, *graph.producer]:
        node = graph.producer.get(name)
        if name in graph.fixed or (node is not None and (node.op_type == 'QuantizeLinear' or moved_inputs(node))):
            continue
        asked = set(graph.asked(name))
        scales = asked - {FLOAT, graph.scale(node) if graph.op(name) == 'DequantizeLinear' else FLOAT}
        free = 1 if graph.op(name) != 'DequantizeLinear' and FLOAT not in asked else 0  # the form its maker writes
        yield from [name] * (len(scales) - free)


def estimate(graph, types, unabsorbed=(), float_bytes=None):
    """Cost of a graph. types: see `tensor_types`. unabsorbed: Q and DQ nodes that run as kernels of their own. float_bytes:
    bytes of a float value; None = as typed in the graph. A tensor of unknown shape counts 0 bytes."""

    def size(name, width=None):
        kind, shape = types.get(name, NONE)
        itemsize = helper.tensor_dtype_to_np_dtype(kind).itemsize
        return math.prod(shape) * (width or (float_bytes if kind in FLOATS and float_bytes else itemsize))

    def stored(name):
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
