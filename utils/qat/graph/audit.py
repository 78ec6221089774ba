"""Audit a Q/DQ graph: find the parts that TensorRT can run in INT8, and avoidable costs.

Findings (see audit_rules.py) are places that another placement of Q/DQ or other scales would repair. Convolutions in
float at the end of the head, and convolutions whose channels do not fill whole INT8 tiles, are properties of the network:
information, no findings.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import onnx

from utils.qat.core.text import counted, listed, markdown_table, number, visible
from utils.qat.graph.audit_rules import CHECKS, CHOICE, DFL, FINDINGS, HEAD, Finding, Rules, float_reason, is_int8
from utils.qat.graph.onnx_graph import (
    CONVS,
    QDQ,
    WEIGHTED,
    Graph,
    attribute,
    axes_of,
    count_qdq,
    metadata_value,
    name_of,
    opset,
    required_inputs,
)
from utils.qat.graph.padding import PADDED
from utils.qat.graph.tensor_types import Types, flops, infer

TILE = 16  # channels: INT8 tensor cores work on multiples of this
TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: 'FP32',
    onnx.TensorProto.FLOAT16: 'FP16',
    onnx.TensorProto.BFLOAT16: 'BF16',
}


@dataclass
class Convolution:
    """A convolution of the graph.

    Attributes:
        reason: why it runs in float; '' if it runs in INT8.
        channels: in and out, per group; None if the weight is computed.
        first: it reads the image.
        flops: per inference, 2 per multiply-add; None if the shapes do not follow from the graph.
    """

    name: str
    int8: bool
    reason: str
    channels: tuple[int, int] | None
    first: bool
    flops: int | None


@dataclass
class Audit:
    """The audit of a graph.

    Attributes:
        images: input name → shape, an open axis by its name; [] if it is unknown.
        layers: operator → number of nodes between image and output, without Q and DQ.
        typing: FP32, FP16, BF16 or other → number of these nodes with such an output.
        qdq: number of Q and of DQ nodes.
        parameters: number of values in weights and biases.
        padded: the multiple to which widths were padded, by the metadata; 0 if they were not.
        findings: the places that break a rule.
    """

    opset: int
    images: dict[str, list[int | str]]
    layers: dict[str, int]
    typing: dict[str, int]
    qdq: tuple[int, int]
    parameters: int
    padded: int
    convs: list[Convolution]
    findings: list[Finding]

    @property
    def misaligned(self) -> list[Convolution]:
        """INT8 convolutions whose channels are not a multiple of TILE, without the first: an image has 3 channels."""
        return [c for c in self.convs if c.int8 and not c.first and c.channels and any(n % TILE for n in c.channels)]


def _convolution(graph: Graph, types: Types, node: onnx.NodeProto) -> Convolution:
    weight, int8 = graph.values.get(graph.unquantized(node.input[1])), is_int8(graph, node)
    channels = None
    if weight is not None:  # shapes of weights, Conv: [K, C / groups, ...]; ConvTranspose: [C, K / groups, ...]
        group = attribute(node, 'group', 1)
        channels = (
            (weight.shape[1], weight.shape[0] // group)
            if node.op_type == 'Conv'
            else (weight.shape[0] // group, weight.shape[1])
        )
    return Convolution(
        name_of(node),
        int8,
        '' if int8 else float_reason(graph, node),
        channels,
        graph.unquantized(node.input[0]) in graph.inputs,
        flops(graph, types, node),
    )


def audit(model: onnx.ModelProto, checks: Rules = CHECKS) -> Audit:
    """Audit an ONNX model, quantized or not, by the rules of its target."""
    graph, (types, _), padded = Graph(model), infer(model), metadata_value(model, PADDED)
    layers = [n for n in graph.nodes if n.op_type not in QDQ and not all(name in graph.fixed for name in n.output)]
    convs = [_convolution(graph, types, n) for n in layers if n.op_type in CONVS]
    weights = {
        graph.unquantized(name) for n in layers if n.op_type in WEIGHTED for name in n.input[1:]
    } & graph.values.keys()
    typing = Counter(TYPES.get(types[n.output[0]][0], 'other') for n in layers if n.output[0] in types)
    return Audit(
        opset=opset(model),
        images={value.name: axes_of(value) for value in required_inputs(model)},
        typing=dict(typing.most_common()),
        layers=dict(Counter(n.op_type for n in layers).most_common()),
        qdq=count_qdq(model),
        parameters=sum(graph.values[name].size for name in weights),
        padded=int(padded) if re.fullmatch('[0-9]{1,4}', padded) else 0,
        convs=convs,
        findings=[finding for check in checks for finding in check(graph)],
    )


def coverage(audit: Audit) -> dict[str, dict[str, float | None]]:
    """Count convolutions and FLOPs in INT8: {'convs' and 'flops': {'int8', 'all', 'ratio'}}; None = unknown or none."""

    def share(int8_values: Sequence[int | None], all_values: Sequence[int | None]) -> dict[str, float | None]:
        part, whole = (None if None in values else sum(filter(None, values)) for values in (int8_values, all_values))
        return {'int8': part, 'all': whole, 'ratio': None if part is None or not whole else part / whole}

    int8 = [c for c in audit.convs if c.int8]
    return {
        'convs': share([1] * len(int8), [1] * len(audit.convs)),
        'flops': share([c.flops for c in int8], [c.flops for c in audit.convs]),
    }


def finding_counts(audit: Audit) -> dict[str, int]:
    """Count the places of every kind of finding."""
    return {kind: sum(f.kind == kind for f in audit.findings) for kind in FINDINGS}


def plain_audit(audit: Audit) -> dict[str, object]:
    """Return an audit as dicts and lists, with the sums of the text."""
    return {
        **asdict(audit),
        'misaligned': [c.name for c in audit.misaligned],
        'counts': finding_counts(audit),
        'coverage': coverage(audit),
    }


def audit_text(audit: Audit, limit: int | None = None) -> str:
    """Format an audit as text: tables, then up to `limit` places of each kind of finding."""
    shapes = {name: ', '.join(visible(axis or '?') for axis in axes) for name, axes in audit.images.items()}
    inputs = ', '.join(f'{name} [{shape}]' if shape else f'{name} of unknown shape' for name, shape in shapes.items())
    typing = ', '.join(f'{kind} ({n} nodes)' for kind, n in audit.typing.items())
    lines = [
        f'{inputs}; opset {audit.opset}; outside Q/DQ {typing}',
        f'{sum(audit.layers.values())} layers, {audit.parameters / 1e6:.2f} M parameters, Q/DQ nodes {audit.qdq[0]}/{audit.qdq[1]}'
        + (f', widths padded to multiples of {audit.padded} (all figures with the padding)' if audit.padded else ''),
        '',
    ]
    rows: list[list[object]] = []
    for what, unit, digits, of in (('convolutions', 1, 0, 'convs'), ('their GFLOPs', 1e9, 2, 'flops')):
        share = coverage(audit)[of]
        rows.append(
            [
                what,
                *('-' if (n := share[k]) is None else f'{n / unit:.{digits}f}' for k in ('int8', 'all')),
                number(share['ratio'], '.1%'),
            ]
        )
    lines += [markdown_table(('INT8 coverage', 'INT8', 'all', 'share'), rows), '']
    lines.append(
        markdown_table(('finding', 'places'), [[FINDINGS[kind], n] for kind, n in finding_counts(audit).items()])
    )
    lines += listed(
        'In float, as it should be', [f'{c.name}: {c.reason}' for c in audit.convs if c.reason in (HEAD, DFL)], limit
    )
    chosen = [c.name for c in audit.convs if c.reason == CHOICE]
    lines += listed('In float by choice', chosen, limit) if chosen else []
    lines += listed(
        f'For information: INT8 convolutions with channels (in, out per group) that are no multiples of {TILE}',
        [f'{c.name}: {", ".join(map(str, c.channels or ()))}' for c in audit.misaligned],
        limit,
    )
    for kind, meaning in FINDINGS.items():
        of_kind = [f'{f.where}: {f.detail}' for f in audit.findings if f.kind == kind]
        lines += listed(f'Finding, {meaning}', of_kind, limit) if of_kind else []
    return '\n'.join([*lines, '', counted(len(audit.findings), 'finding') if audit.findings else 'no findings'])
