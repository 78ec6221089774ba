"""Runs do not mix, and nothing of a manipulated folder is used, changed or deleted (docs/faults.md has the table)."""

import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TREE
from faults import sampled
from matplotlib.figure import Figure
from zoo import program, python, same

from models.quantize.convert import find_twins
from models.quantize.finetuning.loop import supervised_layers
from models.quantize.finetuning.losses import relative_error
from models.quantize.finetuning.training_step import TrainingStep
from models.quantize.run import stages
from utils.qat.config.qat import EvalConfig
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.core.picture import literal
from utils.qat.core.run_folder import LOCK, run_folder, writing
from utils.qat.run.report import verdict
from utils.qat.run.resume import STATE, read_state
from utils.qat.run.sensitivity_summary import FILE, read_summary
from utils.qat.targets.target import load_target

FORK = multiprocessing.get_context('fork')
COMMON = ('--imgsz', 64, '--batch-size', 4, '--calib-images', 4, '--calib-method', 'mse', '--device', 'cpu')


def quantize(small, project, *more):
    return [
        str(a)
        for a in (
            'quantize',
            '--weights',
            small.single,
            '--data',
            small.data,
            *COMMON,
            '--lr',
            '1e-4',
            '--project',
            project,
            *more,
        )
    ]


def started(small, project, *more):
    """Start a process that fine-tunes; returns it and its folder after its first epoch."""
    process = subprocess.Popen(
        [sys.executable, 'qat.py', *quantize(small, project, '--epochs', 1000, '--no-eval-origin', *more)],
        cwd=TREE,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not (project / 'exp' / STATE).exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process, project / 'exp'


def refusal(argv, capfd, command='qat.py'):
    """The error line of a command that is called in this process."""
    capfd.readouterr()
    code = run_command(program(command).main, [str(a) for a in argv])
    out, err = capfd.readouterr()
    assert code == 2 and 'Traceback' not in out + err, err[-2000:]
    return err.strip().splitlines()[-1]


def content(folder):
    """Everything in a folder except its log: bytes, or the target of a link."""
    return {
        p: p.readlink() if p.is_symlink() else stat.S_IFMT(p.stat().st_mode) if not p.is_file() else p.read_bytes()
        for p in folder.rglob('*')
        if p.name != 'log.txt'
    }


# ---- one writer ---------------------------------------------------------------------------------------------------------


def refused_beside(pid, small, folder, capfd):
    """Check that each command refuses to write to a run's folder while process `pid` does."""
    onnx = folder.parent / 'x.onnx'
    onnx.touch()
    named = '--project', folder.parent, '--name', folder.name, '--exist-ok'
    for command, argv in (
        ('qat.py', ('quantize', '--resume', folder)),
        ('qat.py', quantize(small, folder.parent, '--exist-ok')),
        ('qat.py', ('sensitive', '--weights', small.single, '--data', small.data, *named)),
        ('qat.py', ('eval', '--weights', small.quantized, '--data', small.data, *named)),
        ('val_trt.py', ('--weights', onnx, '--data', small.data, '--device', 'cpu', *named)),
        ('compare_outputs.py', (small.single, small.quantized, '--random', 1, '--device', 'cpu', *named)),
        ('benchmark_trt.py', (small.single, '--imgsz', 64, '--device', 'cpu', *named)),
    ):
        line = refusal(argv, capfd, command)
        assert f'{folder}: process {pid} on ' in line and f'kill {pid}' in line, line


def hold(folder, begun, ended):
    with writing(folder, '--resume'):
        begun.set()
        ended.wait()


def test_a_folder_has_one_writer(small, interrupted, tmp_path, capfd):
    folder, begun, ended = shutil.copytree(interrupted, tmp_path / 'exp'), FORK.Event(), FORK.Event()
    writer = FORK.Process(target=hold, args=(folder, begun, ended))
    writer.start()
    begun.wait()
    try:
        refused_beside(writer.pid, small, folder, capfd)
    finally:
        ended.set()
        writer.join()


@pytest.mark.faults
def test_a_folder_has_one_writer_until_its_process_ends(small, tmp_path, capfd):
    """This holds for a killed process too, whose workers live on for some seconds."""
    process, folder = started(small, tmp_path, '--workers', 2)
    try:
        refused_beside(process.pid, small, folder, capfd)
        workers = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True).stdout.split()
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL and workers and (folder / LOCK).exists()
    with writing(folder, '--resume'):
        assert (folder / LOCK).read_text().split()[0] == str(os.getpid())
    process.stderr.close()


