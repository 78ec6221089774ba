"""One table of commands × the conditions under which a process starts: no packages, a hostile folder, other settings, little memory.

Under each a command works, or ends with one line and exit code 2; it loads nothing before it has read its arguments.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, TREE, copy_upstream
from helpers.faults import sampled
from helpers.zoo import python

from utils.qat.core.command import run_apart
from utils.qat.core.machine import CHOSEN

LINES = """
qat.py quantize --weights w.pt --data d.yaml
qat.py sensitive --weights w.pt --data d.yaml
qat.py eval --weights w.pt --data d.yaml
qat.py ship --weights w.pt --data d.yaml
reparameterization.py --weights w.pt --save out.pt
export_qat.py --weights w.pt --include onnx
export_yoloV9.py --weights w.pt
val_trt.py --weights w.onnx --data d.yaml
compare_outputs.py w.pt w.onnx --random 2
benchmark_trt.py w.onnx
segment/qat_seg.py quantize --weights w.pt --data d.yaml
classify/qat_cls.py quantize --weights w.pt --data .
scripts/audit_onnx.py w.onnx
scripts/build_engine.py w.onnx
scripts/coco_to_yolo.py
scripts/draw_engine.py
scripts/infer_onnx.py w.onnx i.jpg
scripts/verify_tensorrt.py
scripts/voc_to_yolo.py . .
demo/make_data.py
demo/weights.py build w.pt out.pt
examples/infer_engine.py model image
""".strip().splitlines()
FILES = sorted({line.split()[0] for line in LINES})
HELPS = [' '.join(line.split()[: 1 + line.startswith('qat.py')]) for line in LINES] + ['qat.py']
PACKAGES = 'torch torchvision numpy scipy cv2 PIL onnx onnxruntime tensorrt matplotlib pandas seaborn sklearn yaml tqdm'.split()
LIGHT = {
    f'scripts/{name}.py' for name in ('audit_onnx', 'coco_to_yolo', 'draw_engine', 'voc_to_yolo')
}  # without PyTorch
INPUTS = 'w.pt', 'w.onnx', 'd.yaml', 'i.jpg'


def test_all_files_are_here():
    folders = '', 'segment', 'classify', 'scripts', 'examples', 'demo'
    there = {f.relative_to(REPO).as_posix() for folder in folders for f in (REPO / folder).glob('*.py')}
    assert {*FILES} == there - {'yolov9_qat.py'}, 'the library is no command'


@pytest.fixture(scope='module')
def patched(tmp_path_factory):
    """A tree patched as users patch theirs, with copies: there our files and upstream's are one package."""
    tree = copy_upstream(tmp_path_factory.mktemp('help') / 'yolov9')
    subprocess.run([REPO / 'patch_yolov9.sh', tree], check=True, stdout=subprocess.DEVNULL)
    return tree


def start(tree, options, line, cwd=None, **environment):
    """The finished `python OPTIONS LINE`; some files are not laid over the tree."""
    file, *words = line.split()
    path = tree / file if (tree / file).exists() else REPO / file
    how = {'capture_output': True, 'text': True, 'errors': 'replace', 'stdin': subprocess.DEVNULL}
    command = [sys.executable, *options, path, *words]
    return subprocess.run(command, cwd=cwd or tree, env={**os.environ, **environment}, **how)


def one_line(done, words):
    """Whether a command refused in one line with these words."""
    return done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1 and words in done.stderr


# ---- without packages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('line', HELPS)
def test_help_with_no_package_installed(patched, line):
    """In a locale without arrows, for which Python does not take UTF-8 by itself, as it does for C."""
    done = start(patched, ('-S',), f'{line} -h', PYTHONPATH='', PYTHONIOENCODING='latin-1')  # without site-packages
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    assert done.stdout.startswith('usage: ') and '-h, --help' in done.stdout


OF_NOTHING = ' '.join(('ship', 'scripts/coco', 'scripts/draw', 'scripts/verify', 'demo', 'examples'))


@pytest.mark.parametrize('line', [line for line in LINES if not re.search(OF_NOTHING.replace(' ', '|'), line)])
def test_a_command_with_no_package_installed(patched, tmp_path, line):
    for name in INPUTS:
        (tmp_path / name).touch()
    done = start(patched, ('-S', '-E'), line, tmp_path)
    assert one_line(done, 'is not installed for '), done.stderr[-2000:]
    assert re.search(r'error: the package \w+ is not installed for .*; .* \./install_dependencies\.sh$', done.stderr)
    assert {f.name for f in tmp_path.iterdir()} == {*INPUTS}, 'it writes nothing'


