"""Laws of files with NMS inside: detections equal NMS outside the file, and all nodes of the plain file are kept."""

import ast

import numpy as np
import onnx
import pytest
import torch
from faults import sampled
from graphs import copy, dims, graph_of, node, run_onnx
from onnx import TensorProto, helper
from utils.general import non_max_suppression

from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import check_detections, export_end2end, made_predictions, torch_nms
from utils.qat.backends.detections import prepared
from utils.qat.backends.file_model import open_file
from utils.qat.config.export import END2END, NMS_LIMITS, PLUGIN, Nms
from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.graph.audit import audit, coverage
from utils.qat.graph.nms import DOMAIN, Appended, add_nms, add_standard
from utils.qat.graph.onnx_graph import count_qdq, opset

CPU = torch.device('cpu')
SIZE = 128
STANDARD = Nms('standard')
EVALUATION = {'topk_all': 300, 'iou_thres': 0.7, 'conf_thres': 0.001}  # as utils.qat.evaluation.evaluate.detect


# ---- the reference: NMS by the book ---------------------------------------------------------------------------------------


def iou(a, b):
    """IoU of two boxes xyxy; 0 if a box has no area."""
    width, height = np.maximum(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0)
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both) if both else np.float32(0)


def by_the_book(predictions, nms):
    """Detections [n, 6] of predictions FP32 [4 + nc, N], in plain Python: the best box drops its overlaps."""
    (centre, size), scores = (predictions[:2], predictions[2:4]), predictions[4:]
    boxes = np.concatenate((centre - size / 2, centre + size / 2)).T
    candidates = [
        (-score, box, c)
        for (c, box), score in np.ndenumerate(scores)
        if score > nms.conf_thres and (not nms.class_agnostic or c == scores[:, box].argmax())
    ]
    kept = []
    for score, box, c in sorted(candidates):
        if all(iou(boxes[box], boxes[other]) <= nms.iou_thres for _, other, d in kept if nms.class_agnostic or c == d):
            kept.append((score, box, c))
    return np.float32([[*boxes[box], -score, c] for score, box, c in kept[: nms.topk_all]]).reshape(-1, 6)


def detections(outputs):
    """The four outputs of a file as a list of [n, 6]; also checks types, and the rows behind the last detection."""
    number, boxes, scores, classes = outputs
    assert [a.dtype for a in outputs] == [np.int32, np.float32, np.float32, np.int32] and number.shape == (
        len(boxes),
        1,
    )
    found = np.concatenate((boxes, scores[..., None], classes[..., None]), 2).astype(np.float32)
    assert not any(image[n:].any() for image, [n] in zip(found, number)), 'zeros behind the last'
    return [image[:n] for image, [n] in zip(found, number)]


def bare(nms, batch=1, classes=3, number=40, version=17):
    """A graph that passes its input, predictions, to NMS."""
    model = graph_of(
        [node('Identity', 'x', 'output0')], ('output0',), shape=(batch, 4 + classes, number), opset=version
    )
    return add_nms(model, nms)


