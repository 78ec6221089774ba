"""The rules of TensorRT's explicit quantization for a Q/DQ graph, one function each.

Another placement of Q and DQ, or other scales, would repair a finding; a consequence of the network itself is none.
Nothing is measured.

Sources: TensorRT's developer guide (explicit quantization, Q/DQ placement), NvInfer.h (IQuantizeLayer), the ONNX
parsers of 8.6 to 11, and NVIDIA/Model-Optimizer (`get_concat_eliminated_tensors`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from utils.qat.graph.onnx_graph import (
    CONVS,
    ELEMENTWISE,
    FLOAT,
    IN_THE_WAY,
    QDQ,
    QUANTIZABLE,
    WEIGHTED,
    Graph,
    attribute,
    moved_inputs,
    name_of,
)

# A Q behind these has no better place: a linear layer reads a normalization, or the mean of a map, one number per channel
FLOAT_MAKERS = {'LayerNormalization', 'GlobalAveragePool'}
HEAD, DFL, CHOICE = 'output of the head', 'integral over the box distribution (DFL)', 'by choice'

FINDINGS = {  # kind → its meaning
    'not quantized': 'no convolution and no matrix product runs in INT8',
    'float conv': 'convolutions that run in float',
    'groups': 'INT8 convolutions with groups, which TensorRT 10.6 computes wrongly',
    'two scales': 'tensors wanted in two scales',
    'mixed': 'tensors wanted in a scale and in float',
    'unequal concat': 'Concats with unequal scales',
    'unequal move': 'other operators that move values, with unequal scales',
    'half add': 'Adds half quantized',
    'unequal add': 'Adds of unequal scales',
    'not absorbed': 'Q/DQ that no kernel absorbs',
    'open end': 'kernels that read integers and return float',
    'duplicate': 'equal Q on one tensor',
    'in the way': 'Identity, Cast or Constant in the way',
    'zero point': 'zero points missing, not zero or not INT8',
    'scale': "scales not positive, subnormal, not finite or not equal to the Q's",
    'axis': 'per-channel Q/DQ with a missing or wrong axis',
}


@dataclass
class Finding:
    """A place that breaks a rule: a key of FINDINGS, the name of a node or tensor, and the fault in words."""

    kind: str
    where: str
    detail: str


def is_int8(graph: Graph, node: NodeProto) -> bool:
    """Tell whether a convolution reads both its data and its weight directly from a DQ."""
    return node.op_type in CONVS and all(graph.op(name) == 'DequantizeLinear' for name in node.input[:2])


def float_reason(graph: Graph, node: NodeProto) -> str:
    """Return why a convolution runs in float: HEAD, DFL or CHOICE if this is right, another text if it is a finding.

    HEAD: neither a Q nor a convolution follows it (see `Graph.ends`). If only one of data and weight is quantized, it is
    always a finding, because that DQ is wasted, unless `_ends_a_kernel`.
    """
    lacks = [what for what, name in zip(('input', 'weight'), node.input) if graph.op(name) != 'DequantizeLinear']
    if lacks == ['weight'] and _ends_a_kernel(graph, graph.producer[node.input[0]]):
        lacks = ['input', 'weight']
    if len(lacks) == 2 and graph.by_choice(node):
        return CHOICE
    if len(lacks) == 2 and graph.is_dfl(node):
        return DFL
    return HEAD if len(lacks) == 2 and graph.ends.issuperset(node.output) else f'{" and ".join(lacks)} not quantized'


def _ends_a_kernel(graph: Graph, dq: NodeProto) -> bool:
    """Tell whether an INT8 convolution computes the integers of a DQ, for an engine that needs a Q after it.

    Only such an engine takes unsigned integers.
    """
    q = graph.producer.get(dq.input[0])
    conv = graph.producer.get(q.input[0]) if q is not None else None
    zero = graph.values.get(dq.input[2]) if len(dq.input) > 2 else None
    return conv is not None and is_int8(graph, conv) and zero is not None and zero.dtype == np.uint8


def float_convs(graph: Graph) -> Iterator[Finding]:
    """Find the convolutions that do not read INT8 data and an INT8 weight.

    The last convolutions of the head, DFL, and convolutions in float by choice are no findings.
    """
    convs = [n for n in graph.nodes if n.op_type in CONVS]
    if not any(all(map(graph.dequantized, n.input[:2])) for n in graph.nodes if n.op_type in WEIGHTED):
        yield Finding('not quantized', 'the graph', f'{len(convs)} convolutions, none of them behind DQ nodes')
    for node in convs:
        if not is_int8(graph, node) and float_reason(graph, node) not in (HEAD, DFL, CHOICE):
            yield Finding('float conv', name_of(node), float_reason(graph, node))


def convs_with_groups(graph: Graph) -> Iterator[Finding]:
    """Find the INT8 convolutions with groups; docs/tensorrt.md#measured. A group for each channel counts in FP16 graphs alone."""
    for node in graph.nodes:
        groups = attribute(node, 'group', 1)
        if groups == 1 or not is_int8(graph, node):
            continue
        weight = graph.values.get(graph.unquantized(node.input[1]))
        in_fp16 = graph.values[graph.producer[node.input[0]].input[1]].dtype == np.float16
        if in_fp16 or weight is None or weight.shape[1] > 1:
            yield Finding('groups', name_of(node), f'{groups} groups')