@pytest.mark.faults
def test_killed_workers_cost_an_epoch(small, tmp_path):
    process, folder = started(small, tmp_path, '--workers', 1)
    for worker in subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True).stdout.split():
        os.kill(int(worker), signal.SIGKILL)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 2 and 'Traceback' not in said, said
    line = said.strip().splitlines()[-1]
    assert 'data loading process was killed' in line and '--workers' in line, line
    assert line.endswith(f'go on with: python qat.py quantize --resume {folder}') and [
        f.name for f in folder.rglob('.*')
    ] == [LOCK]


def in_line(folder, gate, found):
    gate.wait()
    with run_folder(EvalConfig(Path('w.pt'), Path('d.yaml'), project=folder, name='exp')) as mine:
        (mine / 'file').write_text('')
        found.put(mine.name)


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    gate, found = FORK.Barrier(8), FORK.Queue()
    several = [FORK.Process(target=in_line, args=(tmp_path / 'new' / 'project', gate, found)) for _ in range(8)]
    for process in several:
        process.start()
    names = sorted(found.get(timeout=30) for _ in several)
    for process in several:
        process.join()
    assert names == ['exp', *(f'exp{n}' for n in range(2, 9))]


def test_what_did_not_come_to_write_leaves_nothing(tmp_path):
    config = EvalConfig(Path('w.pt'), Path('d.yaml'), project=tmp_path / 'new' / 'project')
    with pytest.raises(KeyboardInterrupt), run_folder(config) as folder:
        assert (folder / LOCK).is_file()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_lock_file_that_is_removed_holds_nobody(tmp_path):
    """A process may open the lock file before its holder removes it, and lock it afterwards."""
    with writing(tmp_path, '--resume'):
        old = os.open(tmp_path / LOCK, os.O_RDWR)
    with writing(tmp_path, '--resume'):
        assert not os.path.samestat(os.fstat(old), os.stat(tmp_path / LOCK))
    os.close(old)


def as_nobody(folder, say):
    os.setgid(65534), os.setuid(65534)
    try:
        with writing(folder, '--resume'):
            say.put('taken')
    except (QatError, OSError) as e:
        say.put(f'{type(e).__name__}: {e}')


def test_folders_of_another_user(tmp_path):
    if os.getuid():
        pytest.skip('only root can be another user')

    def asked():
        say = FORK.Queue()
        child = FORK.Process(target=as_nobody, args=(folder, say))
        child.start()
        answer = say.get(timeout=30)
        child.join()
        return answer

    folder = Path(tempfile.mkdtemp())  # pytest's own is closed to others
    try:
        folder.chmod(0o755)
        assert asked().startswith('PermissionError') and not list(folder.iterdir())
        folder.chmod(0o777)
        with writing(folder, '--resume'):
            assert f'process {os.getpid()} on ' in asked()
        (folder / LOCK).write_text('1 elsewhere\n')  # of a process that was killed
        assert asked() == 'taken'
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize('what', ['link', 'folder', 'pipe'])
def test_a_lock_file_that_is_none(tmp_path, what, capfd, small):
    lock, folder = tmp_path / 'exp' / LOCK, tmp_path / 'exp'
    folder.mkdir()
    (tmp_path / 'mine').write_text('mine')
    {'link': lambda: lock.symlink_to(tmp_path / 'mine'), 'folder': lock.mkdir, 'pipe': lambda: os.mkfifo(lock)}[what]()
    before = content(tmp_path)
    assert str(lock) in refusal(quantize(small, tmp_path, '--exist-ok'), capfd) and content(tmp_path) == before


@pytest.mark.faults
def test_torchrun_beside_a_run(interrupted):
    with writing(interrupted, '--resume'):
        said = python(
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc_per_node',
            2,
            'qat.py',
            'quantize',
            '--resume',
            interrupted,
            code=1,
        )
    lines = [line for line in said.splitlines() if ': error: ' in line]
    assert (
        lines[0].startswith(f'qat.py: error: --resume {interrupted}: process {os.getpid()} on ')
        and 'exitcode  : 2 ' in said
    )


