"""ONNX graphs of checkpoints for edge chips: the last pass over a file, the cut in front of the head's arithmetic, and the audit's rules."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from utils.qat.graph.audit_rules import SHARED, adds, moves
from utils.qat.graph.onnx_graph import producers, replace_nodes
from utils.qat.graph.passes import absorb_relus, drop_repeated_qdq, drop_unread, set_metadata

# Not `moves`: the head's arithmetic, which no chip computes, joins boxes and classes of two scales
RULES = (*(rule for rule in SHARED if rule is not moves), partial(adds, one_scale=False))


def finish(model: ModelProto) -> ModelProto:
    """Drop what changes no value, in place; integers stay signed, as compilers for these chips want them."""
    return absorb_relus(drop_repeated_qdq(model, behind_moves=False))


def raw_heads(model: ModelProto, tensors: Mapping[str, Any], sigmoid: bool) -> ModelProto:
    """Cut a detector's graph behind the Q/DQ of its head's convolutions, in place.

    tensors: of the .tflite file of this layout, see integers.tensors_of. Here they are FP32 and [B, C, h, w]. sigmoid: end with the scores of
    the classes, instead of their logits.
    """
    graph, nodes, made, ends = model.graph, list(model.graph.node), producers(model), list[str]()
    unit = {'unit': np.float32(1 / 256), 'lowest': np.int8(-128)}  # scale and zero point of a sigmoid, which is in 0..1
    for node in model.graph.node:
        source = made.get(node.input[0]) if node.op_type == 'DequantizeLinear' else None  # the Q
        found = re.search(r'/cv([23])\.(\d)\.2/Conv_output_0$', source.input[0]) if source else None
        if not found:
            continue
        name = f'{"box" if found[1] == "2" else "cls"}{8 << int(found[2])}'
        ends.append(name)
        if sigmoid and name.startswith('cls'):
            logit, score, steps = (f'{name} {what}' for what in ('logit', 'score', 'steps'))
            node.output[0] = logit
            nodes += [
                helper.make_node('Sigmoid', [logit], [score], score),
                helper.make_node('QuantizeLinear', [score, *unit], [steps], steps),
                helper.make_node('DequantizeLinear', [steps, *unit], [name], name),
            ]
        else:
            node.output[0] = name
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in unit.items())
    read, kept = {*ends}, []
    for node in reversed(nodes):  # a node stands behind those that it reads
        if read & {*node.output}:
            read |= {*node.input}
            kept.append(node)
    del graph.output[:], graph.value_info[:]
    for name in tensors:
        if name in ends:
            batch, height, width, channels = tensors[name]['shape']
            shape = [batch, channels, height, width]
            graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    set_metadata(model, layout='heads', sigmoid=sigmoid, tensors=json.dumps(tensors))
    return drop_unread(replace_nodes(model, kept[::-1]))
