"""Waiting threads sleep, unless the user chose otherwise; test_each_command.py has when that is said."""

import os
import subprocess
import sys
import textwrap

import onnxruntime
import pytest
from conftest import REPO, TREE

from utils.qat.core.machine import CHOSEN, onnx_options

SET = 'from utils.qat.core.machine import set_environment; set_environment()'
USES = """
import time, torch
x = torch.zeros(torch.get_num_threads() << 16)
x.add_(1)
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(20):
    x.add_(1)
    time.sleep(0.02)
print('busy', (time.process_time() - cpu) / (time.perf_counter() - wall))
"""


def run(*arguments, **variables):
    """stdout of a Python process in the tree; of the user's settings it has only `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in (*CHOSEN, 'OMP_NUM_THREADS')}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=TREE, capture_output=True, text=True, env={**kept, **variables}
    )
    assert not done.returncode, done.stdout + done.stderr[-3000:]
    return done.stdout


def busy(code, **variables):
    """The mean number of busy threads of a process that only waits."""
    return float(run('-c', textwrap.dedent(code) + USES, **variables).split('busy')[-1])


needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason='one CPU: no thread waits for another')


@needs_two
def test_threads_of_pytorch_sleep():
    assert 3 * busy(SET) < busy(SET, OMP_WAIT_POLICY='active')


def entry(options, key):
    """A setting of ONNX Runtime's pool of threads, or None."""
    try:
        return options.get_session_config_entry(f'session.intra_op.{key}')
    except RuntimeError:  # not set
        return None


@pytest.mark.parametrize('version, bounded', [('1.25.1', False), ('1.26.0', True), ('2.0.0', True)])
@pytest.mark.parametrize('choice, asleep', [(None, True), ('passive', True), ('ACTIVE', False)])
def test_threads_of_onnx_runtime(monkeypatch, choice, asleep, version, bounded):
    """They spin for 0.1 ms, or not at all if this version has no bound to set."""
    monkeypatch.setattr(onnxruntime, '__version__', version)
    monkeypatch.delenv('OMP_WAIT_POLICY', raising=False)
    if choice:
        monkeypatch.setenv('OMP_WAIT_POLICY', choice)
    options = onnx_options({'session.disable_quant_qdq': '1'})
    assert entry(options, 'spin_duration_us') == ('100' if asleep and bounded else None)
    assert entry(options, 'allow_spinning') == ('0' if asleep and not bounded else None)
    assert options.get_session_config_entry('session.disable_quant_qdq') == '1'


def test_every_session_has_them():
    """Each session uses `onnx_options`."""
    folders = 'utils', 'models', 'scripts', 'demo', 'benchmarks'
    texts = {file: file.read_text() for folder in folders for file in (REPO / folder).rglob('*.py')}
    made = [file for file in texts if 'InferenceSession(' in texts[file]]
    assert made
    for file in made:
        assert 'onnx_options(' in texts[file], file
