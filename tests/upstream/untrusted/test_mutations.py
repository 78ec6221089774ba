"""Random changes of each kind of file (faults.KINDS): the command ends well or with a refusal, in time, and leaves nothing behind.

    ./run_tests.sh --faults tests/upstream/untrusted/test_mutations.py -n 4 --dist load --mutations 1000 --seed 1
    ./run_tests.sh --faults tests/upstream/untrusted/test_mutations.py -n 0 --mutations 32 --seed 1 -k onnx-31    one of them again

Number N of a kind follows from the seed, the kind and N alone. A case is a call of a command in a process of its own, forked from one
that has the libraries loaded, with limits on time and memory.
"""

import os
import random
import signal
import time
from functools import partial

import pytest
from helpers.faults import KINDS, PATCH, judged, lay, limited
from helpers.mutations import FORMATS, mutated

import utils.qat.data.dataset

pytestmark = pytest.mark.faults

MEMORY = 16 << 30  # of address space
SAID = '.stdout', '.stderr'
LEFT = 'log.txt', 'exp', 'out', 'mobilenet_v3_small.pt', '.lock'  # what a refusal in the middle of the work leaves
CALIBRATED = (
    'report.json',
    'report.md',
    'weights',
)  # and `quantize`, which may meet an unreadable image of val when it has calibrated


def pytest_generate_tests(metafunc):
    if 'number' in metafunc.fixturenames:
        numbers = range(metafunc.config.getoption('mutations'))
        metafunc.parametrize(
            'kind, number', [(k, n) for k in KINDS for n in numbers], ids=lambda it: str(it).replace(' ', '_')
        )


@pytest.fixture
def attempt(material, tmp_path, pytestconfig):
    """Callable: a reader → its exit code and last line, called in the folder of the test."""

    def attempted(reader, seconds=60, within=limited):
        command, *words = reader.split()
        argv = [str(material[w[1:]]) if w.startswith('@') else w for w in words]
        before = set(tmp_path.rglob('*'))
        code = pytestconfig.forker(within, command, argv, tmp_path, seconds, MEMORY)
        out, err = ((tmp_path / name).read_text(errors='replace') for name in SAID)
        assert code != -signal.SIGALRM, f'{reader}: not done after {seconds} s\n{err[-2000:]}'
        left = (*LEFT, *SAID, *(CALIBRATED if reader.startswith('qat.py quantize') else ()))
        made = {f for f in tmp_path.rglob('*') if f.suffix != '.cache' and f.name not in left} - before
        allowed = (0, 1, 2) if '--check' in reader else (0, 2)  # 1: the tree is not patched as it should be
        return code, judged(command, argv, code, out, err, made if command != PATCH else (), allowed)

    return attempted


def test_every_kind_has_its_changes():
    assert FORMATS.keys() == KINDS.keys()


def test_a_mutation(material, tmp_path, attempt, pytestconfig, kind, number):
    chance, done = random.Random(f'{pytestconfig.getoption("seed")} {kind} {number}'), []

    def change(whole):
        what, content = mutated(kind, whole, chance)
        done.append(what)
        return content

    lay(material, kind, tmp_path, change, chance.choice)
    (tmp_path / 'beside').write_text('not of the case')
    reader = KINDS[kind].readers[number % len(KINDS[kind].readers)]
    print(f'{kind} {number}: {done[0]}; {reader}')
    attempt(reader)
    assert (tmp_path / 'beside').read_text() == 'not of the case'


REFUSED_WHOLE = 'sidecar', 'report'  # without a GPU; of a run that cannot go on


@pytest.mark.parametrize('kind, reader', [(kind, reader) for kind in KINDS for reader in KINDS[kind].readers])
def test_a_whole_file_is_read(material, tmp_path, attempt, kind, reader):
    """Or its mutations would show nothing."""
    lay(material, kind, tmp_path)
    code, line = attempt(reader)
    assert code == (2 if kind in REFUSED_WHOLE else 0), line


BUGS = {
    "KeyError: 'a bug'": lambda *_: {}['a bug'],
    'not done after 5 s': lambda *_: time.sleep(60),
    ': -11\n': lambda *_: os.kill(os.getpid(), signal.SIGSEGV),
}


def with_bug(bug, *arguments):
    utils.qat.data.dataset.require_readable = [*BUGS.values()][bug]
    return limited(*arguments)


@pytest.mark.parametrize('bug, says', enumerate(BUGS), ids=['traceback', 'hang', 'crash'])
def test_bugs_are_found(material, tmp_path, attempt, bug, says):
    lay(material, 'label', tmp_path, lambda whole: b'3 nan 0.5 0.2 0.2')
    with pytest.raises(AssertionError, match=says):
        attempt(KINDS['label'].readers[0], seconds=5, within=partial(with_bug, bug))
