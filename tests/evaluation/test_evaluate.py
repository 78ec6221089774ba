"""Laws of the evaluator: figures equal upstream's, agree between backends, and are right in cases by hand."""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TREE
from fresh import fresh
from zoo import command

from models.deploy.formats.onnx import export_onnx
from utils.qat.backends.detections import Detections
from utils.qat.backends.file_model import open_file
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.detection_scores import _correct
from utils.qat.evaluation.evaluate import evaluate

CPU = torch.device('cpu')
SIZE, BATCH = 320, 4  # the images' own size: nothing is resized, so that figures by hand are exact
FIGURES = ('ap', 'ap50', 'precision', 'recall')


def loader_of(demo, square=False, size=SIZE):
    config = EvalConfig(demo.single, demo.data, batch_size=BATCH, imgsz=size, workers=0)
    return val_loader(load_data(demo.data), config, 32, square=square)


def metrics_of(demo, predict, loader=None, **options):
    return evaluate(predict, loader or loader_of(demo), load_data(demo.data).names, CPU, **options)


# ---- against upstream and between backends ------------------------------------------------------------------------------

UPSTREAM = """
import argparse, json, sys, val
val.opt = argparse.Namespace(min_items=0)  # run() reads this global of the script
(p, r, ap50, ap, *_), per_class, _ = val.run(sys.argv[1], sys.argv[2], batch_size=int(sys.argv[3]), imgsz=int(sys.argv[4]), device='cpu',
    workers=0, half=False, plots=False, project=sys.argv[5], name='val')
json.dump({'ap': ap, 'ap50': ap50, 'precision': p, 'recall': r, 'per_class': per_class.tolist()}, open(sys.argv[6], 'w'))
"""


def test_figures_are_those_of_upstreams_val(demo, tmp_path):
    fresh('-c', UPSTREAM, demo.data, demo.single, BATCH, SIZE, tmp_path, tmp_path / 'theirs.json')
    theirs = json.loads((tmp_path / 'theirs.json').read_text())
    ours = metrics_of(demo, TorchModel(demo.float_model()))
    for name in FIGURES:
        assert abs(getattr(ours, name) - theirs[name]) < 1e-3, name
    assert 0.3 < ours.ap < 1 and ours.images == 12
    for row in ours.per_class:
        assert abs(row['ap'] - theirs['per_class'][row['class']]) < 1e-3


@pytest.mark.parametrize('name', ['conf_thres', 'iou_thres', 'max_det'])
def test_defaults_of_nms_are_upstreams(name):
    """On a dozen images another threshold may give equal figures, so the defaults are compared too."""
    import val

    theirs = inspect.signature(val.run).parameters[name].default
    assert inspect.signature(evaluate).parameters[name].default == theirs
    assert getattr(EvalConfig(Path('w.pt'), Path('d.yaml')), name, theirs) == theirs


def test_onnx_and_torch_agree_on_square_images(demo, tmp_path):
    model = demo.float_model()
    loader = loader_of(demo, square=True)
    expected = metrics_of(demo, TorchModel(model), loader)
    for options in (
        {'batch': 1},
        {'batch': 5},
        {'dynamic': True},
    ):  # 5 does not divide the batches: the last part is padded
        export_onnx(model, tmp_path / 'model.onnx', (SIZE, SIZE), **options)
        predict = open_file(tmp_path / 'model.onnx')
        assert (predict.nc, predict.stride, predict.names, list(predict.imgsz)) == (10, 32, model.names, [SIZE, SIZE])
        ours = metrics_of(demo, predict, loader)
        assert all(abs(getattr(ours, name) - getattr(expected, name)) < 1e-3 for name in FIGURES), options


def test_the_batch_size_does_not_matter(demo):
    """For square images; rectangles are padded to the largest of their batch."""
    loader = loader_of(demo, square=True)
    single = torch.utils.data.DataLoader(loader.dataset, 1, collate_fn=loader.dataset.collate_fn)
    predict = TorchModel(demo.float_model())
    first, second = (metrics_of(demo, predict, x) for x in (loader, single))
    assert all(abs(getattr(first, name) - getattr(second, name)) < 1e-3 for name in FIGURES)