def demands(graph: Graph) -> Iterator[Finding]:
    """Find the tensors whose readers need several scales, or a scale and float.

    The kernel that computes a tensor writes it once. So all its readers, also those behind operators that only move values,
    should need the same scale, or all of them float.
    """
    for name in [*graph.inputs, *graph.producer]:
        node = graph.producer.get(name)
        if name in graph.fixed or (node is not None and (node.op_type in QDQ or moved_inputs(node))):
            continue
        asked = graph.asked(name)
        detail = '; '.join(f'{_text(what)}: {", ".join(dict.fromkeys(who))}' for what, who in asked.items())
        scales = len(asked) - (FLOAT in asked)
        if scales > 1:
            yield Finding('two scales', name, detail)
        if scales and FLOAT in asked:
            yield Finding('mixed', name, detail)


def _text(what: object) -> str:
    return f'scale {what:.6g}' if isinstance(what, float) else str(what)


def _all(forms: Iterable[object]) -> str:
    return ', '.join(sorted(map(_text, forms))) or 'nothing'


def moves(graph: Graph) -> Iterator[Finding]:
    """Find the operators that only move values, but have several scales at inputs and outputs.

    Such an operator runs in INT8 if all its inputs, and all readers of its outputs, have one scale. Without any quantization
    it is right too. A QUANTIZABLE reader may replace a Q. A move with a reader that is in float by choice is not checked: it
    cannot serve this reader and a Q at once.
    """
    for node in graph.nodes:
        if any(graph.by_choice(use) for name in node.output for use, _ in graph.uses(name)):
            continue
        given = [node.input[i] for i in moved_inputs(node) if node.input[i] not in graph.fixed]
        if not given:
            continue
        sources = set().union(*map(graph.sources, given))
        reads = {graph.scale(graph.producer[o]) if graph.op(o) == 'DequantizeLinear' else FLOAT for o in sources}
        makes = set()
        for use, _ in (u for name in node.output for u in graph.uses(name)):
            if use is not None and use.op_type == 'QuantizeLinear':
                makes.add(graph.scale(use))
            elif use is None or use.op_type not in QUANTIZABLE:
                makes.add(FLOAT)
        if len(reads | makes) > 1:
            yield Finding(
                'unequal concat' if node.op_type == 'Concat' else 'unequal move',
                name_of(node),
                f'reads {_all(reads)}; makes {_all(makes)}',
            )


def _addends(graph: Graph, node: NodeProto) -> list[str]:
    """Return the addends of a sum in order; an Add that only this Add reads is part of the sum."""
    addends: list[str] = []
    waiting = [(name, node) for name in reversed(node.input)]
    while waiting:
        name, reader = waiting.pop()
        if graph.op(name) == 'Add' and graph.only_reader(name) is reader:
            waiting += [(addend, graph.producer[name]) for addend in reversed(graph.producer[name].input)]
        elif name not in graph.fixed:
            addends.append(name)
    return addends


def _from_int8_conv(graph: Graph, tensor: str) -> bool:
    """Tell whether an INT8 convolution, or its activation function, computes `tensor`."""
    node = graph.producer.get(tensor)
    x = graph.activation_of(node) if node else None
    conv = graph.producer.get(x or tensor)
    return conv is not None and is_int8(graph, conv)