# ---- folders that were tampered with ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def interrupted(small, tmp_path_factory):
    """The folder of a run of 3 epochs that was interrupted in the last. Do not write to it."""
    project = tmp_path_factory.mktemp('interrupted')

    def bar(iterable, text, *_, **__):
        for item in iterable:
            if text == 'epoch 3/3':
                raise KeyboardInterrupt
            yield item

    argv = quantize(small, project, '--epochs', 3, '--iters', 1, '--workers', 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, 'bar', bar)
        assert run_command(program('qat.py').main, argv) == 130
    return project / 'exp'


def put(place, value):
    """A change of the state: the value at `place`, a list of keys."""

    def change(folder):
        content = torch.load(folder / STATE, weights_only=False)
        part = content
        for key in place[:-1]:
            part = part[key]
        if value is DELETED:
            del part[place[-1]]
        else:
            part[place[-1]] = (
                value(part.get(place[-1]) if isinstance(part, dict) else part[place[-1]]) if callable(value) else value
            )
        torch.save(content, folder / STATE)

    return change


DELETED = object()
VALUES = {  # name → change
    **{
        f'{k} is {v!r:.20}': put(('settings', k), v)
        for k, v in (
            ('epochs', '3'),
            ('epochs', True),
            ('epochs', 1),
            ('epochs', 0),
            ('epochs', -1),
            ('lr', '1e-4'),
            ('lr', math.nan),
            ('lr', 7),
            ('imgsz', 64.0),
            ('batch_size', 0),
            ('seed', 2**40),
            ('seed', 10**400),
            ('amp', 'fp8'),
            ('exclude', 'model'),
            ('exclude', [1]),
            ('weights', None),
            ('weights', ['w.pt']),
            ('data', 3),
            ('compile', 1),
            ('max_drop', 'a'),
            ('dry_run', True),
            ('percentile', math.inf),
            ('val_split', 0.5),
            ('name', {}),
        )
    },
    **{
        f'time is {v!r:.20}': put(('times', 'calibrate'), v)
        for v in (-1, '3', math.nan, math.inf, None, 10**400, [1], True)
    },
    **{
        f'epoch without {k}': put(('epochs', 0, k), DELETED)
        for k in ('ap', 'precision', 'recall', 'file', 'loss', 'sqnr', 'epoch', 'per_class')
    },
    **{
        f'epoch {k} is {v!r:.20}': put(('epochs', 0, k), v)
        for k, v in (
            ('epoch', 2),
            ('epoch', 0),
            ('epoch', 99),
            ('ap', 1.5),
            ('ap', '0.5'),
            ('ap', math.nan),
            ('loss', None),
            ('per_class', [1]),
            ('mask', {}),
            ('more', 1),
        )
    },
    **{
        f'PTQ file is {v!r:.30}': put(('ptq', 'file'), v)
        for v in (
            3,
            ['weights/x.pt'],
            '/etc/passwd',
            '../x.pt',
            'weights/../../x.pt',
            'weights/.x.pt',
            'report.json',
            'weights/a/b.pt',
            'weights/x\0.pt',
        )
    },
    'too many epochs': put(('epochs',), lambda epochs: epochs * 1000),
    'epochs twice': put(('epochs',), lambda epochs: epochs + epochs[-1:]),
    'an epoch too few': put(('epochs',), []),
    'no PTQ': put(('ptq',), None),
    'no training': put(('training',), None),
    'val': put(('val',), {}),
    'no images': put(('images', 'val'), 0),
    'images is text': put(('images', 'val'), '12'),
    'other images': put(('images', 'test'), 1),
    'held out': put(('images', 'held out'), 3),
    'versions': put(('versions',), {}),
    'machine': put(('machine', 'cpu'), [1]),
    'nested': put(('machine', 'cpu'), json.loads('[' * 200 + ']' * 200)),
    'classes': put(('classes',), {0: 'a'}),
    'not known': put(('more',), 1),
    'format': put(('format',), 1),
    'calibration': put(('calibration',), None),
    'divergence': put(('calibration', 'divergence'), {'mse': 'x'}),
    'changed': put(('changed',), {'after epoch 1': 3}),
    'SQNR': put(('ptq', 'sqnr', 'boxes'), math.nan),
    'resampled gone': put(('resampled',), {'val': {}}),
    'resampled elsewhere': put(('resampled',), lambda of: {'held out': of['val']}),
    **{
        f'resampled {name}': put(('resampled', 'val', 'PTQ'), change)
        for name, change in {
            'cut': lambda values: values[1:],
            'wide': lambda values: np.repeat(values, 2, 1),
            'flat': lambda values: values[:, 0],
            'above 1': lambda values: values + 1,
            'NaN': lambda values: values * math.nan,
            'single': lambda values: values.astype('f4'),
            'list': lambda values: values.tolist(),
        }.items()
    },
}


