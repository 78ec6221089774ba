"""Passes over any exported ONNX graph: one function each, with its invariant."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph import moves
from utils.qat.graph.onnx_graph import (
    QDQ,
    Graph,
    attribute,
    constants,
    count_qdq,
    moved_inputs,
    readers,
    replace_nodes,
)
from utils.qat.graph.tensor_types import infer

# Weight of an average: a power of two, with which sums that lie between two integers round as those of an average; and two products
# with 255 fit into the 16 bits of CPUs without VNNI
UNITS = 64
AVERAGE = '/average'  # ends the names of such convolutions


def keep_nodes(model: ModelProto, keep: Callable[[NodeProto], bool], renamed: Mapping[str, str]) -> ModelProto:
    """Rewrite the node list in place: rename inputs (old name → new name), and drop nodes that `keep` refuses.

    Nodes come in topological order, so `keep` may add tensors to `renamed` that later nodes read instead.
    """
    kept = []
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        if keep(node):
            kept.append(node)
    return replace_nodes(model, kept)


def remove_identities(model: ModelProto) -> ModelProto:
    """Let readers of an Identity read its input, in place; graph outputs keep their names."""
    outputs = {o.name for o in model.graph.output}
    renamed: dict[str, str] = {}

    def keep(node: NodeProto) -> bool:
        if node.op_type != 'Identity' or node.output[0] in outputs:
            return True
        renamed[node.output[0]] = node.input[0]
        return False

    return keep_nodes(model, keep, renamed)


def merge_duplicates(model: ModelProto) -> ModelProto:
    """Merge nodes that compute the same, in place; graph outputs keep their names.

    Above all, all readers that quantize a tensor with the same scale then share one Q and one DQ. Two nodes are the same if
    operator, attributes and inputs are; constants are compared by value. (The operators of these graphs have no state and no
    randomness.)
    """
    values = constants(model)
    outputs = {o.name for o in model.graph.output}

    def identity(name: str) -> object:
        value = values.get(name)
        return name if value is None else (value.dtype.str, value.shape, value.tobytes())

    first: dict[tuple, list[str]] = {}
    renamed: dict[str, str] = {}

    def keep(node: NodeProto) -> bool:
        if outputs.intersection(node.output):
            return True
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.domain, node.op_type, *attributes, *map(identity, node.input))
        if node.op_type == 'Constant' or key not in first:
            first[key] = list(node.output)
            return True
        renamed.update(zip(node.output, first[key]))
        return False

    return keep_nodes(model, keep, renamed)


def constants_to_initializers(model: ModelProto) -> ModelProto:
    """Turn every Constant node into an initializer of the same name and value, in place.

    TensorRT 8.6 reads scales and zero points from initializers only.
    """
    values = constants(model)
    made = [n.output[0] for n in model.graph.node if n.op_type == 'Constant']
    if lost := [name for name in made if name not in values]:
        raise QatError(f'the graph has a Constant of an unusual kind ({lost[0]}); please report this model')
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in made)
    return keep_nodes(model, lambda node: node.op_type != 'Constant', {})


def write_axis(model: ModelProto) -> ModelProto:
    """Write the axis of every per-channel Q and DQ that leaves it to the default (1), in place.

    Importers disagree on the default.
    """
    values = constants(model)
    for node in model.graph.node:
        if node.op_type in QDQ and values[node.input[1]].ndim and attribute(node, 'axis') is None:
            node.attribute.append(onnx.helper.make_attribute('axis', 1))
    return model


def quantize_moves(model: ModelProto) -> ModelProto:
    """Put Q/DQ on the inputs of moves whose outputs are quantized with one scale, in place; see moves.quantize_moves."""
    graph = Graph(model)
    values, read_by = graph.values, graph.readers
    put_before: dict[str, list[NodeProto]] = {}  # first output of a move → the pairs to put in front of it

    def demanded(move: NodeProto) -> dict[object, NodeProto]:
        grids: dict[object, NodeProto] = {None: move} if graph.outputs.intersection(move.output) else {}
        for reader in (r for name in move.output for r, _ in read_by.get(name, ())):
            per_tensor = reader.op_type == 'QuantizeLinear' and values[reader.input[1]].size == 1
            if reader.op_type != 'Shape':  # which reads no values
                grids.setdefault(graph.grid(reader) if per_tensor else None, reader)
        return grids

    def given(move: NodeProto) -> dict[int, object]:
        sources = {i: graph.producer.get(move.input[i]) for i in moved_inputs(move) if move.input[i] not in values}
        return {
            i: graph.grid(s) if s is not None and s.op_type == 'DequantizeLinear' else None for i, s in sources.items()
        }

    def put(move: NodeProto, i: int, like: NodeProto) -> None:
        name, source = f'{move.name or move.output[0]}/input_{i}', move.input[i]
        q, dq = (
            onnx.helper.make_node(op, [data, *like.input[1:]], [made], f'{name}/{op}')
            for op, data, made in (
                ('QuantizeLinear', source, f'{name}_q'),
                ('DequantizeLinear', f'{name}_q', f'{name}_dq'),
            )
        )
        put_before.setdefault(move.output[0], []).extend((q, dq))
        move.input[i] = f'{name}_dq'
        read_by[source] = [r for r in read_by[source] if not (r[0] is move and r[1] == i)] + [(q, 0)]

    moves.quantize_moves(filter(moved_inputs, reversed(graph.nodes)), demanded, given, put)
    return replace_nodes(model, [n for node in graph.nodes for n in (*put_before.get(node.output[0], ()), node)])


def drop_repeated_qdq(model: ModelProto, behind_moves: bool = True) -> ModelProto:
    """Drop each Q/DQ that repeats the scale of its values, in place; changes no value.

    Such a pair follows operators that only move values, such as Slice and Concat. TensorRT and ONNX Runtime need it there;
    OpenVINO makes an extra layer of it, which encodes i8 as u8 again. Without `behind_moves` drop only pairs directly after
    a DQ.
    """
    graph, renamed = Graph(model), dict[str, str]()

    def repeats(q: NodeProto) -> bool:
        sources = [graph.producer.get(name) for name in (graph.sources(q.input[0]) if behind_moves else q.input[:1])]
        return all(
            o is not None and o.op_type == 'DequantizeLinear' and graph.grid(o) == graph.grid(q) for o in sources
        )

    repeated = {
        node.output[0]
        for node in graph.nodes
        if node.op_type == 'QuantizeLinear' and node.input[0] not in graph.fixed and repeats(node)
    }
    source = {node.output[0]: node.input[0] for node in graph.nodes if node.output[0] in repeated}

    def keep(node: NodeProto) -> bool:
        if node.op_type == 'DequantizeLinear' and node.input[0] in repeated and node.output[0] not in graph.outputs:
            renamed[node.output[0]] = renamed.get(source[node.input[0]], source[node.input[0]])
            return False
        return True

    keep_nodes(model, keep, renamed)
    read = readers(model)
    return keep_nodes(model, lambda node: node.output[0] not in repeated or node.output[0] in read, {})


def require_scales(model: ModelProto, scales: Iterable[object]) -> None:
    """Raise QatError unless the scales in the graph are exactly `scales` (arrays), bit for bit, as sets."""
    values = constants(model)
    in_graph = {np.asarray(values[n.input[1]], np.float32).tobytes() for n in model.graph.node if n.op_type in QDQ}
    wanted = {np.asarray(s, np.float32).tobytes() for s in scales}
    if in_graph != wanted:
        raise QatError(
            f'{len(wanted - in_graph)} of {len(wanted)} scales of the model are missing in the ONNX graph, and '
            f'{len(in_graph - wanted)} are new; please report this model'
        )


def simplify(model: ModelProto) -> ModelProto:
    """Fold constants and drop nodes that compute nothing (onnxslim), or raise QatError if a Q or DQ is lost.

    A simplifier that folds the DQ of a weight turns an INT8 convolution back into a float one.
    """
    import onnxslim

    before = count_qdq(model)
    slim = onnxslim.slim(model)
    if count_qdq(slim) != before:
        raise QatError(
            f'--simplify: onnxslim changed the number of Q/DQ nodes from {before} to {count_qdq(slim)}; '
            'export without --simplify'
        )
    return slim


def store_int8_weights(model: ModelProto) -> ModelProto:
    """Store each weight as the INT8 values that its Q computes, in place: initializer → DQ.

    This removes exactly one Q per weight, none of an activation, and no DQ. The values equal those of the Q bit for bit:
    rounded half to even and saturated.
    """
    values = constants(model)
    stored = {i.name for i in model.graph.initializer}
    of_weights = [n for n in model.graph.node if n.op_type == 'QuantizeLinear' and n.input[0] in stored]
    for node in of_weights:
        weight, scale, zero = (values[name] for name in node.input)
        axis = [1] * weight.ndim
        if scale.ndim:
            axis[attribute(node, 'axis', 1)] = -1
        scale, zero_point, limits = scale.reshape(axis), zero.reshape(axis).astype(np.float32), np.iinfo(zero.dtype)
        with np.errstate(invalid='ignore'):  # NaN has no integer; the comparison with PyTorch refuses such a file
            steps = np.clip(np.rint(weight / scale) + zero_point, limits.min, limits.max).astype(zero.dtype)
        model.graph.initializer.append(numpy_helper.from_array(steps, node.output[0]))
        model.graph.node.remove(node)
    return drop_unread(model)


def drop_unneeded(model: ModelProto) -> ModelProto:
    """Drop the nodes and initializers that no output depends on, in place."""
    needed, kept = {o.name for o in model.graph.output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return drop_unread(replace_nodes(model, kept[::-1]))


def drop_unread(model: ModelProto) -> ModelProto:
    """Drop the initializers that no node reads, in place; ONNX Runtime warns of each one when it opens the file."""
    read = readers(model)
    kept = [i for i in model.graph.initializer if i.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def set_output_shapes(model: ModelProto, *shapes: Iterable[int | str]) -> None:
    """Write the shape of each output, with names for open axes; no node changes.

    With an open batch axis the exporter leaves the other axes open too.
    """
    for output, dims in zip(model.graph.output, shapes, strict=True):
        shape = output.type.tensor_type.shape
        del shape.dim[:]
        for d in dims:
            shape.dim.add(**({'dim_param': d} if isinstance(d, str) else {'dim_value': d}))


def set_metadata(model: ModelProto, **props: object) -> ModelProto:
    """Store `props` as text in the file's metadata; other entries stay."""
    kept = {p.key: p.value for p in model.metadata_props}
    onnx.helper.set_model_props(model, {**kept, **{k: str(v) for k, v in props.items()}})
    return model


