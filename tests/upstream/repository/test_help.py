"""`-h` of every command: it needs none of the packages, and loads none where they are installed."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPO, copy_upstream

VERBS = {'qat.py': ('ship', 'quantize', 'sensitive', 'eval')}
FILES = sorted(
    f.relative_to(REPO).as_posix()
    for folder in ('', 'segment', 'classify', 'scripts', 'examples', 'demo')
    for f in (REPO / folder).glob('*.py')
    if f.name != 'yolov9_qat.py'  # the library
)
COMMANDS = [command for file in FILES for command in ((file,), *((file, verb) for verb in VERBS.get(file, ())))]
OWN = {  # what a file is made of, beyond Python
    'examples/infer_engine.py': {'cv2', 'numpy', 'tensorrt'},
    'demo/make_data.py': {'cv2', 'numpy'},
}

each_command = pytest.mark.parametrize('command', COMMANDS, ids=' '.join)


@pytest.fixture(scope='module')
def patched(tmp_path_factory):
    """A tree patched as users patch theirs, with copies: there our files and upstream's are one package."""
    tree = copy_upstream(tmp_path_factory.mktemp('help') / 'yolov9')
    subprocess.run([REPO / 'patch_yolov9.sh', tree], check=True, stdout=subprocess.DEVNULL)
    return tree


def show_help(patched, command, *options, **environment):
    """The finished `python OPTIONS COMMAND -h`; some files are not laid over the tree."""
    file, *verb = command
    path = patched / file if (patched / file).exists() else REPO / file
    return subprocess.run(
        [sys.executable, *options, path, *verb, '-h'],
        cwd=patched,
        capture_output=True,
        text=True,
        errors='replace',
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def test_all_commands_are_there():
    assert {('qat.py', 'eval'), ('reparameterization.py',), ('scripts/build_engine.py',), ('demo/weights.py',)} <= set(
        COMMANDS
    )


@each_command
def test_help_with_no_package_installed(patched, command):
    done = show_help(patched, command, '-S', '-E')  # without site-packages and PYTHONPATH
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    assert done.stdout.startswith('usage: ') and '-h, --help' in done.stdout


@pytest.mark.parametrize(
    'words',
    [
        'qat.py quantize --weights m.pt --data d.yaml',
        'qat.py sensitive --weights m.pt --data d.yaml',
        'qat.py eval --weights m.pt --data d.yaml',
        'reparameterization.py --weights m.pt',
        'export_qat.py --weights m.pt',
        'export_yoloV9.py --weights m.pt',
        'val_trt.py --weights m.onnx --data d.yaml',
        'compare_outputs.py m.pt m.onnx --random 2',
        'benchmark_trt.py m.onnx',
        'segment/qat_seg.py quantize --weights m.pt --data d.yaml',
        'classify/qat_cls.py quantize --weights m.pt --data .',
        'scripts/audit_onnx.py m.onnx',
        'scripts/build_engine.py m.onnx',
        'scripts/infer_onnx.py m.onnx i.jpg',
    ],
    ids=lambda words: ' '.join(words.split()[:2]),
)
def test_a_command_with_no_package_installed(patched, tmp_path, words):
    for name in ('m.pt', 'm.onnx', 'd.yaml', 'i.jpg'):
        (tmp_path / name).touch()
    file, *arguments = words.split()
    line = [sys.executable, '-S', '-E', patched / file, *arguments]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (2, '') and len(done.stderr.splitlines()) == 1, done.stderr[-2000:]
    assert re.search(r'error: the package \w+ is not installed for .*; .* \./install_dependencies\.sh$', done.stderr)
    assert sorted(f.name for f in tmp_path.iterdir()) == ['d.yaml', 'i.jpg', 'm.onnx', 'm.pt'], 'it writes nothing'


def test_a_client_without_its_packages():
    """It is copied to machines that have nothing of ours."""
    line = [sys.executable, '-S', '-E', REPO / 'examples/infer_engine.py', 'model', 'image']
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, '') and len(done.stderr.splitlines()) == 1
    assert "error: No module named 'cv2'; it needs NumPy" in done.stderr and 'pip install' in done.stderr


@each_command
def test_help_loads_no_package(patched, command):
    """In a locale without arrows, for which Python does not take UTF-8 by itself, as it does for C."""
    done = show_help(patched, command, '-X', 'importtime', PYTHONIOENCODING='latin-1')
    assert done.returncode == 0 and done.stdout.startswith('usage: '), done.stderr[-2000:]
    loaded = {name.split('.')[0] for name in re.findall(r'(?m)^import time: .*\| +(\S+)$', done.stderr)}
    assert len(loaded) > 20, 'Python says what it imports'
    packages = set(
        'torch torchvision numpy scipy cv2 PIL onnx onnxruntime tensorrt matplotlib pandas seaborn sklearn yaml tqdm '
        'pytorch_quantization pkg_resources packaging IPython'.split()
    )
    assert not loaded & packages - OWN.get(command[0], set())
