"""scripts/verify_tensorrt.py: it goes on after a failure, names what it could not check, and its exit code is that of its rows.

TensorRT itself is not here: TensorRT-RTX builds the engines.
"""

import importlib.util
import json
import os
import subprocess

import numpy as np
import onnx
import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.graphs import graph_of
from helpers.zoo import command, python

from command_runner import CommandRunner, reason
from kinds import within_limits
from models.quantize import checkpoint
from raw_outputs import compare, open_session

SCRIPT = REPO / 'scripts/verify_tensorrt.py'
DIES = """
import os, signal, sys
if 'scripts/build_engine.py' in str(sys.orig_argv) and any(word.startswith('deepstream') for word in sys.orig_argv):
    os.kill(os.getpid(), signal.SIGSEGV)
"""
RTX = pytest.mark.skipif(
    importlib.util.find_spec('tensorrt_rtx_bindings') is None,
    reason='no TensorRT-RTX: ./install_dependencies.sh --tests',
)
ON_CPU = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}


def verify(demo, out, *options, code=0, **environment):
    """Run the command on the files of a demo; returns {row: (status, what was found)} and the content of verify.json."""
    files = '--weights', demo.quantized, '--float', demo.single, '--data', demo.data
    said = python(SCRIPT, *files, *options, '--project', out, '--name', 'v', code=code, env=environment)
    report = json.loads((out / 'v' / 'verify.json').read_text())
    assert report['verdict'] in said and report['verdict'] in (out / 'v' / 'verify.md').read_text()
    return {row['name']: (row['status'], row['found']) for row in report['rows']}, report


def classifier(folder):
    """The options of a quantized classifier and its images, which are written to a folder."""
    model = classifiers.quantized(classifiers.loaded('mobilenet_v2', folder))
    checkpoint.save_model(folder / 'class.pt', model, {'imgsz': [classifiers.SIZE] * 2}, '0' * 64)
    return '--classify', folder / 'class.pt', '--classify-data', classifiers.write_images(folder / 'classes')


@RTX
@pytest.mark.faults
def test_it_goes_on_after_a_crash(small, tmp_path):
    """The process that builds DeepStream's file dies, as by a fault of TensorRT."""
    rows = 'build plain', 'build deepstream', 'trtexec plain', 'outputs plain', 'outputs deepstream', 'timing cache'
    (tmp_path / 'sitecustomize.py').write_text(DIES)
    environment = {**ON_CPU, 'PYTHONPATH': f'{tmp_path}:{os.environ.get("PYTHONPATH", "")}'}
    found, report = verify(small, tmp_path, '--imgsz', 64, '--backend', 'rtx', '--only', *rows, code=1, **environment)
    assert list(found) == list(rows)
    assert found['build plain'][0] == found['timing cache'][0] == 'pass'
    assert found['build deepstream'] == ('fail', 'scripts/build_engine.py was ended by SIGSEGV')
    assert found['trtexec plain'][0] == 'skip' and 'no NVIDIA GPU' in found['outputs plain'][1]
    assert found['outputs deepstream'] == ('skip', 'needs build deepstream')
    assert ' on a machine without a GPU: 2 passed, 1 failed, 3 skipped' in report['verdict']


@RTX
def test_a_classifier_has_its_own_size_and_images(small, tmp_path):
    words = *classifier(tmp_path), '--backend', 'rtx', '--only', 'build classify', 'outputs classify', 'outputs plain'
    found, _ = verify(small, tmp_path, *words, **ON_CPU)
    assert found['build classify'][0] == 'pass' and found['outputs classify'][0] == 'skip'
    assert found['outputs plain'] == ('skip', 'needs build plain; name it in --only too')
    side = classifiers.SIZE
    assert json.loads((tmp_path / 'v' / 'classify.engine.json').read_text())['inputs'] == {
        'images': dict(zip(('min', 'opt', 'max'), ([batch, 3, side, side] for batch in (1, 4, 8))))
    }
    words = '--data', tmp_path / 'v' / 'classify', '--project', tmp_path, '--workers', 0
    command('compare_outputs.py', *[tmp_path / 'v' / 'classify.onnx'] * 2, *words)
    same = json.loads((tmp_path / 'exp' / 'compare.json').read_text())['comparisons'][0]
    assert 'the best class is the same in 100.0% of the images' in within_limits(same)
    with pytest.raises(pytest.fail.Exception, match='top-1 differs'):
        within_limits({**same, 'other': {'top1': 1 - same['reference']['top1'], 'top5': 1.0}})