def absorb_relus(model: ModelProto) -> ModelProto:
    """Drop each Relu that only Qs with the smallest zero point read, in place, because these saturate at 0. Changes no value.

    Likewise a Clip from 0 to a limit, such as a ReLU6, if the largest integer of the Qs stands for the limit or less.
    """
    values, read, renamed = constants(model), readers(model), dict[str, str]()
    outputs = {o.name for o in model.graph.output}

    def limit_of(node: NodeProto) -> float:
        """Return the upper limit of a Relu or a Clip from 0; -inf of any other node."""
        ends = [values.get(name) for name in node.input[1:]] if node.op_type == 'Clip' else []
        if len(ends) == 2 and ends[1] is not None and ends[0] is not None and ends[0] == 0:
            return float(ends[1])
        return float('inf') if node.op_type == 'Relu' else -float('inf')

    def saturates(node: NodeProto, limit: float) -> bool:
        zero = values.get(node.input[2]) if node.op_type == 'QuantizeLinear' and len(node.input) > 2 else None
        if zero is None or not (zero == np.iinfo(zero.dtype).min).all():
            return False
        scale, most = values.get(node.input[1]), int(np.iinfo(zero.dtype).max) - int(np.iinfo(zero.dtype).min)
        return limit == float('inf') or (scale is not None and bool((np.rint(limit / scale) >= most).all()))

    def keep(node: NodeProto) -> bool:
        readers_of, limit = [reader for reader, _ in read.get(node.output[0], ())], limit_of(node)
        if (
            limit < 0
            or node.output[0] in outputs
            or not readers_of
            or not all(saturates(each, limit) for each in readers_of)
        ):
            return True
        renamed[node.output[0]] = node.input[0]
        return False

    return keep_nodes(model, keep, renamed)


