"""Infer types and shapes of the tensors of a graph, shape arithmetic included, and count FLOPs."""

import contextlib
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from utils.qat.core.errors import reporting
from utils.qat.graph.onnx_graph import QDQ, Graph, name_of, opset

Types = dict[str, tuple[int, tuple[int, ...]]]  # tensor name → (element type of onnx.TensorProto, shape)

LARGEST, MOST_EVALUATED = 100, 10_000  # limits of shape arithmetic: values of a tensor, nodes


def infer(model: onnx.ModelProto) -> tuple[Types, dict[str, np.ndarray]]:
    """Infer the types and shapes of a graph's tensors, and the values of small constants and of shape arithmetic.

    Shapes that do not follow from the graph are left out. An open first axis of an input counts as 1. Evaluates shape arithmetic
    (Shape, Gather, Div ... before a Slice) on up to LARGEST values at a time, which onnx.shape_inference does only in part.
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
        with _running(node, onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
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
        if evaluated < MOST_EVALUATED and _is_arithmetic(node, known, types, constant):
            constant.update(_evaluate(model, node, types, constant))
            evaluated += 1
    inferred = {name: (t.tensor_type.elem_type, shape) for name, t in types.items() if (shape := _shape(t)) is not None}
    return inferred, {name: numpy_helper.to_array(tensor) for name, tensor in constant.items()}


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
    """Compute the outputs of a node of constants, or of a Shape; empty if ONNX's reference lacks the operator."""
    names = [name for name in node.input if name]
    graph = helper.make_graph(
        [node],
        'one',
        [helper.make_value_info(n, types[n]) for n in names],
        [helper.make_empty_tensor_value_info(n) for n in node.output],
    )
    one = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    # the operators of the reference raise errors of every class
    with _running(node, Exception), contextlib.suppress(NotImplementedError), np.errstate(all='ignore'):
        feeds = {
            n: numpy_helper.to_array(constant[n])
            if n in constant
            else np.broadcast_to(np.float32(0), _shape(types[n]) or ())  # a Shape's input, whose shape is known
            for n in names
        }
        values = ReferenceEvaluator(one).run(None, feeds)
        return {name: numpy_helper.from_array(np.asarray(value), name) for name, value in zip(node.output, values)}
    return {}


def _running(node: NodeProto, *errors: type[BaseException]) -> contextlib.AbstractContextManager[None]:
    """Convert errors of ONNX about a node to a QatError."""
    return reporting(f'{name_of(node)}: the graph cannot run', *errors, remedy='export it anew')


def flops(graph: Graph, types: Types, conv: NodeProto) -> int | None:
    """Count the floating-point operations of a convolution, two per multiply-add; None if its shapes are unknown."""
    weight = graph.values.get(graph.unquantized(conv.input[1]))
    at = types.get(conv.input[0] if conv.op_type == 'ConvTranspose' else conv.output[0])
    return None if weight is None or at is None else 2 * math.prod(at[1]) * math.prod(weight.shape[1:])
