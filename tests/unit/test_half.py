"""Laws of the FP16 graph: features are FP16; INT8 weights and all Q and DQ stay."""

import contextlib

import numpy as np
import onnx
import pytest
from helpers.graphs import FLOAT, HALF, INT8_BLOCK, casts, copy, graph_of, nchw, run_onnx, types_of, with_values
from helpers.tables import rows
from onnx import TensorProto

from utils.qat.core.errors import QatError
from utils.qat.graph import onnx_graph
from utils.qat.graph.passes import store_int8_weights
from utils.qat.vendors.onnxruntime.graph import quantize_in_fp32, rounding, rounds_fp16
from utils.qat.vendors.tensorrt.half import to_half

NP = {FLOAT: np.float32, TensorProto.UINT8: np.uint8}


# ---- graphs made by hand ------------------------------------------------------------------------------------------------

CONV, WEIGHT = 'c = Conv(x, w, b)', 'dw = QDQ<axis = 0>(w, ws, wz)'  # of the texts below
# name, nodes, Casts, and how many Q and DQ are left; OPTIONS has what nchw needs besides
TABLE = """
convolution, then decoding | CONV y = Sigmoid(c) | x HALF, c FLOAT | 0 0
softmax, then the DFL | CONV s = Softmax<axis = 1>(c) y = Conv(s, w) | x HALF, c FLOAT | 0 0
activation between convolutions | CONV m = SiLU(c) d = Conv(m, w) y = Add(d, x) | x HALF, d FLOAT | 0 0
no convolution | y = Relu(x) | | 0 0
a constant on both sides | m = Mul(x, two) c = Conv(m, w) y = Mul(c, two) | x HALF, c FLOAT | 0 0
constants as nodes | k = Constant<value = float {3}>() m = Mul(x, k) c = Conv(m, w) y = Mul(c, k) | x HALF, c FLOAT | 0 0
a feature is returned | y = Conv(x, w, b) c = Conv(y, w) r = Relu(y) z = Add(c, r) | x HALF, y_fp16 FLOAT, c FLOAT | 0 0
bytes in | f = Cast<to = 1>(x) d = Div(f, two) c = Conv(d, w) y = Relu(c) | x HALF, c FLOAT | 0 0
Resize by scales | CONV r = Resize(c, roi, scales) d = Conv(r, w) y = Relu(d) | x HALF, d FLOAT | 0 0
Resize by sizes, CBFuse | CONV r = Resize(c, "", "", sizes) e = Conv(r, w) f = Add(r, e) d = Conv(f, w) y = Relu(d)
    | x HALF, d FLOAT | 0 0
sizes computed in floats | CONV shape = Shape(c) f = Cast<to = 1>(shape) g = Mul(f, scales) i = Cast<to = 7>(g)
    r = Resize(c, "", "", i) d = Conv(r, w) y = Relu(d) | x HALF, d FLOAT | 0 0
moved, then decoding | CONV m = Concat<axis = 2>(c, c) t = Transpose(m) y = Sigmoid(t) | x HALF, t FLOAT | 0 0
moved with something else | CONV m = Concat<axis = 2>(c, x) y = Sigmoid(m) | x HALF, c FLOAT | 0 0
INT8 moved between Q and DQ | a = QuantizeLinear(x, scale, zero)
    p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a) e = DequantizeLinear(p, scale, zero)
    WEIGHT c = Conv(e, dw) y = Relu(c) | x HALF, c FLOAT | 1 2
a DQ that both sides read | a = QDQ(x) c = Conv(a, w) y = Mul(a, c) | x HALF, a FLOAT, c FLOAT | 1 1
Q/DQ in the decoding | CONV a = QDQ(c) y = Relu(a) | x HALF, c FLOAT | 1 1
opset 21 | a = QDQ(x) WEIGHT c = Conv(a, dw) y = Relu(c) | x HALF, c FLOAT | 1 2
"""
TALL = {'returns': (1, 4, 8, 8)}
OPTIONS = {
    'a feature is returned': {'outputs': ('y', 'z')},
    'bytes in': {'given': TensorProto.UINT8},
    **dict.fromkeys(('Resize by scales', 'Resize by sizes, CBFuse', 'sizes computed in floats'), TALL),
    'moved, then decoding': {'returns': (4, 8, 4, 1)},
    'moved with something else': {'returns': (1, 4, 8, 4)},
    'opset 21': {'opset': 21},
}
TYPES = {'HALF': HALF, 'FLOAT': FLOAT}
GRAPHS = {  # name → graph, its Casts, and how many Q and DQ are left
    'INT8': (INT8_BLOCK, [('x', HALF), ('d', FLOAT)], (3, 4)),
    'INT8, images with a scale that is an FP16 number': (with_values(INT8_BLOCK, scale=0.125), [('d', FLOAT)], (3, 4)),
    **{
        name: (
            nchw(text.replace('CONV', CONV).replace('WEIGHT', WEIGHT), **OPTIONS.get(name, {})),
            [(tensor, TYPES[kind]) for tensor, kind in (cast.split() for cast in found.split(', ') if cast)],
            tuple(map(int, left.split())),
        )
        for name, text, found, left in rows(TABLE)
    },
}


