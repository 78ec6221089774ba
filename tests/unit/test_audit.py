"""Laws of the audit: for each rule, a graph that breaks it has this finding, and a graph that keeps it has none."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import REPO
from helpers.commands import answer, command
from helpers.graphs import model_of, nodes_of
from helpers.tables import rows
from onnx import TensorProto, helper

from utils.qat.graph import audit
from utils.qat.graph.audit_rules import DFL, FINDINGS, HEAD

C, SIZE = 16, 8  # every activation is [1, C, SIZE, SIZE] unless a graph says otherwise
WEIGHT = np.linspace(-1, 1, C * C, dtype=np.float32).reshape(C, C, 1, 1)
VALUES = {
    's': np.float32(0.1),
    't': np.float32(0.2),
    'z': np.int8(0),
    'w': WEIGHT,
    'ws': np.full(C, 0.01, np.float32),
    'wz': np.zeros(C, np.int8),
    'w8': WEIGHT.astype(np.int8),
    'one': np.float32(1),
    'axes': np.int64([1]),
    'flat': np.int64([1, C, -1]),
    'halves': np.int64([C // 2, C // 2]),
    'sizes': np.int64([1, C, 2 * SIZE, 2 * SIZE]),
}


def graph_of(text, outputs=(), values=None, opset=17, dtype=TensorProto.FLOAT, batch=1):
    """A model of a text with MACROS, see graphs.nodes_of. It returns y and y2, as far as they are made, and `outputs`."""
    nodes = nodes_of(re.sub('|'.join(rf'\b{name}\b' for name in MACROS), lambda m: MACROS[m[0]], text), 's', 'z')
    made = {name for n in nodes for name in n.output}
    returned = dict.fromkeys((*sorted({'y', 'y2'} & made), *outputs), (dtype, [None] * 4))
    model = model_of(nodes, {'x': (dtype, [batch, C, SIZE, SIZE])}, returned, {**VALUES, **(values or {})}, opset)
    onnx.checker.check_model(model)
    return model


INT8S = 'x1 = QDQ(x) c = Int8Conv(x1) d = Int8Conv(x1)'
MACROS = {  # in texts of graphs
    'X': 'x1 = QDQ(x)',
    'INT8': 'x1 = QDQ(x) c = Int8Conv(x1)',  # c: what an INT8 convolution computes
    'INT8S': INT8S,  # and d
    'QUANTIZED': 'x1 = QDQ(x) c = Int8Conv(x1) c1 = QDQ(c)',  # c1: c behind Q and DQ
    'BOTH': f'{INT8S} c1 = QDQ(c) d1 = QDQ(d)',  # and d1
    'POOLED': '<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>',
    'NEAREST': 'Resize<mode = "nearest">(c1, "", "", sizes)',
    'NEAREST_OF_D': 'Resize<mode = "nearest">(d1, "", "", sizes)',
    'LINEAR': 'Resize<mode = "linear">(c1, "", "", sizes)',
    'GROUPS': 'w1 = QDQ<axis = 0>(wg, ws, wz) y = Conv<group = 2>(x1, w1)',
    'DEPTHWISE': f'w1 = QDQ<axis = 0>(wg, ws, wz) y = Conv<group = {C}>(x1, w1)',
}

HALF = {k: v.astype(np.float16) for k, v in VALUES.items() if v.dtype == np.float32}
TYPED = {'opset': 19, 'dtype': TensorProto.FLOAT16}

# name, nodes, findings as 'kind: where'; OPTIONS has what graph_of needs besides
GRAPHS = """
clean | INT8 y = QConv(c) |
clean: pre-quantized weight | X w1 = DequantizeLinear<axis = 0>(w8, ws, wz) y = Conv(x1, w1) |
clean: ReLU | INT8 r = Relu(c) y = QConv(r) |
clean: SiLU | INT8 r = SiLU(c) y = QConv(r) |
float input | INT8 f = Int8Conv(c) y = QConv(f) | float conv: f
float weight | QUANTIZED f = Conv(c1, w) y = QConv(f) | float conv: f
float in the middle | INT8 f = Conv(c, w) y = QConv(f) | float conv: f
float weight at the end | QUANTIZED y = Conv(c1, w) | float conv: y
one float convolution at the end | INT8 y = Conv(c, w) |
two float convolutions at the end | INT8 f = Conv(c, w) y = Conv(f, w) | float conv: f
DFL | INT8 f = Conv(c, w) p = Softmax<axis = 1>(f) m = Transpose<perm = [0, 1, 3, 2]>(p) y = Conv(m, w) |
attention, no DFL | INT8 f = Conv(c, w) p = Softmax<axis = 1>(f) m = Mul(p, c) y = Conv(m, w) | float conv: f
nothing quantized | f = Conv(x, w) y = Conv(f, w) | not quantized: the graph; float conv: f
two scales | INT8 y = QConv(c) y2 = QConv(c, t) | two scales: c
two scales of the image | a = QDQ(x) y = Int8Conv(a) b = QDQ(x, t) y2 = Int8Conv(b) | two scales: x
two scales behind a move | INT8 m = MaxPool POOLED(c) y = QConv(m) y2 = QConv(c, t) | two scales: c; unequal move: m
one scale, two readers | QUANTIZED y = Int8Conv(c1) y2 = Int8Conv(c1) |
one scale by two names | QUANTIZED y = Int8Conv(c1) m = MaxPool POOLED(c1) y2 = QConv(m, same) |
also returned | INT8 y = QConv(c) | mixed: c
also read in float | INT8 y = QConv(c) y2 = Sigmoid(c) | mixed: c
also read in float behind a move | INT8 y = QConv(c) r = Reshape(c, flat) y2 = Sigmoid(r) | mixed: c
two scales and float | INT8 y = QConv(c) y2 = QConv(c, t) | two scales: c; mixed: c
only its shape is read | INT8 y = QConv(c) y2 = Shape(c) |
concat | BOTH k = Concat<axis = 2>(c1, d1) y = QConv(k) |
concat of two scales | INT8S c1 = QDQ(c) d1 = QDQ(d, t) k = Concat<axis = 2>(c1, d1) y = QConv(k) | unequal concat: k
concat to another scale | BOTH k = Concat<axis = 2>(c1, d1) y = QConv(k, t) | unequal concat: k
concat with a float input | INT8S c1 = QDQ(c) k = Concat<axis = 2>(c1, d) y = QConv(k) | unequal concat: k
concat of float to a scale | INT8S k = Concat<axis = 2>(c, d) y = QConv(k) | unequal concat: k
concat to float | BOTH y = Concat<axis = 2>(c1, d1) | unequal concat: y; not absorbed: c1, d1
concat wholly in float | INT8S y = Concat<axis = 2>(c, d) |
concat with a constant | QUANTIZED k = Concat<axis = 2>(c1, zeros) y = QConv(k) |
moves in a row | QUANTIZED a, b = Split<axis = 1>(c1, halves) m = MaxPool POOLED(b) k = Concat<axis = 1>(a, m) y =
    QConv(k) |
