"""scripts/verify_tensorrt.py: it goes on after a failure, names what it could not check, and its exit code is that of its rows.

TensorRT itself is not here. TensorRT-RTX builds the engines of the slow test. In the others a stand-in takes the place of TensorRT's Python
interface: stand_in/tensorrt.py.
"""

import importlib.util
import json
import os
import subprocess

import classifiers
import pytest
from conftest import REPO
from zoo import command, python

from command_runner import CommandRunner, reason
from kinds import within_limits
from models.quantize import checkpoint

SCRIPT = REPO / 'scripts/verify_tensorrt.py'
STAND_IN = REPO / 'tests/engine/stand_in'
NAMES = json.loads((REPO / 'tests/data/tensorrt_api.json').read_text())['10.13']
TRTEXEC = """#!/bin/sh
echo '&&&& RUNNING TensorRT.trtexec [TensorRT v101303]'
for a; do case $a in --saveEngine=*) printf 'an engine of a stand-in' > "${a#*=}";; esac; done
"""


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
    checkpoint.save_quantized(folder / 'class.pt', model, {'imgsz': [classifiers.SIZE] * 2}, '0' * 64)
    return '--classify', folder / 'class.pt', '--classify-data', classifiers.write_images(folder / 'classes')


def stand_in(tmp_path, **more):
    """The environment in which the stand-ins are TensorRT and trtexec."""
    trtexec = tmp_path / 'bin' / 'trtexec'
    trtexec.parent.mkdir()
    trtexec.write_text(TRTEXEC)
    trtexec.chmod(0o755)
    paths = {
        'PATH': f'{trtexec.parent}:{os.environ["PATH"]}',
        'PYTHONPATH': os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get('PYTHONPATH')])]),
    }
    return {**os.environ, **paths, 'STAND_IN_RECORD': str(tmp_path / 'record'), **more}


@pytest.mark.faults
def test_it_goes_on_after_a_crash(small, tmp_path):
    """The stand-in ends the process that builds DeepStream's file, as a fault of TensorRT can."""
    rows = 'build plain', 'build deepstream', 'timing cache', 'trtexec plain', 'outputs plain', 'outputs deepstream'
    environment = stand_in(tmp_path, STAND_IN_CRASH='deepstream', CUDA_VISIBLE_DEVICES='')
    found, report = verify(small, tmp_path, '--imgsz', 64, '--only', *rows, code=1, **environment)
    assert list(found) == list(rows)
    assert found['build plain'][0] == found['timing cache'][0] == found['trtexec plain'][0] == 'pass'
    assert found['build deepstream'] == ('fail', 'scripts/build_engine.py was ended by SIGSEGV')
    assert found['outputs plain'][0] == 'skip' and 'no NVIDIA GPU' in found['outputs plain'][1]
    assert found['outputs deepstream'] == ('skip', 'needs build deepstream')
    assert report['verdict'].startswith(
        'TensorRT 10.13.3+stand-in on a machine without a GPU: 3 passed, 1 failed, 2 skipped'
    )
    assert report['machine']['described']['versions']['trtexec'] == 'TensorRT 10.13.3'
    asked = set((tmp_path / 'record').read_text().split())
    assert {'Builder.build_serialized_network', 'IBuilderConfig.set_timing_cache', 'IBuilderConfig.set_flag'} <= asked
    assert not [name for name in asked if name.split('.')[1] not in NAMES[name.split('.')[0]]]


def test_a_classifier_has_its_own_size_and_images(small, tmp_path):
    words = *classifier(tmp_path), '--only', 'build classify', 'outputs classify'
    found, _ = verify(small, tmp_path, *words, **stand_in(tmp_path, CUDA_VISIBLE_DEVICES=''))
    assert found['build classify'][0] == 'pass' and found['outputs classify'][0] == 'skip'
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


@pytest.mark.gpu
def test_engines_run_on_a_gpu(small, tmp_path):
    """ONNX Runtime cannot be recorded, so a CUDA graph of the stand-in does nothing: a wrong result is found."""
    rows = 'build plain', 'outputs plain', 'other GPU', 'cut', 'cut alone', 'CUDA graph'
    found, _ = verify(small, tmp_path, '--imgsz', 64, '--only', *rows, code=1, **stand_in(tmp_path))
    assert [status for status, _ in found.values()] == ['pass'] * 5 + ['fail'], found
    assert 'other outputs than without a graph' in found['CUDA graph'][1]


@pytest.mark.slow
def test_the_whole_table_with_tensorrt_rtx(demo, demo_seg, tmp_path):
    pytest.importorskip('tensorrt_rtx_bindings', reason='no TensorRT-RTX: ./install_dependencies.sh --tests')
    masks = '--segment', demo_seg.quantized, '--segment-data', demo_seg.data, *classifier(tmp_path)
    environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
    found, _ = verify(demo, tmp_path, *masks, '--imgsz', 128, '--backend', 'rtx', **environment)
    built = {name.removeprefix('build '): status for name, (status, _) in found.items() if name.startswith('build ')}
    lacks = {'end2end', 'plugin', 'segment-end2end'}
    assert built == {kind: 'skip' if kind in lacks else 'pass' for kind in built} and len(built) == 12, found
    assert 'NonMaxSuppression' in found['build end2end'][1] and 'Plugin not found' in found['build plugin'][1]
    assert found['timing cache'][0] == 'pass'
    assert {status for name, (status, _) in found.items() if not name.startswith(('build', 'timing'))} == {'skip'}


def test_bad_input_is_one_line_and_leaves_nothing(small, tmp_path):
    files = '--weights', small.quantized, '--float', small.single, '--data', small.data, '--project', tmp_path
    for masks, says in (
        (('--segment', small.quantized), 'give both or none'),
        (('--segment', 'none.pt', '--segment-data', 'd'), 'no such file'),
    ):
        assert says in command('scripts/verify_tensorrt.py', *files, *masks, code=2)
    assert not list(tmp_path.iterdir())
    done = subprocess.run([REPO / 'scripts/verify_tensorrt.sh', '-h'], capture_output=True, text=True)
    assert done.returncode == 0 and '--backend rtx' in done.stdout


@pytest.mark.faults
def test_an_unknown_row_and_no_tensorrt(small, tmp_path):
    """The command refuses both. The rows alone are skipped without TensorRT, with the reason."""
    files = '--weights', small.quantized, '--float', small.single, '--data', small.data, '--project', tmp_path
    assert '--only build: allowed are build plain, ' in python(SCRIPT, *files, '--only', 'build', code=2)
    if importlib.util.find_spec('tensorrt') is None:
        assert 'no TensorRT here' in python(SCRIPT, *files, code=2)
        said = python('-m', 'pytest', '-m', 'tensorrt', REPO / 'tests/verify')
        assert '37 skipped' in said and 'no TensorRT here' in said
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