def linked(name):
    """A change: the file or folder is moved, and a link stands in its place."""

    def change(folder):
        [path] = folder.glob(name)
        elsewhere = folder.parent / f'elsewhere-{path.name}'
        shutil.move(path, elsewhere)
        if elsewhere.is_dir():
            (elsewhere / '.unscored.pt').write_text('mine')
            (elsewhere / '.x.1.tmp.pt').write_text('mine')
        path.symlink_to(elsewhere)

    return change


def tensor(change, part='tensors'):
    """A change of the first tensor that learns, or of its state in the optimizer."""

    def changed(content):
        of = content['state']['tensors'] if part == 'tensors' else content['state']['optimizer'][0]
        name = next(k for k in of if of[k].dim()) if part == 'tensors' else part
        of[name] = change(of[name])

    return changed


def negative_amax(content):
    next(t for k, t in content['state']['tensors'].items() if k.endswith('_amax')).neg_()


STATES = {  # name → change of the training in the state: in place, or what is returned
    'a number': lambda c: 3,
    'a list': lambda c: [c],
    'empty': lambda c: c.clear(),
    'one more': lambda c: {**c, 'more': 1},
    'a key that is a number': lambda c: {**c, 3: 1},
    **{
        f'{k} is {v!r:.12}': lambda c, k=k, v=v: {**c, k: v}
        for k, v in (
            ('number', 9),
            ('number', 1),
            ('number', 3),
            ('number', 0),
            ('number', '2'),
            ('number', 2.0),
            ('loss', math.nan),
            ('loss', torch.ones(1)),
            ('steps', -1),
            ('seconds', math.inf),
            ('state', None),
            ('state', {'tensors': {}}),
            ('state', {'tensors': {}, 'optimizer': {}}),
            ('state', {'tensors': [], 'optimizer': {}}),
        )
    },
    'shape': tensor(lambda t: t[:1]),
    'type': tensor(lambda t: t.double()),
    'NaN': tensor(lambda t: t * math.nan),
    'no tensor': tensor(lambda t: 3),
    'sparse': tensor(lambda t: t.to_sparse()),
    'a tensor gone': lambda c: c['state']['tensors'].popitem() and None,
    'amax': negative_amax,
    'moment shape': tensor(lambda t: t[:1], 'exp_avg'),
    'moment below 0': tensor(lambda t: t - 1, 'exp_avg_sq'),
    'moment NaN': tensor(lambda t: t * math.nan, 'exp_avg'),
    'moment step': tensor(lambda t: t.expand(3), 'step'),
    'no moments': lambda c: c['state']['optimizer'].clear(),
    'moments of none': lambda c: c['state']['optimizer'].update({99_999: {}}),
    'moments that are none': lambda c: c['state']['optimizer'].update({0: 1}),
}


def saved(name):
    """A change of the folder: STATES[name] edits the training in its state."""

    def change(folder):
        content = torch.load(folder / STATE, weights_only=False)
        changed = STATES[name](content['training'])
        if changed is not None:
            content['training'] = changed
        torch.save(content, folder / STATE)

    return change