max pool to another scale | QUANTIZED m = MaxPool POOLED(c1) y = QConv(m, t) | unequal move: m
max pool in float | INT8 m = MaxPool POOLED(c) y = QConv(m) | unequal move: m
nearest resize | QUANTIZED r = NEAREST y = QConv(r) |
linear resize | QUANTIZED r = LINEAR y = QConv(r) | not absorbed: c1, y1 int8
add | BOTH a = Add(c1, d1) y = QConv(a) |
add of two scales | INT8S c1 = QDQ(c) d1 = QDQ(d, t) a = Add(c1, d1) y = QConv(a) | unequal add: a
shortcut quantized | INT8S c1 = QDQ(c) a = Add(c1, d) y = QConv(a) |
shortcut quantized, SiLU | INT8S c1 = QDQ(c) e = SiLU(d) a = Add(e, c1) y = QConv(a) |
half of an add | INT8S c1 = QDQ(c) e = Exp(d) a = Add(c1, e) y = QConv(a) | half add: a
half of an add, float convolution | INT8S c1 = QDQ(c) f = Conv(d, w) a = Add(c1, f) y = QConv(a) | float conv: f;
    half add: a
add in float | INT8S a = Add(c, d) y = QConv(a) |
add a constant | QUANTIZED a = Add(c1, one) y = QConv(a) |
add that makes float | BOTH y = Add(c1, d1) | not absorbed: c1, d1
sum of three | BOTH e = Int8Conv(x1) e1 = QDQ(e) a = Add(c1, d1) b = Add(a, e1) y = QConv(b) |
sum of three, one in float | BOTH e = Exp(d) a = Add(c1, d1) b = Add(a, e) y = QConv(b) | mixed: d; half add: b
sum of three, two of them of convolutions | INT8S c1 = QDQ(c) e = Int8Conv(x1) a = Add(c1, d) b = Add(a, e) y =
    QConv(b) | half add: b
