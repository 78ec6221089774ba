"""Find out which Q and DQ are fused into neighbouring kernels, and which cost a kernel of their own.

The sources are in audit_rules.py. Reduce operators count as float: no source says that TensorRT has them in INT8.
"""

from collections.abc import Iterator

from onnx import NodeProto

from utils.qat.graph.onnx_graph import CONVS, ELEMENTWISE, QDQ, WEIGHTED, Graph, moved_inputs, name_of

# A Q behind these has no better place: a linear layer reads a normalization, or the mean of a map, one number per channel
FLOAT_MAKERS = {'LayerNormalization', 'GlobalAveragePool'}
QUANTIZABLE = {'Add', 'AveragePool', 'GlobalAveragePool'}  # run in INT8 if their inputs and outputs are quantized
IN_THE_WAY = {'Cast', 'Identity'}  # have a rule of their own, see audit_rules.py


def unabsorbed(graph: Graph) -> Iterator[tuple[NodeProto, str]]:
    """Find every Q and DQ that needs its own kernel, or that needs none but wastes precision, with the reason.

    A convolution or matrix product absorbs a DQ of its data or weight. So does a QUANTIZABLE operator that a Q follows. A DQ
    moves behind operators that only move values. The kernel that computes the input of a Q absorbs it if it can write INT8;
    so does the reformatting of the graph's input.
    """
    for node in graph.nodes:
        if node.op_type == 'DequantizeLinear':
            uses = graph.uses(node.output[0])
            reasons = [reason for use in uses for reason in [_loose_dq(graph, node, *use)] if reason]
            if not uses or reasons:
                yield node, '; '.join(dict.fromkeys(reasons)) or 'nothing reads it'
        elif node.op_type == 'QuantizeLinear':
            reason = _loose_q(graph, node)
            if reason:
                yield node, reason


def _loose_dq(graph: Graph, dq: NodeProto, reader: NodeProto | None, i: int) -> str:
    """Return why input `i` of `reader` (None: the graph's caller) does not absorb `dq`; '' if it does."""
    if reader is None:
        return 'the graph returns it'
    if reader.op_type == 'QuantizeLinear':
        return f'{name_of(reader)} quantizes it again at once' if reader.input[0] == dq.output[0] else ''
    if reader.op_type in WEIGHTED:
        return f'{name_of(reader)} wants its bias in float' if i > 1 else ''
    if reader.op_type in QUANTIZABLE:
        return '' if id(reader) in graph.quantized_behind else f'{name_of(reader)} makes float of it'
    if reader.op_type in IN_THE_WAY:
        return ''  # a finding of `in_the_way`
    q = graph.producer.get(dq.input[0])
    inside = (
        q is not None
        and graph.op(q.input[0]) in CONVS
        and (reader.op_type == 'Mul' or graph.activation_of(reader) is not None)
    )
    return (
        f'{name_of(reader)} has no INT8 kernel{", and is the activation of the convolution in front" if inside else ""}'
    )


def _loose_q(graph: Graph, q: NodeProto) -> str:
    """Return why nothing absorbs `q`; '' if a kernel does."""
    readers = [n for n, _ in graph.readers.get(q.output[0], ())]
    wrong = [name_of(n) for n in readers if n.op_type not in IN_THE_WAY | {'DequantizeLinear'}]
    if wrong or not readers:
        return f'{", ".join(wrong)} reads it, no DQ' if wrong else 'nothing reads it'
    maker = graph.producer.get(q.input[0])
    if (
        q.input[0] in graph.fixed
        or maker is None
        or maker.op_type in WEIGHTED | ELEMENTWISE | IN_THE_WAY | QDQ | FLOAT_MAKERS
        or moved_inputs(maker)
    ):
        return ''
    if maker.op_type in QUANTIZABLE:
        return '' if graph.dequantized(maker.input[0]) else f'{name_of(maker)} reads float'
    return f'{name_of(maker)} cannot write INT8'
