"""Passes over an exported ONNX graph, one function each, each with the invariant it keeps.

Imports no torch: the passes work on any Q/DQ graph.
"""

import numpy as np
import onnx
from onnx import numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import QDQ, attribute, constants, count_qdq, moved_inputs, producers, readers


def _keep(model, keep, renamed):
    """Rewrite the node list: inputs renamed by `renamed`, and only the nodes for which `keep(node)` is true.

    Nodes come in topological order, so `keep` may add to `renamed` what later nodes shall read instead.
    """
    kept = []
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
        if keep(node):
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def remove_identities(model):
    """Let readers of an Identity read its input, in place. Graph outputs keep their names."""
    renamed, outputs = {}, {o.name for o in model.graph.output}

    def keep(node):
        if node.op_type != 'Identity' or node.output[0] in outputs:
            return True
        renamed[node.output[0]] = node.input[0]
        return False

    return _keep(model, keep, renamed)


def merge_duplicates(model):
    """Merge nodes that compute the same, in place: above all, let every reader of a tensor that quantizes it with the
    same scale share one Q and one DQ.

    Two nodes are the same if operator, attributes and inputs are, constants compared by value (the operators of these
    graphs have no state and no randomness). Graph outputs keep their names.
    """
    values = constants(model)
    outputs = {o.name for o in model.graph.output}

    def identity(name):
        value = values.get(name)
        return name if value is None else (value.dtype.str, value.shape, value.tobytes())

    first, renamed = {}, {}

    def keep(node):
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


def constants_to_initializers(model):
    """Turn every Constant node into an initializer of the same name and value, in place: TensorRT 8.6 reads scales and
    zero points from initializers only."""
    values = constants(model)
    made = [n.output[0] for n in model.graph.node if n.op_type == 'Constant']
    if lost := [name for name in made if name not in values]:
        raise QatError(f'the graph has a Constant of an unusual kind ({lost[0]}); please report this model')
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in made)
    return _keep(model, lambda node: node.op_type != 'Constant', {})


def write_axis(model):
    """Write the axis of every per-channel Q and DQ that leaves it to the default (1), in place: importers disagree on it."""
    values = constants(model)
    for node in model.graph.node:
        if node.op_type in QDQ and values[node.input[1]].ndim and attribute(node, 'axis') is None:
            node.attribute.append(onnx.helper.make_attribute('axis', 1))
    return model


def quantize_moves(model):
    """Q/DQ on the inputs of operations that only move values (Concat, MaxPool, Split, Slice, nearest Resize ...), where
    all that is made of their outputs is quantized with one scale; in place.

    The operation then runs in INT8, and a tensor that a convolution reads in INT8 is not read in float by the Concat
    beside it. Changes no value: quantizing with one scale before and after a move is quantizing once. Moves whose
    readers ask for several scales, or for a scale and float, stay as they are.
    """
    values, outputs = constants(model), {o.name for o in model.graph.output}
    made_by, read_by, nodes = producers(model), readers(model), list(model.graph.node)

    def grid(node):
        """Scale and zero point of a Q or DQ, to compare."""
        return [values[name].tobytes() for name in node.input[1:3]]

    def demand(node):
        """The Q that everything made of the outputs of `node` asks for; None if there are several, or float readers."""
        found = [
            r for name in node.output for r, _ in read_by.get(name, ()) if r.op_type != 'Shape'
        ]  # it reads no value
        if (
            not found
            or outputs.intersection(node.output)
            or any(r.op_type != 'QuantizeLinear' or values[r.input[1]].size > 1 for r in found)
        ):
            return None
        return found[0] if all(grid(r) == grid(found[0]) for r in found) else None

    put_before = {}  # position of a move → the pairs to put in front of it
    for at in reversed(range(len(nodes))):
        move = nodes[at]
        wanted = demand(move) if moved_inputs(move) else None
        for i in moved_inputs(move) if wanted else ():
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
            # for the moves further up: this one no longer reads `given`, its Q does
            read_by[given] = [r for r in read_by[given] if not (r[0] is move and r[1] == i)] + [(q, 0)]
    graph = [n for at, node in enumerate(nodes) for n in (*put_before.get(at, ()), node)]
    del model.graph.node[:]
    model.graph.node.extend(graph)
    return model


def check_scales(model, scales):
    """Raise QatError unless the scales in the graph are exactly `scales` (arrays), bit for bit, as sets."""
    values = constants(model)
    in_graph = {np.asarray(values[n.input[1]], np.float32).tobytes() for n in model.graph.node if n.op_type in QDQ}
    wanted = {np.asarray(s, np.float32).tobytes() for s in scales}
    if in_graph != wanted:
        raise QatError(
            f'{len(wanted - in_graph)} of {len(wanted)} scales of the model are missing in the ONNX graph, and '
            f'{len(in_graph - wanted)} are new; please report this model'
        )


def simplify(model):
    """Fold constants and drop what computes nothing (onnxslim). Keeps every Q and DQ, or raises QatError:
    a simplifier that folds the DQ of a weight turns an INT8 convolution back into a float one."""
    import onnxslim

    before = count_qdq(model)
    slim = onnxslim.slim(model)
    if count_qdq(slim) != before:
        raise QatError(
            f'--simplify: onnxslim changed the number of Q/DQ nodes from {before} to {count_qdq(slim)}; '
            'export without --simplify'
        )
    return slim


def store_int8_weights(model):
    """Store each weight as the INT8 values that its Q computes, in place: initializer → Q → DQ becomes initializer → DQ.

    Takes exactly one Q per weight, none of an activation and no DQ. The values are those of the Q, bit for bit: rounded half
    to even and saturated.
    """
    values = constants(model)
    stored = {i.name: i for i in model.graph.initializer}
    of_weights = [n for n in model.graph.node if n.op_type == 'QuantizeLinear' and n.input[0] in stored]
    for node in of_weights:
        weight, scale, zero = (values[name] for name in node.input)
        axis = [1] * weight.ndim
        if scale.ndim:
            axis[attribute(node, 'axis', 1)] = -1
        scale, zero_point, limits = scale.reshape(axis), zero.reshape(axis).astype(np.float32), np.iinfo(zero.dtype)
        steps = np.clip(np.rint(weight / scale) + zero_point, limits.min, limits.max).astype(zero.dtype)
        model.graph.initializer.append(numpy_helper.from_array(steps, node.output[0]))
        model.graph.node.remove(node)
    read = readers(model)
    for name in {node.input[0] for node in of_weights} - set(read):
        model.graph.initializer.remove(stored[name])
    return model


def set_output_shapes(model, *shapes):
    """Write the shape of each output (ints, or a name for an open axis): with an open batch axis the exporter leaves the
    other axes open too. Changes no node."""
    for output, dims in zip(model.graph.output, shapes, strict=True):
        shape = output.type.tensor_type.shape
        del shape.dim[:]
        for d in dims:
            shape.dim.add(**({'dim_param': d} if isinstance(d, str) else {'dim_value': d}))


def set_metadata(model, **props):
    """Store `props` as text in the file's metadata; keeps what else is there."""
    kept = {p.key: p.value for p in model.metadata_props}
    onnx.helper.set_model_props(model, {**kept, **{k: str(v) for k, v in props.items()}})
    return model
