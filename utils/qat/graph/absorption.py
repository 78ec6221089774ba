"""Which Q and DQ disappear into the kernels beside them, and which cost a kernel of their own.

Sources as in audit_rules.py. Reduce operators are taken as float: nothing read says that TensorRT has them in INT8.
"""

from utils.qat.graph.onnx_graph import CONVS, ELEMENTWISE, QDQ, WEIGHTED, moved_inputs, name_of

QUANTIZABLE = {
    'Add',
    'AveragePool',
    'GlobalAveragePool',
}  # run in INT8 if what they read and what they make is quantized
IN_THE_WAY = {'Cast', 'Identity'}  # a rule of its own, see audit_rules.py


def unabsorbed(graph):
    """(node, reason) of every Q and DQ that runs as a kernel of its own, or as none but wastes precision.

    A DQ is absorbed by a convolution or matrix product (data and weight), by operators that are QUANTIZABLE if a Q follows
    them, and moves behind operators that only move values. A Q is absorbed by what computes its input, if that can write
    INT8, and by the reformatting of the graph's input.
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


def _loose_dq(graph, dq, reader, i):
    if reader is None:
        return 'the graph returns it'
    if reader.op_type == 'QuantizeLinear':
        return f'{name_of(reader)} quantizes it again at once' if reader.input[0] == dq.output[0] else ''
    if reader.op_type in WEIGHTED:
        return f'{name_of(reader)} wants its bias in float' if i > 1 else ''
    if reader.op_type in QUANTIZABLE:
        return '' if id(reader) in graph.quantized_behind else f'{name_of(reader)} makes float of it'
    if reader.op_type in IN_THE_WAY:
        return ''  # says `in_the_way`
    q = graph.producer.get(dq.input[0])
    inside = (
        q is not None
        and graph.op(q.input[0]) in CONVS
        and (reader.op_type == 'Mul' or graph.activation_of(reader) is not None)
    )
    return (
        f'{name_of(reader)} has no INT8 kernel{", and is the activation of the convolution in front" if inside else ""}'
    )


def _loose_q(graph, q):
    readers = [n for n, _ in graph.readers.get(q.output[0], ())]
    wrong = [name_of(n) for n in readers if n.op_type not in IN_THE_WAY | {'DequantizeLinear'}]
    if wrong or not readers:
        return f'{", ".join(wrong)} reads it, no DQ' if wrong else 'nothing reads it'
    maker = graph.producer.get(q.input[0])
    if (
        q.input[0] in graph.fixed
        or maker is None
        or maker.op_type in WEIGHTED | ELEMENTWISE | IN_THE_WAY | QDQ
        or moved_inputs(maker)
    ):
        return ''
    if maker.op_type in QUANTIZABLE:
        return '' if graph.dequantized(maker.input[0]) else f'{name_of(maker)} reads float'
    return f'{name_of(maker)} cannot write INT8'
