"""A small round of tests/mutate.py, on this tree; docs/faults.md has the large one."""

import os
import subprocess
import sys

import pytest
from conftest import REPO, UPSTREAM
from mutate import KINDS
from mutations import FORMATS

pytestmark = pytest.mark.faults

COUNT = 4  # of each kind; the large round has 1000


def run(*arguments):
    return subprocess.run(
        [sys.executable, REPO / 'tests/mutate.py', '--tree', UPSTREAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def test_every_kind_has_its_changes():
    assert set(FORMATS) == set(KINDS)


def test_a_small_round():
    done = run('--count', COUNT)
    assert not done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    for kind in KINDS:
        assert f'| {kind} | {COUNT} |' in done.stdout


BREAKS = """
import sys
sys.path.insert(0, {tests!r})
sys.argv = ['mutate.py', '--tree', {tree!r}, '--kind', 'label', '--count', '18', '--limit', '10', '--seed', '1']
import os, pathlib, signal, time
import conftest, mutate, utils.qat.data.dataset

def check_dropped(files, data):
    '''A traceback, a hang or a crash, where labels are refused.'''
    if files:
        number = int(pathlib.Path.cwd().parent.name.split('-')[-1])
        if number % 3 == 0:
            raise KeyError('a bug')
        time.sleep(60) if number % 3 == 1 else os.kill(os.getpid(), signal.SIGSEGV)

utils.qat.data.dataset.check_dropped = check_dropped
sys.exit(mutate.main())
"""


def test_it_finds_bugs():
    done = subprocess.run(
        [sys.executable, '-c', BREAKS.format(tests=str(REPO / 'tests'), tree=str(UPSTREAM))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    for said in (
        'failures: ',
        "KeyError: 'a bug'",
        'not done after 10.0 s',
        'exit code -11',
        '--kind label --seed 1 --only',
    ):
        assert said in done.stdout, done.stdout
