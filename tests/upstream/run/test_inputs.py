"""Named regressions: what people bring comes in, or gets one true line. Each input is small, and made here."""

import os
import shutil
import sys

import cv2
import numpy as np
import onnx
import pytest
import torch
import yaml
from helpers.commands import scores, state_of
from helpers.zoo import SMALL, build, command, interrupt
from torch.nn.utils import prune
from utils.dataloaders import LoadImagesAndLabels

from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.run.report import conclusions, headline
from utils.qat.run.state import Stage
from utils.qat.untrusted.torchvision_weights import old_state

CASES = {}  # name → (function: bench → command line, exit code, words of the answer)
LETTERS = list('abcdefghij')  # names of the ten classes
FEW = '--epochs 0 --calib-images 4 --calib-method max --no-bias-correction'
QAT = '--device cpu --imgsz 64 --workers 0'


def case(code, *words):
    """Register a function as a case, under its own name."""

    def register(make):
        CASES[make.__name__] = make, code, words
        return make

    return register


class Bench:
    """A folder with copies of the data of `small`, of which the cases make their inputs."""

    def __init__(self, folder, small):
        self.folder, self.small = folder, small
        for name in ('images', 'labels'):
            shutil.copytree(small.data.parent / name, folder / name, ignore=shutil.ignore_patterns('*.cache*', '*.npy'))

    def data(self, **changes):
        """Write a data YAML; None leaves a key out."""
        content = {'path': str(self.folder), 'train': 'images/train', 'val': 'images/val', 'names': LETTERS, **changes}
        file = self.folder / 'data.yaml'
        file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return file

    def model(self, change=lambda model: None, names=LETTERS, file='model.pt'):
        """Write the float checkpoint with a change of its model, which may return another."""
        content = torch.load(self.small.single, weights_only=False)
        content['model'].names = names
        content['model'] = change(content['model']) or content['model']
        torch.save(content, self.folder / file)
        return self.folder / file


@pytest.fixture
def bench(tmp_path, small):
    return Bench(tmp_path, small)


def evaluation(name, code, *words, model=None, **data):
    """Register the evaluation of a checkpoint on a data YAML with these changes."""
    line = 'qat.py eval {} --weights {} --data {}'
    CASES[name] = lambda bench: line.format(QAT, bench.model(**model or {}), bench.data(**data)), code, words


def masked(model):
    prune.l1_unstructured(model.model[0].conv, 'weight', 0.1)


REVERSED, CAPITALS, NUMBERS = LETTERS[::-1], [f'{c.upper()}.' for c in LETTERS], [str(i) for i in range(10)]
OTHER_ORDER = "class 0 is 'j', and the model calls it 'a' (in another order, 10 of 10"
evaluation('names in another order', 2, OTHER_ORDER, '--names-from data', names=REVERSED)
evaluation('names that differ in case only', 0, '| A. ', names=CAPITALS)
evaluation('a model without names', 0, '| a ', model={'names': NUMBERS})
evaluation(
    'more names than classes', 0, '12 names for 10 classes, so they are left out', model={'names': [*LETTERS, *'kl']}
)
evaluation('a YAML of pose', 2, 'kpt_shape: data of pose', kpt_shape=[17, 2])
evaluation('the system in place of a folder', 2, 'val: no images in /proc/self', val='/proc/self')
evaluation(
    'a device in place of a list', 2, 'val: /dev/zero: a pipe, a device or too large, and no list', val='/dev/zero'
)
PARALLEL = 'was saved inside DataParallel; take the model out: torch.save('
evaluation('a model in DataParallel', 2, PARALLEL, model={'change': torch.nn.DataParallel})
MASKED = 'has pruning masks; make them permanent, torch.nn.utils.prune.remove('
evaluation('a model with pruning masks', 2, MASKED, model={'change': masked})


def reordered(bench):
    """A second model, whose classes have another order than those of the data and of the first one."""
    return f'--data {bench.data()} --weights {bench.model()}', bench.model(names=LETTERS[::-1], file='other.pt')


