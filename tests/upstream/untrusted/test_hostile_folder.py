"""Nothing that lies in the current folder runs: a torch.py or a pip.py there is no module of any command or script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, TREE
from helpers.faults import sampled

from utils.qat.core.command import run_apart

PACKAGES = (
    'torch numpy cv2 pip setuptools venv ensurepip tensorrt tensorrt_rtx onnx onnxruntime openvino matplotlib pygraphviz yaml tqdm '
    'models utils'
).split()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a file of the name of each module that Python or a command may import; each of them writes `ran`."""
    folder = tmp_path_factory.mktemp('hostile')
    for name in {*sys.stdlib_module_names, *PACKAGES}:
        (folder / f'{name}.py').write_text(f'open({str(folder / "ran")!r}, "a").write({name!r} + " ")\n')
    return folder


def ran(folder):
    """The names of the files that have run since the last call."""
    file = folder / 'ran'
    found = file.read_text() if file.is_file() else ''
    file.unlink(missing_ok=True)
    return found


def environment():
    """Variables without a package index, and without GitHub."""
    return {
        **os.environ,
        'PYTHON': sys.executable,
        'PIP_NO_INDEX': '1',
        'YOLOV9_DIR': '',
        'GIT_CONFIG_COUNT': '1',
        'GIT_CONFIG_KEY_0': 'url./none.insteadOf',
        'GIT_CONFIG_VALUE_0': 'https://github.com/',
    }


SETUP = f'HERE={REPO}; source {REPO}/demo/setup.sh; '
SCRIPTS = {  # command of a shell → exit code
    f'{REPO}/install_dependencies.sh --dry-run': 0,
    f'{REPO}/install_dependencies.sh --dry-run --tensorrt 10': 0,
    f'{REPO}/scripts/get_yolov9.sh new': 2,  # pip is asked for the sdist, without an index
    f'{SETUP} make_environment $PWD/environment && python -c ""': 0,
    f'{REPO}/scripts/verify_tensorrt.sh --backend rtx --weights none.pt': 2,
    f'{REPO}/patch_yolov9.sh nowhere': 2,
}


@pytest.mark.parametrize('line', [pytest.param(s, marks=[pytest.mark.faults] * ('make_' in s)) for s in SCRIPTS])
def test_no_script_runs_it(folder, line):
    done = subprocess.run(['bash', '-c', line], cwd=folder, env=environment(), capture_output=True, text=True)
    assert not ran(folder), done.stdout + done.stderr
    assert done.returncode == SCRIPTS[line], done.stdout + done.stderr


def test_python_runs_it_unless_it_is_told_otherwise(folder, monkeypatch):
    monkeypatch.chdir(folder)
    code = 'import json, torch, sys; print(torch.__version__, *sys.argv[1:])'
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    subprocess.run([sys.executable, '-c', code], capture_output=True)
    assert ran(folder), 'so the laws here are about something'
    done = run_apart(code, 'a', 1)
    assert not ran(folder) and done.returncode == 0 and done.stdout.split()[1:] == ['a', '1'], done.stderr


def commands(small):
    """Whole jobs, in processes of their own."""
    scored = ('--data', small.data, '--imgsz', 64, '--device', 'cpu', '--project', 'runs', '--workers', 1)
    return {
        'quantize': ('qat.py', 'quantize', '--weights', small.single, *scored, '--epochs', 1, '--iters', 1),
        'eval': ('qat.py', 'eval', '--weights', small.quantized, *scored),
        'compare': ('compare_outputs.py', small.single, small.quantized, '--random', 1, '--device', 'cpu'),
        'export': ('export_qat.py', '--weights', 'float.pt', '--include', 'onnx', 'pt2', '--imgsz', 64),
        'aoti': ('export_qat.py', '--weights', 'float.pt', '--include', 'aoti', '--imgsz', 64),
        'benchmark': ('benchmark_trt.py', small.single, '--device', 'cpu', '--duration', 0.01),
    }


@pytest.mark.parametrize('name', sampled(['eval', 'quantize', 'compare', 'export', 'aoti', 'benchmark'], 6))
def test_no_command_runs_it(folder, small, name):
    if name == 'aoti' and not shutil.which('g++'):
        pytest.skip('no g++')
    shutil.copy(small.single, folder / 'float.pt')
    file, *words = map(str, commands(small)[name])
    done = subprocess.run([sys.executable, TREE / file, *words], cwd=folder, capture_output=True, text=True)
    assert not ran(folder), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_picture_of_an_engine_runs_it(folder, graphviz, monkeypatch):
    from utils.qat.vendors.tensorrt.engine.layer_graph import draw

    monkeypatch.chdir(folder)
    Path('engine.dot').write_text('digraph engine { a -> b }')
    draw(Path('engine.dot'), [Path('engine.svg')])
    assert not ran(folder) and Path('engine.svg').is_file()
