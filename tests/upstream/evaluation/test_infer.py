"""Laws of the clients: they find what the evaluation finds, and the one of docs/client.md needs no file of the toolkit."""

import ast
import math
import operator
import re
import resource
import shutil
import subprocess
import sys
import types
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import torch
from conftest import REPO, TREE
from helpers.graphs import model_of
from helpers.labelled import val_images
from helpers.segmenters import segmenter
from helpers.zoo import command, program
from onnx import helper
from utils.general import non_max_suppression, scale_boxes

from models.deploy.formats.deepstream import deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import export_end2end
from utils.qat.backends.detections import Detections, detect
from utils.qat.config.deploy import InferConfig
from utils.qat.config.export import Nms, Pooling
from utils.qat.core.command import run_command
from utils.qat.data.masks import BoxMasks
from utils.qat.vendors.load import open_file

client = program('scripts/infer_onnx.py')
SIZE, CONF, IOU = 128, 0.01, 0.6
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    """A folder with the demo's plain.onnx and deepstream.onnx, and its validation images. In INT8 some scores would be equal, in no order."""
    folder = tmp_path_factory.mktemp('infer')
    for name, layout in (('plain', None), ('deepstream', deepstream_layout)):
        export_onnx(small.float_model(), folder / f'{name}.onnx', (SIZE, SIZE), layout=layout)
    shutil.copytree(small.data.parent / 'images/val', folder / 'images')
    return folder


@pytest.fixture(scope='module')
def evaluated(small, files):
    """[(path, predictions [1, 4 + nc, N], function to pixels of the image)], as the evaluation has them."""
    predict, found = open_file(files / 'plain.onnx'), []
    for images, _, [path], [shape] in val_images(small.data, SIZE, square=True, batch_size=1):

        def native(rows, shape=shape):
            boxes = scale_boxes((SIZE, SIZE), rows[:, :4].clone(), *shape)
            return torch.cat((boxes, rows[:, 4:]), 1).numpy()

        found.append((path, predict(images.float() / 255), native))
    return found


