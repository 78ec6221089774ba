"""Laws of ONNX export: the file computes what the model computes, with equal scales, or no file is written."""

import ast
import contextlib
import math

import numpy as np
import onnx
import pytest
import torch
from faults import sampled
from graphs import copy, dims, graph_of, node, pair, run_onnx
from onnx import TensorProto, helper, numpy_helper
from segmenters import CLASSES, NM, SEGMENTERS, segmenter
from zoo import image, output, same, state

from models.deploy import agreement
from models.deploy.agreement import LIMITS, RELATIVE, made_images, output_differences, traceable_copy
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from models.quantize.quantizers import named_quantizers, quantizers_off
from utils.qat.core.errors import QatError
from utils.qat.graph import onnx_graph, passes
from utils.qat.graph.audit import audit


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def logit(scores):
    scores = np.clip(scores.astype(np.float64), 1e-6, 1 - 1e-6)
    return np.log(scores / (1 - scores))


# ---- whole models -------------------------------------------------------------------------------------------------------

EXPORTS = [
    ('float', {}),
    ('float', {'dynamic': True, 'simplify': True, 'opset': 13}),
    ('quantized', {'opset': 13}),
    ('quantized', {'dynamic': True, 'simplify': True, 'opset': 13}),
    ('quantized', {'simplify': True, 'batch': 2}),
    ('quantized', {'dynamic': True, 'imgsz': (64, 96), 'inplace': True}),
    ('quantized', {'opset': 20}),
    ('float', {'half': True}),
    ('quantized', {'half': True, 'opset': 19}),
    ('quantized', {'half': True, 'opset': 20, 'dynamic': True, 'simplify': True}),
]