sum behind a resize | BOTH r = NEAREST q = NEAREST_OF_D a = Add(r, q) y = QConv(a) |
average pool | QUANTIZED a = AveragePool POOLED(c1) y = QConv(a, t) |
average pool of float | INT8 a = AveragePool POOLED(c) y = QConv(a) | not absorbed: y1 int8
average pool to float | QUANTIZED y = AveragePool POOLED(c1) | not absorbed: c1
Q/DQ before ReLU | QUANTIZED r = Relu(c1) y = QConv(r) | not absorbed: c1
Q/DQ before SiLU | QUANTIZED r = SiLU(c1) y = QConv(r) | not absorbed: c1
Q/DQ around a softmax | QUANTIZED p = Softmax<axis = 1>(c1) y = QConv(p) | not absorbed: c1, y1 int8
Q/DQ around a reduction | QUANTIZED r = ReduceSum(c1, axes) k = Concat<axis = 1>(r, r, r, r, r, r, r, r, r, r, r,
    r, r, r, r, r) y = Sigmoid(k) | not absorbed: c1
DQ returned | INT8 y = QDQ(c) | not absorbed: y
DQ not read | INT8 y = QConv(c) unread = QDQ(c, t) | two scales: c; not absorbed: unread
Q not read | INT8 y = QConv(c) unread = QuantizeLinear(c, s, z) | not absorbed: unread; duplicate: c
Q after DQ | QUANTIZED y = QConv(c1) | not absorbed: c1
Q of another scale not read | INT8 i = QuantizeLinear(c, s, z) y = QConv(c, t) | two scales: c; not absorbed: i
bias quantized | QUANTIZED b1 = QDQ(b) w1 = QDQ<axis = 0>(w, ws, wz) y = Conv(c1, w1, b1) | not absorbed: b1
two equal Q | INT8 y = QConv(c) y2 = QConv(c, s) | duplicate: c
Identity in a pair | INT8 q = QuantizeLinear(c, s, z) i = Identity(q) d = DequantizeLinear(i, s, z) y = Int8Conv(d)
    | in the way: i
