"""Laws of ONNX export: the file computes what the model computes, with equal scales, or no file is written."""

import ast
import contextlib
import math
import shutil

import numpy as np
import onnx
import pytest
import torch
from helpers.faults import sampled
from helpers.graphs import (
    FLOAT,
    HALF,
    assert_same_outputs,
    between_quantized,
    casts,
    copy,
    dims,
    graph_of,
    metadata,
    run_onnx,
    types_of,
    unread,
)
from helpers.segmenters import CLASSES, NM, SEGMENTERS, segmenter
from helpers.tables import named_rows, rows
from helpers.zoo import FLIPS, SIZE, command, image, output, same, share_of_float, state, tensors
from onnx import TensorProto

from models.deploy import agreement
from models.deploy.agreement import (
    LAST_BITS,
    LIMITS,
    Reference,
    made_images,
    other_last_bits,
    output_differences,
    traceable_copy,
)
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from models.quantize.quantizers import named_quantizers, quantizers_off
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.errors import QatError
from utils.qat.graph import onnx_graph, passes
from utils.qat.vendors.load import open_file

# ---- whole models -------------------------------------------------------------------------------------------------------

DETECTOR = 'detector'
EXPORTS = [
    (DETECTOR, 'float', {}),
    (DETECTOR, 'float', {'dynamic': True, 'simplify': True, 'opset': 13}),
    (DETECTOR, 'quantized', {'opset': 13}),
    (DETECTOR, 'quantized', {'dynamic': True, 'simplify': True, 'opset': 13}),
    (DETECTOR, 'quantized', {'simplify': True, 'batch': 2}),
    (DETECTOR, 'quantized', {'dynamic': True, 'imgsz': (64, 96), 'inplace': True}),
    (DETECTOR, 'quantized', {'opset': 20}),
    (DETECTOR, 'float', {'half': True}),
    (DETECTOR, 'quantized', {'half': True, 'opset': 19}),
    (DETECTOR, 'quantized', {'half': True, 'opset': 20, 'dynamic': True, 'simplify': True}),
]
WITH_MASKS = [
    pytest.param(head, kind, options, marks=[pytest.mark.full_tree] * (head == 'DSegment'))
    for head in ('Segment', 'DSegment')
    for kind in ('float', 'quantized')
    for options in (
        {'imgsz': (64, 96)},
        {'dynamic': True, 'simplify': True, 'opset': 13},
        {'half': True, 'opset': 19, 'dynamic': True},
    )
]


