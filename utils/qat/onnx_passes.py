"""Passes over an exported ONNX graph, one function each, each with the invariant it keeps.

Imports no torch: the passes work on any Q/DQ graph.
"""
import numpy as np
import onnx

from utils.qat.errors import QatError
from utils.qat.onnx_graph import attribute, constants, count_qdq, readers


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


def check_scales(model, scales):
    """Raise QatError unless the scales in the graph are exactly `scales` (arrays), bit for bit, as sets."""
    values = constants(model)
    in_graph = {np.asarray(values[n.input[1]], np.float32).tobytes() for n in model.graph.node if n.op_type == 'QuantizeLinear'}
    wanted = {np.asarray(s, np.float32).tobytes() for s in scales}
    if in_graph != wanted:
        raise QatError(f'{len(wanted - in_graph)} of {len(wanted)} scales of the model are missing in the ONNX graph, and '
                       f'{len(in_graph - wanted)} are new; please report this model')


def simplify(model):
    """Fold constants and drop what computes nothing (onnxslim). Keeps every Q and DQ, or raises QatError:
    a simplifier that folds the DQ of a weight turns an INT8 convolution back into a float one."""
    import onnxslim
    before = count_qdq(model)
    slim = onnxslim.slim(model)
    if count_qdq(slim) != before:
        raise QatError(f'--simplify: onnxslim changed the number of Q/DQ nodes from {before} to {count_qdq(slim)}; '
                       'export without --simplify')
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
        model.graph.initializer.append(onnx.numpy_helper.from_array(steps, node.output[0]))
        model.graph.node.remove(node)
    read = readers(model)
    for name in {node.input[0] for node in of_weights} - set(read):
        model.graph.initializer.remove(stored[name])
    return model


def set_output_shape(model, *dims):
    """Write the shape of the first output (ints, or a name for an open axis): with an open batch axis the exporter
    leaves the other axes open too. Changes no node."""
    shape = model.graph.output[0].type.tensor_type.shape
    del shape.dim[:]
    for d in dims:
        shape.dim.add(**({'dim_param': d} if isinstance(d, str) else {'dim_value': d}))


def set_metadata(model, **props):
    """Store `props` as text in the file's metadata; keeps what else is there."""
    kept = {p.key: p.value for p in model.metadata_props}
    onnx.helper.set_model_props(model, {**kept, **{k: str(v) for k, v in props.items()}})
    return model
