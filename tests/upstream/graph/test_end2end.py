"""Laws of files with NMS inside: detections and masks equal those of NMS outside the file, and all nodes of the plain file are kept."""

import ast
import json

import numpy as np
import onnx
import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.faults import sampled
from helpers.graphs import copy, dims, metadata, model_of, node, run_onnx
from helpers.labelled import val_images
from helpers.segmenters import NM, segmenter
from helpers.zoo import command, program
from onnx import TensorProto, helper
from torchvision.ops import roi_align
from utils.general import non_max_suppression

from models.deploy.agreement import made_images
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import (
    MASK_TOLERANCE,
    export_class_ends,
    export_end2end,
    made_predictions,
    require_detections,
    torch_masks,
    torch_nms,
)
from utils.qat.backends.detections import prepared
from utils.qat.config.export import END2END, MASKS, NMS_LIMITS, PLUGIN, Nms, Pooling
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.data.image_folders import MEAN, STD
from utils.qat.graph.audit import audit, coverage
from utils.qat.graph.ends import DOMAIN, GraphWriter, add_nms, add_standard
from utils.qat.graph.onnx_graph import count_qdq, opset
from utils.qat.graph.passes import set_metadata
from utils.qat.graph.triton_config import triton_config
from utils.qat.vendors.load import open_file

CPU = torch.device('cpu')
SIDE = 64  # pixels, of the images that the graphs made by hand are for
STANDARD = Nms('standard')
EVALUATION = {'topk_all': 300, 'iou_thres': 0.7, 'conf_thres': 0.001}  # as utils.qat.evaluation.evaluate.detect


# ---- the reference: NMS and masks by the book -----------------------------------------------------------------------------


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


def sample(values, y, x):
    """The value of [h, w] at a point in units of its cells, whose centres are at 0.5, 1.5 ...: linear between centres, at most half a cell
    outside that of the border, and 0 farther away."""
    h, w = values.shape
    y, x = y - 0.5, x - 0.5
    if not (-1 <= y <= h and -1 <= x <= w):
        return 0.0
    y, x = min(max(y, 0), h - 1), min(max(x, 0), w - 1)
    top, left = min(int(y), h - 2), min(int(x), w - 2)
    rows = values[top : top + 2, left : left + 2] @ (1 - (x - left), x - left)
    return rows @ (1 - (y - top), y - top)


def mask_by_the_book(box, coefficients, prototypes, pooling):
    """Mask [R * R] in 0..1, in plain FP64: pool each prototype over the box, then sum."""
    r, (x1, y1, x2, y2) = pooling.mask_resolution, np.float64(box) * pooling.pooler_scale
    height, width = (y2 - y1) / r, (x2 - x1) / r  # of a cell
    points_y, points_x = (pooling.sampling_ratio or int(np.ceil(side)) for side in (height, width))
    logits = np.zeros((r, r))
    for weight, p in zip(np.float64(coefficients), np.float64(prototypes)):
        for i, j in np.ndindex(r, r):
            values = [
                sample(p, y1 + (i + (k + 0.5) / points_y) * height, x1 + (j + (m + 0.5) / points_x) * width)
                for k in range(points_y)
                for m in range(points_x)
            ]
            logits[i, j] += weight * np.mean(values or [0])  # a box without area has none
    return (1 / (1 + np.exp(-logits))).ravel()


def masks_of_prototypes(found, prototypes, pooling):
    """Like torch_masks in the other order: RoiAlign of all prototypes for each detection, then the sums."""
    options = pooling.mask_resolution, pooling.pooler_scale, pooling.sampling_ratio
    made = []
    for each, p in zip(found, prototypes):
        pooled = roi_align(p[None], [each[:, :4]], *options, aligned=True)
        made.append(torch.einsum('kc,kcyx->kyx', each[:, 6:], pooled).sigmoid().flatten(1).numpy())
    return made


def detections(outputs):
    """The outputs of a file → rows [n, 6] of each image, and masks [n, R * R] of each image if it has them.

    Types, and the zeros behind the last detection, are checked on the way.
    """
    number, boxes, scores, classes, *masks = outputs
    assert [a.dtype.name for a in outputs] == ['int32', 'float32', 'float32', 'int32', 'float32'][: len(outputs)]
    assert number.shape == (len(boxes), 1)
    rows = np.concatenate((boxes, scores[..., None], classes[..., None]), 2).astype(np.float32)
    for part in (rows, *masks):
        assert not any(image[n:].any() for image, [n] in zip(part, number)), 'zeros behind the last'
    assert all(np.isfinite(m).all() and m.min() >= 0 and m.max() <= 1 for m in masks)
    found, *masks = ([image[:n] for image, [n] in zip(part, number)] for part in (rows, *masks))
    return (found, *masks) if masks else found