def adds(graph: Graph, one_scale: bool = True) -> Iterator[Finding]:
    """Find the sums whose addends are not all quantized with one scale; sums without any quantized addend are right.

    One addend that an INT8 convolution (and its activation) computes may stay float beside quantized ones: the Add is then
    fused into the convolution, as NVIDIA recommends for a shortcut. Without `one_scale` only partly quantized sums are
    findings.
    """
    for node in graph.nodes:
        reader = graph.only_reader(node.output[0]) if node.op_type == 'Add' else node
        if node.op_type != 'Add' or (reader is not None and reader.op_type == 'Add') or graph.by_choice(node):
            continue
        addends = _addends(graph, node)
        quantized = [a for a in addends if graph.dequantized(a)]
        rest = [a for a in addends if not graph.dequantized(a)]
        scales = {graph.scale(graph.producer[o]) for a in quantized for o in graph.sources(a)}
        if quantized and (len(rest) > 1 or (rest and not _from_int8_conv(graph, rest[0]))):
            yield Finding('half add', name_of(node), f'in float: {", ".join(rest)}')
        if one_scale and len(scales) > 1:
            yield Finding('unequal add', name_of(node), _all(scales))


def not_absorbed(graph: Graph) -> Iterator[Finding]:
    """Find every Q and DQ that needs its own kernel, or that needs none but wastes precision.

    A convolution or matrix product absorbs a DQ of its data or weight. So does a QUANTIZABLE operator that a Q follows. A DQ
    moves behind operators that only move values. The kernel that computes the input of a Q absorbs it if it can write INT8;
    so does the reformatting of the graph's input. Reduce operators count as float: no source says that TensorRT has them in INT8.
    """
    for node in graph.nodes:
        reason = ''
        if node.op_type == 'DequantizeLinear':
            uses = graph.uses(node.output[0])
            reasons = [_loose_dq(graph, node, *use) for use in uses] or ['nothing reads it']
            reason = '; '.join(dict.fromkeys(filter(None, reasons)))
        elif node.op_type == 'QuantizeLinear':
            reason = _loose_q(graph, node)
        if reason:
            yield Finding('not absorbed', name_of(node), reason)


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
        or graph.by_choice(maker)
        or maker.op_type in WEIGHTED | ELEMENTWISE | IN_THE_WAY | QDQ | FLOAT_MAKERS
        or moved_inputs(maker)
    ):
        return ''
    if maker.op_type in QUANTIZABLE:
        return '' if graph.dequantized(maker.input[0]) else f'{name_of(maker)} reads float'
    return f'{name_of(maker)} cannot write INT8'


def open_ends(graph: Graph) -> Iterator[Finding]:
    """Find the kernels that read only integers, but whose result a reader takes in float.

    An engine that cannot fuse a float operator into an integer kernel computes both in float. Results for the last
    convolutions of the head, or for operators in float by choice, are no findings.
    """
    for node in graph.nodes:
        inputs = [name for name in node.input[:2] if name and name not in graph.fixed]
        kernel = node.op_type in {*QUANTIZABLE, *CONVS, 'Sigmoid', 'Mul'}
        if not kernel or not inputs or not all(graph.op(name) == 'DequantizeLinear' for name in inputs):
            continue
        readers = [use for use, _ in graph.uses(node.output[0]) if use is not None and use.op_type != 'QuantizeLinear']
        loose = [
            r
            for r in readers
            if not graph.by_choice(r) and (r.op_type not in CONVS or float_reason(graph, r) not in (HEAD, DFL, CHOICE))
        ]
        if loose and not graph.ends.issuperset(node.output):
            yield Finding('open end', name_of(node), f'read in float by {", ".join(map(name_of, loose))}')


def duplicates(graph: Graph) -> Iterator[Finding]:
    """Find the activations that are quantized twice with one scale. Weights may be: the builder folds them."""
    same: dict[tuple[str, object], list[str]] = {}
    for node in graph.nodes:
        if node.op_type == 'QuantizeLinear' and node.input[0] not in graph.fixed:
            same.setdefault((node.input[0], graph.scale(node)), []).append(name_of(node))
    for (tensor, _), names in same.items():
        if len(names) > 1:
            yield Finding('duplicate', tensor, ', '.join(names))


