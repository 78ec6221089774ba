"""Laws of the programs in C++: they find the objects that scripts/infer_onnx.py finds, and answer bad input with one line.

They are built here, which needs cmake, g++ and OpenCV's headers and takes half a minute, so all but one are left for --faults.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import REPO
from helpers.zoo import command, deployed

SOURCES = REPO / 'examples/cpp'
SIZE, CONF, IOU = 128, 0.05, 0.6
MISSING = [name for name in ('cmake', 'g++') if not shutil.which(name)]
ODD = {0: 'a car', 1: "it's", 2: 'Größe 数', 3: '\n\x1b[31m\u202e', 4: '"', 5: '\\', 6: '\U0001f600\x85'}
ROUND_TRIP = """
#include <iostream>
#include "common/text.h"
int main(int, char **argv) try {
    for (const auto &[label, name] : parse_names(argv[1]))
        std::cout << label << ' ' << visible(name) << '\\n';
} catch (const UserError &e) {
    std::cout << e.what() << '\\n';
    return 2;
}
"""


@pytest.mark.skipif(not shutil.which('g++'), reason='no g++')
def test_names_of_classes_are_read_as_the_export_writes_them(tmp_path):
    (tmp_path / 'main.cpp').write_text(ROUND_TRIP)
    build = ['g++', '-std=c++17', '-O0', f'-I{SOURCES}', tmp_path / 'main.cpp', SOURCES / 'common/text.cpp']
    subprocess.run([*build, '-o', tmp_path / 'names'], check=True)

    def read(text):
        done = subprocess.run([tmp_path / 'names', text], capture_output=True, text=True, encoding='utf-8')
        return done.returncode, done.stdout

    shown = [r'a car', r"it's", r'Größe 数', r'\n\x1b[31m\u202e', '"', '\\', '\U0001f600' + r'\x85']
    lines = ''.join(f'{i} {name}\n' for i, name in enumerate(shown))
    assert read(str(ODD)) == read(str(list(ODD.values()))) == (0, lines)
    assert read('') == read('{}') == read('[]') == (0, '')
    for damaged in ("{0: 'a'", "{0 'a'}", '{0: a}', "{'a': 'b'}", "{0: 'a'} 1", "{0: '\\x4'}", '7', "['a' 'b']"):
        code, line = read(damaged)
        assert code == 2 and 'damaged' in line


# ---- whole programs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """Folder with the programs that can be built here."""
    if MISSING:
        pytest.skip(f'no {" and no ".join(MISSING)}')
    folder = tmp_path_factory.mktemp('cpp')
    settings = [f'-DSITE_PACKAGES={Path(torch.__file__).parents[1]}']
    openvino = importlib.util.find_spec('openvino')
    settings += [f'-DOpenVINO_DIR={Path(openvino.origin).parent / "cmake"}'] * bool(openvino)
    done = subprocess.run(['cmake', '-S', SOURCES, '-B', folder, *settings], capture_output=True, text=True)
    if 'no OpenCV' in done.stderr:
        pytest.skip('no OpenCV for C++: apt-get install libopencv-dev')
    assert not done.returncode, done.stderr
    done = subprocess.run(['cmake', '--build', folder, '-j2'], capture_output=True, text=True)
    assert not done.returncode and 'warning' not in done.stderr, done.stderr[-3000:]
    return folder


@pytest.fixture(scope='module')
def openvino(built):
    """Callable: runs yolov9_openvino, see `run`."""
    if not (built / 'yolov9_openvino').exists():
        pytest.skip('no OpenVINO')
    return lambda *arguments, **options: run(built / 'yolov9_openvino', *arguments, **options)


@pytest.fixture(scope='module')
def aoti(built):
    return lambda *arguments, **options: run(built / 'yolov9_aoti', *arguments, **options)


def run(binary, *arguments, code=0):
    """Lines on stdout of a program; after bad input its one line on stderr, without the name of the program."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'OMP_WAIT_POLICY': 'passive', 'TMPDIR': folder}
        done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, env=env)
        assert not os.listdir(folder), 'it leaves nothing behind'
    assert done.returncode == code, done.stderr
    if not code:
        assert not done.stderr
        return done.stdout.splitlines()
    (line,) = done.stderr.splitlines()
    prefix = f'{binary.name}: error: '
    assert line.startswith(prefix)
    return line[len(prefix) :]


