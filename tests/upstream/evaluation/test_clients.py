"""Laws of files in programs of others (docs/other-programs.md): each finds what our own client finds in the same file."""

import cv2
import numpy as np
import pytest
import torch
from helpers.graphs import run_onnx
from helpers.zoo import program
from torchvision.ops import box_iou

from models.deploy.formats.onnx import export_onnx
from utils.qat.backends.detections import detect

SIDE, CONF = 320, 0.4


@pytest.fixture(scope='module')
def files(demo, tmp_path_factory):
    """Folder of float.onnx and int8.onnx, and images as our client prepares them, FP32 [1, 3, SIDE, SIDE]."""
    folder, client = tmp_path_factory.mktemp('files'), program('scripts/infer_onnx.py')
    for name, model in (('float', demo.float_model()), ('int8', demo.quantized_model())):
        export_onnx(model, folder / f'{name}.onnx', (SIDE, SIDE), simplify=True)
    images = sorted(demo.data.parent.glob('images/val/*'))
    return folder, [client.letterbox(cv2.imread(str(file)), (SIDE, SIDE))[0].numpy() for file in images]


def frigate(output):
    """Boxes (corners in pixels), scores and classes that Frigate finds in the output of a model of type yolo-generic.

    Read in its post_process_yolo of July 2026. It gives corners to OpenCV's NMS, which takes them for corner and size, so boxes
    of any class far from the upper left corner drop each other more easily.
    """
    rows = output[0].T
    rows = rows[rows[:, 4:].max(1) > CONF]
    scores, classes = rows[:, 4:].max(1), rows[:, 4:].argmax(1)
    corners = np.hstack((rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2))
    kept = [*cv2.dnn.NMSBoxes(corners, scores, CONF, 0.4)[:20]] if len(rows) else []
    return corners[kept], scores[kept], classes[kept]


def test_frigate_finds_what_our_client_finds(files):
    """Each of its detections is one of ours, and it drops at most a fifth of ours."""
    folder, images = files
    ours = theirs = 0
    for image in images:
        [output] = run_onnx(folder / 'int8.onnx', {'images': image})
        [wanted] = detect(torch.from_numpy(output), (SIDE, SIDE), CONF, 0.45)
        boxes, scores, classes = map(torch.from_numpy, frigate(output))
        ours, theirs = ours + len(wanted.rows), theirs + len(boxes)
        for box, score, number in zip(boxes, scores, classes):
            same = wanted.rows[(wanted.rows[:, 5] == number) & ((wanted.rows[:, 4] - score).abs() < 1e-5)]
            assert len(same) and box_iou(box[None], same[:, :4]).max() > 0.99
    assert 0.8 * ours <= theirs <= ours and ours > 20


def test_opencv_computes_the_same(files):
    """OpenCV's DNN module, with a float file."""
    folder, images = files
    network = cv2.dnn.readNetFromONNX(str(folder / 'float.onnx'))
    for image in images[:2]:
        network.setInput(image)
        assert np.abs(network.forward() - run_onnx(folder / 'float.onnx', {'images': image})[0]).max() < 0.01


@pytest.mark.parametrize('name', ['float', 'int8'])
def test_the_package_ultralytics_predicts(files, demo, name, tmp_path, monkeypatch):
    """By its own loader, letterbox and NMS, from the metadata alone."""
    monkeypatch.setenv('YOLO_OFFLINE', 'true')
    monkeypatch.setenv('YOLO_CONFIG_DIR', str(tmp_path))
    package = pytest.importorskip(
        'ultralytics', reason='needs the package ultralytics (AGPL-3.0), which is no requirement'
    )
    folder, _ = files
    images = sorted(demo.data.parent.glob('images/val/*'))[:3]
    for file, found in zip(
        images, package.YOLO(folder / f'{name}.onnx').predict(images, conf=CONF, iou=0.45, verbose=False)
    ):
        square, place = program('scripts/infer_onnx.py').letterbox(cv2.imread(str(file)), (SIDE, SIDE))
        [output] = run_onnx(folder / f'{name}.onnx', {'images': square.numpy()})
        [wanted] = detect(torch.from_numpy(output), (SIDE, SIDE), CONF, 0.45)
        theirs, ours = found.boxes.conf.sort(descending=True).values, wanted.rows[:, 4].sort(descending=True).values
        number = min(len(theirs), len(ours))
        assert number >= max(len(theirs), len(ours)) - 1 > 2 and found.names == demo.float_model().names
        assert (theirs[:number] - ours[:number]).abs().max() < 0.1  # the letterboxes differ