def bare(nms, batch=1, classes=3, nm=0, number=40, version=17, pooling=Pooling(), sides=(SIDE // 4, SIDE // 4)):
    """A graph that passes its inputs, predictions x and perhaps nm prototypes p, to NMS."""
    shapes = {'images': [batch, 3, SIDE, SIDE], 'x': [batch, 4 + classes + nm, number], 'p': [batch, nm, *sides]}
    outputs = {'output0': 'x', 'output1': 'p'} if nm else {'output0': 'x'}
    model = model_of(
        [node('Identity', given, name) for name, given in outputs.items()],
        {name: shapes[name] for name in ('images', *outputs.values())},
        {name: shapes[given] for name, given in outputs.items()},
        opset=version,
    )
    return add_nms(model, nms, pooling)


def run_bare(model, *given):
    """The detections of a graph of `bare` for predictions, and prototypes."""
    return detections(run_onnx(model, feeds(*given)))


def feeds(predictions, *prototypes):
    images = np.zeros((len(predictions), 3, SIDE, SIDE), np.float32)
    return {'images': images, **{name: np.asarray(given) for name, given in zip('xp', (predictions, *prototypes))}}


def crowd(batch, classes=3, number=40, seed=0):
    """Predictions FP32 [batch, 4 + classes, number] in which most boxes overlap others, scores repeat, and some are exactly at a threshold."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate((rng.integers(20, 60, (batch, 2, number)), rng.integers(8, 30, (batch, 2, number))), 1)
    boxes[:, 2:, ::11] = 0  # without area
    return np.concatenate((boxes, rng.integers(0, 9, (batch, classes, number)) / 8), 1).astype(np.float32)


def crowd_with_masks(batch, classes=3, nm=4, number=40, seed=0):
    """(predictions, prototypes), FP32: boxes of all sizes, some beyond the image, in it and without area."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate((rng.uniform(-5, SIDE + 5, (batch, 2, number)), rng.uniform(1, SIDE, (batch, 2, number))), 1)
    boxes[:, 2:, ::11] = 0
    scores, coefficients = rng.uniform(0, 0.6, (batch, classes, number)), rng.normal(size=(batch, nm, number))
    predictions = np.concatenate((boxes, scores, coefficients), 1)
    return predictions.astype(np.float32), rng.normal(size=(batch, nm, SIDE // 4, SIDE // 4)).astype(np.float32)


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
        assert all(map(np.array_equal, run_bare(model, predictions), wanted))
        assert all(map(np.array_equal, torch_nms(torch.from_numpy(predictions), nms), wanted))
        assert nms.conf_thres == 1 or max(map(len, wanted)) > 6, 'there is something to find'


MASK_SETTINGS = [
    ({}, {'mask_resolution': 16}),
    ({'class_agnostic': True}, {'mask_resolution': 3}),
    ({'topk_all': 5}, {'mask_resolution': 7}),
    ({'iou_thres': 1.0, 'conf_thres': 0.0}, {'mask_resolution': 5, 'sampling_ratio': 2}),
    ({}, {'mask_resolution': 1}),
    ({'class_agnostic': True, 'topk_all': 5}, {'mask_resolution': 2, 'sampling_ratio': 1}),
]


@pytest.mark.parametrize('settings, pooling', MASK_SETTINGS, ids=str)
@pytest.mark.parametrize('batch', [1, 4, 'open'])
def test_masks_are_those_by_the_book(settings, pooling, batch):
    nms, pooling = Nms('standard', **{'topk_all': 12, **settings}), Pooling(**pooling)
    model = bare(nms, batch, nm=4, pooling=pooling)
    onnx.checker.check_model(model, full_check=True)
    for number in (1, 3) if batch == 'open' else (batch,):
        predictions, prototypes = crowd_with_masks(number, seed=number)
        wanted = torch_nms(torch.from_numpy(predictions), nms, 4)
        ours, theirs = (
            way(wanted, torch.from_numpy(prototypes), pooling) for way in (torch_masks, masks_of_prototypes)
        )
        found = run_bare(model, predictions, prototypes)
        assert len(found[0]) == number and min(map(len, found[0])) >= 5
        for rows, masks, each, p, first, second in zip(*found, wanted, prototypes, ours, theirs):
            assert np.array_equal(rows, each[:, :6].numpy())
            assert np.abs(masks - first.numpy()).max() < 1e-5 and np.abs(masks - second).max() < 1e-5
            for mask, row in list(zip(masks, each.numpy()))[:3]:
                assert np.abs(mask - mask_by_the_book(row[:4], row[6:], p, pooling)).max() < 1e-4


@pytest.mark.parametrize('version', [13, 16, 18, 20, 23])
def test_every_opset(version):
    predictions = crowd(1)
    for nms in (Nms('standard', 40), Nms('standard', 40, class_agnostic=True)):
        [found] = run_bare(bare(nms, version=version), predictions)
        assert np.array_equal(found, by_the_book(predictions[0], nms))
    if version in (16, 18, 20):  # RoiAlign has another form before
        (predictions, prototypes), pooling = crowd_with_masks(2), Pooling(14)
        nms = Nms('standard', 12)
        _, found = run_bare(bare(nms, 2, nm=4, version=version, pooling=pooling), predictions, prototypes)
        rows = torch_nms(torch.from_numpy(predictions), nms, 4)
        for masks, wanted in zip(found, masks_of_prototypes(rows, torch.from_numpy(prototypes), pooling)):
            assert np.abs(masks - wanted).max() < 1e-5


@pytest.mark.parametrize('nm', [1, 32])
def test_one_channel_is_cut_out_for_each_detection(nm):
    """The work of RoiAlign does not grow with the number of prototypes."""
    model = bare(Nms('standard', 12), 2, nm=nm, pooling=Pooling(7))
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    [align] = [n for n in model.graph.node if n.op_type == 'RoiAlign']
    [made] = [v for v in model.graph.value_info if v.name == align.output[0]]
    assert dims(made)[1:] == [1, 7, 7]


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
    known = S(
        PLUGIN,
        DOMAIN,
        1,
        type_constraints=[('T', ['tensor(float)', 'tensor(float16)'], ''), ('I', ['tensor(int32)'], '')],
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


@pytest.mark.parametrize('agnostic', [False, True])
def test_the_attributes_of_the_plugin(schema, agnostic):
    model = bare(Nms('plugin', 30, 0.5, 0.125, agnostic), 'batch')
    onnx.checker.check_model(model, full_check=True)
    made = next(n for n in model.graph.node if n.op_type == PLUGIN)
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
    assert (made.domain, list(made.output)) == ('TRT', list(END2END))
    assert ('TRT', 1) in {(o.domain, o.version) for o in model.opset_import}
    values = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    assert [dims(values[name]) for name in made.input] == [['batch', 40, 4], ['batch', 40, 3]]
    assert {values[name].type.tensor_type.elem_type for name in made.input} == {TensorProto.FLOAT}

    made.attribute.remove(next(a for a in made.attribute if a.name == 'box_coding'))
    with pytest.raises(onnx.checker.ValidationError, match='box_coding'):
        onnx.checker.check_model(model)


def with_plugin_as_function(model, nms, classes):
    """A copy of a file, with EfficientNMS_TRT defined by the standard nodes, so that ONNX Runtime runs it."""
    body = helper.make_model(helper.make_graph([], 'body', [], []))
    add_standard(GraphWriter(body), 'boxes', 'scores', nms, classes)
    constants = [helper.make_node('Constant', [], [i.name], value=i) for i in body.graph.initializer]
    model = copy(model)
    imports, nodes = [o for o in model.opset_import if o.domain != DOMAIN], [*constants, *body.graph.node]
    given, returned, attributes = ['boxes', 'scores'], list(END2END), list(DOCUMENTED)
    model.functions.append(helper.make_function(DOMAIN, PLUGIN, given, returned, nodes, imports, attributes))
    return model


@pytest.mark.parametrize('agnostic', [False, True])
def test_the_plugin_replaced_by_the_standard_nodes_gives_the_same(agnostic):
    predictions, settings = crowd(2), {'topk_all': 30, 'class_agnostic': agnostic}
    standard = Nms('standard', **settings)
    found = run_bare(with_plugin_as_function(bare(Nms('plugin', **settings), 2), standard, 3), predictions)
    assert all(map(np.array_equal, found, run_bare(bare(standard, 2), predictions))) and min(map(len, found)) > 6


# ---- whole models ---------------------------------------------------------------------------------------------------------

SIZE = 128  # pixels, of images shown to a detector
WIDE = (64, 96)
DETECTOR = 'detector'  # beside the heads of SEGMENTERS
FULL_TREE = pytest.mark.full_tree
DETECTORS = {
    'float': {},
    'int8 open': {'dynamic': True},
    'int8 of 8': {'batch': 8, 'opset': 20},
    'typed': {'half': True, 'opset': 19, 'dynamic': True},
    'float open': {'imgsz': WIDE, 'dynamic': True, 'simplify': True, 'opset': 13},
    'int8': {'imgsz': WIDE, 'opset': 13},
    'typed float': {'imgsz': WIDE, 'half': True},
}
WITH_MASKS = {
    'float': {},
    'float open': {'dynamic': True, 'simplify': True},
    'int8 open': {'dynamic': True, 'simplify': True},
    'int8 of 4': {'batch': 4, 'opset': 20},
    'typed': {'half': True, 'opset': 19, 'dynamic': True},
}


@pytest.fixture(scope='module')
def exported(small, tmp_path_factory):
    """Function: head, name in DETECTORS or WITH_MASKS → its plain file, made once."""
    folder = tmp_path_factory.mktemp('plain')

    def export(head, name):
        file, quantized = folder / f'{head} {name}.onnx', 'float' not in name
        if not file.exists() and head == DETECTOR:
            model = small.quantized_model() if quantized else small.float_model()
            export_onnx(model, file, **{'imgsz': (SIZE, SIZE), **DETECTORS[name]})
        elif not file.exists():
            export_onnx(segmenter(head, quantized), file, WIDE, **WITH_MASKS[name])
        return file

    return export


@pytest.fixture(scope='module')
def images(small):
    """FP32 [8, 3, SIZE, SIZE]: val images, and one image without objects."""
    batch = next(iter(val_images(small.data, SIZE, square=True, batch_size=7)))
    return torch.cat((prepared(batch, CPU)[0], torch.full((1, 3, SIZE, SIZE), 0.45)))


@pytest.mark.parametrize(
    'head, name, kind',
    [
        *sampled([(DETECTOR, name, kind) for name in DETECTORS for kind in NMS_LIMITS], 5),
        *sampled([('Segment', name, 'standard') for name in WITH_MASKS], 4),
        *sampled([pytest.param('DSegment', name, 'standard', marks=FULL_TREE) for name in WITH_MASKS], 4),
    ],
)
def test_what_was_there_is_there_node_for_node(small, exported, tmp_path, head, name, kind):
    plain, file = onnx.load(exported(head, name)), tmp_path / 'model.onnx'
    export_end2end(exported(head, name), file, Nms(kind, 20, 0.5, 0.125, True), Pooling(28))
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ['model.onnx']

    added = list(model.graph.node)[len(plain.graph.node) :]
    assert list(model.graph.node)[: len(plain.graph.node)] == list(plain.graph.node)
    assert list(model.graph.initializer)[: len(plain.graph.initializer)] == list(plain.graph.initializer)
    assert list(model.graph.input) == list(plain.graph.input) and model.ir_version == plain.ir_version
    assert opset(model) == opset(plain) and count_qdq(model) == count_qdq(plain)
    assert all(n.name.startswith('/end2end/') for n in added)
    new = {i.name for i in model.graph.initializer} - {i.name for i in plain.graph.initializer}
    assert new <= {name for n in added for name in n.input}
    once = [PLUGIN if kind == 'plugin' else 'NonMaxSuppression', *['RoiAlign', 'MatMul'] * (head != DETECTOR)]
    assert all([n.op_type for n in added].count(op) == 1 for op in once)

    batch, meta = dims(plain.graph.output[0])[0], metadata(model)
    outputs = {
        'num_dets': (TensorProto.INT32, [batch, 1]),
        'det_boxes': (TensorProto.FLOAT, [batch, 20, 4]),
        'det_scores': (TensorProto.FLOAT, [batch, 20]),
        'det_classes': (TensorProto.INT32, [batch, 20]),
    }
    wanted = {'nms': kind, 'topk_all': '20', 'iou_thres': '0.5', 'conf_thres': '0.125', 'class_agnostic': 'True'}
    if head == DETECTOR:
        assert ast.literal_eval(meta['names']) == small.float_model().names and meta['stride'] == '32'
    else:
        outputs[MASKS] = (TensorProto.FLOAT, [batch, 20, 28 * 28])
        wanted |= {'task': 'segment', 'nm': str(NM), 'mask_resolution': '28', 'pooler_scale': '0.25'}
        wanted |= {'sampling_ratio': '0'}
        assert 'name: "det_masks", data_type: TYPE_FP32, dims: ' in triton_config(model, 'm', 4)
    assert {o.name: (o.type.tensor_type.elem_type, dims(o)) for o in model.graph.output} == outputs
    assert wanted.items() <= meta.items()


@pytest.mark.parametrize('kind', NMS_LIMITS)
def test_the_audit_finds_nothing_new(exported, kind):
    plain = onnx.load(exported(DETECTOR, 'int8'))
    before, after = audit(plain), audit(add_nms(copy(plain), Nms(kind)))
    assert after.findings == before.findings and after.convs == before.convs and coverage(after) == coverage(before)


@pytest.fixture(scope='module')
def predictions(exported, images):
    """Function: name, batch size → what the plain file of a detector returns for `images`, computed once."""
    done = {}

    def predict(name, size):
        if (name, size) not in done:
            done[name, size] = [open_file(exported(DETECTOR, name))(part) for part in images.split(size)]
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
    export_end2end(exported(DETECTOR, name), tmp_path / 'model.onnx', nms)
    inside = open_file(tmp_path / 'model.onnx')
    for size in sizes:
        found = [d.rows for part in images.split(size) for d in inside(part)]
        wanted = [d for part in predictions(name, size) for d in torch_nms(part, nms)]
        assert len(found) == 8 and all(map(torch.equal, found, wanted))
        lengths = [len(d) for d in wanted]
        assert max(lengths) >= 3 and (nms.conf_thres < 0.1 or min(lengths) == 0)
        assert nms.topk_all > 3 or lengths.count(3) > 3


def test_a_threshold_in_the_metadata_is_a_score_or_unknown(exported, tmp_path):
    export_end2end(exported(DETECTOR, 'float'), tmp_path / 'model.onnx', STANDARD)
    model = onnx.load(tmp_path / 'model.onnx')
    for text, read in {'0': 0, '0.25': 0.25, '1': 1, '1.5': None, '-0.1': None, 'nan': None, 'high': None}.items():
        onnx.save(set_metadata(model, conf_thres=text), tmp_path / 'model.onnx')
        assert open_file(tmp_path / 'model.onnx').conf_thres == read, text


def test_torch_nms_is_upstreams(predictions):
    """At these thresholds only: upstream offsets boxes by class, which can round an IoU across a threshold."""
    [plain], nms = predictions('int8 of 8', 8), STANDARD
    theirs = non_max_suppression(plain, nms.conf_thres, nms.iou_thres, multi_label=True, max_det=nms.topk_all)
    assert sum(map(len, theirs)) > 20 and all(map(torch.equal, torch_nms(plain, nms), theirs))


# ---- the command ----------------------------------------------------------------------------------------------------------


def test_the_trained_demo_is_verified_and_scores_the_same(tmp_path):
    """Boxes score the same, masks nearly: upstream asks for the corner of a cell in the box, we for its centre."""
    program('demo/make_data.py').make_data(tmp_path / 'data', 'segment', train=1, val=8)
    with quiet_upstream():
        program('demo/weights.py').build(REPO / 'demo/demo-seg-weights.pt', tmp_path / 'seg.pt')
    command(
        *('export_qat.py', '--weights', tmp_path / 'seg.pt', '--include', 'onnx', 'onnx_end2end', '--imgsz', 320),
        *('--verify', tmp_path / 'data/data.yaml'),
        *('--conf-thres', 0.001, '--iou-thres', 0.7, '--topk-all', 100),
    )
    verified, plain = (json.loads((tmp_path / f'{name}.verify.json').read_text()) for name in ('seg-end2end', 'seg'))
    inside, reference, outside = verified['other'], verified['reference'], plain['other']
    assert verified['matched'] == 1 and inside['mask']['ap'] == pytest.approx(reference['mask']['ap'], abs=1e-3)
    assert inside['ap'] == pytest.approx(outside['ap'], abs=1e-3) and inside['ap'] > 0.8
    assert inside['mask']['ap'] == pytest.approx(outside['mask']['ap'], abs=0.03) and inside['mask']['ap50'] > 0.9


# ---- failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'head, nms, pooling, says',
    [
        (DETECTOR, Nms('standard', 337, class_agnostic=True), Pooling(), 'only 336 candidates'),
        ('Segment', STANDARD, Pooling(pooler_scale=0.5), 'are 16 x 24 for images of 64 x 96, and masks'),
    ],
)
def test_what_cannot_be_exported_leaves_the_old_file(exported, tmp_path, head, nms, pooling, says):
    """The new file may take the place of the old one, as export_qat.py does if the plain file is not wanted."""
    file = tmp_path / 'model.onnx'
    old = exported(head, 'float').read_bytes()
    file.write_bytes(old)
    with pytest.raises(QatError, match=says):
        export_end2end(file, file, nms, pooling)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'model.onnx': old}
    export_end2end(file, file, STANDARD)
    assert [o.name for o in onnx.load(file).graph.output][:4] == list(END2END)


CHANGES = {  # number, boxes, scores, classes, masks
    'one box less': lambda n, b, s, c, m: n.sub_(1),
    'a box moved by rounding': lambda n, b, s, c, m: b[0, 0].mul_(1 + 1e-6),
    'another class': lambda n, b, s, c, m: c[0, 1].add_(1),
    'another order': lambda n, b, s, c, m: s[0, :2].copy_(s[0, [1, 0]]),
    'a score behind the last': lambda n, b, s, c, m: s[1, -1].fill_(1),
    'masks: that of another': lambda n, b, s, c, m: m[0, :2].copy_(m[0, [1, 0]]),
    'masks: one cell': lambda n, b, s, c, m: m[0, 0, :1].add_(0.01),
    'masks: not a number': lambda n, b, s, c, m: m[0, 0, :1].fill_(np.nan),
    'masks: something behind the last': lambda n, b, s, c, m: m[1, -1].fill_(0.5),
}


@pytest.mark.parametrize('change', [None, *CHANGES])
def test_the_check_of_the_export_sees_what_differs(change):
    """The check makes predictions of two images: one crowded, one empty."""
    nms, pooling = Nms('standard', 10), Pooling(9)
    made = made_predictions(nms, SIDE, (2, 11, 400), (2, 4, SIDE // 4, SIDE // 4))
    outputs = run_onnx(bare(nms, 2, nm=4, number=400, pooling=pooling), feeds(*made))
    outputs = [torch.from_numpy(out) for out in outputs]
    assert outputs[0].tolist() == [[10], [0]] and (outputs[4][0] - 0.5).abs().mean() > 50 * MASK_TOLERANCE
    if change is None:
        return require_detections(outputs, made, nms, pooling, 'ONNX Runtime')
    CHANGES[change](*outputs)
    what = 'masks' if change.startswith('masks') else 'NMS'
    with pytest.raises(QatError, match=f'{what} in ONNX Runtime.*No file was written'):
        require_detections(outputs, made, nms, pooling, 'ONNX Runtime')


# ---- classifiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['float', 'quantized'])
@pytest.mark.parametrize('options', [{}, {'dynamic': True, 'simplify': True}], ids=str)
def test_a_classifier_takes_pixels_and_returns_probabilities(kind, options, tmp_path):
    """Evaluated, the file gives what the plain one gives."""
    model = classifiers.loaded('mobilenet_v2', tmp_path)
    if kind == 'quantized':
        model = classifiers.quantized(model)
    plain, whole = tmp_path / 'plain.onnx', tmp_path / 'whole.onnx'
    export_onnx(model, plain, (SIDE, SIDE), **options)
    export_class_ends(plain, whole)
    pixels = made_images(1, (SIDE, SIDE))
    normal = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    [logits] = run_onnx(plain, {'images': normal.numpy()})
    [found] = run_onnx(whole, {'images': pixels.numpy()})
    assert np.abs(found - torch.from_numpy(logits).softmax(1).numpy()).max() < 1e-4 and found.std() > 0
    file = open_file(whole)
    again = file.task.pixels(normal)
    assert torch.allclose(again, pixels, atol=1e-6)
    [found] = run_onnx(whole, {'images': again.numpy()})
    assert torch.allclose(file(normal), torch.from_numpy(found).log())
    assert open_file(whole).names == open_file(plain).names == model.names
    assert dims(onnx.load(whole).graph.output[0]) == dims(onnx.load(plain).graph.output[0])
    assert count_qdq(onnx.load(whole)) == count_qdq(onnx.load(plain))
