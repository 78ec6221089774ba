"""Let Concats and convolutions read whole tensors, of which they read parts; no output changes.

Where a tensor is split, and its parts go into one Concat, as in upstream's ELAN blocks, engines copy each part.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto

from utils.qat.graph.arranged import NEW, Arranged
from utils.qat.graph.channels import CHANNELS, Tensors
from utils.qat.graph.onnx_graph import QDQ, Graph, attribute, replace_nodes
from utils.qat.graph.passes import drop_unneeded


class Part(NamedTuple):
    """Channels `start` to `end` of a tensor."""

    tensor: str
    start: int
    end: int


def read_whole(model: ModelProto, multiple: int = 1) -> int:
    """Let Concats read a tensor in place of all its parts, and convolutions a tensor in place of a part; return how many do.

    The graph is changed in place, and only if some do. Weights for the other channels are 0. A convolution reads the whole if then
    nothing reads the part, and one larger than 1 × 1 only if that computes no more once widths are padded to `multiple`. Constants
    must be initializers.
    """
    tensors = Tensors(model)
    joined, wide = _readers(tensors, multiple)
    arranged, changed = Arranged(model, tensors.graph, 'whole'), 0
    for node in tensors.graph.nodes:
        result = node.output[0]
        if result in joined:
            changed += joined[result] != list(node.input)
            node.input[:] = joined[result]
        elif result in wide:
            part = wide[result]
            layout = np.full(tensors.number[part.tensor], NEW)
            layout[part.start : part.end] = np.arange(part.end - part.start)
            node.input[0], node.input[1] = part.tensor, arranged.stored(node.input[1], {1: layout})
            changed += 1
        arranged.nodes.append(node)
    if changed:
        del model.graph.value_info[:]
        drop_unneeded(replace_nodes(model, arranged.nodes))
    return changed


def _readers(tensors: Tensors, multiple: int) -> tuple[dict[str, list[str]], dict[str, Part]]:
    """Find the readers of parts, by their outputs: Concats → their new inputs, and convolutions that read the whole → their part."""
    graph = tensors.graph
    joined = {
        node.output[0]: _joined(node.input, tensors)
        for node in graph.nodes
        if node.op_type == 'Concat' and node.output[0] in tensors.number and tensors.along(node)
    }
    wide = {
        node.output[0]: part
        for node in graph.nodes
        if node.op_type == 'Conv' and attribute(node, 'group', 1) == 1 and node.input[1] in graph.fixed
        if (part := _part(tensors, node.input[0])) and _is_free(tensors, node, part, multiple)
    }

    def is_left(name: str) -> bool:
        """Tell whether something still reads a part, perhaps behind Q/DQ."""
        return name in graph.outputs or any(
            is_left(node.output[0])
            if node.op_type in QDQ
            else node.output[0] not in wide and name in joined.get(node.output[0], [name])
            for node, _ in graph.readers.get(name, ())
        )

    given = {node.output[0]: _behind_qdq(graph, node.input[0]) for node in graph.nodes if node.output[0] in wide}
    return joined, {result: part for result, part in wide.items() if not is_left(given[result])}


def _behind_qdq(graph: Graph, name: str) -> str:
    """Return the tensor that a Q/DQ quantizes; any other tensor itself."""
    if graph.op(name) in QDQ:
        return _behind_qdq(graph, graph.producer[name].input[0])
    return name


def _part(tensors: Tensors, name: str) -> Part | None:
    """Return the channels of another tensor that a tensor consists of; None if it is no part.

    A Q/DQ behind the part counts for nothing if the tensor comes from a DQ of the same scale.
    """
    graph = tensors.graph
    node = graph.producer.get(name)
    if node is None or name not in tensors.number:
        return None
    if node.op_type == 'DequantizeLinear':
        q = graph.producer[node.input[0]]
        part = _part(tensors, q.input[0]) if q.op_type == 'QuantizeLinear' else None
        made_by = graph.producer.get(part.tensor) if part else None
        same = made_by is not None and made_by.op_type == 'DequantizeLinear' and graph.grid(made_by) == graph.grid(q)
        return part if same else None
    start = None
    if node.op_type == 'Slice' and tensors.axes(node) == [CHANNELS]:  # not a part of the rows, and none turned round
        start = tensors.start(node)
    elif node.op_type == 'Split' and tensors.along(node):
        start = sum(tensors.number[each] for each in node.output[: list(node.output).index(name)])
    return None if start is None else Part(node.input[0], start, start + tensors.number[name])


def _joined(names: Sequence[str], tensors: Tensors) -> list[str]:
    """Return the inputs of a Concat with the whole tensor in place of all its parts, where they follow one another."""
    parts, joined, i = [_part(tensors, name) for name in names], [], 0
    while i < len(parts):
        first, n = parts[i], _make_up_whole(parts[i:], tensors.number)
        joined.append(first.tensor if first and n else names[i])
        i += n or 1
    return joined


def _make_up_whole(parts: Sequence[Part | None], number: Mapping[str, int]) -> int:
    """Return how many of the first parts are all parts of one tensor, in order; 0 if they are not."""
    first, end = parts[0], 0
    for n, part in enumerate(parts, 1):
        if part is None or first is None or part.tensor != first.tensor or part.start != end:
            break
        end = part.end
        if end == number[part.tensor]:
            return n
    return 0


def _is_free(tensors: Tensors, conv: NodeProto, part: Part, multiple: int) -> bool:
    """Tell whether a convolution costs about the same with a whole tensor as with a part of it."""
    weight = tensors.types[conv.input[1]][1]
    whole, alone = (-(-n // multiple) for n in (tensors.number[part.tensor], part.end - part.start))
    return all(n == 1 for n in weight[2:]) or whole <= alone
