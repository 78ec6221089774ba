"""Laws of the clients that people copy: detections equal the evaluation's, and no file of the toolkit is needed."""

import ast
import operator
import re
import resource
import shutil
import signal
import subprocess
import sys

import cv2
import numpy as np
import onnx
import pytest
import torch
from conftest import REPO
from graphs import FLOAT
from onnx import helper, numpy_helper
from segmenters import segmenter
from torchvision.ops import batched_nms
from utils.general import non_max_suppression, scale_boxes, xyxy2xywh
from zoo import program

from labelled import val_images
from models.deploy.formats.deepstream import deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import export_end2end, torch_masks
from utils.qat.backends.detections import detect
from utils.qat.backends.file_model import open_file
from utils.qat.config.export import Nms, Pooling
from utils.qat.data.masks import BoxMasks, PrototypeMasks

client = program('scripts/infer_onnx.py')
SIZE, CONF, IOU = 128, 0.01, 0.6


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    """A folder with the quantized demo's plain.onnx and deepstream.onnx, and its validation images."""
    folder = tmp_path_factory.mktemp('infer')
    for name, layout in (('plain', None), ('deepstream', deepstream_layout)):
        export_onnx(small.quantized_model(), folder / f'{name}.onnx', (SIZE, SIZE), layout=layout)
    shutil.copytree(small.data.parent / 'images/val', folder / 'images')
    return folder


@pytest.fixture(scope='module')
def evaluated(small, files):
    """[(path, pixels as the model sees them, predictions [1, 4 + nc, N], function to pixels of the image)], as the evaluation has them."""
    predict, found = open_file(files / 'plain.onnx'), []
    for images, _, [path], [shape] in val_images(small.data, SIZE, square=True, batch_size=1):

        def native(rows, shape=shape):
            boxes = scale_boxes((SIZE, SIZE), rows[:, :4].clone(), *shape)
            return torch.cat((boxes, rows[:, 4:]), 1).numpy()

        found.append((path, images[0].numpy() / np.float32(255), predict(images.float() / 255), native))
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
    stored = [numpy_helper.from_array(np.ascontiguousarray(a), f'{name} stored') for name, a in outputs.items()]
    graph = helper.make_graph(
        [helper.make_node('Identity', [f'{name} stored'], [name]) for name in outputs],
        'by hand',
        [helper.make_tensor_value_info('images', FLOAT, [1, 3, SIZE, SIZE])],
        [helper.make_tensor_value_info(name, a.data_type, a.dims) for name, a in zip(outputs, stored)],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=8)


def detected(file, path, conf=CONF):
    """Detections of the client in an image: [n, 6] in pixels of the image."""
    model, image = client.OnnxModel(file, 'cpu'), cv2.imread(path)
    pixels, gain, border = client.letterbox(image, *model.shape[2:])
    found, masks, skipped = client.read_outputs(model(pixels), model.shape[2:], conf, IOU)
    assert masks is None and not skipped
    return client.to_image(found, gain, border, image.shape[:2])


def assert_same(ours, theirs):
    """Same detections in the same order: boxes to 0.01 pixels, scores to 1e-5, classes."""
    assert ours.shape == theirs.shape and len(ours)
    assert np.abs(ours[:, :4] - theirs[:, :4]).max() < 0.01 and np.abs(ours[:, 4] - theirs[:, 4]).max() < 1e-5
    assert np.array_equal(ours[:, 5], theirs[:, 5])


def test_plain_files_as_they_are_evaluated(files, evaluated):
    several = 0
    for path, _, predictions, native in evaluated:
        theirs = native(detect(predictions, (SIZE, SIZE), CONF, IOU)[0].rows)
        assert_same(detected(files / 'plain.onnx', path), theirs)
        several += len(theirs) - len(np.unique(theirs[:, :4], axis=0))
    assert several, 'some boxes are of several classes'


def test_deepstream_files_with_the_best_class_of_each_box(files, evaluated):
    for path, _, predictions, native in evaluated:
        theirs = native(non_max_suppression(predictions, CONF, IOU)[0])
        assert_same(detected(files / 'deepstream.onnx', path), theirs)


def test_end2end_files_as_they_are(evaluated, tmp_path):
    file = tmp_path / 'end2end.onnx'
    for path, _, predictions, native in evaluated[:3]:
        theirs = detect(predictions, (SIZE, SIZE), 0.2, IOU)[0].rows
        onnx.save(end2end(theirs), file)
        assert_same(detected(file, path), native(theirs))
        assert_same(detected(file, path, conf=0.5), native(theirs[theirs[:, 4] > 0.5]))
    onnx.save(end2end(np.zeros((0, 6))), file)
    assert detected(file, evaluated[0][0]).shape == (0, 6)