def crowd(batch, classes=3, number=40, seed=0):
    """Predictions FP32 [batch, 4 + classes, number] in which most boxes overlap others, scores repeat, and some are exactly at a threshold."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate((rng.integers(20, 60, (batch, 2, number)), rng.integers(8, 30, (batch, 2, number))), 1)
    boxes[:, 2:, ::11] = 0  # without area
    return np.concatenate((boxes, rng.integers(0, 9, (batch, classes, number)) / 8), 1).astype(np.float32)


# ---- the nodes, on predictions made by hand -------------------------------------------------------------------------------

SETTINGS = [
    {},
    {'class_agnostic': True},
    {'topk_all': 7},
    {'topk_all': 7, 'class_agnostic': True},
    EVALUATION | {'topk_all': 40},
    {'iou_thres': 0.0},
    {'iou_thres': 1.0},
    {'conf_thres': 0.0},
    {'conf_thres': 1.0},
    {'iou_thres': 0.5, 'conf_thres': 0.5},
]


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
@pytest.mark.parametrize('batch', [1, 8, 'open'])
def test_detections_are_those_by_the_book(settings, batch):
    nms = Nms('standard', **{'topk_all': 40, **settings})
    model = bare(nms, batch)
    onnx.checker.check_model(model, full_check=True)
    for number in (1, 5) if batch == 'open' else (batch,):
        predictions = crowd(number, seed=number)
        wanted = [by_the_book(p, nms) for p in predictions]
        assert all(map(np.array_equal, detections(run_onnx(model, {'x': predictions})), wanted))
        assert all(map(np.array_equal, torch_nms(torch.from_numpy(predictions), nms), wanted))
        assert nms.conf_thres == 1 or max(map(len, wanted)) > 6, 'there is something to find'


@pytest.mark.parametrize('version', [13, 18, 20, 23])
def test_every_opset(version):
    predictions = crowd(1)
    for nms in (Nms('standard', 40), Nms('standard', 40, class_agnostic=True)):
        [found] = detections(run_onnx(bare(nms, version=version), {'x': predictions}))
        assert np.array_equal(found, by_the_book(predictions[0], nms))


def test_empty_and_full_images_in_one_batch():
    predictions, nms = crowd(3), Nms('standard', 5)
    predictions[1, 4:] = 0
    found = detections(run_onnx(bare(nms, 3), {'x': predictions}))
    assert [len(f) for f in found] == [5, 0, 5]
    predictions[:, 4:] = 0
    assert [len(f) for f in detections(run_onnx(bare(nms, 3), {'x': predictions}))] == [0, 0, 0]


A, HALF, NEAR, FAR = (
    (5, 5, 10, 10),
    (5, 2.5, 10, 5),
    (5, 6, 10, 10),
    (50, 50, 10, 10),
)  # IoU of A with HALF is 0.5, with NEAR 9 / 11
BY_HAND = {  # boxes and their scores per class, settings → (box, class) in order
    'the better one stays': ([A, NEAR], [[0.5], [0.9]], {}, [(1, 0)]),
    'an IoU at the threshold stays': ([A, HALF], [[0.9], [0.5]], {'iou_thres': 0.5}, [(0, 0), (1, 0)]),
    'an IoU above it goes': ([A, HALF], [[0.9], [0.5]], {'iou_thres': 0.49}, [(0, 0)]),
    'a score at the threshold goes': ([A, FAR], [[0.25], [0.26]], {}, [(1, 0)]),
    'classes do not matter to each other': ([A, NEAR], [[0.5, 0.0], [0.0, 0.9]], {}, [(1, 1), (0, 0)]),
    'or do': ([A, NEAR], [[0.5, 0.0], [0.0, 0.9]], {'class_agnostic': True}, [(1, 1)]),
    'a box of two classes': ([A], [[0.5, 0.9]], {}, [(0, 1), (0, 0)]),
    'a box of its best': ([A], [[0.5, 0.9]], {'class_agnostic': True}, [(0, 1)]),
    'equal scores: the earlier box stays': ([A, NEAR], [[0.5], [0.5]], {}, [(0, 0)]),
    'equal scores: box, then class': ([A, FAR], [[0.0, 0.5], [0.5, 0.5]], {}, [(0, 1), (1, 0), (1, 1)]),
    'equal scores: the earlier class': ([A], [[0.5, 0.5]], {'class_agnostic': True}, [(0, 0)]),
    'what is dropped drops nothing': (
        [A, NEAR, (5, 7, 10, 10)],
        [[0.9], [0.8], [0.7]],
        {'iou_thres': 0.7},
        [(0, 0), (2, 0)],
    ),
    'boxes without area stay': ([(5, 5, 0, 0)] * 2, [[0.9], [0.8]], {}, [(0, 0), (1, 0)]),
    'the best K': ([A, FAR, (90, 90, 9, 9)], [[0.3], [0.9], [0.6]], {'topk_all': 2}, [(1, 0), (2, 0)]),
}


@pytest.mark.parametrize('case', BY_HAND)
def test_by_hand(case):
    boxes, scores, settings, wanted = BY_HAND[case]
    predictions = np.concatenate((np.float32(boxes), np.float32(scores)), 1).T[None]
    nms = Nms('standard', **{'topk_all': len(boxes), **settings})
    if not nms.class_agnostic and 'topk_all' not in settings:
        nms = Nms('standard', **{**settings, 'topk_all': np.size(scores)})
    [found] = detections(run_onnx(bare(nms, 1, len(scores[0]), len(boxes)), {'x': predictions}))
    corners = [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for x, y, w, h in boxes]
    assert np.array_equal(found, np.float32([[*corners[box], scores[box][c], c] for box, c in wanted]))


def test_more_detections_than_candidates_are_refused():
    for agnostic, most in ((False, 120), (True, 40)):
        bare(Nms('standard', most, class_agnostic=agnostic))
        with pytest.raises(QatError, match=f'--topk-all {most + 1}: .*only {most} candidates'):
            bare(Nms('standard', most + 1, class_agnostic=agnostic))


# ---- the plugin -----------------------------------------------------------------------------------------------------------

# TensorRT's plugin/efficientNMSPlugin/README.md, and createPlugin in efficientNMSPlugin.cpp, which wants all but class_agnostic
DOCUMENTED = {
    'score_threshold': 'FLOAT',
    'iou_threshold': 'FLOAT',
    'max_output_boxes': 'INT',
    'background_class': 'INT',
    'score_activation': 'INT',
    'box_coding': 'INT',
    'class_agnostic': 'INT',
    'plugin_version': 'STRING',
}


@pytest.fixture
def schema():
    """Registers EfficientNMS_TRT with ONNX's checker, as TensorRT documents it."""
    S = onnx.defs.OpSchema
    kinds = [('T', ['tensor(float)', 'tensor(float16)'], ''), ('I', ['tensor(int32)'], '')]
    known = S(
        PLUGIN,
        DOMAIN,
        1,
        type_constraints=kinds,
        inputs=[S.FormalParameter('boxes', 'T'), S.FormalParameter('scores', 'T')],
        outputs=[S.FormalParameter(name, kind) for name, kind in zip(END2END, 'ITTI')],
        attributes=[
            S.Attribute(name, getattr(S.AttrType, kind), required=name != 'class_agnostic')
            for name, kind in DOCUMENTED.items()
        ],
    )
    onnx.defs.register_schema(known)
    yield
    onnx.defs.deregister_schema(PLUGIN, 1, DOMAIN)