def x_of(model):
    """An input for `model`, the same every time."""
    kind, rng = NP[model.graph.input[0].type.tensor_type.elem_type], np.random.default_rng(0)
    return {
        'x': (rng.uniform(0, 255, (1, 4, 4, 4)) if kind is np.uint8 else rng.normal(size=(1, 4, 4, 4))).astype(kind)
    }


@pytest.mark.parametrize('name', GRAPHS)
def test_every_law_on_every_graph(name):
    model, wanted, qdq = GRAPHS[name]
    typed = to_half(onnx.shape_inference.infer_shapes(model))  # with the types of FP32 written
    onnx.checker.check_model(typed, full_check=True)
    assert casts(typed) == wanted
    assert onnx_graph.count_qdq(typed) == qdq
    assert list(typed.graph.input) == list(model.graph.input), 'FP32, or whatever they were'
    assert list(typed.graph.output) == list(model.graph.output)
    written = {v.name: v.type.tensor_type.elem_type for v in typed.graph.value_info}
    assert written.items() <= types_of(typed).items(), 'nothing stale'
    read = onnx_graph.readers(typed)
    assert {i.name for i in typed.graph.initializer} <= read.keys(), 'nothing that nobody reads'

    types = types_of(typed)
    for n in typed.graph.node:
        if n.op_type in ('QuantizeLinear', 'DequantizeLinear') and name != 'Q/DQ in the decoding':
            assert types[n.input[1]] == (types[n.input[0]] if n.op_type == 'QuantizeLinear' else HALF)
            assert types[n.input[2]] == TensorProto.INT8
        if n.op_type == 'Resize':
            assert all(types[i] != HALF for i in n.input[1:] if i), 'roi and scales have types of their own'

    x = x_of(model)
    for ours, theirs in zip(run_onnx(typed, x), run_onnx(model, x), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        limit = 0.05 if any(qdq) else 3e-3  # a value between two INT8 steps may round either way
        assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    'name, values, refusal',
    [
        ('INT8', {'scale': 6e-5}, '^a int8: scale 6e-05 is no normal FP16 number'),
        ('INT8', {'scale': 0}, '^a: scale 0 is no normal'),
        ('INT8', {'scale': 7e4}, '^a int8: scale 7e[+]04 is no normal'),
        ('INT8', {'ws': 1e-9}, '^dw: scale 1e-09 is no normal'),
        ('INT8', {'b': -65505}, '^b: 65505 is beyond FP16'),
        ('convolution, then decoding', {'w': 1e5}, '^w: 100000 is beyond FP16'),
        ('INT8', {'scale': 2**-14}, None),
        ('INT8', {'b': 65504}, None),
        ('INT8', {'b': -np.inf}, None),
        ('Q/DQ in the decoding', {'scale': 1e-6}, None),  # stays FP32
        ('INT8 moved between Q and DQ', {'w': 1e5}, None),  # becomes INT8
    ],
)
def test_what_has_no_place_in_fp16_is_named(name, values, refusal):
    model = with_values(GRAPHS[name][0], **values)
    with pytest.raises(QatError, match=refusal) if refusal else contextlib.nullcontext():
        onnx.checker.check_model(to_half(model), full_check=True)


def test_an_opset_without_fp16_scales_is_refused():
    model = nchw('a = QDQ(x) c = Conv(a, w) y = Relu(c)', opset=18)
    with pytest.raises(QatError, match='^opset 18: .*--trt 11, which takes opset 19'):
        to_half(model)
    to_half(nchw(f'{CONV} y = Relu(c)', opset=13))


def test_a_cast_before_a_convolution_is_refused():
    """One DQ feeds a feature convolution (FP16) and one behind a Softmax (FP32), which TensorRT could not fuse."""
    model = nchw(f'{CONV} {WEIGHT} d = Conv(x, dw) e = Add(c, d) s = Softmax(e) y = Conv(s, dw)')
    with pytest.raises(QatError, match='please report this model'):
        to_half(model)


