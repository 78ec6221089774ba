"""yolov9_qat.py: its page and docstrings run in any folder, it computes what `qat.py quantize` does, and its import changes nothing."""

import re
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import REPO, TREE
from helpers.fresh import fresh
from helpers.zoo import SIZE, image, settings

import yolov9_qat as q
from models.quantize.calibration.ptq import COMPARED, Sample, calibrated
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders

SETTINGS = """
import os, sys, matplotlib, torch
from torch.backends import cuda, cudnn

def settings_of_the_process():
    threads = torch.get_num_threads(), torch.get_num_interop_threads()
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cuda.matmul.allow_tf32
    plots = dict.__getitem__(matplotlib.rcParams, 'backend')
    return dict(os.environ), threads, flags, plots, sys.stdout.errors, torch.get_default_dtype(), torch.is_grad_enabled()

before = settings_of_the_process()
"""
EXAMPLES = """
import doctest, torch
import yolov9_qat as q
found = {'q': q, 'batches': [torch.rand(2, 3, 64, 64) for _ in range(2)]}
examples = sorted(doctest.DocTestFinder(exclude_empty=False).find(q, extraglobs=found), key=lambda test: test.lineno or 0)
runner = doctest.DocTestRunner()
for example in examples:
    example.globs = found
    runner.run(example, clear_globs=False)
functions = {test.name.split('.')[-1] for test in examples if test.examples}
print(runner.summarize(), sorted(functions))
"""
FUNCTIONS = 'adapt audit calibrate evaluate export finetune load prepare save'.split()


@pytest.fixture
def folder(small, tmp_path):
    """A folder with yolov9-t.pt and data.yaml, outside of the tree."""
    (tmp_path / 'yolov9-t.pt').symlink_to(small.single)
    content = yaml.safe_load(small.data.read_text())
    (tmp_path / 'data.yaml').write_text(yaml.safe_dump({**content, 'path': str(small.data.parent)}))
    return tmp_path


def run_in(folder, program):
    """What a program says that runs in a folder, with the tree on its path."""
    return fresh('-c', f'import os, sys\nsys.path.append({str(TREE)!r})\nos.chdir({str(folder)!r})\n{program}')


def test_the_page(folder):
    [program] = re.findall(r'```python\n(.*?)```', (REPO / 'docs/python.md').read_text(encoding='utf-8'), re.DOTALL)
    said = run_in(folder, program.replace('640', '64').replace("'data.yaml')", "'data.yaml', workers=0)"))
    assert re.search(r'(?m)^INT8 0\.\d+ 0\.\d+$', said) and said.endswith('\n[]\n'), said


def test_each_function_has_an_example_that_runs(folder):
    flags = 'assert settings_of_the_process()[1:3] == before[1:3]'  # upstream's import sets variables
    said = run_in(folder, SETTINGS + EXAMPLES + flags)
    assert f'TestResults(failed=0, attempted={len(FUNCTIONS)}) {FUNCTIONS}' in said, said


@pytest.mark.parametrize('module', ['yolov9_qat', 'utils.qat', 'utils.qat.core.command'])
def test_the_import_changes_nothing(tmp_path, module):
    program = SETTINGS.replace('\ndef', "\nmatplotlib.use('svg')\ndef") + (
        f"import {module}\nassert settings_of_the_process() == before\nassert 'utils.general' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=tmp_path, env={'PYTHONPATH': str(TREE)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('target', ['tensorrt', 'openvino'])
def test_it_computes_what_the_command_does(small, target):
    """Also after an evaluation, and if the loop writes into its batch."""
    config = settings(target=target, calib_method='auto', calib_images=12, imgsz=SIZE)
    images = Loaders(load_data(small.data), config, 32, torch.device('cpu')).calibration()
    wanted, found = calibrated(small.float_model(), images, config)
    model = q.load(small.single)
    q.evaluate(model, small.data, imgsz=SIZE, workers=0, square=True)
    q.prepare(model, target)

    def loop(model):
        for batch in images:
            batch = batch.contiguous()
            model(batch)
            batch.zero_()

    assert q.calibrate(model, loop) == found
    theirs = wanted.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    assert not [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, theirs[name])]


def test_a_saved_model_is_the_same(small, tmp_path):
    model = q.load(small.single)
    q.prepare(model, 'tensorrt', exclude=['model.0'])
    q.calibrate(model, lambda model: model(image(batch=2)), calib_method='max')
    q.save(model, tmp_path / 'int8.pt')
    again = q.load(tmp_path / 'int8.pt')
    assert (
        again.quant['recipe'] == model.quant['recipe'] and again.quant['source_sha256'] == model.quant['source_sha256']
    )
    assert again.quant['recipe']['kept_float'] == ['model.0.conv'] and again.quant['recipe']['calib_method'] == 'max'
    with torch.no_grad():
        assert torch.equal(again(image())[0], model(image())[0])