FILES = {
    'weights is a link': linked('weights'),
    'resume.pt is a link': linked(STATE),
    'PTQ is a link': linked('weights/ptq_*'),
    'log is a link': linked('log.txt'),
    'cut short': lambda folder: os.truncate(folder / STATE, 1000),
    'no archive': lambda folder: (folder / STATE).write_bytes(b'x' * 100),
    'nothing': lambda folder: (folder / STATE).write_bytes(b''),
    'a pipe': lambda folder: ((folder / STATE).unlink(), os.mkfifo(folder / STATE)),
    'a folder': lambda folder: ((folder / STATE).unlink(), (folder / STATE).mkdir()),
    'a number': lambda folder: torch.save(3, folder / STATE),
    'a list': lambda folder: torch.save([3], folder / STATE),
    **{name: saved(name) for name in ('empty', 'number is 9', 'NaN', 'moment shape')},
}
SUMMARIES = {
    **{
        f'{k} is {v!r:.12}': lambda s, k=k, v=v: s['units'][0].update({k: v})
        for k, v in (
            ('distortion', math.nan),
            ('distortion', '1'),
            ('distortion', None),
            ('flops', -1),
            ('flops', 10**30),
            ('flops', 1.5),
            ('twins', []),
            ('twins', 'model'),
            ('twins', [1]),
            ('unit', 3),
            ('more', 1),
            ('estimated', {}),
            ('measured', 3),
            ('ranges', {'a': 'b'}),
        )
    },
    'a unit twice': lambda s: s['units'].append(s['units'][0]),
    'no units': lambda s: s.update(units=[]),
    'a target that nobody has': lambda s: s['settings'].update(target='..x'),
    'no FLOPs': lambda s: s.update(flops=0),
    'images': lambda s: s.update(images=0),
    'times': lambda s: s.update(times={'all': -1}),
    'setting': lambda s: s['settings'].update(seed='x'),
    'setting gone': lambda s: s['settings'].pop('seed'),
    'not known': lambda s: s.update(more=1),
    'kind': lambda s: s.update(kind=['x']),
    'version': lambda s: s.update(version=1.0),
    'int8': lambda s: s['int8'].pop('divergence'),
    'gone': lambda s: s.pop('device'),
}


def broken(folder, change, tmp_path, capfd):
    """The error line of `--resume` on a copy of `folder` after `change`; the command changes no file."""
    copy = tmp_path / 'exp'
    shutil.copytree(folder, copy)
    (copy / 'weights' / '.unscored.pt').write_text('half')  # what --resume would delete
    change(copy)
    before = content(tmp_path)
    line = refusal(('quantize', '--resume', copy), capfd)
    assert content(tmp_path) == before and len(line) < 600 + 2 * len(str(copy)), line
    return line


@pytest.mark.parametrize('name', sampled(VALUES, 3))
def test_values_that_no_run_writes(interrupted, tmp_path, capfd, name):
    assert f'--resume {tmp_path}/exp' in broken(interrupted, VALUES[name], tmp_path, capfd)


@pytest.mark.parametrize('name', sampled(FILES, 4))
def test_files_that_no_run_writes(interrupted, tmp_path, capfd, name):
    line = broken(interrupted, FILES[name], tmp_path, capfd)
    assert f'{tmp_path}/exp' in line and ('link' in line if 'link' in name else STATE in line), line


@pytest.fixture(scope='module')
def step(small):
    student = small.quantized_model()
    return TrainingStep(student, small.float_model(), supervised_layers(student, 1), relative_error, 1e-4)


@pytest.mark.parametrize('name', sampled(STATES, 6))
def test_a_training_that_no_run_writes(interrupted, step, tmp_path, name):
    """Only the part of `--resume` that reads the state runs; FILES has some cases with the whole command."""
    folder = tmp_path / 'exp'
    (folder / STATE).parent.mkdir(parents=True)
    shutil.copy(interrupted / STATE, folder / STATE)
    before = read_state(folder).training['state']
    step.load_state_dict(before)
    saved(name)(folder)
    with pytest.raises((QatError, ValueError)):
        step.load_state_dict(read_state(folder).training['state'])
    assert same(step.state_dict()['tensors'], before['tensors']), 'refused before anything is taken'


@pytest.mark.faults
def test_temporary_files_are_deleted_links_and_folders_are_not(interrupted, tmp_path):
    folder = tmp_path / 'exp'
    shutil.copytree(interrupted, folder)
    (tmp_path / 'mine').write_text('mine')
    (folder / '.report.12.tmp.json').write_text('half')
    (folder / 'weights' / '.unscored.pt').write_text('half')
    (folder / '.notes.tmp.txt').write_text('mine')
    (folder / '.link.12.tmp.json').symlink_to(tmp_path / 'mine')
    (folder / '.folder.12.tmp').mkdir()
    assert run_command(program('qat.py').main, ['quantize', '--resume', str(folder)]) == 0
    assert sorted(p.name for p in folder.rglob('.*')) == ['.folder.12.tmp', '.link.12.tmp.json', LOCK, '.notes.tmp.txt']
    assert (tmp_path / 'mine').read_text() == 'mine'