@case(2, 'other.pt: --data', "class 0 is 'a', and the model calls it 'j'", '--names-from data')
def a_baseline_with_names_in_another_order(bench):
    words, other = reordered(bench)
    return f'qat.py eval {QAT} {words} --baseline {other}'


@case(2, 'other.pt: --data', "class 0 is 'a', and the model calls it 'j'", '--names-from data')
def a_second_model_with_names_in_another_order(bench):
    words, other = reordered(bench)
    return f'compare_outputs.py {words.replace("--weights ", "")} {other} --workers 0 --project {bench.folder}/runs'


@case(2, "class 0 is 'a', and the model calls it 'j'", '--names-from data')
def sensitive_with_names_in_another_order(bench):
    return f'qat.py sensitive {QAT} --data {bench.data()} --weights {bench.model(names=LETTERS[::-1])}'


@case(2, "class 3 is 'dog'", 'other names, 1 of 10')
def other_names(bench):
    return f'export_qat.py --weights {bench.model()} --verify {bench.data(names=[*"abc", "dog", *"efghij"])}'


@case(0, 'finds nothing here: check classes, image size, preprocessing', '--names-from data --imgsz 32')
def names_of_the_data(bench):
    data = bench.data(names=LETTERS[::-1])
    return f'qat.py eval {QAT} --imgsz 32 --weights {bench.model()} --data {data} --names-from data'


@case(
    0,
    'all are scored at 128 x 128',
    '12 images as squares of 128 x 128',
    'int8.onnx - single.pt, points',
)
def a_float_file_beside_a_quantized_one(bench):
    export = bench.folder / 'int8.pt'
    shutil.copy(bench.small.quantized, export)
    command('export_qat.py', '--weights', export)
    files = bench.small.single, bench.small.quantized, export.with_suffix('.onnx')
    return f'qat.py eval --device cpu --workers 0 --weights {" ".join(map(str, files))} --data {bench.small.data}'


@case(0, 'warning: scored at different image sizes', '64 x 64', '128 x 128')
def files_of_different_sizes(bench):
    model = bench.model()
    command('export_qat.py', '--weights', model, '--imgsz', 64)
    return f'qat.py eval --device cpu --workers 0 --weights {model.with_suffix(".onnx")} {bench.small.quantized} --data {bench.data()}'


@case(0, '12 images as rectangles of up to 128 x 128 and padding')
def a_float_file_with_a_quantized_baseline(bench):
    files = f'--weights {bench.small.single} --baseline {bench.small.quantized}'
    return f'qat.py eval --device cpu --workers 0 {files} --data {bench.small.data}'


def without_p5(bench):
    """A checkpoint whose head has the strides 8 and 16, behind a backbone that goes down to 32."""
    made = build('demo', backbone=SMALL['backbone'], head=[[[3, 9], 1, 'DDetect', ['nc']]])
    return bench.model(lambda model: made.half())


@case(2, 'must be multiples of 32')
def a_size_for_16_without_p5(bench):
    return f'qat.py eval {QAT} --weights {without_p5(bench)} --data {bench.data()} --imgsz 80'


@case(0, 'PTQ', 'next: python export_qat.py')
def a_network_without_p5(bench):
    command('export_qat.py', '--weights', without_p5(bench), '--imgsz', 96, '--include', 'onnx', 'onnx_end2end')
    command(
        'qat.py', 'eval', *QAT.split(), '--weights', bench.folder / 'model.pt', '--data', bench.data(), '--imgsz', 96
    )
    return f'qat.py quantize {QAT} {FEW} --weights {bench.folder}/model.pt --data {bench.data()} --imgsz 96'


def roboflow(bench):
    """A data YAML as Roboflow writes it, in the folder."""
    for name in ('train', 'valid'):
        for kind in ('images', 'labels'):
            shutil.copytree(bench.folder / kind / name.replace('id', ''), bench.folder / 'set' / name / kind)
    file = bench.data(train='../train/images', val='../valid/images', path=None)
    return file.rename(bench.folder / 'set/data.yaml')