# ---- INT8 weights -------------------------------------------------------------------------------------------------------

STEPS = np.float32(
    [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.5, 126.5, -128.5, 200, -200, 3, 0.49999997, 1e-30, -0.0, 100.3]
)
ROUNDED = np.int8([0, 2, 2, 0, -2, -2, 127, 126, -128, 127, -128, 3, 0, 0, 0, 100])


@pytest.mark.parametrize(
    'axis, scale',
    [
        (None, np.float32(0.25)),
        (0, np.float32([0.25, 4])),
        (1, np.float32([0.25, 2, 1, 8])),
        (-1, np.float32([0.5, 4])),
    ],
)
def test_weights_are_what_their_q_computes(axis, scale):
    """They are rounded half to even and saturated, per tensor and per channel."""
    shape = (2, 4, 2)
    along = scale.reshape([-1 if axis is not None and i == axis % 3 else 1 for i in range(3)])
    weight = STEPS.reshape(shape) * along
    initializers = {'weight': weight, 'scale': scale, 'zero': np.zeros(scale.shape, np.int8)}
    along_axis = '' if axis is None else f'<axis = {axis}>'
    text = f'w = QDQ{along_axis}(weight) y = Add(x, w)'
    model = graph_of(text, shape=shape, initializers=initializers)
    before = run_onnx(model, {'x': np.zeros(shape, np.float32)})[0]
    stored = store_int8_weights(copy(model))
    onnx.checker.check_model(stored, full_check=True)
    assert np.array_equal(onnx_graph.constants(stored)['w int8'], ROUNDED.reshape(shape))
    assert onnx_graph.constants(stored).keys() == {'w int8', 'scale', 'zero'}
    assert np.array_equal(run_onnx(stored, {'x': np.zeros(shape, np.float32)})[0], before)
    assert onnx_graph.count_qdq(stored) == (0, 1) and store_int8_weights(copy(stored)) == stored


def test_only_the_q_of_weights_go():
    """A weight with two readers is stored for each; a reader in float still finds it."""
    text = 'a = QDQ(x) b = QDQ(weight) c = QDQ(weight, "other scale") d = MatMul(a, b) e = MatMul(d, c) y = MatMul(e, weight)'
    model = graph_of(text)
    stored, x = store_int8_weights(copy(model)), {'x': np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}
    assert onnx_graph.count_qdq(model) == (3, 3) and onnx_graph.count_qdq(stored) == (1, 3)
    assert np.array_equal(run_onnx(stored, x)[0], run_onnx(model, x)[0])
    assert 'weight' in onnx_graph.constants(stored)


def test_weights_are_not_rounded_twice():
    """Rounding to FP16 before INT8 would give other steps."""
    steps = np.random.default_rng(0).integers(-100, 100, (4, 4, 1, 1)) + np.float32(0.4995)
    weight = steps.astype(np.float32) * np.float32(0.01)
    stored = onnx_graph.constants(to_half(with_values(INT8_BLOCK, w=weight, ws=0.01)))['dw int8']
    assert np.array_equal(stored, np.floor(steps))
    assert not np.array_equal(stored, np.rint(weight.astype(np.float16) / np.float16(0.01)))


# ---- ONNX Runtime's rounding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scale', [0.0123, 0.1, 3.3])
def test_every_version_of_onnx_runtime_rounds_fp16_values(scale):
    """Versions up to 1.29 need `quantize_in_fp32`, which gives equal values where the plain graph is right."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)].reshape(1, -1)
    typed = graph_of(
        'f = Cast<to = 10>(x) one = QuantizeLinear(f, scale, zero) two = QuantizeLinear(f, scale, zero)'
        'd = DequantizeLinear(one, scale, zero) y = Cast<to = 1>(d)',
        shape=x.shape,
        opset=19,
        initializers={'scale': np.float16(scale)},
    )
    typed.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, TensorProto.INT8, x.shape) for name in ('one', 'two')
    )
    wanted = np.clip(np.rint(x.astype(np.float32) / np.float32(np.float16(scale))), -128, 127)
    wide = quantize_in_fp32(copy(typed))
    assert [n.op_type for n in wide.graph.node].count('Cast') == 3, 'one for both Q'
    onnx.checker.check_model(wide, full_check=True)
    for model in (typed, wide):
        _, *ours = run_onnx(model, {'x': x.astype(np.float32)})
        assert all(np.array_equal(wanted, one) for one in ours)
    assert (rounding(typed.SerializeToString()) == typed.SerializeToString()) is rounds_fp16()