@pytest.fixture(scope='module')
def summary(small, tmp_path_factory):
    """A summary of a sensitivity analysis, as text."""
    project = tmp_path_factory.mktemp('sensitive')
    assert (
        run_command(
            program('qat.py').main,
            [
                str(a)
                for a in (
                    'sensitive',
                    '--weights',
                    small.single,
                    '--data',
                    small.data,
                    *COMMON,
                    '--workers',
                    0,
                    '--num-image',
                    2,
                    '--granularity',
                    'layer',
                    '--project',
                    project,
                )
            ],
        )
        == 0
    )
    return (project / 'exp' / FILE).read_text()


@pytest.fixture(scope='module')
def twins(small):
    return list(find_twins(small.float_model()))


@pytest.mark.parametrize('name', SUMMARIES)
def test_a_summary_that_no_analysis_writes(small, twins, summary, tmp_path, name):
    """Only the part of `--sensitive` that reads the summary runs."""
    path, spoilt = tmp_path / 'summary.json', json.loads(summary)
    path.write_text(summary)
    assert read_summary(path, sha256(small.single), twins, load_target('tensorrt')) == spoilt
    SUMMARIES[name](spoilt)
    path.write_text(json.dumps(spoilt))
    with pytest.raises(QatError, match=re.escape(f'--sensitive {path}: ')):
        read_summary(path, sha256(small.single), twins, load_target('tensorrt'))


def test_a_summary_that_the_command_refuses(small, summary, tmp_path, capfd):
    path = tmp_path / 'summary.json'
    path.write_text(json.dumps({**json.loads(summary), 'units': []}))
    assert f'--sensitive {path}: ' in refusal(
        ('quantize', '--dry-run', '--weights', small.single, '--sensitive', path, '--keep-float', 1), capfd
    )


# ---- what the system refuses --------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_folder_that_is_deleted_meanwhile(small, tmp_path, capfd, monkeypatch):
    folder = tmp_path / 'exp'

    def bar(iterable, text, *_, **__):
        if text == 'epoch 1/1':
            shutil.rmtree(folder)
        return iterable

    monkeypatch.setattr(stages, 'bar', bar)
    assert (
        run_command(program('qat.py').main, quantize(small, tmp_path, '--epochs', 1, '--iters', 1, '--workers', 0)) == 2
    )
    assert (
        'No such file or directory; it or its folder was moved or deleted meanwhile'
        in capfd.readouterr().err.splitlines()[-1]
    )
    assert not folder.exists()


def evaluating(small, project, *more):
    return [
        'qat.py',
        'eval',
        '--weights',
        small.quantized,
        '--data',
        small.data,
        '--imgsz',
        64,
        '--device',
        'cpu',
        '--project',
        project,
        *more,
    ]


@pytest.mark.parametrize('name', ['loop', 'file', 'file/x', 'loop/x'])
def test_projects_that_are_no_folders(small, tmp_path, capfd, name):
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    (tmp_path / 'file').touch()
    assert f'{tmp_path}/{name.split("/")[0]}' in refusal(evaluating(small, tmp_path / name)[1:], capfd)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.faults
def test_closed_streams(small, tmp_path):
    """With closed streams the work is done, and a mistake still gives exit code 2."""
    for closed, code, *more in (
        ('>&-', 2, '--batch-size', 0),
        ('2>&-', 2, '--batch-size', 0),
        ('>&- 2>&- <&-', 2, '--batch-size', 0),
        ('>&- 2>&- <&-', 0),
    ):
        command = shlex.join([sys.executable, *map(str, evaluating(small, tmp_path, '--workers', 1, *more))])
        done = subprocess.run(['sh', '-c', f'{command} {closed}'], cwd=TREE, capture_output=True, text=True)
        assert done.returncode == code and 'Traceback' not in done.stdout + done.stderr, done.stderr
    assert {p.name for p in (tmp_path / 'exp').iterdir()} == {
        'metrics.json',
        'report.md',
        'classes.png',
        'log.txt',
        'predictions.json',
        '.lock',
    }
    assert (
        json.loads((tmp_path / 'exp/metrics.json').read_text())['ap'] > 0
        and 'Computed on' in (tmp_path / 'exp/report.md').read_text()
    )


@pytest.mark.faults
def test_little_address_space(small, tmp_path):
    said = python(
        '-c',
        'import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (10 ** 9, 10 ** 9)); sys.argv = sys.argv[1:]; '
        'runpy.run_path(sys.argv[0], run_name="__main__")',
        *evaluating(small, tmp_path),
        code=2,
    )
    assert 'error: out of memory (the address space is limited to 1000 MB: ulimit -v)' in said.splitlines()[
        -1
    ] and not list(tmp_path.iterdir())