def end2end(found, most=100):
    """A file that returns the detections `found` [n, 6] for any input; rows behind the last hold garbage."""
    rows = np.full((1, most, 6), 77, np.float32)
    rows[0, : len(found)] = found
    outputs = {
        'num_dets': np.int32([[len(found)]]),
        'det_boxes': rows[..., :4],
        'det_scores': rows[..., 4],
        'det_classes': rows[..., 5].astype(np.int32),
    }
    nodes = [helper.make_node('Identity', [f'{name} stored'], [name]) for name in outputs]
    returned = {name: (helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for name, a in outputs.items()}
    values = {f'{name} stored': np.ascontiguousarray(a) for name, a in outputs.items()}
    return model_of(nodes, {'images': [1, 3, SIZE, SIZE]}, returned, values)


def detected(file, path, conf=CONF):
    """Detections of the command in an image: [n, 6] in pixels of the image."""
    config = InferConfig((file,), Path(path), conf_thres=conf, iou_thres=IOU, device='cpu')
    model = client.open_model(file, None, CPU)
    rows, masks, skipped = client.detections(model, cv2.imread(str(path)), (SIZE, SIZE), config)
    assert not masks and not skipped
    return np.float32(rows).reshape(-1, 6)


def assert_same(ours, theirs):
    """Same detections in the same order: boxes to 0.01 pixels, scores to 1e-5, classes."""
    assert ours.shape == theirs.shape and len(ours)
    assert np.abs(ours[:, :4] - theirs[:, :4]).max() < 0.01 and np.abs(ours[:, 4] - theirs[:, 4]).max() < 1e-5
    assert np.array_equal(ours[:, 5], theirs[:, 5])


def test_plain_files_as_they_are_evaluated(files, evaluated):
    several = 0
    for path, predictions, native in evaluated:
        theirs = native(detect(predictions, (SIZE, SIZE), CONF, IOU)[0].rows)
        assert_same(detected(files / 'plain.onnx', path), theirs)
        several += len(theirs) - len(np.unique(theirs[:, :4], axis=0))
    assert several, 'some boxes are of several classes'


def test_deepstream_files_with_the_best_class_of_each_box(files, evaluated):
    for path, predictions, native in evaluated:
        theirs = native(non_max_suppression(predictions, CONF, IOU)[0])
        assert_same(detected(files / 'deepstream.onnx', path), theirs)


def test_end2end_files_as_they_are(evaluated, tmp_path):
    file = tmp_path / 'end2end.onnx'
    for path, predictions, native in evaluated[:3]:
        theirs = detect(predictions, (SIZE, SIZE), CONF, IOU, max_det=50)[0].rows
        onnx.save(end2end(theirs), file)
        assert_same(detected(file, path), native(theirs))
        half = theirs[:, 4].median().item()
        assert_same(detected(file, path, conf=half), native(theirs[theirs[:, 4] > half]))
    onnx.save(end2end(np.zeros((0, 6))), file)
    assert detected(file, evaluated[0][0]).shape == (0, 6)


def test_a_fixed_batch_takes_one_image(small, files, evaluated, tmp_path):
    export_onnx(small.float_model(), tmp_path / 'two.onnx', (SIZE, SIZE), batch=2)
    path = evaluated[0][0]
    assert_same(detected(tmp_path / 'two.onnx', path), detected(files / 'plain.onnx', path))


SHAPES = (
    '128x128 97x131 131x97 33x500 500x31 40x30 255x129 64x128 300x299 99x128 128x99'  # odd, tall, wide, small, large
)


def test_every_shape_of_image(tmp_path):
    """The model sees the pixels that the evaluation shows it, and boxes return to their place."""
    rng = np.random.default_rng(0)
    for folder in ('images', 'labels'):
        (tmp_path / folder).mkdir()
    for shape in SHAPES.split():
        noise = rng.integers(0, 255, (9, 9, 3)).astype(np.uint8)
        cv2.imwrite(str(tmp_path / f'images/{shape}.png'), cv2.resize(noise, tuple(map(int, shape.split('x')))))
        (tmp_path / f'labels/{shape}.txt').write_text('0 0.5 0.5 0.5 0.25\n')
    (tmp_path / 'data.yaml').write_text(f'path: {tmp_path}\ntrain: images\nval: images\nnames: [a]\n')
    for images, _, [path], [place] in val_images(tmp_path / 'data.yaml', SIZE, square=True, batch_size=1):
        pixels, ours = client.letterbox(cv2.imread(path), (SIZE, SIZE))
        assert torch.equal(pixels, images.float() / 255) and np.allclose(np.hstack(ours[1]), np.hstack(place[1]))


def test_what_is_drawn():
    image, rows = np.full((100, 200, 3), 40, np.uint8), [[20, 30, 80, 90, 0.5, 0], [150, 2, 199, 60, 0.75, 7]]
    mask = np.zeros((100, 200), bool)
    mask[50:60, 40:70] = True
    drawn = client.drawn(image, rows, [mask], {0: 'ζ', 7: 'cell'})
    assert (image == 40).all(), 'the image is copied'
    first, second = drawn[88, 50].astype(int), drawn[30, 150].astype(int)
    assert np.abs(first - second).max() > 60 and (drawn[45, 40:70] == 40).all()
    assert np.abs(drawn[55, 50].astype(int) - drawn[52, 60]).max() == 0 and (drawn[55, 50] != 40).any()


# ---- masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('shape', [(256, 256), (97, 160), (500, 31), (40, 30)], ids=str)
def test_masks_are_where_the_objects_are(shape):
    """Images are larger or smaller than the model's; the mask is the left half of its box."""
    height, width = shape
    _, place = client.letterbox(np.zeros((*shape, 3), np.uint8), (SIZE, SIZE))
    (_, gain), (left, top) = place[1]
    box = torch.tensor([[left, top, left + width * gain, top + height * gain]])
    crop = (torch.arange(64) < 32).float().expand(1, 64, 64)
    found = Detections(torch.cat((box, torch.tensor([[0.9, 0]])), 1), BoxMasks(crop, box, (SIZE, SIZE)))
    [mask] = client.masks_of(found, place)
    assert mask.shape == shape
    edge = math.ceil(2 / gain)  # two pixels of the letterboxed image
    assert mask[edge:-edge, edge : width // 2 - edge].all() and not mask[:, width // 2 + edge :].any()


# ---- numbers that are none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_out_and_counted(files, tmp_path, value):
    rows = np.float32([[20, 10, 90, 70, 0.9, 0], [5, 30, 60, 100, 0.8, 0], [64, 64, 128, 128, 0.7, 0]])
    rows[1, 2] = value
    onnx.save(end2end(rows), tmp_path / 'model.onnx')
    image = next((files / 'images').iterdir())
    assert '2 detections (1 more left out: NaN or infinite) in 1 image at' in run(tmp_path / 'model.onnx', image)


# ---- the command --------------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    return command('scripts/infer_onnx.py', *arguments, '--device', 'cpu', code=code)


@pytest.fixture
def start(tmp_path, monkeypatch, capfd):
    """Callable: run the command in the folder of the test; returns stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def started(*arguments, code=0):
        capfd.readouterr()
        assert run_command(client.main, [*map(str, arguments), '--device', 'cpu']) == code
        return capfd.readouterr()

    return started


def lines(file, path, conf):
    """Lines that the command prints of an image."""
    found = [
        f'{Path(path).name}: {int(n)} {score:.3f}  {" ".join(f"{x:.1f}" for x in box)}'
        for *box, score, n in detected(file, path, conf).tolist()
    ]
    return found or [f'{Path(path).name}: nothing found']


def test_the_command_prints_and_draws(start, files, evaluated, tmp_path):
    thresholds = '--conf-thres', 0.3, '--iou-thres', IOU
    said, _ = start(files / 'plain.onnx', files / 'images', '--save', *thresholds)
    paths = sorted(path for path, *_ in evaluated)
    wanted = [line for path in paths for line in lines(files / 'plain.onnx', path, 0.3)]
    assert said.splitlines()[: len(wanted)] == wanted and len(wanted) > 20
    assert f' in {len(paths)} images at {SIZE} px, pictures in runs/infer' in said
    for path in paths:
        drawn, image = cv2.imread(str(tmp_path / 'runs/infer' / Path(path).name)), cv2.imread(path)
        found = detected(files / 'plain.onnx', path, 0.3)
        assert drawn.shape == image.shape and (len(found) == 0 or np.abs(drawn.astype(int) - image).max() > 60)


def test_several_models_have_a_folder_each(start, files, evaluated, tmp_path):
    """And the same models under one name as well."""
    shutil.copytree(files / 'images', tmp_path / 'images')
    (tmp_path / 'other').mkdir()
    for name in ('a.onnx', 'other/a.onnx'):
        shutil.copy(files / 'plain.onnx', tmp_path / name)
    said, _ = start('a.onnx', 'other/a.onnx', 'images', '--save')
    first, second = said.split('\nother/a.onnx\n')
    assert first.partition(' images')[0].split('a.onnx\n')[1] == second.partition(' images')[0]
    for folder in ('a.onnx', 'other_a.onnx'):
        assert {f.name for f in (tmp_path / 'runs/infer' / folder).iterdir()} == {Path(p).name for p, *_ in evaluated}


def test_a_checkpoint_is_a_model_too(small, files):
    image = next((files / 'images').iterdir())
    assert re.search(r'\d+ detections? in 1 image at', run(small.single, image, '--imgsz', SIZE))


@pytest.mark.parametrize('kind', ['plain', 'end2end'])
def test_a_segmentation_model(start, files, tmp_path, kind):
    export_onnx(segmenter(), tmp_path / 'plain.onnx', (SIZE, SIZE))
    if kind == 'end2end':
        export_end2end(tmp_path / 'plain.onnx', tmp_path / 'end2end.onnx', Nms('standard', 20, IOU, 0.3), Pooling(28))
    thresholds = '--conf-thres', 0.3, '--iou-thres', IOU
    said, _ = start(tmp_path / f'{kind}.onnx', files / 'images', '--save', *thresholds)
    pixels = [int(n) for n in re.findall(r'(?m)  (\d+) px$', said)]
    assert len(pixels) > 5 and max(pixels) > 20 and 'pictures in runs/infer' in said
    assert {f.name for f in (files / 'images').iterdir()} <= {f.name for f in (tmp_path / 'runs/infer').iterdir()}


def test_an_unreadable_image_is_named_and_the_others_done(start, files, tmp_path):
    (tmp_path / 'some').mkdir()
    (tmp_path / 'some/a.jpg').write_bytes(b'no image')
    shutil.copy(next((files / 'images').iterdir()), tmp_path / 'some/b.JPG')
    said, _ = start(files / 'deepstream.onnx', 'some', code=1)
    assert 'warning: some/a.jpg: OpenCV cannot read it' in said and 'b.JPG: ' in said
    assert not (tmp_path / 'runs').exists()
    _, complaint = start(files / 'deepstream.onnx', 'some/a.jpg', code=2)
    assert 'some/a.jpg: OpenCV can read no image of it' in complaint


def test_a_picture_of_a_format_that_opencv_only_reads_is_a_png(start, files, tmp_path):
    image = next((files / 'images').iterdir())
    (tmp_path / 'some').mkdir()
    for name in ('a.mpo', 'b.jpg'):
        shutil.copy(image, tmp_path / 'some' / name)
    start(files / 'plain.onnx', 'some', '--save')
    assert {'a.mpo.png', 'b.jpg'} <= {f.name for f in (tmp_path / 'runs/infer').iterdir()}


@pytest.mark.parametrize('kind', ['plain', 'deepstream'])
def test_a_file_of_another_size_is_refused(start, files, kind):
    _, complaint = start(files / f'{kind}.onnx', next((files / 'images').iterdir()), '--imgsz', 96, code=2)
    assert f'--imgsz 96: {files / kind}.onnx takes ' in complaint


def test_no_room_for_the_pictures(files, tmp_path):
    """A limit on the size of files stands in for a full disk: the third picture is larger."""
    (tmp_path / 'some').mkdir()
    for name, side in (('a', 20), ('b', 20), ('c', 400), ('d', 20)):
        cv2.imwrite(str(tmp_path / f'some/{name}.bmp'), np.zeros((side, side, 3), np.uint8))
    done = subprocess.run(
        [sys.executable, TREE / 'scripts/infer_onnx.py', files / 'plain.onnx', 'some', '--save', '--device', 'cpu'],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert done.returncode == 2 and 'runs/infer/c.bmp' in done.stderr and done.stderr.count('\n') == 1, done.stderr
    assert 'pictures in' not in done.stdout
    assert {f.name for f in (tmp_path / 'runs/infer').iterdir()} == {'.lock', 'a.bmp', 'b.bmp'}


def test_pictures_that_cannot_be_written(start, files, tmp_path):
    """A format of which OpenCV writes none so large."""
    cv2.imwrite(str(tmp_path / 'wide.png'), np.zeros((4, 17_000, 3), np.uint8))
    (tmp_path / 'wide.png').rename(tmp_path / 'wide.webp')  # OpenCV reads what it is, and writes what it is called
    _, complaint = start(files / 'plain.onnx', 'wide.webp', '--save', code=2)
    assert 'OpenCV writes no .webp of 17000 x 4 pixels' in complaint


def test_a_folder_with_folders_and_a_folder_of_pictures_for_each_run(start, files, tmp_path):
    image = next((files / 'images').iterdir())
    for folder in ('some', 'some/left', 'some/right'):
        (tmp_path / folder).mkdir()
        shutil.copy(image, tmp_path / folder)
    for pictures in ('runs/infer', 'runs/infer2'):
        said, _ = start(files / 'plain.onnx', 'some', '--save')
        assert f' in 3 images at {SIZE} px, pictures in {pictures}\n' in said
        written = {str(f.relative_to(tmp_path / pictures)) for f in (tmp_path / pictures).rglob('*.jpg')}
        assert written == {image.name, f'left/{image.name}', f'right/{image.name}'}


# ---- clients to copy ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def copied(tmp_path_factory):
    """The client of docs/client.md, in a folder where torch and the packages of this tree cannot be imported."""
    folder = tmp_path_factory.mktemp('client')
    [text] = re.findall(r'(?s)```python\n(.*?)```', (REPO / 'docs/client.md').read_text())
    (folder / 'client.py').write_text(text)
    for name in ('torch', 'torchvision', 'models', 'utils'):
        (folder / f'{name}.py').write_text('raise ImportError("not where it was copied to")')
    return folder


def test_the_client_of_the_docs_finds_what_the_command_finds(files, evaluated, copied):
    assert len([line for line in (copied / 'client.py').read_text().splitlines() if line.strip()]) <= 32
    config = InferConfig((files / 'plain.onnx',), files, device='cpu')
    model, number = client.open_model(files / 'plain.onnx', None, CPU), 0
    for path, *_ in evaluated:
        rows, *_ = client.detections(model, cv2.imread(path), (SIZE, SIZE), config)
        theirs = [f'{int(n)} {score:.3f}  {" ".join(f"{x:.1f}" for x in box)}' for *box, score, n in rows]
        line = [sys.executable, 'client.py', files / 'plain.onnx', path]
        done = subprocess.run(line, cwd=copied, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.splitlines() == theirs, done.stderr
        number += len(theirs)
    assert number > 20


def class_by_class(predictions):
    """The detections of the evaluation, whose NMS offsets boxes by class: far from 0 the last bits of an IoU, and a box near the threshold, are lost."""
    found = []
    for c in range(predictions.shape[1] - 4):
        (of_class,) = detect(predictions[:, [*range(4), 4 + c]], (SIZE, SIZE), CONF, IOU)
        found.append(torch.cat((of_class.rows[:, :5], torch.full((len(of_class.rows), 1), c)), 1))
    rows = torch.cat(found)
    return rows[rows[:, 4].argsort(descending=True)]


def test_the_steps_of_the_engine_client(evaluated, monkeypatch):
    """Its pixels and detections are those of the evaluation; what only TensorRT can run is below."""
    for name in ('tensorrt', 'cuda', 'cuda.bindings', 'cuda.bindings.runtime'):  # not used here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules['cuda.bindings'].runtime = sys.modules['cuda.bindings.runtime']
    engine = program('examples/infer_engine.py')
    for path, predictions, native in evaluated:
        image = cv2.imread(path)
        pixels, gain, border = engine.letterbox(image, SIZE, SIZE)
        theirs, place = client.letterbox(image, (SIZE, SIZE))
        assert np.array_equal(pixels, theirs[0].numpy()) and gain == place[1][0][0]
        found = engine.read_outputs({'output0': predictions.numpy()}, CONF, IOU)
        wanted = native(class_by_class(predictions))
        h, w = image.shape[:2]
        found[:, :4] = ((found[:, :4] - border) / gain).clip(0, [w, h, w, h])
        assert_same(found, wanted)
    rows = np.float32([[1, 2, 3, 4, 0.5, 0]])
    outputs = {'num_dets': np.int32([[1]]), 'det_boxes': rows[None, :, :4], 'det_scores': rows[None, :, 4]}
    assert np.array_equal(engine.read_outputs({**outputs, 'det_classes': np.int32([[0]])}), rows)


def test_names_of_cuda_python():
    """Every name that the engine's client takes from cuda-python is there; tests/unit/test_tensorrt_api.py has those of TensorRT."""
    cudart = pytest.importorskip('cuda.bindings.runtime', reason='no cuda-python: pip install cuda-bindings')
    tree = ast.parse((REPO / 'examples/infer_engine.py').read_text(encoding='utf-8'))
    names = {
        ast.unparse(node).partition('.')[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.fullmatch(r'cudart(\.\w+)+', ast.unparse(node))
    }
    assert {'cudaMemcpyAsync', 'cudaError_t.cudaSuccess', 'cudaMemcpyKind.cudaMemcpyDeviceToHost'} <= names
    for name in names:
        assert operator.attrgetter(name)(cudart) is not None