@pytest.fixture(scope='module')
def files(small, tmp_path_factory):
    """Folder with the quantized demo's plain.onnx and .xml, end2end.onnx and .xml, its validation images and images of odd sizes."""
    folder = tmp_path_factory.mktemp('files')
    shutil.copy(small.quantized, folder / 'plain.pt')
    formats = 'onnx', 'onnx_end2end', *['openvino', 'openvino_end2end'] * bool(importlib.util.find_spec('openvino'))
    options = '--dynamic', '--imgsz', SIZE, '--conf-thres', CONF, '--iou-thres', IOU
    command('export_qat.py', '--weights', folder / 'plain.pt', '--include', *formats, *options)
    for file in folder.glob('plain-end2end.*'):
        file.rename(folder / f'end2end{file.suffix}')
    shutil.copytree(small.data.parent / 'images/val', folder / 'images')
    image = cv2.imread(str(next((folder / 'images').iterdir())))
    for i, size in enumerate(((61, 300), (400, 33), (128, 128), (127, 129))):
        cv2.imwrite(str(folder / f'images/odd{i}.png'), cv2.resize(image, size))
    return folder


def python_finds(model, images):
    """The lines of scripts/infer_onnx.py for detections."""
    options = '--conf-thres', CONF, '--iou-thres', IOU, '--device', 'cpu'
    by = ['--backend', 'aoti'] * (model.suffix == '.pt2')
    said = command('scripts/infer_onnx.py', model, images, *options, *by).splitlines()
    return [line for line in said if re.match(r'\S+: \S+ [\d.]+  |\d+ detections', line)]


def assert_same_lines(ours, theirs, score=0.002, pixels=0.2):
    """The same detections, and the same last line; objects of nearly the same score may change places.

    OpenCV of the system and of Python may resize a pixel by one level differently.
    """
    assert ours[-1] == theirs[-1] and len(ours) == len(theirs) > 20, (len(ours), len(theirs))
    left = [parsed(line) for line in theirs[:-1]]
    for what, *numbers in map(parsed, ours[:-1]):
        near = [
            (other, *others)
            for other, *others in left
            if other == what and np.all(np.abs(np.subtract(numbers, others)) <= [score, *[pixels] * 4][: len(numbers)])
        ]
        assert near, (what, numbers)
        left.remove(near[0])


def parsed(line):
    """A line as image and class, score, x1, y1, x2, y2; of an image without objects as one text."""
    words = line.split()
    return (line,) if words[-1] == 'found' else (' '.join(words[:-5]), *map(float, words[-5:]))


@pytest.mark.faults
@pytest.mark.parametrize('name', ['plain', 'end2end'])
def test_openvino_finds_what_python_finds(openvino, files, name):
    ours = openvino('--model', files / f'{name}.xml', '--input', files / 'images', '--conf', CONF, '--iou', IOU)
    assert_same_lines(ours, python_finds(files / f'{name}.xml', files / 'images'))


@pytest.fixture(scope='module')
def package(small, tmp_path_factory):
    path = tmp_path_factory.mktemp('package') / 'float.pt2'
    deployed('aoti', small.float_model(), path, imgsz=(SIZE, SIZE), batch_size=2)
    return path


@pytest.mark.faults
def test_a_package_finds_what_python_finds(aoti, package, files):
    ours = aoti('--model', package, '--input', files / 'images', '--conf', CONF, '--iou', IOU)
    assert_same_lines(ours, python_finds(package, files / 'images'))