def plugin_of(model):
    return next(n for n in model.graph.node if n.op_type == PLUGIN)


@pytest.mark.parametrize('agnostic', [False, True])
def test_the_attributes_of_the_plugin(schema, agnostic):
    nms = Nms('plugin', 30, 0.5, 0.125, agnostic)
    model = bare(nms, 'batch')
    onnx.checker.check_model(model, full_check=True)
    made = plugin_of(model)
    assert {a.name: helper.get_attribute_value(a) for a in made.attribute} == {
        'score_threshold': 0.125,
        'iou_threshold': 0.5,
        'max_output_boxes': 30,
        'background_class': -1,
        'score_activation': 0,
        'box_coding': 1,
        'plugin_version': b'1',
        **({'class_agnostic': 1} if agnostic else {}),
    }
    assert (made.domain, list(made.output)) == ('TRT', list(END2END)) and ('TRT', 1) in {
        (o.domain, o.version) for o in model.opset_import
    }
    types = {v.name: v.type.tensor_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    boxes, scores = ([d.dim_param or d.dim_value for d in types[name].shape.dim] for name in made.input)
    assert (boxes, scores) == (['batch', 40, 4], ['batch', 40, 3]) and {
        types[name].elem_type for name in made.input
    } == {TensorProto.FLOAT}

    made.attribute.remove(next(a for a in made.attribute if a.name == 'box_coding'))
    with pytest.raises(onnx.checker.ValidationError, match='box_coding'):
        onnx.checker.check_model(model)


def with_plugin_as_function(model, nms, classes):
    """A copy of a file, with EfficientNMS_TRT defined by the standard nodes, so that ONNX Runtime runs it."""
    body = helper.make_model(helper.make_graph([], 'body', [], []))
    add_standard(Appended(body), 'boxes', 'scores', nms, classes)
    constants = [helper.make_node('Constant', [], [i.name], value=i) for i in body.graph.initializer]
    model = copy(model)
    imports = [o for o in model.opset_import if o.domain != DOMAIN]
    model.functions.append(
        helper.make_function(
            DOMAIN,
            PLUGIN,
            ['boxes', 'scores'],
            list(END2END),
            [*constants, *body.graph.node],
            imports,
            list(DOCUMENTED),
        )
    )
    return model


@pytest.mark.parametrize('agnostic', [False, True])
def test_the_plugin_replaced_by_the_standard_nodes_gives_the_same(agnostic):
    predictions = crowd(2)
    settings = {'topk_all': 30, 'class_agnostic': agnostic}
    model = with_plugin_as_function(bare(Nms('plugin', **settings), 2), Nms('standard', **settings), 3)
    found = detections(run_onnx(model, {'x': predictions}))
    wanted = detections(run_onnx(bare(Nms('standard', **settings), 2), {'x': predictions}))
    assert all(map(np.array_equal, found, wanted)) and min(map(len, found)) > 6


def test_onnx_runtime_says_that_the_plugin_is_tensorrts(tmp_path):
    onnx.save(bare(Nms('plugin', 40)), tmp_path / 'model.onnx')
    with pytest.raises(QatError, match=f'model.onnx: its NMS is {PLUGIN}, which TensorRT alone has.*--nms standard'):
        open_file(tmp_path / 'model.onnx')


# ---- whole models ---------------------------------------------------------------------------------------------------------

SMALL = {'imgsz': (64, 96)}  # pixels at which no image is shown
EXPORTS = {
    'float': {},
    'int8 open': {'dynamic': True},
    'int8 of 8': {'batch': 8, 'opset': 20},
    'typed': {'half': True, 'opset': 19, 'dynamic': True},
    'float open': {'dynamic': True, 'simplify': True, 'opset': 13, **SMALL},
    'int8': {'opset': 13, **SMALL},
    'typed float': {'half': True, **SMALL},
}


@pytest.fixture(scope='module')
def exported(small, tmp_path_factory):
    """Function: name in EXPORTS → its plain file, made once."""
    folder = tmp_path_factory.mktemp('plain')

    def export(name):
        file = folder / f'{name}.onnx'
        if not file.exists():
            model = small.float_model() if 'float' in name else small.quantized_model()
            export_onnx(model, file, **{'imgsz': (SIZE, SIZE), **EXPORTS[name]})
        return file

    return export


@pytest.fixture(scope='module')
def images(small):
    """FP32 [8, 3, SIZE, SIZE]: val images, and one image without objects."""
    loader = val_loader(
        load_data(small.data),
        EvalConfig(small.single, small.data, batch_size=7, imgsz=SIZE, workers=0),
        32,
        square=True,
    )
    return torch.cat((prepared(next(iter(loader)), CPU)[0], torch.full((1, 3, SIZE, SIZE), 0.45)))


@pytest.mark.parametrize('kind', NMS_LIMITS)
@pytest.mark.parametrize('name', sampled(EXPORTS, 3, 2))
def test_what_was_there_is_there_node_for_node(small, exported, tmp_path, name, kind):
    plain = onnx.load(exported(name))
    nms = Nms(kind, 20, 0.5, 0.125, True)
    export_end2end(exported(name), tmp_path / 'model.onnx', nms)
    model = onnx.load(tmp_path / 'model.onnx')
    onnx.checker.check_model(model, full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ['model.onnx']

    assert list(model.graph.node)[: len(plain.graph.node)] == list(plain.graph.node)
    assert list(model.graph.initializer)[: len(plain.graph.initializer)] == list(plain.graph.initializer)
    assert (
        list(model.graph.input) == list(plain.graph.input)
        and opset(model) == opset(plain)
        and model.ir_version == plain.ir_version
    )
    added = list(model.graph.node)[len(plain.graph.node) :]
    assert all(n.name.startswith('/end2end/') for n in added) and count_qdq(model) == count_qdq(plain)
    assert {i.name for i in model.graph.initializer} - {i.name for i in plain.graph.initializer} <= {
        name for n in added for name in n.input
    }
    assert [n.op_type for n in added].count({'plugin': PLUGIN, 'standard': 'NonMaxSuppression'}[kind]) == 1

    batch = dims(plain.graph.output[0])[0]
    assert {o.name: (o.type.tensor_type.elem_type, dims(o)) for o in model.graph.output} == {
        'num_dets': (TensorProto.INT32, [batch, 1]),
        'det_boxes': (TensorProto.FLOAT, [batch, 20, 4]),
        'det_scores': (TensorProto.FLOAT, [batch, 20]),
        'det_classes': (TensorProto.INT32, [batch, 20]),
    }
    meta = {p.key: p.value for p in model.metadata_props}
    assert ast.literal_eval(meta['names']) == small.float_model().names and meta['stride'] == '32'
    assert [meta[k] for k in ('nms', 'topk_all', 'iou_thres', 'conf_thres', 'class_agnostic')] == [
        kind,
        '20',
        '0.5',
        '0.125',
        'True',
    ]


@pytest.mark.parametrize('kind', NMS_LIMITS)
def test_the_audit_finds_nothing_new(exported, kind):
    plain = onnx.load(exported('int8'))
    before, after = audit(plain), audit(add_nms(copy(plain), Nms(kind)))
    assert after.findings == before.findings and after.convs == before.convs and coverage(after) == coverage(before)


@pytest.fixture(scope='module')
def predictions(exported, images):
    """Function: name, batch size → what the plain file returns for `images`, computed once."""
    done = {}

    def predict(name, size):
        if (name, size) not in done:
            done[name, size] = [open_file(exported(name))(part) for part in images.split(size)]
        return done[name, size]

    return predict


@pytest.mark.parametrize(
    'settings',
    sampled([{}, {'class_agnostic': True}, {'topk_all': 3}, EVALUATION, EVALUATION | {'class_agnostic': True}], 2),
    ids=str,
)
@pytest.mark.parametrize(
    'name, sizes', [('float', [1]), ('int8 of 8', [8]), pytest.param('typed', [1, 8], marks=pytest.mark.faults)]
)
def test_detections_are_those_of_nms_outside(exported, images, predictions, tmp_path, name, sizes, settings):
    """The plain file and the file with NMS run apart; the nodes before NMS give equal values in both."""
    nms = Nms('standard', **settings)
    export_end2end(exported(name), tmp_path / 'model.onnx', nms)
    inside = open_file(tmp_path / 'model.onnx')
    for size in sizes:
        found = [d.rows for part in images.split(size) for d in inside(part)]
        wanted = [d for part in predictions(name, size) for d in torch_nms(part, nms)]
        assert len(found) == 8 and all(map(torch.equal, found, wanted))
        lengths = [len(d) for d in wanted]
        assert (
            max(lengths) >= 3
            and (nms.conf_thres < 0.1 or min(lengths) == 0)
            and (nms.topk_all > 3 or lengths.count(3) > 3)
        )


def test_torch_nms_is_upstreams(predictions):
    """At these thresholds only: upstream offsets boxes by class, which can round an IoU across a threshold."""
    [plain], nms = predictions('int8 of 8', 8), STANDARD
    theirs = non_max_suppression(plain, nms.conf_thres, nms.iou_thres, multi_label=True, max_det=nms.topk_all)
    assert sum(map(len, theirs)) > 20 and all(map(torch.equal, torch_nms(plain, nms), theirs))


@pytest.mark.parametrize('name', ['float', 'int8 open'])
def test_ap_with_nms_inside_is_that_of_nms_outside(small, exported, tmp_path, name):
    export_end2end(exported(name), tmp_path / 'model.onnx', Nms('standard', **EVALUATION))
    loader = val_loader(
        load_data(small.data),
        EvalConfig(small.single, small.data, batch_size=5, imgsz=SIZE, workers=0),
        32,
        square=True,
    )
    inside, outside = (
        evaluate(open_file(file), loader, load_data(small.data).names, CPU)
        for file in (tmp_path / 'model.onnx', exported(name))
    )
    for figure in ('ap', 'ap50', 'precision', 'recall'):
        assert abs(getattr(inside, figure) - getattr(outside, figure)) < 1e-3, figure
    assert outside.ap > 0.05


def test_the_plugin_in_a_whole_model(exported, images, tmp_path):
    """A quantized file of open batch, run with the standard nodes in place of the plugin."""
    export_end2end(exported('int8 open'), tmp_path / 'plugin.onnx', Nms('plugin'))
    onnx.save(with_plugin_as_function(onnx.load(tmp_path / 'plugin.onnx'), STANDARD, 10), tmp_path / 'function.onnx')
    export_end2end(exported('int8 open'), tmp_path / 'standard.onnx', STANDARD)
    found, wanted = (open_file(tmp_path / f'{name}.onnx')(images) for name in ('function', 'standard'))
    assert all(torch.equal(f.rows, w.rows) for f, w in zip(found, wanted)) and sum(map(len, wanted)) > 20


def test_in_place(exported, tmp_path):
    """export_qat.py does this if the plain file is not wanted."""
    (tmp_path / 'model.onnx').write_bytes(exported('float').read_bytes())
    export_end2end(tmp_path / 'model.onnx', tmp_path / 'model.onnx', STANDARD)
    assert [o.name for o in onnx.load(tmp_path / 'model.onnx').graph.output] == list(END2END)


# ---- failures -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_leaves_the_old_file(exported, tmp_path):
    (tmp_path / 'model.onnx').write_bytes(b'the old one')
    with pytest.raises(QatError, match='only 336 candidates'):
        export_end2end(exported('float'), tmp_path / 'model.onnx', Nms('standard', 337, class_agnostic=True))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'model.onnx': b'the old one'}


CHANGES = {
    'one box less': lambda n, b, s, c: n.sub_(1),
    'a box moved by rounding': lambda n, b, s, c: b[0, 0].mul_(1 + 1e-6),
    'another class': lambda n, b, s, c: c[0, 1].add_(1),
    'another order': lambda n, b, s, c: s[0, :2].copy_(s[0, [1, 0]]),
    'something behind the last': lambda n, b, s, c: s[1, -1].fill_(1),
}


@pytest.mark.parametrize('what', [None, *CHANGES])
def test_the_check_of_the_export_sees_what_differs(what):
    """The check makes predictions of two images: one crowded, one empty."""
    nms = Nms('standard', 10)
    [predictions] = made_predictions(nms, 640, (2, 7, 400))
    outputs = [torch.from_numpy(out) for out in run_onnx(bare(nms, 2, 3, 400), {'x': predictions.numpy()})]
    assert outputs[0].tolist() == [[10], [0]]
    if what is None:
        return check_detections(outputs, [predictions], nms, None, 'ONNX Runtime')
    CHANGES[what](*outputs)
    with pytest.raises(QatError, match='NMS in ONNX Runtime.*No file was written'):
        check_detections(outputs, [predictions], nms, None, 'ONNX Runtime')
