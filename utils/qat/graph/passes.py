"""Passes over any exported ONNX graph: one function each, with its invariant."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import (
    QDQ,
    Graph,
    attribute,
    constants,
    count_qdq,
    is_half,
    moved_inputs,
    opset,
    producers,
    readers,
    replace_nodes,
)

OPENVINO = 'org.openvinotoolkit'  # domain of its own operators in an ONNX graph


def _keep(model: ModelProto, keep: Callable[[NodeProto], bool], renamed: Mapping[str, str]) -> ModelProto:
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

    return _keep(model, keep, renamed)


def merge_duplicates(model: ModelProto) -> ModelProto:
    """Merge nodes that compute the same, in place; graph outputs keep their names.

    Above all, all readers that quantize a tensor with the same scale then share one Q and one DQ. Two nodes are the same if
    operator, attributes and inputs are; constants are compared by value. (The operators of these graphs have no state and no
    randomness.)
    """
    values = constants(model)
    outputs = {o.name for o in model.graph.output}

    def identity(name: str) -> Any:
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

    return _keep(model, keep, renamed)


def constants_to_initializers(model: ModelProto) -> ModelProto:
    """Turn every Constant node into an initializer of the same name and value, in place.

    TensorRT 8.6 reads scales and zero points from initializers only.
    """
    values = constants(model)
    made = [n.output[0] for n in model.graph.node if n.op_type == 'Constant']
    if lost := [name for name in made if name not in values]:
        raise QatError(f'the graph has a Constant of an unusual kind ({lost[0]}); please report this model')
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in made)
    return _keep(model, lambda node: node.op_type != 'Constant', {})


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
    """Put Q/DQ on the inputs of moves whose outputs are quantized with one scale, in place.

    A move is an operation that only moves values: Concat, MaxPool, Split, Slice, nearest Resize ... With Q/DQ it runs in
    INT8, so a Concat does not read a tensor in float that a convolution beside it reads in INT8. No value changes:
    quantizing with one scale before and after a move equals quantizing once. A move is not changed if its readers need
    several scales, or a scale and float.
    """
    values, outputs = constants(model), {o.name for o in model.graph.output}
    made_by, read_by, nodes = producers(model), readers(model), list(model.graph.node)

    def grid(node: NodeProto) -> list[bytes]:
        return [values[name].tobytes() for name in node.input[1:3]]

    def demand(node: NodeProto) -> NodeProto | None:
        """Return the Q that all readers of a node's outputs share; None if there are several, or float readers."""
        # A Shape reads no values.
        found = [r for name in node.output for r, _ in read_by.get(name, ()) if r.op_type != 'Shape']
        if (
            not found
            or outputs.intersection(node.output)
            or any(r.op_type != 'QuantizeLinear' or values[r.input[1]].size > 1 for r in found)
        ):
            return None
        return found[0] if all(grid(r) == grid(found[0]) for r in found) else None

    put_before: dict[int, list[NodeProto]] = {}  # position of a move → the pairs to put in front of it
    for at in reversed(range(len(nodes))):
        move = nodes[at]
        wanted = demand(move) if moved_inputs(move) else None
        if wanted is None:
            continue
        for i in moved_inputs(move):
            given = move.input[i]
            source = made_by.get(given)
            if given in values or (
                source is not None and source.op_type == 'DequantizeLinear' and grid(source) == grid(wanted)
            ):
                continue
            name = f'{move.name or move.output[0]}/input_{i}'
            q = onnx.helper.make_node(
                'QuantizeLinear', [given, *wanted.input[1:]], [f'{name}_q'], f'{name}/QuantizeLinear'
            )
            dq = onnx.helper.make_node(
                'DequantizeLinear', [f'{name}_q', *wanted.input[1:]], [f'{name}_dq'], f'{name}/DequantizeLinear'
            )
            put_before.setdefault(at, []).extend((q, dq))
            move.input[i] = f'{name}_dq'
            # Moves further up must see that this Q, not the move, reads `given` now.
            read_by[given] = [r for r in read_by[given] if not (r[0] is move and r[1] == i)] + [(q, 0)]
    return replace_nodes(model, [n for at, node in enumerate(nodes) for n in (*put_before.get(at, ()), node)])


