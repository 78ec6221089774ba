"""Laws of the evaluator: figures equal upstream's, agree between backends, and are right in cases by hand."""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fresh import fresh
from helpers.labelled import CPU, PERFECT, boxes_of, labels_of, val_images, words
from helpers.zoo import command, holds, rows_of

from models.deploy.formats.onnx import export_onnx
from utils.qat.backends.detections import detect
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import open_file

SIZE, BATCH = 320, 4  # the images' own size: nothing is resized, so that figures by hand are exact
FIGURES = 'ap', 'ap50', 'precision', 'recall'


def metrics_of(demo, predict, loader, **options):
    return evaluate(predict, loader, load_data(demo.data).names, CPU, **options)


def assert_close(ours, theirs):
    assert all(abs(getattr(ours, name) - getattr(theirs, name)) < 1e-3 for name in FIGURES)


@pytest.fixture(scope='module')
def predict(demo):
    return TorchModel(demo.float_model())


@pytest.fixture(scope='module')
def loader(demo):
    """Images padded to rectangles, as upstream's val.py has them."""
    return val_images(demo.data, SIZE)


# ---- against upstream and between backends ------------------------------------------------------------------------------

UPSTREAM = """
import argparse, json, sys, val
val.opt = argparse.Namespace(min_items=0)  # run() reads this global of the script
(p, r, ap50, ap, *_), per_class, _ = val.run(sys.argv[1], sys.argv[2], batch_size=int(sys.argv[3]), imgsz=int(sys.argv[4]), device='cpu',
    workers=0, half=False, plots=False, project=sys.argv[5], name='val')
json.dump({'ap': ap, 'ap50': ap50, 'precision': p, 'recall': r, 'per_class': per_class.tolist()}, open(sys.argv[6], 'w'))
"""


def test_figures_are_those_of_upstreams_val(demo, predict, loader, tmp_path):
    fresh('-c', UPSTREAM, demo.data, demo.single, BATCH, SIZE, tmp_path, tmp_path / 'theirs.json')
    theirs = json.loads((tmp_path / 'theirs.json').read_text())
    ours, names = metrics_of(demo, predict, loader), load_data(demo.data).names
    for name in FIGURES:
        assert abs(getattr(ours, name) - theirs[name]) < 1e-3, name
        assert np.mean([row[name] for row in ours.per_class]) == pytest.approx(getattr(ours, name), abs=1e-9)
    for row in ours.per_class:
        assert abs(row['ap'] - theirs['per_class'][row['class']]) < 1e-3 and row['name'] == names[row['class']]
    labels = [line for file in (demo.data.parent / 'labels/val').iterdir() for line in file.read_text().splitlines()]
    assert ours.instances == len(labels) == sum(row['instances'] for row in ours.per_class)
    assert 0.3 < ours.ap < 1 and ours.images == 12


@pytest.mark.parametrize('name', ['conf_thres', 'iou_thres', 'max_det'])
def test_defaults_of_nms_are_upstreams(name):
    """On a dozen images another threshold may give equal figures, so the defaults are compared too."""
    import val

    theirs = inspect.signature(val.run).parameters[name].default
    assert inspect.signature(evaluate).parameters[name].default == theirs
    assert getattr(EvalConfig(Path('w.pt'), Path('d.yaml')), name, theirs) == theirs


def test_neither_backend_nor_batch_matters_on_squares(demo, predict, tmp_path):
    """Rectangles are padded to the largest of their batch."""
    squares = val_images(demo.data, 128, square=True)
    expected = metrics_of(demo, predict, squares)
    assert_close(metrics_of(demo, predict, val_images(demo.data, 128, square=True, batch_size=1)), expected)
    # 5 does not divide the batches: the last part is padded
    for options in ({'batch': 1}, {'batch': 5}, {'dynamic': True}):
        export_onnx(predict.model, tmp_path / 'model.onnx', (128, 128), **options)
        file = open_file(tmp_path / 'model.onnx')
        assert (file.nc, file.stride, file.names, list(file.imgsz)) == (10, 32, predict.names, [128, 128])
        assert_close(metrics_of(demo, file, squares), expected)


# ---- by hand ------------------------------------------------------------------------------------------------------------


class Oracle:
    """Predicts the labels of the images it is asked about, changed by `change(boxes xywh, classes, scores)`."""

    def __init__(self, loader, change=lambda boxes, classes, scores: (boxes, classes, scores)):
        self.batches, self.change = list(loader), change

    def __call__(self, images):
        height, width = images.shape[2:]
        out = torch.zeros(len(images), 4 + 10, 40)
        for i, (labels, _) in enumerate(labels_of(self.batches, images)):
            boxes = labels[:, 2:] * torch.tensor((width, height, width, height))
            boxes, classes, scores = self.change(boxes, labels[:, 1].long(), torch.full((len(labels),), 0.9))
            out[i, :4, : len(boxes)] = boxes.T
            out[i, 4 + classes, range(len(classes))] = scores
        return out


def narrower(share):
    """Boxes of the same centre and height whose IoU with the truth is `share`."""
    return lambda boxes, classes, scores: (boxes * torch.tensor((1, 1, share, 1)), classes, scores)


def nothing(boxes, classes, scores):
    return boxes[:0], classes[:0], scores[:0]


