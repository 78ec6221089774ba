"""Let convolutions read the addends of a sum in place of it: W (a + b) = W a + W b.

In upstream's RepNCSP blocks a Concat joins the sum of the last residual Add with another tensor, and a 1 × 1 convolution reads it. TensorRT
computes each such Add by a kernel of its own, because there is a SiLU before it. Without them yolov9-c takes 4 to 6 % less time
(docs/tensorrt.md#measured); narrow sums gain nothing.
"""

from itertools import chain

import numpy as np
from onnx import ModelProto, NodeProto

from utils.qat.graph.arranged import Arranged
from utils.qat.graph.channels import Tensors
from utils.qat.graph.onnx_graph import QDQ, Graph, attribute, replace_nodes
from utils.qat.graph.passes import drop_unneeded


def split_sums(model: ModelProto, widths: float) -> ModelProto:
    """Replace in Concats each sum of `widths` channels or more by its addends, in place, if a single 1 × 1 convolution reads the Concat.

    Sum and addends must have Q/DQ of one scale, and nothing else may read the sum. A sum beyond the range of INT8 is no longer cut off; no
    other value changes. Constants must be initializers.
    """
    tensors = Tensors(model)
    graph, layouts = tensors.graph, dict[str, np.ndarray]()  # of the weights of convolutions, by their outputs
    arranged = Arranged(model, graph, 'sums')
    for node in graph.nodes:
        conv = _reader(graph, node.output[0]) if node.op_type == 'Concat' and node.output[0] in tensors.number else None
        if conv is not None and tensors.along(node) and _mixes_channels(tensors, conv):
            read = [_addends(tensors, name) if tensors.number[name] >= widths else [name] for name in node.input]
            ends = np.cumsum([tensors.number[name] for name in node.input])
            parts = [np.arange(end - tensors.number[name], end) for name, end in zip(node.input, ends)]
            layouts[conv.output[0]] = np.concatenate([part for part, names in zip(parts, read) for _ in names])
            node.input[:] = chain.from_iterable(read)
        elif node.output[0] in layouts:
            node.input[1] = arranged.stored(node.input[1], {1: layouts[node.output[0]]})
        arranged.nodes.append(node)
    del model.graph.value_info[:]
    return drop_unneeded(replace_nodes(model, arranged.nodes))


def _reader(graph: Graph, name: str) -> NodeProto | None:
    """Return the node that alone reads a tensor, perhaps behind Q/DQ; None if several read it, or if it is an output."""
    node = graph.only_reader(name)
    return _reader(graph, node.output[0]) if node is not None and node.op_type in QDQ else node


def _mixes_channels(tensors: Tensors, node: NodeProto) -> bool:
    """Tell whether a node is a 1 × 1 convolution with one group and stored weights."""
    return (
        node.op_type == 'Conv'
        and attribute(node, 'group', 1) == 1
        and node.input[1] in tensors.graph.fixed
        and all(n == 1 for n in tensors.types[node.input[1]][1][2:])
    )


def _addends(tensors: Tensors, name: str) -> list[str]:
    """Return the addends of a sum behind Q/DQ, which only the reader of `name` reads, if these have its scale and shape; else [name]."""
    graph = tensors.graph
    dq = graph.producer.get(name)
    q = graph.producer.get(dq.input[0]) if dq is not None and dq.op_type == 'DequantizeLinear' else None
    add = graph.producer.get(q.input[0]) if q is not None else None
    if q is None or add is None or add.op_type != 'Add' or _reader(graph, add.output[0]) is None:
        return [name]
    sources = [graph.producer.get(addend) for addend in add.input]
    alike = all(s is not None and s.op_type == 'DequantizeLinear' and graph.grid(s) == graph.grid(q) for s in sources)
    whole = all(tensors.types[addend] == tensors.types[name] for addend in add.input)  # none is broadcast
    return list(add.input) if alike and whole else [name]