def test_a_client_without_its_packages(tmp_path):
    """It is copied to machines that have nothing of ours."""
    done = start(REPO, ('-S', '-E'), 'examples/infer_engine.py model image', tmp_path)
    assert one_line(done, "error: No module named 'cv2'; it needs NumPy") and 'pip install' in done.stderr


# ---- a folder of hostile files ------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a file of the name of each module that Python or a command may import; each of them writes `ran`."""
    folder = tmp_path_factory.mktemp('hostile')
    more = 'pip setuptools venv ensurepip tensorrt_rtx openvino pygraphviz models utils'.split()
    for name in {*sys.stdlib_module_names, *PACKAGES, *more}:
        (folder / f'{name}.py').write_text(f'open({str(folder / "ran")!r}, "a").write({name!r} + " ")\n')
    return folder


def ran(folder):
    """The names of the files that have run since the last call."""
    file = folder / 'ran'
    found = file.read_text() if file.is_file() else ''
    file.unlink(missing_ok=True)
    return found


def test_python_runs_it_unless_it_is_told_otherwise(folder, monkeypatch):
    monkeypatch.chdir(folder)
    code = 'import json, torch, sys; print(torch.__version__, *sys.argv[1:])'
    monkeypatch.delenv('PYTHONSAFEPATH', raising=False)
    subprocess.run([sys.executable, '-c', code], capture_output=True)
    assert ran(folder), 'so the laws here are about something'
    done = run_apart(code, 'a', 1)
    assert not ran(folder) and done.returncode == 0 and done.stdout.split()[1:] == ['a', '1'], done.stderr


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
    """Without a package index, and without GitHub."""
    git = dict(zip(('COUNT', 'KEY_0', 'VALUE_0'), ('1', 'url./none.insteadOf', 'https://github.com/')))
    env = {'PYTHON': sys.executable, 'PIP_NO_INDEX': '1', 'YOLOV9_DIR': ''}
    env |= {f'GIT_CONFIG_{name}': value for name, value in git.items()}
    done = subprocess.run(['bash', '-c', line], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    assert not ran(folder), done.stdout + done.stderr
    assert done.returncode == SCRIPTS[line], done.stdout + done.stderr


SCORED = '--data {data} --imgsz 64 --device cpu --project runs --workers 1'
JOBS = [  # whole jobs, in processes of their own
    f'qat.py eval --weights {{quantized}} {SCORED}',
    f'qat.py quantize --weights {{single}} {SCORED} --epochs 1 --iters 1',
    'compare_outputs.py {single} {quantized} --random 1 --device cpu',
    'export_qat.py --weights float.pt --include onnx pt2 --imgsz 64',
    'export_qat.py --weights float.pt --include aoti --imgsz 64',
    'benchmark_trt.py {single} --device cpu --duration 0.01',
]


@pytest.mark.parametrize('line', sampled(JOBS, 6))
def test_no_command_runs_it(folder, small, line):
    if 'aoti' in line and not shutil.which('g++'):
        pytest.skip('no g++')
    shutil.copy(small.single, folder / 'float.pt')
    done = start(TREE, (), line.format(**vars(small)), folder)
    assert not ran(folder), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_picture_of_an_engine_runs_it(folder, graphviz, monkeypatch):
    from utils.qat.vendors.tensorrt.engine.layer_graph import draw

    monkeypatch.chdir(folder)
    Path('engine.dot').write_text('digraph engine { a -> b }')
    draw(Path('engine.dot'), [Path('engine.svg')])
    assert not ran(folder) and Path('engine.svg').is_file()


@pytest.mark.parametrize(
    'line', sampled([f'qat.py eval --weights {{single}} {SCORED}', 'export_yoloV9.py -w {single}'], 2)
)
def test_in_the_folder_of_the_toolkit_itself_one_line_says_where_commands_run(small, line):
    before = set(REPO.iterdir())
    done = start(REPO, ('-B',), line.format(**vars(small)))
    assert one_line(done, 'no patched YOLOv9') and './patch_yolov9.sh ../yolov9' in done.stderr, done.stderr
    assert {path.name for path in set(REPO.iterdir()) - before} <= {'__pycache__'}


# ---- settings of the environment ----------------------------------------------------------------------------------------

SETTINGS = {  # variables → words of the line, '' = it works
    'PYTHONSAFEPATH=1': '',
    'MPLBACKEND=evil': '',
    'RANK=0 WORLD_SIZE=1': '',
    'RANK=0 WORLD_SIZE=1 LOCAL_RANK=0': '',
    'LOCAL_RANK=-1': '',
    'RANK=abc WORLD_SIZE=2': 'RANK=abc: must be a whole number',
    'RANK=2 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=localhost MASTER_PORT=1': 'RANK=2: must be less than WORLD_SIZE=2',
    'PYTHONOPTIMIZE=2': 'unset PYTHONOPTIMIZE',
}
OURS = [file for file in FILES if (TREE / file).exists() and 'verify' not in file]


def variables(setting):
    return dict(word.split('=') for word in setting.split())


@pytest.mark.parametrize('file, setting', sampled([(file, setting) for setting in SETTINGS for file in OURS], 15))
def test_each_command_starts_or_says_why_not(file, setting):
    done = start(TREE, (), f'{file} -h', **variables(setting))
    assert one_line(done, SETTINGS[setting]) if SETTINGS[setting] else done.stdout.startswith('usage: '), done.stderr


@pytest.mark.faults
@pytest.mark.parametrize('setting', [setting for setting, refused in SETTINGS.items() if not refused])
def test_a_job_under_each_setting(small, tmp_path, setting):
    done = start(TREE, (), JOBS[0].format(**vars(small)).replace(' runs ', f' {tmp_path} '), **variables(setting))
    assert done.returncode == 0 and list(tmp_path.rglob('metrics.json')), done.stderr


@pytest.mark.faults
def test_a_torchrun_whose_processes_cannot_meet(small):
    setting = 'RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=99999'
    done = start(TREE, (), JOBS[0].format(**vars(small)), **variables(setting))
    assert one_line(done, 'the processes of torchrun do not find each other'), done.stderr


@pytest.mark.parametrize('file', sampled(OURS, 5))
def test_a_small_address_space(file):
    """PyTorch's libraries would end the process there, or crash; commands without PyTorch work."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (3 * 10**9,) * 2)

    said = python(file, '-h', code=0 if file in LIGHT else 2, preexec_fn=limit)
    line = 'error: out of memory (the address space is limited to 3000 MB: ulimit -v)'
    assert 'usage: ' in said if file in LIGHT else line in said and said.count('\n') == 1


# ---- waiting threads sleep, unless the user chose otherwise ----------------------------------------------------------------

LOADED = """
import os, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ('torch', 'onnxruntime'):
            os.write(1, f"loads {name} with {os.environ.get('OMP_WAIT_POLICY')}".encode())
            os._exit(0)
sys.meta_path.insert(0, Finder)
"""
NEITHER = *LIGHT, 'demo/make_data.py', 'examples/infer_engine.py', 'benchmarks/fod.py'  # loads torch or ONNX Runtime
LATER = 'scripts/verify_tensorrt.py', 'scripts/build_engine.py'  # in other processes; when an engine is built
BENCHMARKS = sorted({f.relative_to(REPO).as_posix() for f in (REPO / 'benchmarks').glob('*.py')} - {*NEITHER})
LOADING = [line for line in LINES if line.split()[0] not in (*NEITHER, *LATER)]


@pytest.fixture(scope='module')
def watched(tmp_path_factory):
    """A folder of empty inputs, and of a sitecustomize.py that ends a process where it loads torch or ONNX Runtime."""
    folder = tmp_path_factory.mktemp('watched')
    (folder / 'sitecustomize.py').write_text(LOADED)
    for name in INPUTS:
        (folder / name).touch()
    return folder


def loads(watched, line, **environment):
    """Return what a command says that ends where it loads; of the user's settings it has only `environment`."""
    line = ' '.join(str(watched / word) if word in INPUTS else word for word in line.split())
    unset = dict.fromkeys([*CHOSEN, 'OMP_NUM_THREADS'], None)
    with pytest.MonkeyPatch.context() as patch:
        for name in unset:
            patch.delenv(name, raising=False)
        return start(TREE, (), line, PYTHONPATH=str(watched), **environment).stdout


@pytest.mark.parametrize('line', [*LOADING, *BENCHMARKS])
def test_it_is_said_before_torch_is_loaded(watched, line):
    assert loads(watched, line) in ('loads torch with passive', 'loads onnxruntime with passive')
    if line.startswith('qat.py eval'):
        assert loads(watched, line, KMP_BLOCKTIME='9').endswith(' with None'), "the user's choice"


def test_upstreams_commands_keep_their_settings(watched):
    assert loads(watched, 'train.py -h') == 'loads torch with None'