def unsigned_activations(model: ModelProto, all_of_them: bool = True) -> ModelProto:
    """Convert the Q/DQ of activations to unsigned integers, in place: zero points grow by 128; changes no value.

    ONNX Runtime's kernels for x86 take unsigned activations and signed weights. Without `all_of_them` only those that are never
    negative are converted, whose zero point becomes 0.
    """
    values = constants(model)
    stored: dict[int, str] = {}
    for node in model.graph.node:
        if (
            (node.op_type == 'QuantizeLinear' and node.input[0] in values)
            or node.op_type not in QDQ
            or len(node.input) < 3
        ):
            continue
        if values[node.input[2]].dtype == np.int8 and values[node.input[2]].ndim == 0:
            zero = int(values[node.input[2]]) + 128
            if zero == 0 or all_of_them:
                node.input[2] = stored.setdefault(zero, f'zero_point {zero}')
    for zero, name in stored.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(zero, np.uint8), name))
    del model.graph.value_info[:]  # types of the signed integers
    return drop_unread(model)


def averages_by_convolutions(model: ModelProto) -> ModelProto:
    """Write each average pooling between a DQ and Qs as an INT8 convolution with a group for each channel, in place.

    On CPUs its own kernels take several times as long: ONNX Runtime's goes by FP32, and OpenVINO's takes 1.5 ms of 24 for yolov9-t.
    """
    graph, (types, _), nodes = Graph(model), infer(model), list[NodeProto]()
    for node in graph.nodes:
        kind, shape = types.get(node.input[0], (None, ())) if node.op_type == 'AveragePool' else (None, ())
        if kind == TensorProto.FLOAT and _is_int8_mean(graph, node):
            nodes += _convolution(model, node, shape[1])
        else:
            nodes.append(node)
    return replace_nodes(model, nodes)