def drop_repeated_qdq(model: ModelProto, behind_moves: bool = True) -> ModelProto:
    """Drop each Q/DQ that repeats the scale of its values, in place; changes no value.

    Such a pair follows operators that only move values, such as Slice and Concat. TensorRT and ONNX Runtime need it there;
    OpenVINO makes an extra layer of it, which encodes i8 as u8 again. Without `behind_moves` drop only pairs directly after
    a DQ.
    """
    graph, outputs = Graph(model), {o.name for o in model.graph.output}
    renamed: dict[str, str] = {}

    def grid(node: NodeProto) -> tuple:
        return graph.scale(node), *(graph.values[name].tobytes() for name in node.input[2:3] if name in graph.values)

    def repeats(q: NodeProto) -> bool:
        origins = [graph.producer.get(name) for name in (graph.origins(q.input[0]) if behind_moves else q.input[:1])]
        return all(o is not None and o.op_type == 'DequantizeLinear' and grid(o) == grid(q) for o in origins)

    repeated = {
        node.output[0]
        for node in graph.nodes
        if node.op_type == 'QuantizeLinear' and node.input[0] not in graph.fixed and repeats(node)
    }
    source = {node.output[0]: node.input[0] for node in graph.nodes if node.output[0] in repeated}

    def keep(node: NodeProto) -> bool:
        if node.op_type == 'DequantizeLinear' and node.input[0] in repeated and node.output[0] not in outputs:
            renamed[node.output[0]] = renamed.get(source[node.input[0]], source[node.input[0]])
            return False
        return True

    _keep(model, keep, renamed)
    read = readers(model)
    return _keep(model, lambda node: node.output[0] not in repeated or node.output[0] in read, {})


def fake_quantize(model: ModelProto) -> ModelProto:
    """Replace each Q/DQ of an activation by one FakeQuantize, an operator of OpenVINO, in place; changes no value.

    OpenVINO (2025.2 to 2026.4) reads Q and DQ as several operators, and on CPUs without AMX it then rounds some
    activations with a scale of 1: docs/cpu.md. Its own tools write this one operator, which it computes correctly.
    """
    values, made, half = constants(model), producers(model), is_half(model)
    stored, nodes = set(values), []

    def is_plain(node: NodeProto) -> bool:
        """Whether a Q or DQ has one scale and one zero point, both constant."""
        return len(node.input) == 3 and all(name in values and values[name].ndim == 0 for name in node.input[1:])

    def limit(node: NodeProto, end: int) -> str:
        """Return the name of a constant with the value of the integer `end`, by the scale and zero point of a Q or DQ."""
        value = np.float32(end - int(values[node.input[2]])) * values[node.input[1]].astype(np.float32)
        name = f'limit {value!r}'
        if name not in stored:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
            stored.add(name)
        return name

    for dq in model.graph.node:
        q = made.get(dq.input[0]) if dq.op_type == 'DequantizeLinear' else None
        if q is None or q.op_type != 'QuantizeLinear' or q.input[0] in values or not (is_plain(q) and is_plain(dq)):
            nodes.append(dq)
            continue
        kept = np.iinfo(values[q.input[2]].dtype)
        ends = [limit(node, end) for node in (q, dq) for end in (kept.min, kept.max)]  # of inputs and outputs
        source, result = q.input[0], dq.output[0]
        if half:  # for FP16 data the limits would be FP16 too, and inexact
            nodes.append(
                onnx.helper.make_node('Cast', [source], [f'{result} in'], f'{q.name} in', to=onnx.TensorProto.FLOAT)
            )
            source, result = f'{result} in', f'{result} out'
        nodes.append(
            onnx.helper.make_node(
                'FakeQuantize',
                [source, *ends],
                [result],
                q.name,
                domain=OPENVINO,
                levels=1 + kept.max - kept.min,
            )
        )
        if half:
            kind = attribute(dq, 'output_dtype') or onnx.helper.np_dtype_to_tensor_dtype(values[dq.input[1]].dtype)
            nodes.append(onnx.helper.make_node('Cast', [result], [dq.output[0]], f'{q.name} out', to=kind))
    replace_nodes(model, nodes)
    model.opset_import.append(onnx.helper.make_opsetid(OPENVINO, 1))
    read = readers(model)
    return _keep(model, lambda node: node.op_type != 'QuantizeLinear' or node.output[0] in read, {})