def test_figures_repeat(demo):
    predict, loader = TorchModel(demo.float_model()), loader_of(demo)
    assert metrics_of(demo, predict, loader).plain() == metrics_of(demo, predict, loader).plain()


def test_overall_is_the_mean_over_classes(demo):
    metrics = metrics_of(demo, TorchModel(demo.float_model()))
    for name in FIGURES:
        assert np.mean([row[name] for row in metrics.per_class]) == pytest.approx(getattr(metrics, name), abs=1e-9)
    assert sum(row['instances'] for row in metrics.per_class) == metrics.instances
    names = load_data(demo.data).names
    assert all(row['name'] == names[row['class']] for row in metrics.per_class)
    assert metrics.instances == sum(
        len(file.read_text().splitlines()) for file in (demo.data.parent / 'labels' / 'val').iterdir()
    )


# ---- by hand ------------------------------------------------------------------------------------------------------------


class Oracle:
    """Predicts the labels of the images it is asked about, changed by `change(boxes xywh, classes, scores)`."""

    def __init__(self, loader, change=lambda boxes, classes, scores: (boxes, classes, scores)):
        self.batches, self.change = list(loader), change

    def __call__(self, images):
        of = next(b for b in self.batches if b[0].shape == images.shape and torch.equal(b[0].float() / 255, images))
        targets, (height, width) = of[1], images.shape[2:]
        out = torch.zeros(len(images), 4 + 10, 40)
        for i in range(len(images)):
            mine = targets[targets[:, 0] == i]
            boxes, classes, scores = self.change(
                mine[:, 2:] * torch.tensor((width, height, width, height)),
                mine[:, 1].long(),
                torch.full((len(mine),), 0.9),
            )
            out[i, :4, : len(boxes)] = boxes.T
            out[i, 4 + classes, range(len(classes))] = scores
        return out


ALL_RIGHT = 0.995  # what upstream's interpolation makes of a perfect result


def narrower(share):
    """Boxes of the same centre and height whose IoU with the truth is `share`."""
    return lambda boxes, classes, scores: (boxes * torch.tensor((1, 1, share, 1)), classes, scores)


@pytest.mark.parametrize(
    'change, ap, ap50, recall',
    [
        (lambda b, c, s: (b, c, s), 1, 1, 1),
        (narrower(0.63), 0.3, 1, 1),  # right at 0.50, 0.55 and 0.60
        (narrower(0.93), 0.9, 1, 1),
        (narrower(0.45), 0, 0, 0),
        (lambda b, c, s: (b, (c + 1) % 10, s), 0, 0, 0),
        (lambda b, c, s: (b[:0], c[:0], s[:0]), 0, 0, 0),
        (lambda b, c, s: (b, c, s * 1e-5), 0, 0, 0),
    ],  # below --conf-thres
    ids=['perfect', 'IoU 0.63', 'IoU 0.93', 'IoU 0.45', 'wrong class', 'nothing', 'too low'],
)
def test_figures_by_hand(demo, change, ap, ap50, recall):
    loader = loader_of(demo)
    metrics = metrics_of(demo, Oracle(loader, change), loader)
    assert metrics.ap == pytest.approx(ap * ALL_RIGHT, abs=1e-3) and metrics.ap50 == pytest.approx(
        ap50 * ALL_RIGHT, abs=1e-3
    )
    assert metrics.recall == pytest.approx(recall, abs=0.01) and metrics.precision == pytest.approx(recall, abs=0.01)
    assert metrics.images == 12 and metrics.instances > 30


def test_a_label_is_found_once():
    """At each IoU threshold the first detection of its class with enough overlap counts: here the second from 0.75 on."""
    found = Detections(torch.tensor([[0, 0, 9, 9, score, c] for score, c in ((0.9, 1), (0.8, 1), (0.7, 1), (0.6, 2))]))
    correct = _correct(found, torch.tensor([[1.0, 5, 5, 9, 9]]), torch.tensor([[0.72, 0.96, 0.97, 0.99]]))
    assert correct.tolist() == [[True] * 5 + [False] * 5, [False] * 5 + [True] * 5, [False] * 10, [False] * 10]