def _is_int8_mean(graph: Graph, pool: NodeProto) -> bool:
    """Tell whether a pooling reads and makes integers, and divides each sum by the size of its window."""
    result, inside = pool.output[0], not any(attribute(pool, 'pads', ())) or attribute(pool, 'count_include_pad', 0)
    read_by = {reader.op_type for reader, _ in graph.readers.get(result, ())} - {'Shape'}  # which reads no values
    return (
        graph.op(pool.input[0]) == 'DequantizeLinear'
        and result not in graph.outputs
        and read_by == {'QuantizeLinear'}
        and bool(inside and not attribute(pool, 'ceil_mode', 0))
    )


def _convolution(model: ModelProto, pool: NodeProto, channels: int) -> list[NodeProto]:
    """Make the convolution that computes a pooling, behind the DQ of its weight, which is added to the constants."""
    result, sides = pool.output[0], attribute(pool, 'kernel_shape')
    names = [f'{result}/{part}' for part in ('weight', 'scale', 'zero_point')]
    weight, scale, zero = np.full((channels, 1, *sides), UNITS), 1 / (UNITS * math.prod(sides)), 0
    for name, value, kind in zip(names, (weight, scale, zero), (np.int8, np.float32, np.int8)):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, kind), name))
    kept = [a for a in pool.attribute if a.name in ('kernel_shape', 'strides', 'pads')]
    dequantized = f'{result}/dequantized'
    conv = helper.make_node('Conv', [pool.input[0], dequantized], [result], f'{pool.name}{AVERAGE}', group=channels)
    conv.attribute.extend(kept)
    return [helper.make_node('DequantizeLinear', names, [dequantized], f'{result}/DequantizeLinear'), conv]