@pytest.mark.faults
def test_a_package_for_another_machine_is_refused_before_it_runs(aoti, package, files, tmp_path):
    image = files / 'images/odd0.png'

    def changed(keep=False, **metadata):
        path = tmp_path / 'changed.pt2'
        with zipfile.ZipFile(package) as source, zipfile.ZipFile(path, 'w') as target:
            for name in source.namelist():
                content = source.read(name)
                if name.endswith('_metadata.json'):
                    content = json.dumps({k: v for k, v in {**json.loads(content), **metadata}.items() if v})
                target.writestr(name, b'no library' if name.endswith('.so') and not keep else content)
        return aoti('--model', path, '--input', image, code=2)

    again = '; export it here with export_qat.py --include aoti'
    for metadata, reason in (
        ({'device': 'cuda'}, 'compiled for an NVIDIA GPU, and torch finds none here'),
        ({'device': 'xpu'}, 'compiled for the device xpu'),
        ({'torch': '2.1.0'}, 'compiled by torch 2.1.0, and this is torch '),
        ({'cpu': 'fpu avx9000'}, 'compiled for another CPU, with avx9000'),
        ({'cpu': None}, 'its metadata has no cpu'),
        ({'imgsz': '640'}, 'its metadata imgsz names no height and width'),
        ({'names': '{0: '}, 'the names of the classes are damaged'),
        ({}, 'no package of AOTInductor, or damaged'),  # by now it is loaded, and there is no library inside
    ):
        if metadata.get('device') == 'cuda' and torch.cuda.is_available():
            continue
        line = changed(**metadata)
        assert line.startswith(f'{tmp_path}/changed.pt2: {reason}') and line.endswith(again), line
    line = changed(keep=True, imgsz='64,64')  # it would read memory that is not its own
    assert 'cannot be run here, on images of its imgsz: ' in line and line.endswith(again), line
    whole = package.read_bytes()
    for cut in (0, 100, len(whole) // 2, len(whole) - 30):
        (tmp_path / 'cut.pt2').write_bytes(whole[:cut])
        line = aoti('--model', tmp_path / 'cut.pt2', '--input', image, code=2)
        assert 'no package of AOTInductor, or damaged' in line and line.endswith(again)


@pytest.mark.faults
def test_pictures_and_latency(openvino, files, tmp_path):
    image = files / 'images/odd1.png'
    lines = openvino(
        '--model',
        files / 'plain.xml',
        f'--input={image}',
        '--output',
        tmp_path / 'new/a.png',
        '--benchmark-iterations',
        5,
    )
    picture = cv2.imread(str(tmp_path / 'new/a.png'))
    assert picture.shape == cv2.imread(str(image)).shape
    assert lines[-2].endswith(f'in 1 images, saved: {tmp_path}/new/a.png')
    assert lines[-1].startswith('latency of 5 runs of batch 1, ms: min ')
    times = [float(t) for t in re.findall(r'(?:min|p50|p90|p95|p99|max) (\S+?),', lines[-1])]
    assert len(times) == 6 and times == sorted(times) and times[0] > 0
    openvino('--model', files / 'plain.xml', '--input', files / 'images', '--output', tmp_path / 'all', '--conf', '0.5')
    assert {f.name for f in (tmp_path / 'all').iterdir()} == {f.name for f in (files / 'images').iterdir()}
    assert [f.name for f in (tmp_path / 'new').iterdir()] == ['a.png'], 'no temporary file'


@pytest.mark.faults
def test_bad_input_gets_one_line(openvino, files, tmp_path):
    model, image = files / 'plain.xml', files / 'images/odd0.png'
    both = '--model', model, '--input', image
    (tmp_path / 'text.png').write_text('no image')
    (tmp_path / 'empty.png').touch()
    (tmp_path / 'cut.png').write_bytes(image.read_bytes()[:3000])
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'cut.xml').write_bytes(model.read_bytes()[:2000])
    shutil.copy(model, tmp_path / 'alone.xml')
    shutil.copy(model, tmp_path / 'short.xml')
    (tmp_path / 'short.bin').write_bytes(model.with_suffix('.bin').read_bytes()[:2000])
    for arguments, reason in (
        ([], '--model is missing; see --help'),
        (['--model', model], '--input is missing; see --help'),
        ([*both, '--batch', 1], '--batch: no such option; see --help'),
        ([*both, '--conf'], '--conf: needs a value; see --help'),
        ([*both, '--conf', 1.5], '--conf 1.5: must lie in 0 to 1'),
        ([*both, '--iou=nan'], '--iou nan: must lie in 0 to 1'),
        ([*both, '--iou', ''], '--iou : must lie in 0 to 1'),
        ([*both, '--warmup', -1], '--warmup -1: must be a whole number from 0 to 1000000'),
        ([*both, '--benchmark-iterations', '1e3'], '--benchmark-iterations 1e3: must be a whole number'),
        ([*both, '--output', tmp_path / 'a.gif'], f'--output {tmp_path}/a.gif: must end in .bmp'),
        ([*both, '--output', image], f'--output {image}: is the input'),
        ([*both, '--output', tmp_path / 'text.png/a.png'], f'{tmp_path}/text.png/a.png: could not be written'),
        (['--model', files / 'plain.onnx', '--input', image], f'{files}/plain.onnx: expected a file ending in .xml'),
        (['--model', tmp_path / 'no.xml', '--input', image], f'{tmp_path}/no.xml: expected a file ending in .xml'),
        (['--model', model, '--input', tmp_path / 'no.png'], f'{tmp_path}/no.png: no such image or folder'),
        (['--model', model, '--input', tmp_path / 'text.png'], f'{tmp_path}/text.png: OpenCV cannot read it'),
        (['--model', model, '--input', tmp_path / 'cut.png'], f'{tmp_path}/cut.png: OpenCV cannot read it'),
        (['--model', model, '--input', tmp_path / 'empty.png'], f'{tmp_path}/empty.png: OpenCV cannot read it'),
        (['--model', model, '--input', tmp_path / 'empty'], f'{tmp_path}/empty: a folder without images'),
        (['--model', tmp_path / 'cut.xml', '--input', image], f'{tmp_path}/cut.xml: OpenVINO cannot load it'),
        (['--model', tmp_path / 'alone.xml', '--input', image], f'{tmp_path}/alone.xml: OpenVINO cannot load it'),
        (['--model', tmp_path / 'short.xml', '--input', image], f'{tmp_path}/short.xml: OpenVINO cannot load it'),
        (['--model', model, '--input', '\x1b[31m\n'], r'\x1b[31m\n: no such image or folder'),
    ):
        line = openvino(*arguments, code=2)
        assert line.startswith(reason), (arguments, line)