Cast before a convolution | QUANTIZED i = Cast<to = 1>(c1) y = Int8Conv(i) | float conv: y; in the way: i
Cast before a Q | INT8 i = Cast<to = 1>(c) y = QConv(i) | in the way: i
Cast of the image | i = Cast<to = 1>(x) y = QConv(i) |
Constant as scale | INT8 u = Constant<value_float = 0.1>() y = QConv(c, u) | in the way: u
Identity as zero point | INT8 u = Identity(z) c1 = QDQ(c, s, u) y = Int8Conv(c1) | in the way: u
zero point | INT8 y = QConv(c, s, u) | zero point: y1
UINT8 | INT8 y = QConv(c, s, u) | zero point: y1
no zero point | INT8 q = QuantizeLinear(c, s) d = DequantizeLinear(q, s) y = Int8Conv(d) | zero point: d
DQ with another scale | INT8 q = QuantizeLinear(c, s, z) d = DequantizeLinear(q, t, z) y = Int8Conv(d) | scale: d
a weight with a dead channel | QUANTIZED w1 = QDQ<axis = 0>(w, v, wz) y = Conv(c1, w1) | scale: w1
groups | X GROUPS | groups: y
clean: a group for each channel | X DEPTHWISE |
a group for each channel, in FP16 | X DEPTHWISE | groups: y
no axis | QUANTIZED w1 = QDQ(w, ws, wz) y = Conv(c1, w1) | axis: w1
wrong axis | QUANTIZED y = Int8Conv<axis = 1>(c1) | axis: y w
transposed convolution | QUANTIZED y = Int8ConvTranspose<axis = 1>(c1) |
wrong axis, transposed convolution | QUANTIZED y = Int8ConvTranspose(c1) | axis: y w
activation per channel | INT8 c1 = QDQ<axis = 1>(c, ws, wz) y = Int8Conv(c1) | axis: c1
"""
OPTIONS = {
    'one scale by two names': {'values': {'same': np.float32(0.1)}},
    'also returned': {'outputs': 'c'},
    'two scales and float': {'outputs': 'c'},
    'concat with a constant': {'values': {'zeros': np.zeros((1, C, SIZE, SIZE), np.float32)}},
    'bias quantized': {'values': {'b': np.ones(C, np.float32)}},
    'zero point': {'values': {'u': np.int8(3)}},
    'UINT8': {'values': {'u': np.uint8(0)}},
    'a weight with a dead channel': {'values': {'v': np.float32([0] + [0.1] * (C - 1))}},
    'groups': {'values': {'wg': WEIGHT[:, : C // 2]}},
    'clean: a group for each channel': {'values': {'wg': WEIGHT[:, :1]}},
    'a group for each channel, in FP16': {'values': HALF | {'wg': HALF['w'][:, :1]}, **TYPED},
}
SCALES = {  # → whether it is a finding
    **dict.fromkeys(map(np.float32, (0, -1, 1e-39, np.inf, np.nan)), True),
    **dict.fromkeys(map(np.float32, (2e-38, 1e-5)), False),
}
TABLE = {
    **{
        name: (text, dict(pair.split(': ') for pair in found.split('; ') if pair)) for name, text, found in rows(GRAPHS)
    },
    **{f'scale {value!r}': ('INT8 y = QConv(c, v)', {'scale': 'y1'} if bad else {}) for value, bad in SCALES.items()},
}
OPTIONS |= {f'scale {value!r}': {'values': {'v': value}} for value in SCALES}


def graph_named(name):
    return graph_of(TABLE[name][0], **OPTIONS.get(name, {}))


def audit_of(name):
    return audit.audit(graph_named(name))


@pytest.mark.parametrize('name', TABLE)
def test_exactly_the_findings_expected(name):
    wanted = {(kind, at) for kind, where in TABLE[name][1].items() for at in where.split(', ')}
    found = [(f.kind, f.where) for f in audit_of(name).findings]
    assert set(found) == wanted and len(found) == len(wanted)


def test_every_kind_is_shown_by_a_graph():
    shown = {kind for _, findings in TABLE.values() for kind in findings}
    assert shown == set(FINDINGS) - {'open end'}, 'that one is of a target: test_targets.py'


FP16_SCALES = {2.0**-14: False, 6e-5: True, 1e-8: True}  # below 2^-14 a FP16 number is subnormal; 1e-8 becomes 0


@pytest.mark.parametrize('value', FP16_SCALES)
def test_fp16_scales(value):
    values = {**HALF, 'v': np.float16(value)}
    model = graph_of('INT8 y = QConv(c, v)', values=values, **TYPED)
    found = audit.audit(model)
    assert [(f.kind, f.where) for f in found.findings] == ([('scale', 'y1')] if FP16_SCALES[value] else [])
    assert found.typing == {'FP16': 2} and found.opset == 19


@pytest.mark.parametrize(
    'name, reasons',
    [
        ('DFL', ['', HEAD, DFL]),
        ('two float convolutions at the end', ['', 'input and weight not quantized', HEAD]),
        ('float input', ['', 'input not quantized', '']),
        ('float weight at the end', ['', 'weight not quantized']),
    ],
)
def test_why_a_convolution_is_float(name, reasons):
    found = audit_of(name)
    assert [c.reason for c in found.convs] == reasons and [c.int8 for c in found.convs] == [not r for r in reasons]


@pytest.mark.parametrize(
    'name, inside', [('Q/DQ before ReLU', True), ('Q/DQ before SiLU', True), ('Q/DQ around a softmax', False)]
)
def test_a_pair_between_convolution_and_activation_is_called_that(name, inside):
    [detail] = [f.detail for f in audit_of(name).findings if f.where == 'c1']
    assert ('activation of the convolution in front' in detail) == inside


def test_channels_are_counted_per_group():
    weights = {'w1': (24, 16), 'w2': (16, 12), 'w3': (48, 16)}  # 16 -> 24, two groups of 12 -> 8, 16 -> 48
    text = (
        'x1 = QDQ(x) q1 = QDQ(w1, s) c0 = Conv(x1, q1) d0 = QDQ(c0) q2 = QDQ(w2, s) c1 = Conv<group = 2>(d0, q2)'
        'd1 = QDQ(c1) q3 = QDQ(w3, s) c2 = Conv(d1, q3) d2 = QDQ(c2) y = Conv(d2, last)'
    )
    shapes = {**weights, 'last': (1, 48)}
    found = audit.audit(graph_of(text, values={k: np.ones((*v, 1, 1), np.float32) for k, v in shapes.items()}))
    assert [c.channels for c in found.convs] == [(16, 24), (12, 8), (16, 48), (48, 1)]
    assert [c.name for c in found.misaligned] == ['c1'], 'c0 reads the image, the last is float'
    assert [c.flops for c in found.convs] == [2 * SIZE**2 * n for n in (24 * 16, 16 * 12, 48 * 16, 48)]
    assert found.parameters == 24 * 16 + 16 * 12 + 48 * 16 + 48


def test_an_open_batch_counts_as_one():
    counted = replace(audit.audit(graph_of(TABLE['clean'][0], batch='batch')), images={'x': [1, C, SIZE, SIZE]})
    assert counted == audit_of('clean')


@pytest.mark.parametrize(
    ('batch', 'shown'),
    [(1, '[1, 16, 8, 8]'), ('n', '[n, 16, 8, 8]'), ('\x1b', r'[\x1b, 16, 8, 8]'), (None, '[?, 16, 8, 8]')],
)
def test_an_open_axis_is_shown_by_its_name(batch, shown):
    assert audit.audit_text(audit.audit(graph_of('INT8 y = QConv(c)', batch=batch))).startswith(f'x {shown}; opset 17')


def test_open_image_axes_give_no_flops_but_findings():
    model = graph_named('two scales')
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = 'any'
    found = audit.audit(model)
    assert audit.coverage(found)['flops'] == {'int8': None, 'all': None, 'ratio': None}
    assert [f.kind for f in found.findings] == ['two scales']


def test_operators_of_others_are_float():
    model = graph_of('INT8 y2 = QConv(c)')
    model.graph.node.append(helper.make_node('NMS', ['c'], ['y'], name='plugin', domain='somebody'))
    model.graph.output.append(helper.make_tensor_value_info('y', TensorProto.FLOAT, [None]))
    model.opset_import.append(helper.make_opsetid('somebody', 1))
    found = audit.audit(model)
    assert [(f.kind, f.where) for f in found.findings] == [('mixed', 'c')]
    assert audit.coverage(found)['flops']['ratio'] == 1


# ---- the command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'name, strict, code',
    [
        ('clean', True, 0),
        ('two scales', True, 1),
        ('two scales', False, 0),
        ('nothing quantized', True, 1),
        ('nothing quantized', False, 0),
    ],
)
def test_strict_is_the_exit_code(tmp_path, name, strict, code):
    onnx.save(graph_named(name), tmp_path / 'model.onnx')
    command('scripts/audit_onnx.py', tmp_path / 'model.onnx', *['--strict'] * strict, code=code)


def contradictory():
    """A graph that passes ONNX's checker: a Concat of 8 x 8 with 1 x 1 pixels."""
    return graph_of('y = Concat<axis = 1>(x, w)').SerializeToString()