def test_the_sample_is_evenly_spread():
    for number in (1, COMPARED, 2 * COMPARED - 1, 2 * COMPARED, 500):
        sample = Sample()
        for batch in torch.arange(number).view(-1, 1, 1, 1).split(7):
            sample(None, (batch,))
        chosen = torch.cat(sample.batches()).flatten().tolist()
        assert sample.count == number and len(chosen) == min(number, COMPARED)
        if number < 2 * COMPARED:
            assert chosen == [i * number // len(chosen) for i in range(len(chosen))], 'as loaders.spread'
        ideal = [i * number / len(chosen) for i in range(len(chosen))]
        apart = number / COMPARED  # two steps of the kept ones, and the last ones that are not full
        assert all(abs(i - j) <= 2 * apart + 1 for i, j in zip(chosen, ideal)), number


@pytest.mark.parametrize(
    'wrong, words',
    [
        (lambda model, folder: q.calibrate(model, lambda model: None), 'after it was prepared'),
        (lambda model, folder: q.prepare(model, 'gpu'), '--target gpu: must be one of tensorrt'),
        (lambda model, folder: q.adapt(model, 'relu', 'tensorrt'), 'takes images'),
        (lambda model, folder: q.export(model, folder / 'int8.bin'), 'must end in .onnx'),
        (lambda model, folder: (q.prepare(model, 'tensorrt'), q.prepare(model, 'tensorrt')), 'quantized already'),
        (lambda model, folder: (q.prepare(model, 'tensorrt'), q.save(model, folder / 'a.pt')), 'no ranges yet'),
        (lambda model, folder: (q.prepare(model, 'tensorrt'), q.export(model, folder / 'a.onnx')), 'no ranges yet'),
        (lambda model, folder: (q.prepare(model, 'tensorrt'), q.calibrate(model, lambda model: None)), 'saw no data'),
        (
            lambda model, folder: (
                q.prepare(model, 'tensorrt'),
                q.calibrate(model, lambda model: model(image()), calib_method='max'),
                q.calibrate(model, lambda model: model(image())),
            ),
            'takes a model once',
        ),
        (lambda model, folder: q.calibrate(model, print, target='openvino'), 'target: no setting of this function'),
        (lambda model, folder: q.calibrate(model, print, calib_methd='mse'), 'calib_methd: no setting'),
        (lambda model, folder: q.export(model, folder / 'a.onnx', verify='data.yaml'), 'verify: no setting'),
        (lambda model, folder: q.export(model, folder / 'nowhere' / 'a.onnx', imgsz=64), 'nowhere: no such folder'),
        (lambda model, folder: q.evaluate(model, 'data.yaml', backend='openvino'), 'backend: no setting'),
        (lambda model, folder: q.evaluate('a.pt', 'data.yaml', backend='openvino'), 'backend: no setting'),
        (lambda model, folder: q.evaluate('ex.py', 'data.yaml'), 'no exported file'),
        (
            lambda model, folder: (q.prepare(model, 'tensorrt'), q.adapt(model, 'relu', 'tensorrt', [1])),
            'quantized already',
        ),
        (lambda model, folder: q.adapt(model, 'relu', 'tensorrt', iter([])), 'can be counted'),
        (lambda model, folder: q.finetune(model, model, [image()]), 'learns from a float model'),
        (
            lambda model, folder: (q.prepare(model, 'tensorrt'), q.finetune(model, model, [image()])),
            'learns from a float model',
        ),
    ],
)
def test_mistakes(small, tmp_path, wrong, words):
    with pytest.raises(q.QatError, match=words):
        wrong(q.load(small.single), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_activation_that_stays_returns_the_model(small):
    model = q.load(small.single)
    assert q.adapt(model, 'keep', 'openvino') is model is q.adapt(model, 'auto', 'tensorrt')


def test_a_checkpoint_and_a_backend_are_scored(small, exports):
    options = {'imgsz': SIZE, 'workers': 0, 'device': 'cpu'}
    found = q.evaluate(small.single, small.data, **options, square=True)
    assert found.ap == q.evaluate(q.load(small.single), small.data, imgsz=SIZE, workers=0, square=True).ap
    one, other = (
        q.evaluate(exports / 'int8.onnx', small.data, workers=0, backend=name) for name in ('onnxruntime', 'openvino')
    )
    assert one.ap == pytest.approx(other.ap, abs=0.05) and one.to_json() != other.to_json()