@pytest.mark.parametrize('shape', [(1, 14, 21), (1, 21, 6)], ids=['plain', 'deepstream'])
def test_nothing_found(shape):
    assert client.read_outputs({'output': np.zeros(shape, np.float32)}, (SIZE, SIZE), 0.25, 0.45)[0].shape == (0, 6)


def test_a_fixed_batch_takes_one_image(small, files, evaluated, tmp_path):
    export_onnx(small.quantized_model(), tmp_path / 'two.onnx', (SIZE, SIZE), batch=2)
    path = evaluated[0][0]
    assert_same(detected(tmp_path / 'two.onnx', path), detected(files / 'plain.onnx', path))


# ---- its parts ----------------------------------------------------------------------------------------------------------


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
    for images, _, [path], [(shape, ratio)] in val_images(tmp_path / 'data.yaml', SIZE, square=True, batch_size=1):
        image = cv2.imread(path)
        pixels, gain, border = client.letterbox(image, SIZE, SIZE)
        assert pixels.dtype == np.float32 and np.array_equal(pixels, (images.float() / 255)[0].numpy()), image.shape
        boxes = torch.tensor([[20.5, 30, 90, 100.25, 0.9, 2], [-3, -3, 200, 200, 0.8, 1]])
        found = client.to_image(boxes.numpy(), gain, border, image.shape[:2])
        scale_boxes((SIZE, SIZE), boxes[:, :4], shape, ratio)
        assert np.abs(found - boxes.numpy()).max() < 1e-3


@pytest.mark.parametrize('iou', [0.0, 0.3, 0.7, 1.0])
def test_nms(iou):
    rng = np.random.default_rng(1)
    corner = rng.uniform(0, 100, (200, 2))
    boxes = np.hstack((corner, corner + rng.uniform(1, 60, (200, 2)))).astype(np.float32)
    scores, classes = rng.permutation(200).astype(np.float32) / 200, rng.integers(0, 3, 200)
    theirs = batched_nms(*map(torch.from_numpy, (boxes, scores, classes)), iou)
    assert client.nms(boxes, scores, classes, iou) == theirs.tolist()
    assert 3 <= len(theirs) <= 200


def test_no_more_than_the_evaluation_keeps():
    boxes = np.float32([[10 * i, 0, 10 * i + 5, 5] for i in range(400)])
    scores = np.linspace(0.1, 0.9, 400, dtype=np.float32)
    assert client.nms(boxes, scores, np.zeros(400), 0.5) == list(range(399, 99, -1))


def test_what_is_drawn():
    image = np.zeros((100, 200, 3), np.uint8)
    client.draw(image, np.float32([[20, 30, 80, 90, 0.5, 0], [150, 2, 199, 60, 0.75, 7]]), {0: 'cell'})
    first, second = image[60, 20].tolist(), image[30, 150].tolist()
    assert first != second and [0, 0, 0] not in (first, second), 'a colour for each class'
    assert image[90, 50].tolist() == first and image[60, 199].tolist() == second and not image[50, 50].any()
    assert (image[20:30, 20:40] == first).all(2).mean() > 0.3, 'its name is above the box'
    assert (image[:14, 140:] == second).all(2).mean() > 0.2, 'and stays inside the image'


def test_no_label_hides_another():
    labels, shape = [], (200, 300)
    best, second, third = [100, 80, 180, 160], [102, 82, 178, 158], [99, 79, 181, 161]
    for box in (best, second, third, [0, 0, 30, 30], [1, 1, 31, 31], [280, 190, 300, 200]):
        client.place(box, 60, 14, shape, labels)
    for i, (left, top, right, bottom) in enumerate(labels):
        assert 0 <= left < right <= shape[1] and 0 <= top < bottom <= shape[0]
        assert all(right <= a or c <= left or bottom <= b or d <= top for a, b, c, d in labels[:i])
    assert labels[0] == (100, 66, 160, 80), 'the best detection has its label above its box'
    crowded = [client.place([10, 10, 20, 20], 290, 190, shape, labels) for _ in range(2)]
    assert crowded[0] == crowded[1], 'without room it is where it always was'