@case(0, '12 images')
def data_of_roboflow(bench):
    return f'qat.py eval {QAT} --weights {bench.model()} --data {roboflow(bench)}'


@case(0, '12 images')
def data_of_roboflow_with_a_path(bench):
    file = roboflow(bench)
    file.write_text(f'path: {bench.folder}/set\n{file.read_text()}')
    return f'qat.py eval {QAT} --weights {bench.model()} --data {file}'


@case(0, '12 images', 'set [v2] a*b?')
def folders_with_characters_of_patterns(bench):
    folder = bench.folder / 'set [v2] a*b?'
    folder.mkdir()
    for name in ('images', 'labels'):
        (bench.folder / name).rename(folder / name)
    file = bench.data(path=str(folder)).rename(folder / 'data.yaml')
    model = bench.model(file='set [v2] a*b?/m[1].pt')
    command('export_qat.py', '--weights', model, '--imgsz', 64, '--include', 'onnx_end2end', 'onnx')
    return ['qat.py', 'eval', *QAT.split(), '--weights', model, '--data', file, '--name', '[a]*']


def listed(bench, content):
    """Evaluate on a list of images; content: function from their paths, relative to the list, to the bytes of it."""
    names = sorted(f'images/val/{path.name}' for path in (bench.folder / 'images/val').glob('*.*'))
    (bench.folder / 'val.txt').write_bytes(content(names))
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data(val="val.txt")}'


def list_of(name, content):
    CASES[name] = lambda bench: listed(bench, content), 0, ['12 images']


list_of('lines_without_a_dot', lambda names: '\n'.join(names).encode())
list_of('a_list_of_windows', lambda names: '\r\n'.join(n.replace('/', '\\') for n in names).encode('utf-16'))
list_of(
    'a_list_with_a_bom_and_comments', lambda names: '\n# val\n\n'.join(['\ufeff./' + names[0], *names[1:]]).encode()
)


@case(2, 'val.txt, line 3: none.png does not exist; relative lines start at')
def a_line_without_its_image(bench):
    return listed(bench, lambda names: '\n'.join([*names[:2], 'none.png']).encode())


@case(2, 'images/val/', 'no text; give a folder, or a text file with the path of an image on each line')
def an_image_in_place_of_a_list(bench):
    image = next((bench.folder / 'images/val').glob('*.*'))
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data(val=str(image))}'


def calibrated(bench, data):
    return f'qat.py quantize {QAT} {FEW} --weights {bench.model()} --data {data}'


@case(0, 'no image has a label, so nothing is scored', 'next: python export_qat.py')
def a_folder_of_images(bench):
    return calibrated(bench, shutil.move(bench.folder / 'images', bench.folder / 'pictures'))


@case(0, 'no image has a label, so nothing is scored', 'calibrated on 4 images')
def a_yaml_without_labels(bench):
    shutil.rmtree(bench.folder / 'labels')
    return calibrated(bench, bench.data())


@case(0, 'calibrated on 4 images', 'PTQ')
def wrong_labels_of_train(bench):
    for label in (bench.folder / 'labels/train').glob('*.txt'):
        label.write_text('77 0.5 0.5 0.1 0.1')
    return calibrated(bench, bench.data())


@case(2, 'none of its 24 images has a label, so nothing can be scored', 'quantize --epochs 0')
def a_fine_tuning_on_a_folder(bench):
    return f'qat.py quantize {QAT} --weights {bench.model()} --data {shutil.move(bench.folder / "images", bench.folder / "pictures")}'


@case(2, 'a folder with data.yaml in it; give that')
def the_folder_of_a_yaml(bench):
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data().parent}'


def relabelled(bench, row):
    """Evaluate on labels of another form; row: function of a class and a box, x y width height → text."""
    for file in (bench.folder / 'labels').rglob('*.txt'):
        lines = [line.split() for line in file.read_text().splitlines()]
        file.write_text('\n'.join(row(c, *map(float, box)) for c, *box in lines))
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data()}'