def multiply_dfl(model: ModelProto) -> ModelProto:
    """Rewrite the integral over the box distribution (DFL) as a matrix product, in place; sums may round differently.

    The export has Transpose → Softmax over axis 1 → 1x1 convolution, for which OpenVINO copies all maps twice. The product
    uses a Softmax over axis 2 of the Transpose's input, which needs neither the Transpose nor a copy: 1 to 2 % less time.
    """
    if opset(model) < 13:  # there Softmax flattens all later axes into one
        return model
    graph, values, made = Graph(model), constants(model), producers(model)
    dropped: set[str] = set()

    def behind(node: NodeProto, kind: str) -> NodeProto | None:
        """Return the node of this kind that produces the first input of a node, and that has no other reader."""
        source = made.get(node.input[0])
        alone = source is not None and source.op_type == kind and len(graph.uses(source.output[0])) == 1
        return source if alone else None

    for node in model.graph.node:
        weight = values.get(node.input[1]) if node.op_type == 'Conv' and len(node.input) == 2 else None
        if weight is None or weight.shape != (1, weight.size, 1, 1):
            continue
        softmax = behind(node, 'Softmax')
        if softmax is None or attribute(softmax, 'axis', -1) != 1:
            continue
        first = behind(softmax, 'Cast') or softmax  # in a file in FP16 the Softmax is FP32
        turned = behind(first, 'Transpose')
        if turned is None or list(attribute(turned, 'perm', ())) != [0, 2, 1, 3]:
            continue
        name = f'{node.name}/weight'
        model.graph.initializer.append(numpy_helper.from_array(weight.reshape(1, 1, 1, -1), name))
        dropped.add(turned.output[0])
        first.input[0] = turned.input[0]
        softmax.attribute[0].i = 2
        node.CopyFrom(onnx.helper.make_node('MatMul', [name, softmax.output[0]], list(node.output), node.name))
    return _keep(model, lambda node: node.output[0] not in dropped, {})


def check_scales(model: ModelProto, scales: Iterable[Any]) -> None:
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
    """Drop each Relu that only Qs with the smallest zero point read, in place, because these saturate at 0. Changes no value."""
    values, read, renamed = constants(model), readers(model), dict[str, str]()
    outputs = {o.name for o in model.graph.output}

    def saturates(node: NodeProto) -> bool:
        zero = values.get(node.input[2]) if node.op_type == 'QuantizeLinear' and len(node.input) > 2 else None
        return zero is not None and bool((zero == np.iinfo(zero.dtype).min).all())

    def keep(node: NodeProto) -> bool:
        found = [reader for reader, _ in read.get(node.output[0], ())]
        if node.op_type != 'Relu' or node.output[0] in outputs or not found or not all(map(saturates, found)):
            return True
        renamed[node.output[0]] = node.input[0]
        return False

    return _keep(model, keep, renamed)


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


def integers_in_onnxruntime(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, into the form that ONNX Runtime computes in integers; changes no value."""
    return unsigned_activations(absorb_relus(drop_repeated_qdq(model, behind_moves=False)))


def integers_in_openvino(model: ModelProto) -> ModelProto:
    """Rewrite a graph, in place, so that OpenVINO's own reader of ONNX finds integers that it computes with; changes no value.

    On a CPU with AMX it computes a convolution in float if its input has a zero point other than 0.
    """
    return unsigned_activations(model, all_of_them=False)


LAST = {  # target → last pass over its graphs
    'onnxruntime': integers_in_onnxruntime,
    'litert': integers_in_onnxruntime,
    'openvino': integers_in_openvino,
}