@pytest.mark.parametrize(
    'kind, options',
    sampled(EXPORTS, 6, 2),
    ids=lambda x: x if isinstance(x, str) else '-'.join(map(str, x)) or 'defaults',
)
def test_every_law_on_every_export(demo, tmp_path, kind, options):
    model = demo.float_model() if kind == 'float' else demo.quantized_model()
    before, expected_before = state(model), output(model, image(96))
    options = {'imgsz': (96, 96), **options}
    (height, width), batch = options['imgsz'], options.get('batch', 1)
    file = tmp_path / 'model.onnx'
    done = export_onnx(model, file, **options)
    graph = onnx.load(file)

    # the file
    onnx.checker.check_model(graph, full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ['model.onnx']
    assert next(o.version for o in graph.opset_import if o.domain in ('', 'ai.onnx')) == options.get('opset', 17)
    meta = {p.key: p.value for p in graph.metadata_props}
    assert int(meta['stride']) == 32 and ast.literal_eval(meta['names']) == model.names
    assert meta['task'] == 'detect' and 'nm' not in meta
    [given], [returned] = graph.graph.input, graph.graph.output
    anchors = sum(height * width // stride**2 for stride in (8, 16, 32))
    first = 'batch' if options.get('dynamic') else batch
    assert (given.name, dims(given)) == ('images', [first, 3, height, width])
    assert (returned.name, dims(returned)) == ('output0', [first, 14, anchors])

    # what it computes
    limit = LIMITS['float' if kind == 'float' else 'INT8', 'FP16' if options.get('half') else 'FP32']
    for n in (1, 3) if options.get('dynamic') else (batch,):
        images = torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(n))
        [ours] = run_onnx(file, {'images': images.numpy()})
        theirs = output(model, images)[0].numpy()
        assert ours.shape == theirs.shape == (n, 14, anchors)
        assert relative(ours[:, :4], theirs[:, :4]) <= limit
        assert relative(logit(ours[:, 4:]), logit(theirs[:, 4:])) <= limit
        assert kind != 'float' or np.abs(ours[:, 4:] - theirs[:, 4:]).max() <= (2e-3 if options.get('half') else 1e-4)
    assert done.limit >= limit and max(done.boxes, done.scores) <= limit and (done.noise > 0) == (kind != 'float')

    # its scales
    assert done.qdq == onnx_graph.count_qdq(graph)
    if kind == 'float':
        assert done.qdq == (0, 0)
    else:
        assert scales_of(graph) == {q.scale.numpy().tobytes() for _, q in named_quantizers(model)}
        assert_int8(graph, model)

    # the model is as it was
    assert same(state(model), before) and same(output(model, image(96)), expected_before)


def scales_of(graph):
    """Bytes of the scale of every DequantizeLinear, as FP32."""
    values = onnx_graph.constants(graph)
    return {
        values[n.input[1]].astype(np.float32).tobytes() for n in graph.graph.node if n.op_type == 'DequantizeLinear'
    }


def assert_int8(graph, model):
    """Zero points are INT8 zeros, weights are quantized along axis 0, and every quantized convolution reads two DQ."""
    values = onnx_graph.constants(graph)
    made_by = {o: n for n in graph.graph.node for o in n.output}
    for n in graph.graph.node:
        if n.op_type in ('QuantizeLinear', 'DequantizeLinear'):
            zero = values[n.input[2]]
            assert zero.dtype == np.int8 and not zero.any()
            if values[n.input[1]].ndim:
                assert {a.name: helper.get_attribute_value(a) for a in n.attribute}['axis'] == 0
    convs = [n for n in graph.graph.node if n.op_type == 'Conv']
    int8 = [
        n
        for n in convs
        if all(made_by.get(i) is not None and made_by[i].op_type == 'DequantizeLinear' for i in n.input[:2])
    ]
    assert len(int8) == sum(isinstance(m, QuantConv2d) for m in model.modules())
    assert all(
        not any(made_by.get(i) is not None and made_by[i].op_type == 'DequantizeLinear' for i in n.input)
        for n in convs
        if n not in int8
    ), 'float convolutions are all float'


def test_int8_is_not_float(demo, tmp_path):
    """The limit of INT8 is strict: the float model differs more from the quantized model than ONNX Runtime."""
    model, images = demo.quantized_model(), image(96)
    export_onnx(model, tmp_path / 'model.onnx', (96, 96))
    [ours] = run_onnx(tmp_path / 'model.onnx', {'images': images.numpy()})
    with quantizers_off(model):
        floating = output(model, images)[0].numpy()
    theirs = output(model, images)[0].numpy()
    assert relative(ours[:, :4], theirs[:, :4]) < relative(floating[:, :4], theirs[:, :4])


# ---- segmentation models ------------------------------------------------------------------------------------------------

SEGMENT = {
    'wide': {'imgsz': (64, 96)},
    'open': {'dynamic': True, 'simplify': True, 'opset': 13},
    'typed': {'half': True, 'opset': 19, 'dynamic': True},
}


@pytest.mark.parametrize('options', sampled(SEGMENT.values(), 3, 2), ids=SEGMENT)
@pytest.mark.parametrize('quantized', [False, True], ids=['float', 'quantized'])
@pytest.mark.parametrize('head', SEGMENTERS)
def test_a_segmentation_model_returns_predictions_and_prototypes(tmp_path, head, quantized, options):
    model, options = segmenter(head, quantized), {'imgsz': (96, 96), **options}
    (height, width), first, file = options['imgsz'], 'batch' if options.get('dynamic') else 1, tmp_path / 'model.onnx'
    before = state(model)
    done = export_onnx(model, file, **options)
    graph = onnx.load(file)

    anchors = sum(height * width // stride**2 for stride in (8, 16, 32))
    assert [(o.name, dims(o)) for o in graph.graph.output] == [
        ('output0', [first, 4 + CLASSES + NM, anchors]),
        ('output1', [first, NM, height // 4, width // 4]),
    ]
    assert {v.type.tensor_type.elem_type for v in (*graph.graph.input, *graph.graph.output)} == {TensorProto.FLOAT}
    meta = {p.key: p.value for p in graph.metadata_props}
    assert (meta['task'], meta['nm'], len(ast.literal_eval(meta['names']))) == ('segment', str(NM), CLASSES)

    for n in (1, 3) if options.get('dynamic') else (1,):
        ours = [torch.from_numpy(out) for out in run_onnx(file, {'images': made_images(n, (height, width)).numpy()})]
        with torch.no_grad():
            figures = output_differences(ours, traceable_copy(model)(made_images(n, (height, width))))
        assert max(figures[name] for name in RELATIVE if name in figures) <= done.limit, figures
    assert (
        max(done.boxes, done.scores, done.coefficients, done.prototypes) <= done.limit and (done.noise > 0) == quantized
    )

    if quantized:
        assert scales_of(graph) == {q.scale.numpy().tobytes() for _, q in named_quantizers(model)}
        assert_int8(graph, model)
    weights = sum(w.numel() for w in model.parameters() if w.ndim == 4) * (
        4 if not options.get('half') else 1 if quantized else 2
    )
    assert 0.9 * weights < file.stat().st_size < 1.5 * weights + 2e5, 'each weight is there once'
    assert same(state(model), before)


@pytest.mark.parametrize('head', SEGMENTERS)
def test_the_audit_of_a_segmentation_model(tmp_path, head):
    """All is INT8, except the outputs of the head (boxes, classes, coefficients at three levels) and the DFL."""
    model = segmenter(head, quantized=True)
    export_onnx(model, tmp_path / 'model.onnx', (96, 96), opset=19, half=True)
    report = audit(onnx.load(tmp_path / 'model.onnx'))
    assert not report.findings
    assert len([c for c in report.convs if not c.int8]) == 10 and len(report.convs) > 30


@pytest.mark.parametrize(
    'part, change',
    [
        ('coefficients', lambda p, m: p[:, -NM:].mul_(1.01)),
        ('prototypes', lambda p, m: m[:, 0].mul_(1.1)),
        ('scores', lambda p, m: p[:, 4:-NM].mul_(0.9)),
        ('boxes', lambda p, m: p[:, :4].mul_(0.9)),
    ],
)
def test_each_part_of_a_segmentation_model_is_compared(part, change):
    with torch.no_grad():
        theirs = traceable_copy(segmenter())(made_images(1, (96, 96)))
    ours = [t.clone() for t in theirs]
    assert not any(output_differences(ours, theirs).values())
    change(*ours)
    assert {name for name, error in output_differences(ours, theirs).items() if error and name in RELATIVE} == {part}


def test_a_difference_of_the_prototypes_alone_leaves_no_file(tmp_path, monkeypatch):
    """The graph differs from the model in the last bias of the prototypes."""

    def other(graph):
        made_by, stored = onnx_graph.producers(graph), {i.name: i for i in graph.graph.initializer}
        node = made_by['output1']
        while node.op_type != 'Conv':
            node = made_by[node.input[0]]
        bias = stored[node.input[2]]
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(0.1), bias.name))
        return graph

    monkeypatch.setattr(passes, 'write_axis', other)
    with pytest.raises(
        QatError, match=r'0.00% \(coefficients\), \d+\.\d+% \(prototypes\), more than 0.1%; no file was written'
    ):
        export_onnx(segmenter(), tmp_path / 'model.onnx', (96, 96))
    assert not list(tmp_path.iterdir())


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


def test_a_model_that_is_not_finite_leaves_the_old_file(small, tmp_path):
    (tmp_path / 'model.onnx').write_bytes(b'the old one')
    model = small.float_model()
    next(model.parameters()).data.fill_(math.nan)
    with pytest.raises(QatError, match='no file was written'):
        export_onnx(model, tmp_path / 'model.onnx', (96, 96))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'model.onnx': b'the old one'}


def test_an_unknown_opset_leaves_no_file(small, tmp_path):
    with pytest.raises(Exception):  # whatever PyTorch says
        export_onnx(small.float_model(), tmp_path / 'model.onnx', (96, 96), opset=99)
    assert not list(tmp_path.iterdir())


def test_a_model_without_scales_leaves_no_file(small, tmp_path):
    model = small.quantized_model()
    q = named_quantizers(model)[0][1]
    del q._amax
    with pytest.raises(AttributeError):
        export_onnx(model, tmp_path / 'model.onnx', (96, 96))
    assert not list(tmp_path.iterdir())


# ---- passes, on graphs made by hand -------------------------------------------------------------------------------------

TWICE = [
    *pair('x', 'a'),
    *pair('x', 'b'),
    node('Relu', 'a', 'c'),
    node('MatMul', 'b', 'weight', 'd'),
    node('Add', 'c', 'd', 'y'),
]
GRAPHS = {  # name → graph, and the Q and DQ that merging leaves
    'twice': (graph_of(TWICE), (1, 1)),
    'equal constants under two names': (
        graph_of([*pair('x', 'a'), *pair('x', 'b', scale='same scale', zero='same zero'), node('Add', 'a', 'b', 'y')]),
        (1, 1),
    ),
    'two scales': (
        graph_of([*pair('x', 'a'), *pair('x', 'b', scale='other scale'), node('Add', 'a', 'b', 'y')]),
        (2, 2),
    ),
    'two tensors': (
        graph_of([node('Relu', 'x', 'r'), *pair('x', 'a'), *pair('r', 'b'), node('Add', 'a', 'b', 'y')]),
        (2, 2),
    ),
    'one after the other': (
        graph_of([*pair('x', 'a'), *pair('a', 'b'), *pair('a', 'c'), node('Add', 'b', 'c', 'y')]),
        (2, 2),
    ),
    'two axes': (
        graph_of(
            [
                *pair('weight', 'a', scale='scales', zero='zeros', axis=0),
                *pair('weight', 'b', scale='scales', zero='zeros', axis=1),
                node('MatMul', 'x', 'a', 'c'),
                node('MatMul', 'c', 'b', 'y'),
            ],
            initializers={'scales': np.float32([0.1, 0.2, 0.3]), 'zeros': np.zeros(3, np.int8)},
        ),
        (2, 2),
    ),
    'constants as nodes': (
        graph_of(
            [
                helper.make_node('Constant', [], ['s1'], value=numpy_helper.from_array(np.float32(0.1))),
                helper.make_node('Constant', [], ['s2'], value=numpy_helper.from_array(np.float32(0.1))),
                *pair('x', 'a', scale='s1'),
                *pair('x', 'b', scale='s2'),
                node('Add', 'a', 'b', 'y'),
            ]
        ),
        (1, 1),
    ),
    'identities': (
        graph_of(
            [
                node('Identity', 'x', 'i'),
                node('Identity', 'i', 'j'),
                *pair('j', 'a'),
                *pair('x', 'b'),
                node('Add', 'a', 'b', 'c'),
                node('Identity', 'c', 'y'),
            ]
        ),
        (2, 2),
    ),
    'pooled twice': (
        graph_of(
            [
                *(
                    n
                    for side in 'ab'
                    for n in (
                        *pair('x', f'{side}1'),
                        node('AveragePool', f'{side}1', f'{side}2', kernel_shape=[2]),
                        *pair(f'{side}2', f'{side}3'),
                    )
                ),
                node('Add', 'a3', 'b3', 'y'),
            ],
            shape=(2, 3, 5),
            returns=(2, 3, 4),
        ),
        (2, 2),
    ),
    'pooled in two ways': (
        graph_of(
            [
                *(
                    n
                    for side, pad in (('a', 0), ('b', 1))
                    for n in (
                        *pair('x', f'{side}1'),
                        node(
                            'AveragePool', f'{side}1', f'{side}2', kernel_shape=[3], pads=[1, 1], count_include_pad=pad
                        ),
                        *pair(f'{side}2', f'{side}3'),
                    )
                ),
                node('Add', 'a3', 'b3', 'y'),
            ],
            shape=(2, 3, 5),
        ),
        (3, 3),
    ),
    'split twice': (
        graph_of(
            [helper.make_node('Split', ['x'], [f'{side}1', f'{side}2'], axis=1, num_outputs=2) for side in 'ab']
            + [node('Add', 'a1', 'b2', 'y')],
            shape=(2, 4),
            returns=(2, 2),
            opset=18,
        ),
        (0, 0),
    ),
    'none': (graph_of([node('Relu', 'x', 'y')]), (0, 0)),
}


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
    assert all(
        np.array_equal(a, b) for a, b in zip(run_onnx(once, x_of(model)), run_onnx(model, x_of(model)), strict=True)
    )
    assert [o.name for o in once.graph.output] == [o.name for o in model.graph.output]
    assert merge(copy(once)) == once


@pytest.mark.parametrize('name', GRAPHS)
def test_merging_leaves_one_pair_per_tensor_and_scale(name):
    model, left = GRAPHS[name]
    assert onnx_graph.count_qdq(passes.merge_duplicates(copy(model))) == left
    assert onnx_graph.count_qdq(passes.remove_identities(copy(model))) == onnx_graph.count_qdq(model)


def moved(made, asked, shape=(1, 2, 4, 4), returns=None, opset=17):
    """A graph of the nodes `made`, which read x and Relu(x) and return m, with one reader of m per letter of `asked`.

    s and o are readers with two scales, f reads in float.
    """
    kinds = {
        's': lambda i: [*pair('m', f'r{i}')],
        'o': lambda i: [*pair('m', f'r{i}', scale='other scale')],
        'f': lambda i: [node('Relu', 'm', f'r{i}')],
    }
    reads = [n for i, kind in enumerate(asked) for n in kinds[kind](i)]
    return graph_of(
        [
            node('Relu', 'x', 'a'),
            node('Neg', 'x', 'b'),
            *made,
            *reads,
            helper.make_node('Sum', [f'r{i}' for i in range(len(asked))], ['y']),
        ],
        shape=shape,
        returns=returns or shape,
        opset=opset,
        initializers={
            'end': np.int64([3]),
            'start': np.int64([1]),
            'axis': np.int64([2]),
            'sizes': np.float32([1, 1, 2, 2]),
        },
    )


CONCAT = [node('Concat', 'a', 'b', 'm', axis=1)]
MOVED = {  # name → graph, and the pairs before and after
    'concat': (moved(CONCAT, 's', returns=(1, 4, 4, 4)), 1, 3),
    'read twice': (moved(CONCAT, 'ss', returns=(1, 4, 4, 4)), 2, 4),
    'two scales': (moved(CONCAT, 'so', returns=(1, 4, 4, 4)), 2, 2),
    'read in float too': (moved(CONCAT, 'sf', returns=(1, 4, 4, 4)), 1, 1),
    'only in float': (moved(CONCAT, 'f', returns=(1, 4, 4, 4)), 0, 0),
    'pools in a row': (
        moved(
            [node('MaxPool', 'a', 'p', kernel_shape=[2, 2]), node('MaxPool', 'p', 'm', kernel_shape=[2, 2])],
            's',
            returns=(1, 2, 2, 2),
        ),
        1,
        3,
    ),
    'a pool beside the concat': (
        moved(
            [node('MaxPool', 'a', 'p', kernel_shape=[3, 3], pads=[1, 1, 1, 1]), node('Concat', 'a', 'p', 'm', axis=1)],
            's',
            returns=(1, 4, 4, 4),
        ),
        1,
        4,
    ),
    'slice': (moved([node('Slice', 'a', 'start', 'end', 'axis', 'm')], 's', returns=(1, 2, 2, 4)), 1, 2),
    'nearest': (moved([node('Resize', 'a', '', 'sizes', 'm', mode='nearest')], 's', returns=(1, 2, 8, 8)), 1, 2),
    'linear': (moved([node('Resize', 'a', '', 'sizes', 'm', mode='linear')], 's', returns=(1, 2, 8, 8)), 1, 1),
    'average': (moved([node('AveragePool', 'a', 'm', kernel_shape=[1, 1])], 's'), 1, 1),
    'its shape is read': (
        moved([*CONCAT, node('Shape', 'm', 'shape'), node('ConstantOfShape', 'shape', 'n')], 's', returns=(1, 4, 4, 4)),
        1,
        3,
    ),
    'quantized before': (
        moved([*pair('a', 'c'), node('Concat', 'c', 'b', 'm', axis=1)], 's', returns=(1, 4, 4, 4)),
        2,
        3,
    ),
    'quantized before, otherwise': (
        moved([*pair('a', 'c', scale='other scale'), node('Concat', 'c', 'b', 'm', axis=1)], 's', returns=(1, 4, 4, 4)),
        2,
        4,
    ),
}


@pytest.mark.parametrize('name', MOVED)
def test_moves_are_quantized_where_one_scale_is_asked_for(name):
    model, before, after = MOVED[name]
    assert onnx_graph.count_qdq(model) == (before, before)
    once = passes.quantize_moves(copy(model))
    onnx.checker.check_model(once, full_check=True)
    assert onnx_graph.count_qdq(once) == (after, after)
    assert all(
        np.array_equal(a, b) for a, b in zip(run_onnx(once, x_of(model)), run_onnx(model, x_of(model)), strict=True)
    )
    assert passes.quantize_moves(copy(once)) == once


def test_no_constant_node_is_left():
    model, _ = GRAPHS['constants as nodes']
    left = passes.constants_to_initializers(copy(model))
    assert {n.op_type for n in left.graph.node}.isdisjoint({'Constant'}) and {
        i.name for i in left.graph.initializer
    } >= {'s1', 's2'}


def test_the_axis_is_written_where_it_was_the_default():
    weights = graph_of(
        [
            helper.make_node('QuantizeLinear', ['weight', 'scales', 'zeros'], ['q']),
            helper.make_node('DequantizeLinear', ['q', 'scales', 'zeros'], ['d']),
            node('MatMul', 'x', 'd', 'y'),
        ],
        initializers={'scales': np.float32([0.1, 0.2, 0.3]), 'zeros': np.zeros(3, np.int8)},
    )
    written = passes.write_axis(copy(weights))
    assert [onnx_graph.attribute(n, 'axis') for n in written.graph.node[:2]] == [1, 1]
    assert np.array_equal(run_onnx(written, x_of(weights))[0], run_onnx(weights, x_of(weights))[0])
    per_tensor = GRAPHS['twice'][0]
    assert passes.write_axis(copy(per_tensor)) == per_tensor


@pytest.mark.parametrize('name, op', [('pooled twice', 'AveragePool'), ('split twice', 'Split')])
def test_other_duplicates_go_too(name, op):
    left = passes.merge_duplicates(copy(GRAPHS[name][0]))
    assert [n.op_type for n in left.graph.node].count(op) == 1


def test_identities_go_but_for_the_output():
    model, _ = GRAPHS['identities']
    left = passes.remove_identities(copy(model))
    assert [n.output[0] for n in left.graph.node if n.op_type == 'Identity'] == ['y']
    assert onnx_graph.count_qdq(passes.merge_duplicates(left)) == (1, 1), 'now both read x'


def test_two_outputs_of_equal_pairs_both_stay():
    """Merging keeps every output of the graph."""
    model = graph_of([*pair('x', 'y'), *pair('x', 'z')], outputs=('y', 'z'))
    merged = passes.merge_duplicates(copy(model))
    onnx.checker.check_model(merged, full_check=True)
    assert all(
        np.array_equal(a, b) for a, b in zip(run_onnx(merged, x_of(model)), run_onnx(model, x_of(model)), strict=True)
    )


def test_check_scales_is_exact():
    model, _ = GRAPHS['two scales']
    good = [np.float32(0.2), np.float32(0.1), np.float32(0.1)]
    passes.check_scales(model, good)
    for bad in (
        [np.float32(0.1)],
        [*good, np.float32(0.3)],
        [np.float32(0.2), np.nextafter(np.float32(0.1), np.float32(1))],
        [],
    ):
        with pytest.raises(QatError, match='scales'):
            passes.check_scales(model, bad)


def test_check_scales_of_a_model(small, tmp_path):
    model = small.quantized_model()
    export_onnx(model, tmp_path / 'model.onnx', (96, 96))
    graph, scales = onnx.load(tmp_path / 'model.onnx'), [q.scale.numpy() for _, q in named_quantizers(model)]
    passes.check_scales(graph, scales)
    with pytest.raises(QatError):
        passes.check_scales(graph, [*scales[:-1], np.nextafter(scales[-1], np.float32(9))])


def test_simplify_keeps_pairs_and_outputs():
    model, _ = GRAPHS['two axes']
    slim = passes.simplify(copy(model))
    assert onnx_graph.count_qdq(slim) == (2, 2) and np.array_equal(
        run_onnx(slim, x_of(model))[0], run_onnx(model, x_of(model))[0]
    )


def test_simplify_that_would_drop_a_pair_is_refused():
    model = graph_of([*pair('x', 'unused'), *pair('x', 'a', scale='other scale'), node('Relu', 'a', 'y')])
    with pytest.raises(QatError, match=r'--simplify: .*from \(2, 2\) to \(1, 1\); export without --simplify'):
        passes.simplify(model)


def test_metadata_and_shapes_are_written():
    model = passes.set_metadata(copy(GRAPHS['none'][0]), stride=32, names={0: 'a "b"'})
    passes.set_metadata(model, stride=16)
    assert {p.key: p.value for p in model.metadata_props} == {'stride': '16', 'names': str({0: 'a "b"'})}
    two = graph_of([node('Relu', 'x', 'y'), node('Neg', 'x', 'z')], outputs=('y', 'z'))
    passes.set_output_shapes(two, ('batch', 3), (2, 3))
    assert [dims(o) for o in two.graph.output] == [['batch', 3], [2, 3]]
