"""The environment of a process: under each setting every command works, or ends with one line and exit code 2."""

import os
import resource

import pytest
from helpers.faults import sampled
from helpers.zoo import python

COMMANDS = """
    qat.py reparameterization.py export_qat.py export_yoloV9.py val_trt.py benchmark_trt.py
    compare_outputs.py segment/qat_seg.py classify/qat_cls.py scripts/audit_onnx.py
    scripts/build_engine.py scripts/coco_to_yolo.py scripts/draw_engine.py scripts/infer_onnx.py
""".split()
LIGHT = {'scripts/audit_onnx.py', 'scripts/coco_to_yolo.py', 'scripts/draw_engine.py'}  # without PyTorch
SETTINGS = {  # variables → words of the line, None = it works
    'PYTHONSAFEPATH=1': None,
    'MPLBACKEND=evil': None,
    'RANK=0 WORLD_SIZE=1': None,
    'RANK=0 WORLD_SIZE=1 LOCAL_RANK=0': None,
    'LOCAL_RANK=-1': None,
    'RANK=abc WORLD_SIZE=2': 'RANK=abc: must be a whole number',
    'RANK=2 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=localhost MASTER_PORT=1': 'RANK=2: must be less than WORLD_SIZE=2',
    'PYTHONOPTIMIZE=2': 'unset PYTHONOPTIMIZE',
}
EACH = [(command, setting) for setting in SETTINGS for command in COMMANDS]


def variables(setting):
    return {**os.environ, **dict(word.split('=') for word in setting.split())}


def one_line(said, words):
    """Whether a refusal is one line with these words."""
    return ': error: ' in said and words in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize('command, setting', sampled(EACH, 15))
def test_each_command_starts_or_says_why_not(command, setting):
    refused = SETTINGS[setting]
    said = python(command, '-h', env=variables(setting), code=2 if refused else 0)
    assert one_line(said, refused) if refused else 'usage: ' in said


@pytest.mark.faults
@pytest.mark.parametrize('setting', [setting for setting, refused in SETTINGS.items() if not refused])
def test_a_job_under_each_setting(small, tmp_path, setting):
    scored = ('--data', small.data, '--imgsz', 64, '--device', 'cpu', '--project', tmp_path, '--workers', 1)
    python('qat.py', 'eval', '--weights', small.single, *scored, env=variables(setting))
    assert list(tmp_path.rglob('metrics.json'))


@pytest.mark.faults
def test_a_torchrun_whose_processes_cannot_meet(small, tmp_path):
    setting = 'RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=99999'
    said = python('qat.py', 'eval', '--weights', small.single, '--data', small.data, env=variables(setting), code=2)
    assert one_line(said, 'the processes of torchrun do not find each other')


@pytest.mark.parametrize('command', sampled(COMMANDS, 5))
def test_a_small_address_space(command):
    """PyTorch's libraries would end the process there, or crash; commands without PyTorch work."""
    said = python(
        command,
        '-h',
        code=0 if command in LIGHT else 2,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 10**9,) * 2),
    )
    assert 'usage: ' in said if command in LIGHT else one_line(said, 'limited to 3000 MB: ulimit -v')