def in_the_way(graph: Graph) -> Iterator[Finding]:
    """Find the nodes between Q and DQ, or between Q/DQ and the kernel that absorbs it.

    Scales and zero points must be initializers: a node that computes one is a finding too.
    """
    fed = {
        name: (node, what)
        for node in graph.nodes
        if node.op_type in QDQ
        for what, name in zip(('scale', 'zero point'), node.input[1:])
        if name in graph.producer
    }
    for name, (node, what) in fed.items():
        yield Finding('in the way', name_of(graph.producer[name]), f'feeds the {what} of {name_of(node)}')
    for node in graph.nodes:
        if node.op_type in IN_THE_WAY:
            before = graph.producer.get(node.input[0])
            behind = [n for n, _ in graph.uses(node.output[0]) if n is not None]
            quantizes = any(n.op_type == 'QuantizeLinear' for n in behind)
            if before is not None and (before.op_type in QDQ or (quantizes and node.input[0] not in graph.fixed)):
                yield Finding(
                    'in the way', name_of(node), f'between {name_of(before)} and {", ".join(map(name_of, behind))}'
                )


def numbers(graph: Graph, zero_points: str = 'none') -> Iterator[Finding]:
    """Find wrong zero points, scales and axes. Zero points of activations: see vendors.vendor.Target.

    Zero points are INT8 zeros ('unsigned': UINT8 zeros too; 'any': any UINT8). Scales are positive normal numbers, the same in
    DQ as in Q. Only weights are per-channel, along the output channel, with an explicit axis. A fault that a Q and its DQ
    share is reported for the DQ.
    """
    for node in graph.nodes:
        pairs = [
            n
            for n, _ in graph.readers.get(node.output[0], ())
            if n.op_type == 'DequantizeLinear'
            and n.input[1:] == node.input[1:]
            and attribute(n, 'axis') == attribute(node, 'axis')
        ]
        if node.op_type not in QDQ or pairs:
            continue
        where, scale = name_of(node), graph.values.get(node.input[1])
        zero = graph.values.get(node.input[2]) if len(node.input) > 2 else None
        if len(node.input) < 3 or not node.input[2]:
            yield Finding('zero point', where, 'missing; TensorRT 8.6 wants it written')
        elif zero is not None and (wrong := _wrong_zero(zero, node.output[0] not in graph.fixed, zero_points)):
            yield Finding('zero point', where, wrong)
        q = graph.producer.get(node.input[0])
        if (
            node.op_type == 'DequantizeLinear'
            and q is not None
            and q.op_type == 'QuantizeLinear'
            and q.input[1] != node.input[1]
            and graph.scale(q) != graph.scale(node)
        ):
            yield Finding('scale', where, f'differs from that of {name_of(q)}')
        if scale is None:
            continue  # computed: see `in_the_way`
        tiny = np.finfo(np.float16 if scale.dtype == np.float16 else np.float32).tiny
        for what, bad in (
            ('not finite', ~np.isfinite(scale)),
            ('negative', scale < 0),
            ('zero', scale == 0),
            (f'subnormal in {scale.dtype}', (scale > 0) & (scale < tiny)),
        ):
            if bad.any():
                yield Finding('scale', where, f'{np.count_nonzero(bad)} of {scale.size} {what}')
        if scale.size > 1:
            axis = attribute(node, 'axis')
            kernels = {
                n.op_type for n, i in graph.uses(node.output[0]) if n is not None and n.op_type in CONVS and i == 1
            }
            wanted = 1 if 'ConvTranspose' in kernels else 0
            if node.output[0] not in graph.fixed:
                yield Finding('axis', where, 'an activation is quantized per channel')
            elif axis is None:
                yield Finding('axis', where, 'not written; parsers differ in what they take instead')
            elif kernels and axis != wanted:
                yield Finding('axis', where, f'{axis}, the output channels are on {wanted}')


def _wrong_zero(zero: np.ndarray, activation: bool, zero_points: str) -> str:
    """Say what is wrong with a zero point; '' if nothing is. See `numbers`."""
    unsigned = activation and zero.dtype == np.uint8 and zero.ndim == 0
    if activation and zero_points == 'any':
        return '' if unsigned else f'{zero.dtype} {zero.tolist()}, not one of uint8'
    if unsigned and zero_points == 'unsigned' and zero == 0:
        return ''
    if zero.dtype != np.int8:
        return f'{zero.dtype}, not int8'
    return f'{np.count_nonzero(zero)} of {zero.size} are not 0' if zero.any() else ''


Rules = tuple[Callable[[Graph], Iterator[Finding]], ...]

SHARED: Rules = (float_convs, demands, moves, duplicates, in_the_way)
CHECKS: Rules = (*SHARED, convs_with_groups, adds, not_absorbed, numbers)