BY_HAND = {  # what is done to perfect detections, options of evaluate → AP and AP50 as shares of a perfect one, recall
    'perfect': (lambda b, c, s: (b, c, s), {}, 1, 1, 1),
    'IoU 0.63': (narrower(0.63), {}, 0.3, 1, 1),  # right at 0.50, 0.55 and 0.60
    'IoU 0.93': (narrower(0.93), {}, 0.9, 1, 1),
    'IoU 0.45': (narrower(0.45), {}, 0, 0, 0),
    'wrong class': (lambda b, c, s: (b, (c + 1) % 10, s), {}, 0, 0, 0),
    'nothing': (nothing, {}, 0, 0, 0),
    'too low': (lambda b, c, s: (b, c, s * 1e-5), {}, 0, 0, 0),
    'below --conf-thres': (lambda b, c, s: (b, c, s), {'conf_thres': 0.95}, 0, 0, 0),
}


@pytest.mark.parametrize('change, options, ap, ap50, recall', BY_HAND.values(), ids=BY_HAND)
def test_figures_by_hand(demo, loader, change, options, ap, ap50, recall):
    metrics = metrics_of(demo, Oracle(loader, change), loader, **options)
    assert (metrics.ap, metrics.ap50) == pytest.approx((ap * PERFECT, ap50 * PERFECT), abs=1e-3)
    assert (metrics.recall, metrics.precision) == pytest.approx((recall, recall), abs=0.01)
    assert metrics.images == 12 and metrics.instances > 30


def test_boxes_that_overlap_by_more_than_the_threshold_are_dropped():
    boxes = torch.tensor([[[50.0, 50], [50, 60], [40, 40], [40, 40], [0.9, 0.8]]])  # of an IoU of 0.6
    kept = {threshold: len(detect(boxes, (100, 100), iou_thres=threshold)[0]) for threshold in (0.5, 0.59, 0.61)}
    assert kept == {0.5: 1, 0.59: 1, 0.61: 2} and len(detect(boxes, (100, 100))[0]) == 2


def test_no_more_detections_than_asked_for(demo, loader):
    assert metrics_of(demo, Oracle(loader), loader, max_det=1).recall < 0.5


def test_detections_are_written_in_pixels_of_the_original(demo, loader, tmp_path):
    metrics = metrics_of(demo, Oracle(loader), loader, predictions_file=tmp_path / 'predictions.json')
    rows = json.loads((tmp_path / 'predictions.json').read_text())
    assert len(rows) == metrics.instances
    for file in (demo.data.parent / 'images/val').iterdir():
        _, wanted = boxes_of(file)
        found = [(row['category_id'], *row['bbox']) for row in rows if row['image_id'] == int(file.stem)]
        assert np.abs(np.array(sorted(wanted)) - np.array(sorted(found))).max() < 0.01, file.name


def test_without_labels_there_is_nothing_to_score(demo, loader):
    unlabelled = [(images, targets[:0], paths, shapes) for images, targets, paths, shapes in loader]
    with pytest.raises(QatError, match='no labels.*val: in --data'):
        metrics_of(demo, Oracle(loader), unlabelled)


@pytest.mark.parametrize(
    'line',
    [
        'val_trt.py --weights {f}/model.xml --data {data} --device cpu --project {f}/runs',
        'val_trt.py --weights {f}/model.onnx --backend openvino --data {data} --device cpu --project {f}/runs',
        'export_qat.py --weights {f}/model.pt --include openvino',
    ],
)
def test_without_openvino_it_is_one_line(demo, tmp_path, monkeypatch, line):
    """The package is asked for before its file is read, and before anything is written."""
    monkeypatch.setitem(sys.modules, 'openvino', None)
    file, _, model, *rest = words(line, f=tmp_path, data=demo.data)
    Path(model).write_bytes(demo.single.read_bytes() if model.endswith('.pt') else b'not read')
    said = command(file, '--weights', model, *rest, code=2)
    assert 'no package openvino that can be loaded here' in said and './install_dependencies.sh' in said
    assert list(tmp_path.rglob('*')) == [Path(model)]


# ---- against a baseline -------------------------------------------------------------------------------------------------


def test_eval_compares_with_the_baseline(small, tmp_path):
    """Each cell of a row of differences is the difference of the cells above it, in points."""
    line = '--weights {s.quantized} --data {s.data} --imgsz 64 --device cpu --workers 0 --project {f}'
    given = words(line, s=small, f=tmp_path)
    command('qat.py', 'eval', *given, '--baseline', small.single, '--name', 'both')
    command('qat.py', 'eval', *given, '--name', 'alone')
    both, alone = (json.loads((tmp_path / name / 'metrics.json').read_text()) for name in ('both', 'alone'))
    assert both['ap'] == alone['ap'] and 'baseline' not in alone
    assert both['against_baseline']['difference'] == pytest.approx(both['ap'] - both['baseline']['ap'])
    rows = rows_of((tmp_path / 'both/report.md').read_text(), 'model')
    less = f'{small.quantized.name} - {small.single.name}, points'
    assert list(rows) == ['model', small.single.name, small.quantized.name, less]
    assert holds(*list(rows.values())[1:]) and '±' in rows[less][0]
    assert rows[small.single.name][0] == f'{both["baseline"]["ap"]:.4f}'