@case(2, 'its labels are of pose, boxes with keypoints')
def labels_of_pose(bench):
    return relabelled(bench, lambda c, x, y, w, h: f'{c} {x} {y} {w} {h} {x} {y} {x + w / 2} {y} {x} {y - h / 2} 0 0')


@case(2, 'its labels are of OBB, rotated boxes')
def labels_of_rotated_boxes(bench):
    return relabelled(
        bench, lambda c, x, y, w, h: f'{c} {x} {y - h / 2} {x + w / 2} {y} {x} {y + h / 2} {x - w / 2} {y}'
    )


@case(2, '(no keypoints of pose)')
def labels_of_pose_with_visibility(bench):
    return relabelled(bench, lambda c, x, y, w, h: f'{c} {x} {y} {w} {h} {x} {y} 2')


@case(0, '12 images')
def outlines_of_four_points(bench):
    def corners(c, x, y, w, h):
        left, right, top, bottom = x - w / 2, x + w / 2, y - h / 2, y + h / 2
        return f'{c} {left} {top} {right} {top} {right} {bottom} {left} {bottom}'

    return relabelled(bench, corners)


@case(0, '10 classes count as one', '12 images', '67 |')
def training_with_a_single_class(bench):
    made = build('demo', **SMALL, nc=1)
    made.model[-1].bias_init()
    made.names = ['item']
    torch.save({'model': made.half(), 'ema': None}, bench.folder / 'one.pt')
    command('reparameterization.py', '--weights', bench.folder / 'one.pt', '--save', bench.folder / 'single.pt')
    return f'qat.py eval {QAT} --weights {bench.folder}/single.pt --data {bench.data()}'


@case(2, 'takes 1 channel; only 3 are supported')
def a_model_of_grey_images(bench):
    made = build('demo', **SMALL)
    made.model[0].conv = torch.nn.Conv2d(1, 16, 3, 2, 1, bias=False)
    torch.save({'model': made.half(), 'ema': None}, bench.folder / 'grey.pt')
    return f'qat.py quantize {QAT} --weights {bench.folder}/grey.pt --data {bench.data()}'


@case(2, 'takes 4 channels; only 3 are supported')
def a_file_of_four_channels(bench):
    command('export_qat.py', '--weights', bench.model(), '--imgsz', 64)
    graph = onnx.load(bench.folder / 'model.onnx')
    graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
    [weight] = [w for w in graph.graph.initializer if w.name == graph.graph.node[0].input[1]]
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.concatenate((values, values[:, :1]), 1), weight.name))
    onnx.save(graph, bench.folder / 'four.onnx')
    return f'qat.py eval {QAT} --weights {bench.folder}/four.onnx --data {bench.data()}'


def pruned(model):
    """Take the last channels of a layer inside a block away, as a pruning does."""
    first, second = model.model[2].cv2[0].m[0].cv1, model.model[2].cv2[0].m[0].cv2
    for conv, norm in ((c.conv, c.bn) for c in (first.conv1, first.conv2)):
        conv.weight, conv.out_channels, norm.num_features = torch.nn.Parameter(conv.weight[:3]), 3, 3
        for name in ('weight', 'bias'):
            setattr(norm, name, torch.nn.Parameter(getattr(norm, name)[:3]))
        norm.running_mean, norm.running_var = norm.running_mean[:3], norm.running_var[:3]
    second.conv.weight, second.conv.in_channels = torch.nn.Parameter(second.conv.weight[:, :3]), 3


def two_branches(bench, change):
    content = torch.load(bench.small.dual, weights_only=False)
    change(content['model'].float())
    torch.save(content, bench.folder / 'dual.pt')
    command('reparameterization.py', '--weights', bench.folder / 'dual.pt', '--save', bench.folder / 'one.pt')
    return f'qat.py quantize {QAT} {FEW} --weights {bench.folder}/dual.pt --data {bench.small.data}'