def test_a_difference_of_two_runs_is_seen(tmp_path):
    """In dB: an output that is lost leaves as much noise as signal."""
    sessions = []
    for name, factor in (('a', 1), ('b', 1), ('c', 0)):
        text = 'y = Identity(x) z = Mul(x, factor)'
        graph = graph_of(text, ('y', 'z'), {'factor': np.float32(factor)}, shape=(1, 3, 4, 4))
        onnx.save(graph, tmp_path / f'{name}.onnx')
        sessions.append(open_session(tmp_path / f'{name}.onnx', torch.device('cpu'), 'onnxruntime', False))
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    same, other = (compare(sessions[0], session, images) for session in sessions[1:])
    assert same == {'equal': True, 'sqnr': None} and other == {'equal': False, 'sqnr': 0}


@RTX
@pytest.mark.slow
def test_the_whole_table_with_tensorrt_rtx(demo, demo_seg, tmp_path):
    masks = '--segment', demo_seg.quantized, '--segment-data', demo_seg.data, *classifier(tmp_path)
    found, _ = verify(demo, tmp_path, *masks, '--imgsz', 128, '--backend', 'rtx', **ON_CPU)
    built = {name.removeprefix('build '): status for name, (status, _) in found.items() if name.startswith('build ')}
    lacks = {'end2end', 'plugin', 'segment-end2end'}
    assert built == {kind: 'skip' if kind in lacks else 'pass' for kind in built} and len(built) == 12, found
    assert 'NonMaxSuppression' in found['build end2end'][1] and 'Plugin not found' in found['build plugin'][1]
    assert found['timing cache'][0] == 'pass'
    assert {status for name, (status, _) in found.items() if not name.startswith(('build', 'timing'))} == {'skip'}


def test_the_script_says_what_it_takes():
    done = subprocess.run([REPO / 'scripts/verify_tensorrt.sh', '-h'], capture_output=True, text=True)
    assert done.returncode == 0 and '--backend rtx' in done.stdout


@pytest.mark.faults
def test_an_unknown_row_and_no_tensorrt(small, tmp_path):
    """The command refuses both. The rows alone are skipped without TensorRT, with the reason."""
    files = '--weights', small.quantized, '--float', small.single, '--data', small.data, '--project', tmp_path
    assert '--only build: allowed are build plain, ' in python(SCRIPT, *files, '--only', 'build', code=2)
    if importlib.util.find_spec('tensorrt') is None:
        assert 'no TensorRT here' in python(SCRIPT, *files, code=2)
        said = python('-m', 'pytest', '-m', 'tensorrt', REPO / 'tests/gpu/verify')
        assert '39 skipped' in said and 'no TensorRT here' in said
    assert not list(tmp_path.iterdir())


def test_the_end_of_a_command_in_words(tmp_path):
    assert reason('a.py', -9, 0, '') == 'a.py was ended by SIGKILL'
    assert reason('a.py', 0, 2, 'fine\n') == 'a.py: exit code 0, not 2: fine'
    assert reason('a.py', 2, 0, 'a.py: error: no\nmore\n') == 'a.py: exit code 2, not 0: no'
    slow = tmp_path / 'slow.py'
    slow.write_text('import time; time.sleep(60)')
    with pytest.raises(pytest.fail.Exception, match=r'slow.py had not ended .*--minutes'):
        CommandRunner(None, {}, tmp_path, 0.0, []).run(slow)


@pytest.mark.parametrize(
    'change, says',
    [
        ({}, None),
        ({'ap_difference': -0.006}, 'AP differs by 0.006'),
        ({'ap_difference': -0.006, 'against_reference': {'chance': 0.002}}, None),
        ({'ap_difference': -0.006, 'against_reference': {'chance': None}}, 'AP differs by 0.006'),
        ({'matched': 0.9}, '90.00% of the top 10 detections'),
        ({'matched_score': 0.03}, 'scores differ by 0.03'),
        ({'matched_mask': 0.5}, 'masks have an IoU of 0.5'),
    ],
)
def test_differences_beyond_the_limits_fail(change, says):
    found = {'reference': {'ap': 0.5}, 'other': {'ap': 0.5}, 'ap_difference': 0.0, 'mask_ap_difference': 0.0}
    found |= {'ranks': [{}], 'top': 10, 'matched': 1.0, 'matched_score': 0.0, 'matched_mask': None, **change}
    if says:
        with pytest.raises(pytest.fail.Exception, match=says):
            within_limits(found)
    else:
        assert within_limits(found).startswith('AP 0.5000, ONNX Runtime 0.5000')