@pytest.mark.faults
def test_little_shared_memory(small, tmp_path):
    """A worker that cannot hand over its images gives an error; PyTorch alone would wait forever."""
    mounting = [
        'unshare',
        '--mount',
        '--map-root-user',
        'sh',
        '-c',
        'mount -t tmpfs -o size=100k tmpfs /dev/shm && "$@"',
        'sh',
    ]
    if not shutil.which('unshare') or subprocess.run([*mounting, 'true'], capture_output=True).returncode:
        pytest.skip('no /dev/shm of another size can be mounted here')
    done = subprocess.run(
        [*mounting, sys.executable, *map(str, evaluating(small, tmp_path, '--workers', 2))],
        cwd=TREE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and 'Traceback' not in done.stdout + done.stderr, done.stderr
    assert (
        'error: out of shared memory' in done.stderr.splitlines()[-1] and '--workers 0' in done.stderr.splitlines()[-1]
    )


# ---- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_names_are_names(small, tmp_path, monkeypatch, capfd):
    """Braces, %, $, quotes, spaces and a dash first: in files, folders, pictures, and the commands that follow."""
    monkeypatch.chdir(tmp_path)
    name, project, run = '-{x} {score} %d %(a)s $y$ \'".pt', 'a {b} %s $c$', 'ü "q" {0}'
    shutil.copy(small.single, name)
    assert (
        run_command(
            program('qat.py').main,
            [
                str(a)
                for a in (
                    'quantize',
                    '--weights',
                    f'./{name}',
                    '--data',
                    small.data,
                    *COMMON,
                    '--workers',
                    0,
                    '--project',
                    project,
                    '--name',
                    run,
                    '--epochs',
                    1,
                    '--iters',
                    1,
                )
            ],
        )
        == 0
    )
    folder = Path(project, run)
    best = folder / 'weights' / f'qat_best_{name}'
    *_, following = capfd.readouterr().out.strip().splitlines()
    assert shlex.split(following)[:5] == ['next:', 'python', 'export_qat.py', '--weights', str(best)] and best.is_file()
    report = json.loads((folder / 'report.json').read_text())
    assert report['ptq']['file'] == f'weights/ptq_ap_{report["ptq"]["ap"]:.4f}_{name}' and f'--weights={name}' in (
        folder / 'report.md'
    ).read_text().replace("'\"'\"'", "'")
    assert (
        run_command(
            program('benchmark_trt.py').main,
            [f'./{name}', '--imgsz', '64', '--batch', '1', '--duration', '0.01', '--warmup', '0', '--device', 'cpu'],
        )
        == 0
    )
    *_, following = capfd.readouterr().out.strip().splitlines()
    assert shlex.split(following)[-1] == f'./{name}'


def test_names_in_pictures():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1], label=literal('_a $b$ {c} %d'))
    figure.canvas.draw()
    [shown] = axes.legend().get_texts()
    assert shown.get_text().strip().replace(r'\$', '$') == '_a $b$ {c} %d'


# ---- the first sentence of the report -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'difference, chance, says',
    [
        (
            -0.004,
            0.005,
            'INT8 costs nothing that these images show: AP 0.5000, -0.40 ± 0.50 points of AP, within chance, on 72 images',
        ),
        (-0.02, 0.005, 'INT8 costs 2.00 points of AP beyond chance: AP 0.5000'),
        (0.02, 0.005, 'INT8 scores higher than float: AP 0.5000'),
    ],
)
def test_a_verdict_in_one_sentence(difference, chance, says):
    scored = {'ap': 0.5, 'file': 'weights/ptq.pt', 'against_float': {'difference': difference, 'chance': chance}}
    report = {'ptq': scored, 'best': None, 'val': None, 'chosen_on': 'val', 'images': {'val': 72}}
    assert verdict(report).startswith(says) and verdict(report).endswith('; weights/ptq.pt is the model to export.')
    alone = {**report, 'ptq': {'ap': 0.5, 'file': 'f.pt'}}
    assert (
        verdict(alone)
        == 'The INT8 model has AP 0.5000 on 72 images, and the float model was not scored; f.pt is the model to export.'
    )
    assert verdict({**report, 'ptq': {'file': 'f.pt'}}) == 'The INT8 model was not scored; f.pt is the model to export.'
    assert 'not over' in verdict({**report, 'ptq': None})
