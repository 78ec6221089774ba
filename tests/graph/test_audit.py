"""Laws of the audit: for each rule, a graph that breaks it has this finding, and a graph that keeps it has none."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from conftest import REPO
from faults import answer
from onnx import TensorProto, helper, numpy_helper
from torch.utils.flop_counter import FlopCounterMode
from zoo import command, image, python, settings

from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from models.quantize.calibration.calibrate import calibrate
from models.quantize.convert import quantize_model
from utils.qat.graph import audit
from utils.qat.graph.audit_rules import DFL, FINDINGS, HEAD
from utils.qat.graph.onnx_file import load
from utils.qat.graph.tensor_types import tensor_types

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


def node(op, given, out, **attributes):
    """A node with the name of its first output."""
    given, out = ([names] if isinstance(names, str) else names for names in (given, out))
    return helper.make_node(op, given, out, name=out[0], **attributes)


def pair(given, out, s='s', z='z', dq_scale=None, **attributes):
    """given → 'OUT q' → out: a Q and a DQ."""
    zero = [z] if z else []
    return [
        node('QuantizeLinear', [given, s, *zero], f'{out} q', **attributes),
        node('DequantizeLinear', [f'{out} q', dq_scale or s, *zero], out, **attributes),
    ]


def conv(given, out, op='Conv', **attributes):
    """A convolution with a quantized weight. It runs in INT8 if `given` is the output of a DQ."""
    return [*pair('w', f'{out} w', 'ws', 'wz', **{'axis': 0, **attributes}), node(op, [given, f'{out} w'], out)]


def pool(op, given, out):
    return node(op, given, out, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def graph_of(nodes, outputs=('y',), values=None, opset=17, dtype=TensorProto.FLOAT, batch=1):
    values = {**VALUES, **(values or {})}
    used = {name for n in nodes for name in n.input} - {name for n in nodes for name in n.output}
    graph = helper.make_graph(
        nodes,
        'by hand',
        [helper.make_tensor_value_info('x', dtype, [batch, C, SIZE, SIZE])],
        [helper.make_tensor_value_info(name, dtype, [None] * 4) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in values.items() if k in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', opset)], ir_version=9)
    onnx.checker.check_model(model)
    return model


START = [*pair('x', 'x1'), *conv('x1', 'c')]  # c: what an INT8 convolution computes
START2 = [*START, *conv('x1', 'd')]  # and d
QUANTIZED = [*START, *pair('c', 'c1')]  # c1: c behind Q and DQ
QUANTIZED2 = [*START2, *pair('c', 'c1'), *pair('d', 'd1')]  # and d1
TWO = ('y', 'y2')


def end(given, s='s', out='y'):
    """An INT8 convolution at the end of the graph, which reads `given` with scale `s`."""
    return [*pair(given, f'{out}1', s), *conv(f'{out}1', out)]


def float_conv(given, out):
    return node('Conv', [given, 'w'], out)


def silu(given, out):
    return [node('Sigmoid', given, f'{out} gate'), node('Mul', [given, f'{out} gate'], out)]


def concat(*given, out='k'):
    return node('Concat', [*given], out, axis=2)


def resize(given, out, mode='nearest'):
    return node('Resize', [given, '', '', 'sizes'], out, mode=mode)


def cast(given):
    return node('Cast', given, 'i', to=TensorProto.FLOAT)


def softmax(given):
    return node('Softmax', given, 'p', axis=1)


GRAPHS = {  # name → nodes, findings as {kind: where}, and what graph_of needs besides
    'clean': ([*START, *end('c')], {}),
    'clean: pre-quantized weight': (
        [*pair('x', 'x1'), node('DequantizeLinear', ['w8', 'ws', 'wz'], 'w1', axis=0), node('Conv', ['x1', 'w1'], 'y')],
        {},
    ),
    'clean: ReLU': ([*START, node('Relu', 'c', 'r'), *end('r')], {}),
    'clean: SiLU': ([*START, *silu('c', 'r'), *end('r')], {}),
    'float input': ([*START, *conv('c', 'f'), *end('f')], {'float conv': 'f'}),
    'float weight': ([*QUANTIZED, float_conv('c1', 'f'), *end('f')], {'float conv': 'f'}),
    'float in the middle': ([*START, float_conv('c', 'f'), *end('f')], {'float conv': 'f'}),
    'float weight at the end': ([*QUANTIZED, float_conv('c1', 'y')], {'float conv': 'y'}),
    'one float convolution at the end': ([*START, float_conv('c', 'y')], {}),
    'two float convolutions at the end': ([*START, float_conv('c', 'f'), float_conv('f', 'y')], {'float conv': 'f'}),
    'DFL': (
        [
            *(*START, float_conv('c', 'f'), softmax('f')),
            *(node('Transpose', 'p', 'm', perm=[0, 1, 3, 2]), float_conv('m', 'y')),
        ],
        {},
    ),
    'attention, no DFL': (
        [*START, float_conv('c', 'f'), softmax('f'), node('Mul', ['p', 'c'], 'm'), float_conv('m', 'y')],
        {'float conv': 'f'},
    ),
    'nothing quantized': (
        [float_conv('x', 'f'), float_conv('f', 'y')],
        {'not quantized': 'the graph', 'float conv': 'f'},
    ),
    'two scales': ([*START, *end('c'), *end('c', 't', 'y2')], {'two scales': 'c'}, {'outputs': TWO}),
    'two scales of the image': (
        [*pair('x', 'a'), *conv('a', 'y'), *pair('x', 'b', 't'), *conv('b', 'y2')],
        {'two scales': 'x'},
        {'outputs': TWO},
    ),
    'two scales behind a move': (
        [*START, pool('MaxPool', 'c', 'm'), *end('m'), *end('c', 't', 'y2')],
        {'two scales': 'c', 'unequal move': 'm'},
        {'outputs': TWO},
    ),
    'one scale, two readers': ([*QUANTIZED, *conv('c1', 'y'), *conv('c1', 'y2')], {}, {'outputs': TWO}),
    'one scale by two names': (
        [*QUANTIZED, *conv('c1', 'y'), pool('MaxPool', 'c1', 'm'), *end('m', 'same', 'y2')],
        {},
        {'outputs': TWO, 'values': {'same': np.float32(0.1)}},
    ),
    'also returned': ([*START, *end('c')], {'mixed': 'c'}, {'outputs': ('y', 'c')}),
    'also read in float': ([*START, *end('c'), node('Sigmoid', 'c', 'y2')], {'mixed': 'c'}, {'outputs': TWO}),
    'also read in float behind a move': (
        [*START, *end('c'), node('Reshape', ['c', 'flat'], 'r'), node('Sigmoid', 'r', 'y2')],
        {'mixed': 'c'},
        {'outputs': TWO},
    ),
    'two scales and float': (
        [*START, *end('c'), *end('c', 't', 'y2')],
        {'two scales': 'c', 'mixed': 'c'},
        {'outputs': (*TWO, 'c')},
    ),
    'only its shape is read': ([*START, *end('c'), node('Shape', 'c', 'y2')], {}, {'outputs': TWO}),
    'concat': ([*QUANTIZED2, concat('c1', 'd1'), *end('k')], {}),
    'concat of two scales': (
        [*START2, *pair('c', 'c1'), *pair('d', 'd1', 't'), concat('c1', 'd1'), *end('k')],
        {'unequal concat': 'k'},
    ),
    'concat to another scale': ([*QUANTIZED2, concat('c1', 'd1'), *end('k', 't')], {'unequal concat': 'k'}),
    'concat with a float input': (
        [*START2, *pair('c', 'c1'), concat('c1', 'd'), *end('k')],
        {'unequal concat': 'k'},
    ),
    'concat of float to a scale': ([*START2, concat('c', 'd'), *end('k')], {'unequal concat': 'k'}),
    'concat to float': (
        [*QUANTIZED2, concat('c1', 'd1', out='y')],
        {'unequal concat': 'y', 'not absorbed': ('c1', 'd1')},
    ),
    'concat wholly in float': ([*START2, concat('c', 'd', out='y')], {}),
    'concat with a constant': (
        [*QUANTIZED, concat('c1', 'zeros'), *end('k')],
        {},
        {'values': {'zeros': np.zeros((1, C, SIZE, SIZE), np.float32)}},
    ),
    'moves in a row': (
        [
            *(*QUANTIZED, node('Split', ['c1', 'halves'], ['a', 'b'], axis=1), pool('MaxPool', 'b', 'm')),
            *(node('Concat', ['a', 'm'], 'k', axis=1), *end('k')),
        ],
        {},
    ),
    'max pool to another scale': ([*QUANTIZED, pool('MaxPool', 'c1', 'm'), *end('m', 't')], {'unequal move': 'm'}),
    'max pool in float': ([*START, pool('MaxPool', 'c', 'm'), *end('m')], {'unequal move': 'm'}),
    'nearest resize': ([*QUANTIZED, resize('c1', 'r'), *end('r')], {}),
    'linear resize': ([*QUANTIZED, resize('c1', 'r', 'linear'), *end('r')], {'not absorbed': ('c1', 'y1 q')}),
    'add': ([*QUANTIZED2, node('Add', ['c1', 'd1'], 'a'), *end('a')], {}),
    'add of two scales': (
        [*START2, *pair('c', 'c1'), *pair('d', 'd1', 't'), node('Add', ['c1', 'd1'], 'a'), *end('a')],
        {'unequal add': 'a'},
    ),
    'shortcut quantized': ([*START2, *pair('c', 'c1'), node('Add', ['c1', 'd'], 'a'), *end('a')], {}),
    'shortcut quantized, SiLU': (
        [*START2, *pair('c', 'c1'), *silu('d', 'e'), node('Add', ['e', 'c1'], 'a'), *end('a')],
        {},
    ),
    'half of an add': (
        [*START2, *pair('c', 'c1'), node('Exp', 'd', 'e'), node('Add', ['c1', 'e'], 'a'), *end('a')],
        {'half add': 'a'},
    ),
    'half of an add, float convolution': (
        [*START2, *pair('c', 'c1'), float_conv('d', 'f'), node('Add', ['c1', 'f'], 'a'), *end('a')],
        {'float conv': 'f', 'half add': 'a'},
    ),
    'add in float': ([*START2, node('Add', ['c', 'd'], 'a'), *end('a')], {}),
    'add a constant': ([*QUANTIZED, node('Add', ['c1', 'one'], 'a'), *end('a')], {}),
    'add that makes float': ([*QUANTIZED2, node('Add', ['c1', 'd1'], 'y')], {'not absorbed': ('c1', 'd1')}),
    'sum of three': (
        [
            *(*QUANTIZED2, *conv('x1', 'e'), *pair('e', 'e1')),
            *(node('Add', ['c1', 'd1'], 'a'), node('Add', ['a', 'e1'], 'b'), *end('b')),
        ],
        {},
    ),
    'sum of three, one in float': (
        [
            *(*QUANTIZED2, node('Exp', 'd', 'e')),
            *(node('Add', ['c1', 'd1'], 'a'), node('Add', ['a', 'e'], 'b'), *end('b')),
        ],
        {'mixed': 'd', 'half add': 'b'},
    ),
    'sum of three, two of them of convolutions': (
        [
            *(*START2, *pair('c', 'c1'), *conv('x1', 'e')),
            *(node('Add', ['c1', 'd'], 'a'), node('Add', ['a', 'e'], 'b'), *end('b')),
        ],
        {'half add': 'b'},
    ),
    'sum behind a resize': (
        [*QUANTIZED2, resize('c1', 'r'), resize('d1', 'q'), node('Add', ['r', 'q'], 'a'), *end('a')],
        {},
    ),
    'average pool': ([*QUANTIZED, pool('AveragePool', 'c1', 'a'), *end('a', 't')], {}),
    'average pool of float': ([*START, pool('AveragePool', 'c', 'a'), *end('a')], {'not absorbed': 'y1 q'}),
    'average pool to float': ([*QUANTIZED, pool('AveragePool', 'c1', 'y')], {'not absorbed': 'c1'}),
    'Q/DQ before ReLU': ([*QUANTIZED, node('Relu', 'c1', 'r'), *end('r')], {'not absorbed': 'c1'}),
    'Q/DQ before SiLU': ([*QUANTIZED, *silu('c1', 'r'), *end('r')], {'not absorbed': 'c1'}),
    'Q/DQ around a softmax': ([*QUANTIZED, softmax('c1'), *end('p')], {'not absorbed': ('c1', 'y1 q')}),
    'Q/DQ around a reduction': (
        [
            *(*QUANTIZED, node('ReduceSum', ['c1', 'axes'], 'r')),
            *(node('Concat', ['r'] * C, 'k', axis=1), node('Sigmoid', 'k', 'y')),
        ],
        {'not absorbed': 'c1'},
    ),
    'DQ returned': ([*START, *pair('c', 'y')], {'not absorbed': 'y'}),
    'DQ not read': ([*START, *end('c'), *pair('c', 'unread', 't')], {'two scales': 'c', 'not absorbed': 'unread'}),
    'Q not read': ([*START, *end('c'), pair('c', 'unread')[0]], {'not absorbed': 'unread q', 'duplicate': 'c'}),
    'Q after DQ': ([*QUANTIZED, *end('c1')], {'not absorbed': 'c1'}),
    'INT8 returned': ([*START, pair('c', 'y2')[0], *end('c', 't')], {'two scales': 'c', 'not absorbed': 'y2 q'}),
    'bias quantized': (
        [
            *(*QUANTIZED, *pair('b', 'b1'), *pair('w', 'w1', 'ws', 'wz', axis=0)),
            node('Conv', ['c1', 'w1', 'b1'], 'y'),
        ],
        {'not absorbed': 'b1'},
        {'values': {'b': np.ones(C, np.float32)}},
    ),
    'two equal Q': ([*START, *end('c'), *end('c', 's', 'y2')], {'duplicate': 'c'}, {'outputs': TWO}),
    'Identity in a pair': (
        [
            *(*START, node('QuantizeLinear', ['c', 's', 'z'], 'q'), node('Identity', 'q', 'i')),
            *(node('DequantizeLinear', ['i', 's', 'z'], 'd'), *conv('d', 'y')),
        ],
        {'in the way': 'i'},
    ),
    'Cast before a convolution': ([*QUANTIZED, cast('c1'), *conv('i', 'y')], {'float conv': 'y', 'in the way': 'i'}),
    'Cast before a Q': ([*START, cast('c'), *end('i')], {'in the way': 'i'}),
    'Cast of the image': ([cast('x'), *end('i')], {}),
    'Constant as scale': ([*START, node('Constant', [], 'u', value_float=0.1), *end('c', 'u')], {'in the way': 'u'}),
    'Identity as zero point': (
        [*START, node('Identity', 'z', 'u'), *pair('c', 'c1', z='u'), *conv('c1', 'y')],
        {'in the way': 'u'},
    ),
    **{
        name: ([*START, *pair('c', 'c1', z=z), *conv('c1', 'y')], {'zero point': 'c1'}, {'values': {'u': value}})
        for name, z, value in (
            ('zero point', 'u', np.int8(3)),
            ('UINT8', 'u', np.uint8(0)),
            ('no zero point', None, np.int8(0)),
        )
    },
    'DQ with another scale': ([*START, *pair('c', 'c1', dq_scale='t'), *conv('c1', 'y')], {'scale': 'c1'}),
    **{
        f'scale {value!r}': ([*START, *end('c', 'v')], {'scale': 'y1'} if bad else {}, {'values': {'v': value}})
        for bad, values in ((True, (0, -1, 1e-39, np.inf, np.nan)), (False, (2e-38, 1e-5)))
        for value in map(np.float32, values)
    },
    'a weight with a dead channel': (
        [*QUANTIZED, *pair('w', 'w1', 'v', 'wz', axis=0), node('Conv', ['c1', 'w1'], 'y')],
        {'scale': 'w1'},
        {'values': {'v': np.float32([0] + [0.1] * (C - 1))}},
    ),
    'no axis': ([*QUANTIZED, *pair('w', 'w1', 'ws', 'wz'), node('Conv', ['c1', 'w1'], 'y')], {'axis': 'w1'}),
    'wrong axis': ([*QUANTIZED, *conv('c1', 'y', axis=1)], {'axis': 'y w'}),
    'transposed convolution': ([*QUANTIZED, *conv('c1', 'y', 'ConvTranspose', axis=1)], {}),
    'wrong axis, transposed convolution': ([*QUANTIZED, *conv('c1', 'y', 'ConvTranspose', axis=0)], {'axis': 'y w'}),
    'activation per channel': ([*START, *pair('c', 'c1', 'ws', 'wz', axis=1), *conv('c1', 'y')], {'axis': 'c1'}),
}


def graph_named(name):
    nodes, _, *options = GRAPHS[name]
    return graph_of(nodes, **(options[0] if options else {}))


def audit_of(name):
    return audit.audit(graph_named(name))


@pytest.mark.parametrize('name', GRAPHS)
def test_exactly_the_findings_expected(name):
    wanted = {
        (kind, at) for kind, where in GRAPHS[name][1].items() for at in ([where] if isinstance(where, str) else where)
    }
    found = [(f.kind, f.where) for f in audit_of(name).findings]
    assert set(found) == wanted and len(found) == len(wanted)


def test_every_kind_is_shown_by_a_graph():
    shown = {kind for _, findings, *_ in GRAPHS.values() for kind in findings}
    assert shown == set(FINDINGS) - {'open end'}, 'that one is of a target: test_targets.py'


FP16_SCALES = {2.0**-14: False, 6e-5: True, 1e-8: True}  # below 2^-14 a FP16 number is subnormal; 1e-8 becomes 0


@pytest.mark.parametrize('value', FP16_SCALES)
def test_fp16_scales(value):
    half = {k: v.astype(np.float16) for k, v in VALUES.items() if v.dtype == np.float32}
    model = graph_of(
        [*START, *end('c', 'v')], values={**half, 'v': np.float16(value)}, opset=19, dtype=TensorProto.FLOAT16
    )
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
    nodes, given = [*pair('x', 'x1')], 'x1'
    for i, (name, group) in enumerate(zip(weights, (1, 2, 1))):
        nodes += [
            *pair(name, f'{name} dq', 's'),
            node('Conv', [given, f'{name} dq'], f'c{i}', group=group),
            *pair(f'c{i}', f'd{i}'),
        ]
        given = f'd{i}'
    found = audit.audit(
        graph_of(
            [*nodes, node('Conv', [given, 'last'], 'y')],
            values={
                **{k: np.ones((*v, 1, 1), np.float32) for k, v in weights.items()},
                'last': np.ones((1, 48, 1, 1), np.float32),
            },
        )
    )
    assert [c.channels for c in found.convs] == [(16, 24), (12, 8), (16, 48), (48, 1)]
    assert [c.name for c in found.misaligned] == ['c1'], 'c0 reads the image, the last is float'
    assert [c.flops for c in found.convs] == [2 * SIZE**2 * n for n in (24 * 16, 16 * 12, 48 * 16, 48)]
    assert found.parameters == 24 * 16 + 16 * 12 + 48 * 16 + 48


def test_an_open_batch_counts_as_one():
    assert audit.audit(graph_of(GRAPHS['clean'][0], batch='batch')) == audit_of('clean')


def test_open_image_axes_give_no_flops_but_findings():
    model = graph_of(GRAPHS['two scales'][0], ('y', 'y2'))
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = 'any'
    found = audit.audit(model)
    assert audit.coverage(found)['flops'] == {'int8': None, 'all': None, 'ratio': None}
    assert [f.kind for f in found.findings] == ['two scales']


def test_operators_of_others_are_float():
    plugin = helper.make_node('NMS', ['c'], ['y'], name='plugin', domain='somebody')
    model = graph_of([*START, *end('c', out='y2')], ('y2',))
    model.graph.node.append(plugin)
    model.graph.output.append(helper.make_tensor_value_info('y', TensorProto.FLOAT, [None]))
    model.opset_import.append(helper.make_opsetid('somebody', 1))
    found = audit.audit(model)
    assert [(f.kind, f.where) for f in found.findings] == [('mixed', 'c')] and audit.coverage(found)['flops'][
        'ratio'
    ] == 1


# ---- whole models -------------------------------------------------------------------------------------------------------

IMGSZ = (96, 96)


def free_scales(small):
    model = small.float_model()
    quantize_model(model)
    calibrate(model, [image(batch=4)], settings())
    return model


@pytest.fixture(scope='module')
def exports(small, tmp_path_factory):
    """{name: file} of the small model: float; INT8 with free scales; INT8 with tied scales, as traced and in FP16."""
    folder = tmp_path_factory.mktemp('exports')
    free, tied = free_scales(small), small.quantized_model()
    for name, model, options in (
        ('float', small.float_model(), {}),
        ('free', free, {}),
        ('tied', tied, {}),
        ('half', tied, {'half': True, 'opset': 19}),
    ):
        export_onnx(model, folder / f'{name}.onnx', IMGSZ, **options)
    return {file.stem: file for file in folder.iterdir()}


@pytest.fixture(scope='module')
def audits(exports):
    return {name: audit.audit(load(file)) for name, file in exports.items()}


def test_coverage_is_what_was_quantized(small, audits):
    found = audits['free']
    share = audit.coverage(found)
    assert share['convs']['int8'] == sum(isinstance(m, QuantConv2d) for m in small.quantized_model().modules())
    assert [c.reason for c in found.convs if not c.int8] == [HEAD] * 6 + [DFL]
    assert 0.9 < share['flops']['ratio'] < 1


def test_flops_and_parameters_are_those_of_the_model(small, audits):
    model = small.float_model()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, *IMGSZ))
    for found in audits.values():
        assert sum(c.flops for c in found.convs) == counter.get_total_flops()
        assert found.parameters == sum(p.numel() for p in model.parameters())


def test_free_scales_conflict_and_tied_do_not(audits):
    free, tied = (audit.finding_counts(audits[name]) for name in ('free', 'tied'))
    assert free['two scales'] > 5
    assert set(tied.values()) == set(audit.finding_counts(audits['half']).values()) == {0}


def test_typing_is_what_is_in_the_file(audits):
    typed, half = audits['tied'], audits['half']
    assert set(typed.typing) - {'other'} == {'FP32'} and half.typing['FP16'] > 100 > half.typing['FP32'] > 0


@pytest.mark.faults
def test_simplified_or_not_open_batch_or_not_the_same_audit(small, audits, tmp_path):
    """Except for names, for nodes that slice, and for a few nodes of the box decoding."""
    export_onnx(free_scales(small), tmp_path / 'simplified.onnx', IMGSZ, dynamic=True, simplify=True)
    free, simplified = audits['free'], audit.audit(load(tmp_path / 'simplified.onnx'))
    assert sorted(free.convs, key=str) == sorted(simplified.convs, key=str)
    assert {**audit.finding_counts(free), 'unequal move': 0} == {**audit.finding_counts(simplified), 'unequal move': 0}


def test_a_float_export_is_found_not_quantized(audits):
    counts = audit.finding_counts(audits['float'])
    assert counts['not quantized'] == 1 and sum(counts.values()) == 1 + counts['float conv']


def test_shapes_are_those_that_onnx_infers(exports):
    """Every shape that onnx.shape_inference finds is found here, with equal values."""
    for name in ('free', 'tied'):
        model = onnx.load(exports[name])
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        theirs = {
            v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
            for v in inferred
            if all(d.HasField('dim_value') for d in v.type.tensor_type.shape.dim)
            and v.type.tensor_type.HasField('shape')
        }
        ours = tensor_types(model)
        assert len(theirs) > 100 and {k: ours[k][1] for k in theirs} == theirs
        assert {n for node in model.graph.node for n in node.output} <= ours.keys()


# ---- the command --------------------------------------------------------------------------------------------------------


def test_the_command(exports, tmp_path):
    out = python('scripts/audit_onnx.py', exports['free'], '--json', tmp_path / 'audit.json')
    content = json.loads((tmp_path / 'audit.json').read_text())
    assert content['counts'] == audit.finding_counts(audit.audit(onnx.load(exports['free'])))
    assert len(content['findings']) == sum(content['counts'].values()) and f'{len(content["findings"])} findings' in out
    assert '... and' in out and content['findings'][-1]['where'] not in out.split('... and')[0]
    whole = python('scripts/audit_onnx.py', exports['free'], '--verbose')
    assert '... and' not in whole and all(f'{f["where"]}: {f["detail"]}' in whole for f in content['findings'])


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
    return graph_of([node('Concat', ['x', 'w'], 'y', axis=1)]).SerializeToString()


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


def test_it_needs_neither_torch_nor_yolov9(exports):
    """It runs in the toolkit's own folder, without upstream's utils/__init__.py, which imports torch."""
    code = f"""import runpy, sys
sys.argv = ['audit_onnx.py', {str(exports['free'])!r}]
try:
    runpy.run_path({str(REPO / 'scripts/audit_onnx.py')!r}, run_name='__main__')
except SystemExit as done:
    assert not done.code
assert 'torch' not in sys.modules and 'models' not in sys.modules
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=REPO / 'scripts', capture_output=True, text=True)
    assert done.returncode == 0 and 'INT8 coverage' in done.stdout, done.stderr


def test_it_runs_in_a_copied_tree(clone, exports):
    subprocess.run([REPO / 'patch_yolov9.sh', clone], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [sys.executable, 'scripts/audit_onnx.py', exports['free']], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0 and 'INT8 coverage' in done.stdout, done.stderr