@pytest.mark.parametrize(
    'head, kind, options',
    [*sampled(EXPORTS, 6, 2), *sampled(WITH_MASKS, 3, 2)],
    ids=lambda x: x if isinstance(x, str) else '-'.join(map(str, x)) or 'defaults',
)
def test_every_law_on_every_export(small, tmp_path, head, kind, options):
    quantized, file = kind == 'quantized', tmp_path / 'model.onnx'
    if head == DETECTOR:
        model, masks = small.quantized_model() if quantized else small.float_model(), 0
    else:
        model, masks = segmenter(head, quantized), NM
    before, expected_before = state(model), output(model, image(96))
    options = {'imgsz': (96, 96), **options}
    (height, width), batch = options['imgsz'], options.get('batch', 1)
    done = export_onnx(model, file, **options)
    graph = onnx.load(file)

    # the file
    onnx.checker.check_model(graph, full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ['model.onnx']
    assert onnx_graph.opset(graph) == options.get('opset', 17)
    assert not unread(graph)
    meta = metadata(graph)
    assert int(meta['stride']) == int(max(model.stride)) and ast.literal_eval(meta['names']) == model.names
    assert (meta['task'], meta.get('nm')) == (('segment', str(NM)) if masks else ('detect', None))
    anchors = sum(height * width // stride**2 for stride in (8, 16, 32))
    first = 'batch' if options.get('dynamic') else batch
    classes = CLASSES if masks else 10
    shapes = {'images': [first, 3, height, width], 'output0': [first, 4 + classes + masks, anchors]}
    if masks:
        shapes['output1'] = [first, NM, height // 4, width // 4]
    values = [*graph.graph.input, *graph.graph.output]
    assert {v.name: dims(v) for v in values} == shapes
    assert {v.type.tensor_type.elem_type for v in values} == {TensorProto.FLOAT}
    bytes_each = 1 if quantized else 2 if options.get('half') else 4
    weights = bytes_each * sum(w.numel() for w in model.parameters() if w.ndim == 4)
    assert not masks or 0.9 * weights < file.stat().st_size < 1.5 * weights + 2e5, 'each weight is there once'

    # what it computes
    typing = 'FP16' if options.get('half') else 'FP32'
    for n in (1, 3) if options.get('dynamic') else (batch,):
        reference = Reference(model, n, (height, width))
        ours = [torch.from_numpy(out) for out in run_onnx(file, {'images': reference.images.numpy()})]
        reference.require_agreement(tuple(ours) if masks else ours[0], 'ONNX Runtime', typing)
        scores = (ours[0] - tensors(reference.outputs)[0])[:, 4:]
        assert quantized or masks or scores.abs().max() <= (2e-3 if options.get('half') else 1e-4)
    limit = LIMITS['INT8' if quantized else 'float', typing]
    errors = list(done.errors.values())
    assert done.limit >= limit and max(errors) <= done.limit and (done.noise > 0) == quantized
    assert len(errors) == (4 if masks else 2)

    # its scales
    assert done.qdq == onnx_graph.count_qdq(graph)
    if quantized:
        assert scales_of(graph) == {q.scale.numpy().tobytes() for _, q in named_quantizers(model)}
        assert_int8(graph, model)
    else:
        assert done.qdq == (0, 0)

    # its types
    if options.get('half'):
        assert_half(graph, quantized)

    # the model is as it was
    assert same(state(model), before) and same(output(model, image(96)), expected_before)


def assert_half(graph, quantized):
    """All is FP16 up to the decoding but the integers and the sums of them, with Casts at the two ends alone. The images of INT8 are
    quantized as they come. Each sum has DQs of its own, which are FP32 as it is.
    """
    types, convs = types_of(graph), [n for n in graph.graph.node if n.op_type == 'Conv']
    assert {types[n.output[0]] for n in convs} == {HALF}
    assert [name for name, kind in casts(graph) if kind == HALF] == ([] if quantized else ['images'])
    decoding = [n for n in graph.graph.node if n.op_type in ('Softmax', 'MatMul')]
    assert {types[n.output[0]] for n in decoding} == {FLOAT}
    assert {types[n.output[0]] for n in graph.graph.node if n.op_type == 'Resize'} <= {HALF}
    between = between_quantized(graph.graph.node)
    dequantized = {o for n in graph.graph.node if n.op_type == 'DequantizeLinear' for o in n.output}
    sums = [n for n in between if n.op_type == 'Add' and dequantized.issuperset(n.input)]
    in_fp32 = [name for n in sums for name in (*n.input, *n.output)]
    assert {types[name] for name in in_fp32} == ({FLOAT} if quantized else set())
    assert len(in_fp32) == len(set(in_fp32)) and all(len(onnx_graph.readers(graph)[name]) == 1 for name in in_fp32)
    others = {o for n in between for o in n.output}.difference(in_fp32)
    assert {types[name] for name in others} <= {HALF, TensorProto.INT8, TensorProto.INT64}
    assert not quantized or {'Conv', 'Mul', 'Sigmoid', 'Add', 'Concat'} <= {n.op_type for n in between}


def scales_of(graph):
    """Bytes of the scale of every DequantizeLinear, as FP32."""
    values = onnx_graph.constants(graph)
    scales = [values[n.input[1]] for n in graph.graph.node if n.op_type == 'DequantizeLinear']
    return {scale.astype(np.float32).tobytes() for scale in scales}


def assert_int8(graph, model):
    """Zero points are INT8 zeros, weights are quantized along axis 0, and every quantized convolution reads two DQ."""
    values, made_by = onnx_graph.constants(graph), onnx_graph.producers(graph)
    for n in graph.graph.node:
        if n.op_type in ('QuantizeLinear', 'DequantizeLinear'):
            zero = values[n.input[2]]
            assert zero.dtype == np.int8 and not zero.any()
            assert not values[n.input[1]].ndim or onnx_graph.attribute(n, 'axis') == 0
    convs = [n for n in graph.graph.node if n.op_type == 'Conv']
    behind_dq = [
        sum(name in made_by and made_by[name].op_type == 'DequantizeLinear' for name in n.input) for n in convs
    ]
    assert set(behind_dq) <= {0, 2}, 'float convolutions are all float'
    assert behind_dq.count(2) == sum(isinstance(m, QuantConv2d) for m in model.modules())


def test_weights_are_integers_but_for_tensorrt_8(small, tmp_path):
    """The outputs are the same bit for bit, and the file is less than half as large."""
    shutil.copy(small.quantized, tmp_path / 'model.pt')
    graphs = {}
    for trt in (8, 10):
        command('export_qat.py', '--weights', tmp_path / 'model.pt', '--imgsz', 64, '--trt', trt, '--opset', 17)
        graphs[trt] = onnx.load(tmp_path / 'model.onnx')
    weights = sum(isinstance(m, QuantConv2d) for m in small.quantized_model().modules())
    (before, pairs), (after, left) = (onnx_graph.count_qdq(graph) for graph in graphs.values())
    assert (before, left) == (pairs, pairs) and before - after == weights
    assert 2 * graphs[10].ByteSize() < graphs[8].ByteSize()
    images = {'images': image(64).numpy()}
    assert np.array_equal(*(run_onnx(graph, images)[0] for graph in graphs.values()))


@pytest.mark.parametrize('head', [DETECTOR, *SEGMENTERS])
def test_int8_is_not_float(small, tmp_path, head):
    """ONNX Runtime, and PyTorch on CPUs of other last bits, are nearer to the quantized model than the float model is."""
    model = small.quantized_model() if head == DETECTOR else segmenter(head, quantized=True)
    images, predict = image(batch=16), TorchModel(model)
    wanted = predict(images)
    with quantizers_off(model):
        floating = predict(images)
    export_onnx(model, tmp_path / 'model.onnx', (SIZE, SIZE), dynamic=True)
    assert share_of_float(open_file(tmp_path / 'model.onnx')(images), wanted, floating) < FLIPS
    for seed in range(5):
        with other_last_bits(model, LAST_BITS['FP32'], seed):
            assert share_of_float(predict(images), wanted, floating) < FLIPS


@pytest.mark.parametrize(
    'part, change, error',
    [
        ('coefficients', lambda p, m: p[:, -NM:].mul_(1.01), 0.01),
        ('prototypes', lambda p, m: m.mul_(1.1), 0.1),
        ('scores', lambda p, m: p[:, 4:-NM].copy_((p[:, 4:-NM].logit() * 0.9).sigmoid()), 0.1),
        ('boxes', lambda p, m: p[:, :4].mul_(0.9), 0.1),
    ],
)
def test_each_part_of_a_segmentation_model_is_compared(part, change, error):
    with torch.no_grad():
        theirs = traceable_copy(segmenter())(made_images(1, (96, 96)))
    ours = [t.clone() for t in theirs]
    assert not any(output_differences(ours, theirs).values())
    change(*ours)
    found = {name: error for name, error in output_differences(ours, theirs).items() if error}
    assert found == {part: pytest.approx(error, rel=1e-3)}
    with pytest.raises(QatError, match='ONNX Runtime returns .* PyTorch'):
        output_differences(ours[0], theirs)


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_file_is_refused_after_several_measurements_of_the_noise(small, tmp_path, monkeypatch):
    """A single measurement may be too small: other noise moves the output more."""
    monkeypatch.setitem(agreement.LIMITS, ('INT8', 'FP32'), -1.0)
    model, asked = small.quantized_model(), []
    for noises, refused in (([-1.0, -1.0, 1.0], False), ([-1.0] * agreement.SAMPLES, True)):
        left = iter(noises)
        monkeypatch.setattr(agreement, 'rounding_noise', lambda *given: asked.append(given[-1]) or next(left))
        with (
            pytest.raises(QatError, match='ONNX Runtime differs from PyTorch') if refused else contextlib.nullcontext()
        ):
            assert export_onnx(model, tmp_path / 'x.onnx', (64, 64)).limit == agreement.MARGIN
    assert asked == [1, 2, 3, *range(1, 1 + agreement.SAMPLES)]


def not_finite(model):
    next(model.parameters()).data.fill_(math.nan)


def without_a_scale(model):
    del named_quantizers(model)[0][1]._amax


@pytest.mark.parametrize(
    'change, options, error, says',
    [
        (not_finite, {}, QatError, 'no file was written'),
        (without_a_scale, {}, AttributeError, None),
        (lambda model: None, {'opset': 99}, Exception, None),  # whatever PyTorch says
    ],
    ids=['not finite', 'without a scale', 'an unknown opset'],
)
def test_what_cannot_be_exported_leaves_the_old_file(small, tmp_path, change, options, error, says):
    (tmp_path / 'model.onnx').write_bytes(b'the old one')
    model = small.quantized_model()
    change(model)
    with pytest.raises(error, match=says):
        export_onnx(model, tmp_path / 'model.onnx', (96, 96), **options)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'model.onnx': b'the old one'}


# ---- passes, on graphs made by hand -------------------------------------------------------------------------------------


def numbers(cell):
    return tuple(map(int, cell.split()))


POOL, PAIRS = 'AveragePool<kernel_shape = [2]>', '<axis = 1, num_outputs = 2>(x)'
PER_CHANNEL = {'ws': np.float32([0.1, 0.2, 0.3]), 'wz': np.zeros(3, np.int8)}
# name, nodes, and the Q and DQ that merging leaves; OPTIONS has what graph_of needs besides
TABLE = f"""
twice | a = QDQ(x) b = QDQ(x) y = Add(a, b) | 1 1
equal constants under two names | a = QDQ(x) b = QDQ(x, "same scale", "same zero") y = Add(a, b) | 1 1
two scales | a = QDQ(x) b = QDQ(x, "other scale") y = Add(a, b) | 2 2
two tensors | r = Relu(x) a = QDQ(x) b = QDQ(r) y = Add(a, b) | 2 2
one after the other | a = QDQ(x) b = QDQ(a) c = QDQ(a) y = Add(b, c) | 2 2
two axes | a = QDQ<axis = 0>(weight, ws, wz) b = QDQ<axis = 1>(weight, ws, wz) c = MatMul(x, a) y = MatMul(c, b) | 2 2
constants as nodes | s1 = Constant<value = float {{0.1}}>() s2 = Constant<value = float {{0.1}}>()
    a = QDQ(x, s1) b = QDQ(x, s2) y = Add(a, b) | 1 1
identities | i = Identity(x) j = Identity(i) a = QDQ(j) b = QDQ(x) c = Add(a, b) y = Identity(c) | 2 2
pooled twice | a1 = QDQ(x) a2 = {POOL}(a1) a3 = QDQ(a2) b1 = QDQ(x) b2 = {POOL}(b1) b3 = QDQ(b2) y = Add(a3, b3) | 2 2
pooled in two ways | a1 = QDQ(x) a2 = AveragePool<kernel_shape = [3], pads = [1, 1], count_include_pad = 0>(a1) a3 = QDQ(a2)
    b1 = QDQ(x) b2 = AveragePool<kernel_shape = [3], pads = [1, 1], count_include_pad = 1>(b1) b3 = QDQ(b2)
    y = Add(a3, b3) | 3 3
split twice | a1, a2 = Split{PAIRS} b1, b2 = Split{PAIRS} y = Add(a1, b2) | 0 0
none | y = Relu(x) | 0 0
two outputs of equal pairs | y = QDQ(x) z = QDQ(x) | 1 2
"""
OPTIONS = {
    'two axes': {'initializers': PER_CHANNEL},
    'pooled twice': {'shape': (2, 3, 5), 'returns': (2, 3, 4)},
    'pooled in two ways': {'shape': (2, 3, 5)},
    'split twice': {'shape': (2, 4), 'returns': (2, 2), 'opset': 18},
    'two outputs of equal pairs': {'outputs': ('y', 'z')},
}
GRAPHS = {name: (graph_of(text, **OPTIONS.get(name, {})), numbers(left)) for name, text, left in rows(TABLE)}


def x_of(model):
    return {'x': np.random.default_rng(0).normal(size=dims(model.graph.input[0])).astype(np.float32)}


PASSES = [
    passes.merge_duplicates,
    passes.remove_identities,
    passes.constants_to_initializers,
    passes.write_axis,
    passes.quantize_moves,
]


@pytest.mark.parametrize('merge', PASSES)
@pytest.mark.parametrize('name', GRAPHS)
def test_passes_change_no_output_and_are_idempotent(name, merge):
    model, _ = GRAPHS[name]
    once = merge(copy(model))
    onnx.checker.check_model(once, full_check=True)
    assert_same_outputs(once, model, x_of(model))
    assert [o.name for o in once.graph.output] == [o.name for o in model.graph.output]
    assert merge(copy(once)) == once


@pytest.mark.parametrize('name', GRAPHS)
def test_merging_leaves_one_pair_per_tensor_and_scale(name):
    model, left = GRAPHS[name]
    assert onnx_graph.count_qdq(passes.merge_duplicates(copy(model))) == left
    assert onnx_graph.count_qdq(passes.remove_identities(copy(model))) == onnx_graph.count_qdq(model)


def moved(made, asked, returns):
    """A graph of the nodes `made`, which read Relu(x) and -x as a and b and make m, with one reader of m per letter of `asked`.

    s and o are readers with two scales, f reads in float.
    """
    kinds = {'s': 'QDQ(m)', 'o': 'QDQ(m, "other scale")', 'f': 'Relu(m)'}
    reads = ' '.join(f'r{i} = {kinds[kind]}' for i, kind in enumerate(asked))
    every = ', '.join(f'r{i}' for i in range(len(asked)))
    return graph_of(
        f'a = Relu(x) b = Neg(x) {made} {reads} y = Sum({every})',
        shape=(1, 2, 4, 4),
        returns=returns,
        initializers={k: np.int64([i]) for k, i in (('end', 3), ('start', 1), ('axis', 2))}
        | {'sizes': np.float32([1, 1, 2, 2])},
    )


# name, nodes that make m of a and b, its readers, the shape of m, and the pairs before and after
MOVED = """
concat | m = Concat<axis = 1>(a, b) | s | 1 4 4 4 | 1 3
read twice | m = Concat<axis = 1>(a, b) | ss | 1 4 4 4 | 2 4
two scales | m = Concat<axis = 1>(a, b) | so | 1 4 4 4 | 2 2
read in float too | m = Concat<axis = 1>(a, b) | sf | 1 4 4 4 | 1 1
only in float | m = Concat<axis = 1>(a, b) | f | 1 4 4 4 | 0 0
pools in a row | p = MaxPool<kernel_shape = [2, 2]>(a) m = MaxPool<kernel_shape = [2, 2]>(p) | s | 1 2 2 2 | 1 3
a pool beside the concat | p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a) m = Concat<axis = 1>(a, p)
    | s | 1 4 4 4 | 1 4
slice | m = Slice(a, start, end, axis) | s | 1 2 2 4 | 1 2
nearest | m = Resize<mode = "nearest">(a, "", sizes) | s | 1 2 8 8 | 1 2
linear | m = Resize<mode = "linear">(a, "", sizes) | s | 1 2 8 8 | 1 1
average | m = AveragePool<kernel_shape = [1, 1]>(a) | s | 1 2 4 4 | 1 1
its shape is read | m = Concat<axis = 1>(a, b) shape = Shape(m) | s | 1 4 4 4 | 1 3
quantized before | c = QDQ(a) m = Concat<axis = 1>(c, b) | s | 1 4 4 4 | 2 3
quantized before, otherwise | c = QDQ(a, "other scale") m = Concat<axis = 1>(c, b) | s | 1 4 4 4 | 2 4
"""


@pytest.mark.parametrize('made, asked, shape, pairs', named_rows(MOVED, str, str, numbers, numbers))
def test_moves_are_quantized_where_one_scale_is_asked_for(made, asked, shape, pairs):
    model, (before, after) = moved(made, asked, shape), pairs
    assert onnx_graph.count_qdq(model) == (before, before)
    once = passes.quantize_moves(copy(model))
    onnx.checker.check_model(once, full_check=True)
    assert onnx_graph.count_qdq(once) == (after, after)
    assert_same_outputs(once, model, x_of(model))
    assert passes.quantize_moves(copy(once)) == once


@pytest.mark.parametrize(
    'simpler, name, op, left',
    [
        (passes.constants_to_initializers, 'constants as nodes', 'Constant', []),
        (passes.remove_identities, 'identities', 'Identity', ['y']),
        (passes.merge_duplicates, 'pooled twice', 'AveragePool', ['a2']),
        (passes.merge_duplicates, 'split twice', 'Split', ['a1']),
        (passes.merge_duplicates, 'two outputs of equal pairs', 'DequantizeLinear', ['y', 'z']),
    ],
)
def test_what_a_pass_leaves(simpler, name, op, left):
    model = simpler(copy(GRAPHS[name][0]))
    assert [n.output[0] for n in model.graph.node if n.op_type == op] == left


def test_the_axis_is_written_where_it_was_the_default():
    text = 'q = QuantizeLinear(weight, ws, wz) d = DequantizeLinear(q, ws, wz) y = MatMul(x, d)'
    weights = graph_of(text, initializers=PER_CHANNEL)
    written = passes.write_axis(copy(weights))
    assert [onnx_graph.attribute(n, 'axis') for n in written.graph.node[:2]] == [1, 1]
    assert_same_outputs(written, weights, x_of(weights))
    per_tensor = GRAPHS['twice'][0]
    assert passes.write_axis(copy(per_tensor)) == per_tensor


def test_without_identities_equal_pairs_are_one():
    model = passes.remove_identities(copy(GRAPHS['identities'][0]))
    assert onnx_graph.count_qdq(passes.merge_duplicates(model)) == (1, 1), 'now both read x'


def test_check_scales_is_exact():
    model, _ = GRAPHS['two scales']
    good = [np.float32(0.2), np.float32(0.1), np.float32(0.1)]
    passes.require_scales(model, good)
    for bad in (
        [np.float32(0.1)],
        [*good, np.float32(0.3)],
        [np.float32(0.2), np.nextafter(np.float32(0.1), np.float32(1))],
        [],
    ):
        with pytest.raises(QatError, match='scales'):
            passes.require_scales(model, bad)


def test_simplify_that_would_drop_a_pair_is_refused():
    model = graph_of('unused = QDQ(x) a = QDQ(x, "other scale") y = Relu(a)')
    with pytest.raises(QatError, match=r'--simplify: .*from \(2, 2\) to \(1, 1\); export without --simplify'):
        passes.simplify(model)