@case(0, 'pruned, or fused before it was saved', 'PTQ')
def two_pruned_branches(bench):
    return two_branches(bench, pruned)


@case(0, 'pruned, or fused before it was saved', 'PTQ')
def two_fused_branches(bench):
    return two_branches(bench, lambda model: model.fuse())


@case(0, '24 images')
def links_in_a_circle(bench):
    (bench.folder / 'images/val/again').symlink_to(bench.folder / 'images')
    (bench.folder / 'images/val/self').symlink_to('.')
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data(train="images/val")}'


@case(2, 'log.txt: a pipe or a device, in the folder of a run')
def a_log_that_is_a_pipe(bench):
    folder = bench.folder / 'runs/exp'
    folder.mkdir(parents=True)
    os.mkfifo(folder / 'log.txt')
    (folder / '.lock').touch()
    return f'qat.py eval {QAT} --weights {bench.model()} --data {bench.data()} --exist-ok'


@case(2, 'not UTF-8 (')
def an_xml_that_is_not_utf8(bench):
    pytest.importorskip('openvino')
    command('export_qat.py', '--weights', bench.model(), '--imgsz', 64, '--include', 'openvino')
    file = bench.folder / 'model.xml'
    file.write_bytes(file.read_bytes().replace(b'name="images"', b'name="im\xff\xfe"'))
    return f'benchmark_trt.py {file} --device cpu --project {bench.folder}/runs'


@case(2, 'no valid ONNX file', 'too long')
def external_data_of_a_long_name(bench):
    command('export_qat.py', '--weights', bench.model(), '--imgsz', 64)
    graph = onnx.load(bench.folder / 'model.onnx')
    weight = graph.graph.initializer[0]
    weight.raw_data, weight.data_location = b'', onnx.TensorProto.EXTERNAL
    weight.external_data.add(key='location', value='a' * 300)
    (bench.folder / 'long.onnx').write_bytes(graph.SerializeToString())
    return f'scripts/audit_onnx.py {bench.folder}/long.onnx'


def repainted(bench, pixels, suffix):
    """Calibrate on the images in other pixels and another format; pixels: function of those of an image."""
    for file in [*(bench.folder / 'images').rglob('*.*')]:
        cv2.imwrite(str(file.with_suffix(suffix)), pixels(cv2.imread(str(file))))
        file.unlink()
    return calibrated(bench, bench.data())


def repainting(name, code, *words, suffix, pixels):
    """Register such a calibration."""
    CASES[name] = lambda bench: repainted(bench, pixels, suffix), code, words


MEND = '.tiff: cannot be read; mend or remove it (32 bits per value; save it with 8 or 16)'
NONE_USED = 'none of its 12 images can be used', '(cannot identify image file'
repainting('16 bits', 0, 'PTQ            AP 0.0', suffix='.png', pixels=lambda image: image.astype(np.uint16) * 257)
repainting('32 bits', 2, MEND, suffix='.tiff', pixels=lambda image: image[..., 0].astype(np.float32))
repainting('64 bits', 2, *NONE_USED, suffix='.tiff', pixels=lambda image: image[..., 0].astype(np.float64))
repainting('one colour', 0, 'warning', 'have no structure', suffix='.png', pixels=lambda image: image * 0 + 7)


@case(0, '12 images')
def a_model_that_was_saved_whole(bench):
    torch.save(torch.load(bench.model(), weights_only=False)['model'], bench.folder / 'whole.pt')
    return f'qat.py eval {QAT} --weights {bench.folder}/whole.pt --data {bench.data()}'


@case(2, 'was saved compiled; take the model out: torch.save(')
def a_compiled_model(bench):
    content = torch.load(bench.model(), weights_only=False)
    torch.save({'model': torch.compile(content['model'])}, bench.folder / 'model.pt')
    return f'qat.py eval {QAT} --weights {bench.folder}/model.pt --data {bench.data()}'