# ---- masks --------------------------------------------------------------------------------------------------------------

BOXES = np.float32([[20, 10, 90, 70], [5.5, 30.2, 60.8, 101.7], [64, 64, 128, 128], [-20, 40, 30, 140]])


def outputs_of(layout):
    """Outputs of a segmentation model that finds BOXES in an image of SIZE, with smooth masks: {name: array}; and the masks as the
    evaluation has them."""
    generator, boxes, shape = torch.Generator().manual_seed(0), torch.from_numpy(BOXES), (SIZE, SIZE)
    small = torch.randn(1, 8, 4, 4, generator=generator)
    prototypes = torch.nn.functional.interpolate(small, (SIZE // 4, SIZE // 4), mode='bicubic')
    coefficients, scores = torch.randn(4, 8, generator=generator), torch.linspace(0.9, 0.3, 4)[:, None]
    if layout == 'plain':
        predictions = torch.cat((xyxy2xywh(boxes), scores, torch.zeros(4, 2), coefficients), 1).T[None]
        masks = PrototypeMasks(coefficients, prototypes[0], boxes, shape)
        return {'output0': predictions.numpy(), 'output1': prototypes.numpy()}, masks
    [crops] = torch_masks([torch.cat((boxes, scores, torch.zeros(4, 1), coefficients), 1)], prototypes, Pooling(28))
    outputs = {
        'num_dets': np.int32([[4]]),
        'det_boxes': BOXES[None],
        'det_scores': scores.T.numpy(),
        'det_classes': np.zeros((1, 4)),
        'det_masks': crops[None].numpy(),
    }
    return outputs, BoxMasks(crops.unflatten(1, (28, 28)), boxes, shape)


@pytest.mark.parametrize('layout', ['plain', 'end2end'])
def test_masks_are_those_of_the_evaluation(layout):
    """Except at the border of the box: upstream asks for the corner of a pixel in the box, the client for its centre."""
    outputs, evaluated = outputs_of(layout)
    found, masks, _ = client.read_outputs(outputs, (SIZE, SIZE), 0.25, 1)
    assert np.allclose(found[:, :4], BOXES, atol=1e-4)
    for mask, area, box, theirs in zip(*masks, found, evaluated.fine().bool().numpy()):
        ours = client.paste(mask, area, box, (SIZE, SIZE))
        inside = np.zeros((SIZE, SIZE), bool)
        left, top, right, bottom = (box[:4] + (2, 2, -2, -2)).round().astype(int).clip(0, SIZE)
        inside[top:bottom, left:right] = True
        assert (ours == theirs)[inside].mean() > 0.995 and 0.1 < ours[inside].mean() < 0.9
        inside[max(top - 4, 0) : bottom + 4, max(left - 4, 0) : right + 4] = True
        assert not ours[~inside].any()


@pytest.mark.parametrize('layout', ['plain', 'end2end'])
def test_what_is_below_the_threshold_takes_its_mask_along(layout):
    outputs, _ = outputs_of(layout)
    (_, all_masks, _), (found, masks, _) = (client.read_outputs(outputs, (SIZE, SIZE), conf, 1) for conf in (0.25, 0.6))
    assert len(found) == len(masks[0]) == len(masks[1]) == 2
    # Not bit for bit: BLAS multiplies two rows by other kernels than three.
    assert np.allclose(masks[0], all_masks[0][:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize('shape', [(256, 256), (97, 160), (500, 31), (40, 30)], ids=str)
def test_masks_are_where_the_objects_are(shape):
    """Of an image that is larger or smaller: a mask of what is left of its middle, in a box of which the middle is another."""
    height, width = shape
    _, gain, border = client.letterbox(np.zeros((*shape, 3), np.uint8), SIZE, SIZE)
    middle = width / 2 * gain + border[0]
    box = np.float32([[border[0], border[1], border[0] + 0.75 * width * gain, border[1] + height * gain]])
    for cells, area in ((SIZE // 4, np.float32([[0, 0, SIZE, SIZE]])), (160, box)):
        x = area[0, 0] + (np.arange(cells, dtype=np.float32) + 0.5) / cells * (area[0, 2] - area[0, 0])
        mask = np.tile(0.5 + 0.1 * (middle - x).clip(-4, 4), (cells, 1)).astype(np.float32)
        there = client.paste(mask, *client.unscaled(np.vstack((area, box)), gain, border), shape)
        assert there[:, : width // 2 - 1].all() and not there[:, width // 2 + 1 :].any()


@pytest.mark.parametrize('area', [[50, 50, 50, 80], [0, 0, SIZE, SIZE]])
def test_a_mask_without_area_is_empty(area):
    assert not client.paste(np.ones((4, 4), np.float32), area, [50, 50, 50, 80], (SIZE, SIZE)).any()


def test_masks_are_drawn_in_the_colour_of_the_class():
    image, found = np.full((100, 200, 3), 40, np.uint8), np.float32([[20, 30, 80, 90, 0.5, 0]])
    mask = np.zeros((100, 200), bool)
    mask[50:60, 40:70] = True
    client.draw(image, found, {}, [mask])
    colour = image[90, 50].astype(int)
    assert np.abs(image[mask] - (colour + 40) / 2).max() <= 1 and (image[45, 40:70] == 40).all()


# ---- numbers that are none ----------------------------------------------------------------------------------------------


def spoilt(layout, value, column):
    """Outputs of `layout` with three detections, the second of which has `value` in a column: 0 to 3 of the box, 4 its score."""
    rows = np.float32([[20, 10, 90, 70, 0.9, 0], [5, 30, 60, 100, 0.8, 0], [64, 64, 128, 128, 0.7, 0]])
    if layout == 'plain':  # centre, size, the scores of two classes, coefficients of masks
        centre, size = (rows[:, :2] + rows[:, 2:4]) / 2, rows[:, 2:4] - rows[:, :2]
        rows = np.column_stack((centre, size, rows[:, 4], np.zeros((3, 9), np.float32)))
    rows[1, column] = value
    if layout == 'plain':
        return {'output0': rows.T[None], 'output1': np.ones((1, 8, 32, 32), np.float32)}
    if layout == 'deepstream':
        return {'output': rows[None]}
    return {
        'num_dets': np.int32([[3]]),
        'det_boxes': rows[None, :, :4],
        'det_scores': rows[None, :, 4],
        'det_classes': rows[None, :, 5],
        'det_masks': np.ones((1, 3, 49), np.float32),
    }


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('layout', ['plain', 'deepstream', 'end2end'])
def test_what_is_not_finite_is_left_out_and_counted(layout, value):
    whole, masks, skipped = client.read_outputs(spoilt(layout, 20, 0), (SIZE, SIZE), 0.25, 0.95)
    assert len(whole) == 3 and skipped == 0
    for column in range(5):
        with np.errstate(invalid='ignore'):
            found, masks, skipped = client.read_outputs(spoilt(layout, value, column), (SIZE, SIZE), 0.25, 0.95)
        below = layout == 'plain' and column == 4 and value == -np.inf  # of its other class it may be one
        assert np.array_equal(found, whole[[0, 2]]) and skipped == 1 - below, column
        assert masks is None or len(masks[0]) == len(masks[1]) == 2


def test_the_last_line_counts_them(files, tmp_path):
    found = np.float32([[20, 10, 90, 70, 0.9, 0], [np.nan, 30, 60, 100, 0.8, 0], [64, 64, 128, 128, np.inf, 0]])
    onnx.save(end2end(found), tmp_path / 'model.onnx')
    said, complaint = run(tmp_path, tmp_path / 'model.onnx', next((files / 'images').iterdir()), '--save', '--quiet')
    assert said == '1 detections (2 more left out: NaN or infinite) in 1 images, pictures in runs/infer\n'
    assert not complaint


# ---- the programs -------------------------------------------------------------------------------------------------------


def run(folder, *arguments, code=0, largest=resource.RLIM_INFINITY):
    """Run a copy of the client in `folder`, where torch and the packages of this tree cannot be imported; returns stdout, stderr."""
    shutil.copy(REPO / 'scripts/infer_onnx.py', folder)
    for name in ('torch', 'torchvision', 'models', 'utils'):
        (folder / f'{name}.py').write_text('raise ImportError("not where it was copied to")')
    done = subprocess.run(
        [sys.executable, 'infer_onnx.py', *map(str, arguments)],
        cwd=folder,
        text=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest)),
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_a_reader_that_ends_and_a_full_disk(files):
    """The program ends as other Unix tools do: quietly where `head` has read enough, in one line where nothing can be written."""
    line = [sys.executable, REPO / 'scripts/infer_onnx.py', files / 'plain.onnx', files / 'images']
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ''
    assert process.returncode == -signal.SIGPIPE
    with open('/dev/full', 'w') as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == 'infer_onnx.py: error: output: No space left on device\n'


def test_a_copy_runs_alone(files, evaluated, tmp_path):
    said, _ = run(tmp_path, files / 'plain.onnx', files / 'images', '--save', '--conf-thres', 0.3, '--iou-thres', IOU)
    *lines, last, slow = said.splitlines()
    wanted = []
    for path, *_ in sorted(evaluated, key=lambda one: one[0]):
        found = detected(files / 'plain.onnx', path, 0.3)
        name = path.split('/')[-1]
        for *box, score, n in found.tolist():
            wanted.append(f'{name}: {int(n)} {score:.3f}  {" ".join(f"{x:.1f}" for x in box)}')
        wanted += [f'{name}: nothing found'] * (not len(found))
        drawn, image = cv2.imread(str(tmp_path / 'runs/infer' / name)), cv2.imread(path)
        assert drawn.shape == image.shape and (len(found) == 0 or np.abs(drawn.astype(int) - image).max() > 60)
    assert lines == wanted and len(lines) > 20 and last.endswith(' images, pictures in runs/infer')
    assert 'computes the INT8 of this file in float' in slow


@pytest.mark.parametrize('kind', ['plain', 'end2end'])
def test_a_copy_runs_alone_on_a_segmentation_model(files, tmp_path, kind):
    export_onnx(segmenter(), tmp_path / 'plain.onnx', (SIZE, SIZE))
    if kind == 'end2end':
        export_end2end(tmp_path / 'plain.onnx', tmp_path / 'end2end.onnx', Nms('standard', 20, IOU, 0.3), Pooling(28))
    thresholds = '--conf-thres', 0.3, '--iou-thres', IOU
    said, _ = run(tmp_path, tmp_path / f'{kind}.onnx', files / 'images', '--save', *thresholds)
    *lines, last = said.splitlines()
    pixels = [int(line.split('  ')[2].removesuffix(' px')) for line in lines if 'nothing found' not in line]
    assert len(pixels) > 5 and max(pixels) > 20 and last.endswith(' images, pictures in runs/infer')
    assert len(list((tmp_path / 'runs/infer').iterdir())) == len(list((files / 'images').iterdir()))


def test_an_unreadable_image_is_named_and_the_others_done(files, tmp_path):
    (tmp_path / 'some').mkdir()
    (tmp_path / 'some/a.jpg').write_bytes(b'no image')
    shutil.copy(next((files / 'images').iterdir()), tmp_path / 'some/b.JPG')
    said, complaint = run(tmp_path, files / 'deepstream.onnx', 'some', code=1)
    assert said.startswith('b.JPG: ') and complaint == 'some/a.jpg: OpenCV cannot read it\n'
    assert not (tmp_path / 'runs').exists()


def test_no_room_for_the_pictures(files, tmp_path):
    """A limit on the size of files stands in for a full disk: the third picture is larger."""
    (tmp_path / 'some').mkdir()
    for name, side in (('a', 20), ('b', 20), ('c', 400), ('d', 20)):
        cv2.imwrite(str(tmp_path / f'some/{name}.bmp'), np.zeros((side, side, 3), np.uint8))
    (tmp_path / 'runs/infer').mkdir(parents=True)  # of an earlier run
    said, complaint = run(tmp_path, files / 'plain.onnx', 'some', '--save', code=2, largest=50_000)
    assert re.fullmatch(
        r'infer_onnx.py: error: runs/infer2/c.bmp could not be written \(File too large, [\d.]+ MB are free\), nor what follows; '
        r'2 pictures are whole\n',
        complaint,
    )
    assert 'pictures in' not in said and not list((tmp_path / 'runs/infer').iterdir())
    assert sorted(f.name for f in (tmp_path / 'runs/infer2').iterdir()) == ['a.bmp', 'b.bmp']
    assert cv2.imread(str(tmp_path / 'runs/infer2/b.bmp')).shape == (20, 20, 3)


def test_pictures_that_cannot_be_written(files, tmp_path):
    """A file where the folder has to be, and a format of which OpenCV writes none so large."""
    (tmp_path / 'runs').write_bytes(b'')
    image = next((files / 'images').iterdir())
    _, complaint = run(tmp_path, files / 'plain.onnx', image, '--save', code=2)
    assert complaint.count('\n') == 1 and f'runs/infer/{image.name} could not be written (' in complaint
    (tmp_path / 'runs').unlink()
    cv2.imwrite(str(tmp_path / 'wide.png'), np.zeros((4, 17_000, 3), np.uint8))
    (tmp_path / 'wide.png').rename(tmp_path / 'wide.webp')  # OpenCV reads what it is, and writes what it is called
    _, complaint = run(tmp_path, files / 'plain.onnx', 'wide.webp', '--save', code=2)
    assert 'OpenCV writes no .webp of 17000 x 4 pixels' in complaint and not (tmp_path / 'runs').exists()


def test_a_folder_with_folders_and_a_folder_of_pictures_for_each_run(files, tmp_path):
    image = next((files / 'images').iterdir())
    for folder in ('some', 'some/left', 'some/right'):
        (tmp_path / folder).mkdir()
        shutil.copy(image, tmp_path / folder)
    for pictures in ('runs/infer', 'runs/infer2'):
        said, _ = run(tmp_path, files / 'plain.onnx', 'some', '--save')
        assert said.splitlines()[-2].endswith(f' in 3 images, pictures in {pictures}')
        written = {str(f.relative_to(tmp_path / pictures)) for f in (tmp_path / pictures).rglob('*') if f.is_file()}
        assert written == {image.name, f'left/{image.name}', f'right/{image.name}'}
    run(tmp_path, files / 'plain.onnx', 'runs/infer', '--save')
    assert (tmp_path / 'runs/infer3').is_dir(), 'no picture is written over'


BAD = {
    'model': ('images.onnx images', 'images.onnx: expected a file ending in .onnx'),
    'suffix': ('plain.pt images', 'plain.pt: expected a file'),
    'not ONNX': ('broken.onnx images', 'broken.onnx: ONNX Runtime cannot load it'),
    'images': ('plain.onnx missing', 'missing: no such image, nor a folder with images'),
    'empty folder': ('plain.onnx empty', 'empty: no such image, nor a folder with images'),
    'no images': ('plain.onnx', 'arguments are required: IMAGE|FOLDER'),
    'confidence': ('plain.onnx images --conf-thres 25', '--conf-thres 25.0: must lie in 0 to 1'),
    'IoU': ('plain.onnx images --iou-thres -1', '--iou-thres -1.0: must lie in 0 to 1'),
    'device': ('plain.onnx images --device gpu', '--device gpu: must be the number of a GPU, or cpu'),
    'open size': ('open.onnx images', "open.onnx: takes [1, 3, 'height', 'width']; expected images"),
}


@pytest.mark.parametrize('arguments, says', BAD.values(), ids=BAD)
def test_bad_input_is_one_line(files, tmp_path, monkeypatch, capsys, arguments, says):
    for name in ('plain.onnx', 'images'):
        (tmp_path / name).symlink_to(files / name)
    (tmp_path / 'empty').mkdir()
    for name in ('plain.pt', 'broken.onnx'):
        (tmp_path / name).write_bytes(b'nothing of that kind')
    model = end2end(np.zeros((0, 6)))
    for axis, name in ((0, 'batch'), (2, 'height'), (3, 'width')):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    onnx.save(model, tmp_path / 'open.onnx')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        client.main(argv=arguments.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count('\n') == 1 and says in said


def test_names_of_cuda_python():
    """Every name that the engine's client takes from cuda-python is there; tests/engine/test_tensorrt_api.py has those of TensorRT."""
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


@pytest.mark.gpu
def test_the_engine_finds_what_the_onnx_file_finds(files, evaluated, tmp_path):
    pytest.importorskip('tensorrt')
    pytest.importorskip('cuda.bindings.runtime')
    from utils.qat.config.deploy import BuildConfig
    from utils.qat.engine.build import EngineFromOnnx

    engine = program('examples/infer_engine.py')
    for name in ('plain', 'deepstream'):
        EngineFromOnnx(BuildConfig(files / f'{name}.onnx', engine=tmp_path / f'{name}.engine')).build()
        model = engine.EngineModel(tmp_path / f'{name}.engine', '0')
        of_onnx = client.OnnxModel(files / f'{name}.onnx', 'cpu')
        assert model.shape == [1, 3, SIZE, SIZE] and len(model.names) == 10
        for path, pixels, *_ in evaluated:
            ours, *_ = client.read_outputs(model(pixels), (SIZE, SIZE), 0.5, IOU)
            theirs, *_ = client.read_outputs(of_onnx(pixels), (SIZE, SIZE), 0.5, IOU)
            assert abs(len(ours) - len(theirs)) <= 1 + len(theirs) // 5
