"""Laws of segmentation models with NMS inside: each detection has the mask that it has with NMS outside the file."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
import torch
from conftest import REPO
from faults import sampled
from graphs import dims, node, run_onnx
from onnx import TensorProto, helper
from segmenters import NM, SEGMENTERS, segmenter
from torchvision.ops import roi_align
from zoo import program

from models.deploy.agreement import made_images
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import (
    MASK_TOLERANCE,
    check_detections,
    choose_nms,
    export_end2end,
    made_predictions,
    torch_detections,
    torch_masks,
    torch_nms,
)
from utils.qat.backends.file_model import open_file
from utils.qat.config.export import NMS_LIMITS, ExportConfig, Nms, Pooling
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.graph.nms import add_nms
from utils.qat.graph.onnx_graph import count_qdq, opset
from utils.qat.graph.triton_config import triton_config

export_qat = program('export_qat.py').main
SIDE = 64  # of the images that the graphs made by hand are for


# ---- the reference: one prototype after the other -------------------------------------------------------------------------


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
    """Mask [R, R] in 0..1, in plain FP64: pool each prototype over the box, then sum."""
    r, (x1, y1, x2, y2) = pooling.mask_resolution, np.float64(box) * pooling.pooler_scale
    height, width = (y2 - y1) / r, (x2 - x1) / r  # of a cell
    points_y, points_x = (pooling.sampling_ratio or int(np.ceil(side)) for side in (height, width))
    logits = np.zeros((r, r))
    for weight, p in zip(np.float64(coefficients), np.float64(prototypes)):
        for i, j in np.ndindex(r, r):
            logits[i, j] += weight * np.mean(
                [
                    sample(p, y1 + (i + (k + 0.5) / points_y) * height, x1 + (j + (m + 0.5) / points_x) * width)
                    for k in range(points_y)
                    for m in range(points_x)
                ]
                or [0]
            )  # a box without area has none
    return 1 / (1 + np.exp(-logits))


def masks_of_prototypes(found, prototypes, pooling):
    """Like torch_masks in the other order: RoiAlign of all prototypes for each detection, then the sums."""
    made = []
    for each, p in zip(found, prototypes):
        pooled = roi_align(
            p[None], [each[:, :4]], pooling.mask_resolution, pooling.pooler_scale, pooling.sampling_ratio, aligned=True
        )
        made.append(torch.einsum('kc,kcyx->kyx', each[:, 6:], pooled).sigmoid().flatten(1))
    return made


def bare(
    nms,
    pooling=Pooling(),
    batch=1,
    classes=3,
    nm=4,
    number=40,
    version=17,
    sides=(SIDE // 4, SIDE // 4),
    imgsz=(SIDE, SIDE),
):
    """A graph that passes its inputs, predictions and prototypes, to NMS."""
    shapes = {'images': (batch, 3, *imgsz), 'x': (batch, 4 + classes + nm, number), 'p': (batch, nm, *sides)}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    returned = [
        helper.make_tensor_value_info(f'output{i}', TensorProto.FLOAT, shapes[name]) for i, name in enumerate('xp')
    ]
    graph = helper.make_graph(
        [node('Identity', 'x', 'output0'), node('Identity', 'p', 'output1')], 'by hand', given, returned
    )
    return add_nms(
        helper.make_model(graph, opset_imports=[helper.make_opsetid('', version)], ir_version=8), nms, pooling
    )


def crowd(batch, classes=3, nm=4, number=40, seed=0):
    """(predictions, prototypes), FP32: boxes of all sizes, some beyond the image, in it and without area."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate((rng.uniform(-5, SIDE + 5, (batch, 2, number)), rng.uniform(1, SIDE, (batch, 2, number))), 1)
    boxes[:, 2:, ::11] = 0
    predictions = np.concatenate(
        (boxes, rng.uniform(0, 0.6, (batch, classes, number)), rng.normal(size=(batch, nm, number))), 1
    )
    return predictions.astype(np.float32), rng.normal(size=(batch, nm, SIDE // 4, SIDE // 4)).astype(np.float32)


def run_bare(model, predictions, prototypes):
    images = np.zeros((len(predictions), 3, SIDE, SIDE), np.float32)
    return run_onnx(model, {'images': images, 'x': predictions, 'p': prototypes})


def detections(outputs, nm=0):
    """The five outputs of a file → per image ([n, 6], masks [n, R * R]); types and the rows that do not count are checked on the way."""
    number, boxes, scores, classes, masks = outputs
    assert [a.dtype for a in outputs] == [np.int32, np.float32, np.float32, np.int32, np.float32] and number.shape == (
        len(boxes),
        1,
    )
    assert np.isfinite(masks).all() and masks.min() >= 0 and masks.max() <= 1
    found = np.concatenate((boxes, scores[..., None], classes[..., None]), 2).astype(np.float32)
    assert not any(image[n:].any() or m[n:].any() for image, m, [n] in zip(found, masks, number)), (
        'zeros behind the last'
    )
    return [(image[:n], m[:n]) for image, m, [n] in zip(found, masks, number)]


# ---- the nodes, on predictions made by hand -------------------------------------------------------------------------------

SETTINGS = [
    ({}, {'mask_resolution': 16}),
    ({'class_agnostic': True}, {'mask_resolution': 3}),
    ({'topk_all': 5}, {'mask_resolution': 7}),
    ({'iou_thres': 1.0, 'conf_thres': 0.0}, {'mask_resolution': 5, 'sampling_ratio': 2}),
    ({}, {'mask_resolution': 1}),
    ({'class_agnostic': True, 'topk_all': 5}, {'mask_resolution': 2, 'sampling_ratio': 1}),
]


@pytest.mark.parametrize('settings, pooling', SETTINGS, ids=str)
@pytest.mark.parametrize('batch', [1, 4, 'open'])
def test_masks_are_those_by_the_book(settings, pooling, batch):
    nms, pooling = Nms('standard', **{'topk_all': 12, **settings}), Pooling(**pooling)
    model = bare(nms, pooling, batch)
    onnx.checker.check_model(model, full_check=True)
    for number in (1, 3) if batch == 'open' else (batch,):
        predictions, prototypes = crowd(number, seed=number)
        made = [torch.from_numpy(a) for a in (predictions, prototypes)]
        wanted = torch_nms(made[0], nms, 4)
        references = torch_masks(wanted, made[1], pooling), masks_of_prototypes(wanted, made[1], pooling)
        found = detections(run_bare(model, predictions, prototypes))
        assert len(found) == number and min(len(rows) for rows, _ in found) >= 5
        for (rows, masks), each, p, *others in zip(found, wanted, prototypes, *references):
            assert np.array_equal(rows, each[:, :6].numpy())
            assert all(np.abs(masks - m.numpy()).max() < 1e-5 for m in others)
            for mask, row in list(zip(masks, each.numpy()))[:3]:
                assert np.abs(mask - mask_by_the_book(row[:4], row[6:], p, pooling).ravel()).max() < 1e-4


@pytest.mark.parametrize('version', [16, 18, 20])
def test_every_opset(version):
    predictions, prototypes = crowd(2)
    nms, pooling = Nms('standard', 12), Pooling(14)
    wanted = torch_nms(torch.from_numpy(predictions), nms, 4)
    found = detections(run_bare(bare(nms, pooling, 2, version=version), predictions, prototypes))
    for (_, masks), other in zip(found, masks_of_prototypes(wanted, torch.from_numpy(prototypes), pooling)):
        assert np.abs(masks - other.numpy()).max() < 1e-5


def test_which_cell_is_where():
    """Row by row, from the upper left: of R x R cells that divide the box, each has the value at its centre. Prototypes grow with x and y here,
    by 1/4 per pixel, and are 0 in the middle of the image, so that a mask tells where it was taken."""
    r, (x1, y1, x2, y2) = 20, (12, 8, 44, 40)
    ramp = (np.arange(SIDE // 4) + 0.5) - SIDE / 8
    prototypes = np.float32([[np.tile(ramp, (SIDE // 4, 1)), np.tile(ramp[:, None], (1, SIDE // 4))]])
    predictions = np.zeros((1, 7, 40), np.float32)
    predictions[0, :4, :2] = np.float32([[(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]] * 2).T
    predictions[0, 4, :2] = 0.9, 0.8
    predictions[0, 5:, 0], predictions[0, 5:, 1] = (1, 0), (0, 1)  # the better one is of the first prototype
    model = bare(Nms('standard', 2, iou_thres=1.0), Pooling(r), 1, classes=1, nm=2)
    [(_, masks)] = detections(run_bare(model, predictions, prototypes))
    x, y = 4 * np.log(masks / (1 - masks)).reshape(2, r, r) + SIDE / 2  # in pixels of the image
    centres = (np.arange(r) + 0.5) / r
    assert (
        np.abs(x - (x1 + centres * (x2 - x1))).max() < 1e-3
        and np.abs(y - (y1 + centres * (y2 - y1))[:, None]).max() < 1e-3
    )


def test_outside_the_image_a_mask_is_undecided():
    """There are no prototypes outside the image: the mask is 0.5 there, which is not above 0.5."""
    predictions = np.zeros((1, 6, 40), np.float32)
    predictions[0, :, 0] = 0, SIDE / 2, SIDE, SIDE, 0.9, 1  # its left half is beyond the border
    model = bare(Nms('standard', 1), Pooling(8, sampling_ratio=1), 1, classes=1, nm=1)
    [(_, [mask])] = detections(run_bare(model, predictions, np.full((1, 1, SIDE // 4, SIDE // 4), 3, np.float32)))
    assert (mask.reshape(8, 8)[:, :4] == 0.5).all() and (mask.reshape(8, 8)[:, 4:] > 0.9).all()


def test_empty_and_full_images_in_one_batch():
    (predictions, prototypes), nms = crowd(3), Nms('standard', 5)
    predictions[1, 4:7] = 0
    found = detections(run_bare(bare(nms, batch=3), predictions, prototypes))
    assert [len(masks) for _, masks in found] == [5, 0, 5]


def test_one_channel_is_cut_out_for_each_detection():
    """The work of RoiAlign does not grow with the number of prototypes."""
    for nm in (1, 32):
        model = onnx.shape_inference.infer_shapes(bare(Nms('standard', 12), Pooling(7), 2, nm=nm), data_prop=True)
        [align] = [n for n in model.graph.node if n.op_type == 'RoiAlign']
        [made] = [v for v in model.graph.value_info if v.name == align.output[0]]
        assert dims(made)[1:] == [1, 7, 7]


def test_prototypes_of_another_size_are_refused():
    with pytest.raises(
        QatError, match='the prototypes of this model are 8 x 8 for images of 64 x 64, and masks inside'
    ):
        bare(Nms('standard', 12), Pooling(7), sides=(8, 8))


# ---- whole models ---------------------------------------------------------------------------------------------------------

IMGSZ = (64, 96)
EXPORTS = {
    'float': {},
    'float open': {'dynamic': True, 'simplify': True},
    'int8 open': {'dynamic': True, 'simplify': True},
    'int8 of 4': {'batch': 4, 'opset': 20},
    'typed': {'half': True, 'opset': 19, 'dynamic': True},
}


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """Function: head, name in EXPORTS → its plain file, made once."""
    folder = tmp_path_factory.mktemp('plain')

    def export(head, name):
        file = folder / f'{head} {name}.onnx'
        if not file.exists():
            export_onnx(segmenter(head, 'float' not in name), file, IMGSZ, **EXPORTS[name])
        return file

    return export


@pytest.mark.parametrize('name', sampled(EXPORTS, 4))
@pytest.mark.parametrize('head', SEGMENTERS)
def test_what_was_there_is_there_node_for_node(exported, tmp_path, head, name):
    plain = onnx.load(exported(head, name))
    export_end2end(exported(head, name), tmp_path / 'model.onnx', Nms('standard', 20), Pooling(28))
    model = onnx.load(tmp_path / 'model.onnx')
    onnx.checker.check_model(model, full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ['model.onnx']

    assert list(model.graph.node)[: len(plain.graph.node)] == list(plain.graph.node)
    assert list(model.graph.initializer)[: len(plain.graph.initializer)] == list(plain.graph.initializer)
    assert (
        list(model.graph.input) == list(plain.graph.input)
        and opset(model) == opset(plain)
        and count_qdq(model) == count_qdq(plain)
    )
    added = [n.op_type for n in list(model.graph.node)[len(plain.graph.node) :]]
    assert [added.count(op) for op in ('NonMaxSuppression', 'RoiAlign', 'MatMul')] == [1, 1, 1]

    batch = dims(plain.graph.output[0])[0]
    assert {o.name: (o.type.tensor_type.elem_type, dims(o)) for o in model.graph.output} == {
        'num_dets': (TensorProto.INT32, [batch, 1]),
        'det_boxes': (TensorProto.FLOAT, [batch, 20, 4]),
        'det_scores': (TensorProto.FLOAT, [batch, 20]),
        'det_classes': (TensorProto.INT32, [batch, 20]),
        'det_masks': (TensorProto.FLOAT, [batch, 20, 28 * 28]),
    }
    meta = {p.key: p.value for p in model.metadata_props}
    assert [
        meta[k] for k in ('task', 'nm', 'nms', 'topk_all', 'mask_resolution', 'pooler_scale', 'sampling_ratio')
    ] == ['segment', str(NM), 'standard', '20', '28', '0.25', '0']
    assert 'name: "det_masks", data_type: TYPE_FP32, dims: ' in triton_config(model, 'm', 4)


@pytest.mark.parametrize('settings', sampled([{}, {'class_agnostic': True}, {'topk_all': 3}], 2), ids=str)
@pytest.mark.parametrize('name, sizes', sampled([('int8 of 4', [4]), ('float open', [1, 4]), ('typed', [1, 4])], 3))
@pytest.mark.parametrize('head', SEGMENTERS)
def test_detections_and_masks_are_those_outside(exported, tmp_path, head, name, sizes, settings):
    """The plain file and the file with NMS run apart; outside, prototypes are cut out one by one."""
    nms, pooling = Nms('standard', **{'topk_all': 30, **settings}), Pooling(28)
    export_end2end(exported(head, name), tmp_path / 'model.onnx', nms, pooling)
    images = made_images(4, IMGSZ)
    for part in [part for size in sizes for part in images.split(size)]:
        predictions, prototypes = (
            torch.from_numpy(a) for a in run_onnx(exported(head, name), {'images': part.numpy()})
        )
        wanted = torch_nms(predictions, nms, NM)
        found = detections(run_onnx(tmp_path / 'model.onnx', {'images': part.numpy()}))
        assert len(found) == len(part) == len(wanted)
        for (rows, masks), each, other in zip(found, wanted, masks_of_prototypes(wanted, prototypes, pooling)):
            assert np.array_equal(rows, each[:, :6].numpy()) and len(rows) >= 3
            assert np.abs(masks - other.numpy()).max() < 1e-4
            assert np.ptp(masks) > 0.05, 'there is something to see'


def test_outside_is_inside(exported, tmp_path):
    """The reference of --verify equals detections made from the plain file's outputs."""
    nms, pooling = Nms('standard', 20), Pooling(40)
    export_end2end(exported('Segment', 'int8 open'), tmp_path / 'model.onnx', nms, pooling)
    images = made_images(2, IMGSZ)
    wanted = torch_detections(open_file(exported('Segment', 'int8 open'))(images), IMGSZ, nms, pooling)
    found = open_file(tmp_path / 'model.onnx')(images)
    assert [len(d) for d in found] == [len(d) for d in wanted] and min(map(len, found)) > 3
    for ours, theirs in zip(found, wanted):
        assert torch.equal(ours.rows, theirs.rows) and torch.allclose(ours.masks.crops, theirs.masks.crops, atol=1e-4)
        assert (
            ours.masks.fine() != theirs.masks.fine()
        ).float().mean() < 1e-3 and 0.01 < ours.masks.fine().mean() < 0.9


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(checkpoint, data) of the trained demo for segmentation."""
    import models.yolo as upstream

    folder = tmp_path_factory.mktemp('trained')
    program('demo/make_data.py').make_data(folder / 'data', 'segment', train=1, val=8)
    with quiet_upstream():
        program('demo/weights.py').build(REPO / 'demo/demo-seg-weights.pt', folder / 'seg.pt', upstream)
    return folder / 'seg.pt', folder / 'data/data.yaml'


def test_the_trained_demo_is_verified_and_scores_the_same(trained):
    """Boxes score the same, masks nearly: upstream asks for the corner of a cell in the box, we for its centre."""
    weights, data = trained
    assert (
        run_command(
            export_qat,
            [
                '--weights',
                str(weights),
                '--include',
                'onnx',
                'onnx_end2end',
                '--imgsz',
                '320',
                '--verify',
                str(data),
                '--conf-thres',
                '0.001',
                '--iou-thres',
                '0.7',
                '--topk-all',
                '100',
            ],
        )
        == 0
    )
    verified = json.loads(weights.with_name('seg-end2end.verify.json').read_text())
    assert verified['matched'] == 1 and verified['other']['mask']['ap'] == pytest.approx(
        verified['reference']['mask']['ap'], abs=1e-3
    )
    plain = json.loads(weights.with_name('seg.verify.json').read_text())['other']
    inside = verified['other']
    assert inside['ap'] == pytest.approx(plain['ap'], abs=1e-3) and inside['ap'] > 0.8
    assert inside['mask']['ap'] == pytest.approx(plain['mask']['ap'], abs=0.03) and inside['mask']['ap50'] > 0.9


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A float segmentation checkpoint."""
    file = tmp_path_factory.mktemp('checkpoint') / 'seg.pt'
    torch.save({'model': segmenter(), 'ema': None}, file)
    return file


@pytest.mark.parametrize('trt', ['10', '11'])
def test_the_command(checkpoint, tmp_path, capsys, trt):
    file = shutil.copy(checkpoint, tmp_path)
    assert (
        run_command(
            export_qat,
            [
                '--weights',
                file,
                '--include',
                'onnx',
                'onnx_end2end',
                '--imgsz',
                '64',
                '--dynamic',
                '--trt',
                trt,
                '--batch-size',
                '4',
                '--topk-all',
                '20',
                '--mask-resolution',
                '28',
            ],
        )
        == 0
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ['seg-end2end.onnx', 'seg-end2end.pbtxt', 'seg.onnx', 'seg.pt']
    said = capsys.readouterr().out
    assert re.search(r'mask coefficients 0\.\d+%, prototypes 0\.\d+%; allowed', said)
    assert 'det_masks of up to 20 detections; NMS standard' in said and 'output0, output1\n' in said
    assert 'name: "det_masks", data_type: TYPE_FP32, dims: [20, 784]' in (tmp_path / 'seg-end2end.pbtxt').read_text()


@pytest.mark.parametrize(
    'arguments, says',
    [
        ('--nms plugin', '--nms plugin: EfficientNMS_TRT does not tell'),
        ('--opset 13', '--opset 13: masks take'),
        ('--pooler-scale 0.5', '--pooler-scale 0.5: must be one of 0.25'),
    ],
)
def test_the_command_refuses(checkpoint, tmp_path, capsys, arguments, says):
    file = shutil.copy(checkpoint, tmp_path)
    assert (
        run_command(export_qat, ['--weights', file, '--include', 'onnx_end2end', '--imgsz', '64', *arguments.split()])
        == 2
    )
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and says in said[0] and [p.name for p in tmp_path.iterdir()] == ['seg.pt']


def test_the_command_refuses_masks_of_a_detector(demo, tmp_path, capsys):
    assert (
        run_command(
            export_qat,
            ['--weights', str(demo.single), '--include', 'onnx_end2end', '--imgsz', '64', '--mask-resolution', '28'],
        )
        == 2
    )
    assert f'--mask-resolution: only for a segmentation model, which {demo.single} is not' in capsys.readouterr().err


# ---- failures -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_leaves_the_old_file(exported, tmp_path):
    (tmp_path / 'model.onnx').write_bytes(b'the old one')
    with pytest.raises(QatError, match='the prototypes of this model are 16 x 24 for images of 64 x 96, and masks'):
        export_end2end(
            exported('Segment', 'float'), tmp_path / 'model.onnx', Nms('standard'), Pooling(pooler_scale=0.5)
        )
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {'model.onnx': b'the old one'}


CHANGES = {
    'the mask of another': lambda masks: masks[0, :2].copy_(masks[0, [1, 0]]),
    'one cell': lambda masks: masks[0, 0, :1].add_(0.01),
    'not a number': lambda masks: masks[0, 0, :1].fill_(np.nan),
    'something behind the last': lambda masks: masks[1, -1].fill_(0.5),
}


@pytest.mark.parametrize('what', [None, *CHANGES])
def test_the_check_of_the_export_sees_what_differs(what):
    """The check makes predictions of two images: one crowded, one empty."""
    nms, pooling = Nms('standard', 10), Pooling(9)
    made = made_predictions(nms, SIDE, (2, 11, 400), (2, 4, SIDE // 4, SIDE // 4))
    outputs = [torch.from_numpy(out) for out in run_bare(bare(nms, pooling, 2, number=400), *(m.numpy() for m in made))]
    assert outputs[0].tolist() == [[10], [0]] and (outputs[4][0] - 0.5).abs().mean() > 50 * MASK_TOLERANCE
    if what is None:
        return check_detections(outputs, made, nms, pooling, 'ONNX Runtime')
    CHANGES[what](outputs[4])
    with pytest.raises(QatError, match='masks in ONNX Runtime.*No file was written'):
        check_detections(outputs, made, nms, pooling, 'ONNX Runtime')


def settings_of(**changes):
    return ExportConfig('seg.pt', ['onnx_end2end'], **changes)


def kind_of(**changes):
    return choose_nms(settings_of(**changes), masks=False)[0].kind


@pytest.mark.parametrize('trt', [8, 10, 11])
def test_a_segmentation_model_takes_the_standard_kind(trt):
    nms, pooling = choose_nms(settings_of(trt=trt, mask_resolution=28), masks=True)
    assert nms.kind == 'standard' and pooling == Pooling(28)
    assert kind_of(trt=trt) == ('standard' if trt == 11 else 'plugin')
    for kind in NMS_LIMITS:
        assert kind_of(trt=trt, nms=kind) == kind


@pytest.mark.parametrize(
    'changes, segments, says',
    [
        ({'nms': 'plugin'}, True, '--nms plugin: EfficientNMS_TRT does not tell which candidates it keeps'),
        ({'nms': 'plugin', 'trt': 11}, True, '--nms plugin: .*a segmentation model takes --nms standard'),
        ({'opset': 15}, True, '--opset 15: masks take RoiAlign of opset 16'),
        ({'topk_all': 3841}, True, '--topk-all 3841: must lie in 1 to 3840 for --nms standard'),
        (
            {'mask_resolution': 28, 'sampling_ratio': 1},
            False,
            '^--mask-resolution, --sampling-ratio: only for a segmentation model, which seg.pt is not$',
        ),
    ],
)
def test_flags_that_do_not_fit_the_model(changes, segments, says):
    with pytest.raises(QatError, match=says):
        choose_nms(settings_of(**changes), segments)


@pytest.mark.parametrize(
    'changes, says',
    [
        ({'mask_resolution': 0}, '--mask-resolution 0: must lie in 1 to 1024'),
        ({'sampling_ratio': -1}, '--sampling-ratio -1'),
        ({'pooler_scale': 0.0}, '--pooler-scale 0.0: must be one of 0.25'),
        ({'pooler_scale': float('nan')}, 'nan'),
    ],
)
def test_flags_that_fit_no_model(changes, says):
    with pytest.raises(QatError, match=says):
        settings_of(**changes)
    with pytest.raises(QatError, match='only with --include onnx_end2end'):
        ExportConfig('seg.pt', ['onnx'], pooler_scale=0.5)