def test_thresholds_are_used(demo):
    loader = loader_of(demo)
    assert metrics_of(demo, Oracle(loader), loader, conf_thres=0.95).ap == 0
    assert metrics_of(demo, Oracle(loader), loader, max_det=1).recall < 0.5


def test_detections_are_written_in_pixels_of_the_original(demo, tmp_path):
    loader = loader_of(demo)
    metrics = metrics_of(demo, Oracle(loader), loader, predictions_file=tmp_path / 'predictions.json')
    rows = json.loads((tmp_path / 'predictions.json').read_text())
    assert len(rows) == metrics.instances
    import cv2

    for file in sorted((demo.data.parent / 'labels' / 'val').iterdir()):
        height, width = cv2.imread(str(demo.data.parent / 'images' / 'val' / f'{file.stem}.jpg')).shape[:2]
        wanted = []
        for line in file.read_text().splitlines():
            c, x, y, w, h = map(float, line.split())
            wanted.append((c, (x - w / 2) * width, (y - h / 2) * height, w * width, h * height))
        found = [(row['category_id'], *row['bbox']) for row in rows if row['image_id'] == int(file.stem)]
        assert np.abs(np.array(sorted(wanted)) - np.array(sorted(found))).max() < 0.01, file.name


def test_pycocotools_agrees_on_perfect_and_on_nothing(demo, tmp_path):
    """Through COCO's own scorer and category numbers (1 to 11 for the first classes)."""
    loader = loader_of(demo)
    metrics_of(demo, Oracle(loader), loader, predictions_file=tmp_path / 'p.json')
    truth = [
        {**row, 'id': i, 'area': row['bbox'][2] * row['bbox'][3], 'iscrowd': 0, 'category_id': row['category_id'] + 1}
        for i, row in enumerate(json.loads((tmp_path / 'p.json').read_text()), 1)
    ]
    (tmp_path / 'instances.json').write_text(
        json.dumps(
            {
                'images': [{'id': i} for i in {row['image_id'] for row in truth}],
                'annotations': truth,
                'categories': [{'id': i, 'name': str(i)} for i in range(1, 12)],
            }
        )
    )
    perfect = metrics_of(demo, Oracle(loader), loader, annotations=tmp_path / 'instances.json')
    assert perfect.coco['ap'] == pytest.approx(1, abs=1e-3) and perfect.coco['ap50'] == pytest.approx(1, abs=1e-3)
    nothing = metrics_of(
        demo, Oracle(loader, lambda b, c, s: (b[:0], c[:0], s[:0])), loader, annotations=tmp_path / 'instances.json'
    )
    assert nothing.coco['ap'] == 0 and nothing.ap == 0


def test_without_labels_there_is_nothing_to_score(demo, tmp_path):
    loader = loader_of(demo)
    unlabelled = [(images, targets[:0], paths, shapes) for images, targets, paths, shapes in loader]
    with pytest.raises(QatError, match='no labels.*val: in --data'):
        metrics_of(demo, Oracle(loader), unlabelled)


@pytest.mark.parametrize(
    'file, arguments',
    [
        ('val_trt.py', ['--weights', 'model.xml']),
        ('val_trt.py', ['--weights', 'model.onnx', '--backend', 'openvino']),
        ('export_qat.py', ['--weights', 'model.pt', '--include', 'openvino']),
    ],
)
def test_without_openvino_it_is_one_line(demo, tmp_path, monkeypatch, file, arguments):
    """The package is asked for before anything is read or written."""
    monkeypatch.setitem(sys.modules, 'openvino', None)
    flag, model, *rest = arguments
    (tmp_path / model).write_bytes(b'not read')
    data = ['--data', demo.data, '--device', 'cpu', '--project', tmp_path / 'runs'] * (file == 'val_trt.py')
    said = command(file, flag, tmp_path / model, *rest, *data, code=2)
    assert 'no package openvino that can be loaded here' in said and './install_dependencies.sh' in said
    assert [f.name for f in tmp_path.rglob('*')] == [model]


def test_upstream_is_asked_in_the_patched_tree():
    import val

    assert str(TREE) in val.__file__