BAD = [
    ('none.onnx', None, 'no such file'),
    ('model.pt', b'', 'expected a file ending in .onnx'),
    ('text.onnx', b'no graph', 'no valid ONNX file'),
    ('shapes.onnx', contradictory(), 'shapes.onnx: y: '),
    ('empty.onnx', b'', 'no valid ONNX file'),
]


@pytest.mark.parametrize('name, content, says', BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capfd, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, line = answer('scripts/audit_onnx.py', [tmp_path / name], capfd, tmp_path)
    assert code == 2 and says in line and name in line


def test_it_needs_neither_torch_nor_yolov9(tmp_path):
    """It runs in the toolkit's own folder, without upstream's utils/__init__.py, which imports torch."""
    onnx.save(graph_named('two scales'), tmp_path / 'model.onnx')
    code = f"""import runpy, sys
sys.argv = ['audit_onnx.py', {str(tmp_path / 'model.onnx')!r}]
try:
    runpy.run_path({str(REPO / 'scripts/audit_onnx.py')!r}, run_name='__main__')
except SystemExit as done:
    assert not done.code
assert 'torch' not in sys.modules and 'models' not in sys.modules
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=REPO / 'scripts', capture_output=True, text=True)
    assert done.returncode == 0 and 'INT8 coverage' in done.stdout, done.stderr