@pytest.mark.parametrize('name', CASES)
def test_regression(bench, name):
    make, code, words = CASES[name]
    line = make(bench)
    file, *arguments = line.split() if isinstance(line, str) else line
    if file == 'qat.py':
        arguments += ['--project', bench.folder / 'runs']
    before = {path for path in bench.folder.rglob('*') if not path.name.endswith('.cache')}
    said = command(file, *arguments, code=code)
    assert all(word in said for word in words), said
    if code:
        assert said.count('\n') == 1, said
        assert {path for path in bench.folder.rglob('*') if not path.name.endswith('.cache')} == before


def test_labels_are_read_once_by_us_and_by_upstream(bench, monkeypatch):
    score = f'eval {QAT} --weights {bench.model()} --data {bench.data()} --project {bench.folder}/runs'.split()
    command('qat.py', *score)
    monkeypatch.delattr(LoadImagesAndLabels, 'cache_labels')
    command('qat.py', *score)
    assert len(LoadImagesAndLabels(str(bench.folder / 'images/val'))) == 12
    assert not (bench.folder / 'labels/val.cache').is_symlink()


def test_two_processes_may_read_the_same_labels_at_once(bench):
    """Upstream writes under one name in all processes; what another has begun there stays untouched."""
    score = f'eval {QAT} --weights {bench.model()} --data {bench.data()} --project {bench.folder}/runs'.split()
    begun, cache = (bench.folder / f'labels/val.cache{end}' for end in ('.npy', ''))
    cache.unlink(missing_ok=True)
    begun.write_bytes(b'begun')
    command('qat.py', *score)
    assert begun.read_bytes() == b'begun' and len(LoadImagesAndLabels(str(bench.folder / 'images/val'))) == 12
    assert {path.name for path in cache.parent.glob('*val*')} == {'val', begun.name, cache.name}


def test_the_report_of_an_interrupted_run_says_how_to_go_on(bench):
    run = f'--project {bench.folder} --iters 1 --epochs 2 --target openvino --calib-images 4 --calib-method max'
    words = f'quantize {QAT} {run} --weights {bench.model()} --data {bench.data()}'.split()
    interrupt('epoch 2/2', 0, 'qat.py', *words)
    report, again = bench.folder / 'exp/report.md', f'qat.py quantize --resume {bench.folder}/exp'
    text = report.read_text()
    assert 'Interrupted, or not over yet' in text and again in text and 'export_qat.py' not in text
    said = command(*again.split())
    assert '--include openvino' in said and 'Interrupted' not in report.read_text()


@pytest.mark.parametrize(
    ('option', 'refused'), [('error', True), ('error::UserWarning', True), ('ignore', False), ('error:::mine', False)]
)
def test_warnings_that_stop_libraries_are_refused(monkeypatch, capsys, option, refused):
    monkeypatch.setattr(sys, 'warnoptions', [option])
    assert run_command(lambda _: None, torch=False) == (2 if refused else 0)
    assert ('unset PYTHONWARNINGS' in capsys.readouterr().err) == refused


def test_an_older_pytorch_reads_no_older_files(tmp_path, monkeypatch):
    torch.save({}, tmp_path / 'resnet18-1.pth', _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torch, '__version__', '2.9.1')
    with pytest.raises(QatError, match='which can run code in PyTorch 2.9.1; use PyTorch 2.10'):
        old_state(tmp_path / 'resnet18-1.pth')


def test_nothing_is_said_of_int8_where_the_float_model_finds_nothing():
    ptq = Stage(scores(ap=0.0), against_float={'difference': -1e-5, 'chance': 1.0})
    state = state_of(1, origin=Stage(scores(ap=0.0)), ptq=ptq)
    assert 'finds nothing here' in headline(state) and conclusions(state) == [headline(state)]
    assert conclusions(state_of(1, origin=Stage(scores()), ptq=ptq))[0] == (
        'INT8 against float: +0.00 ± ? points of AP, and one image has no confidence interval on these 1 images.'
    )
