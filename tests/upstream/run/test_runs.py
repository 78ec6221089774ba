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
from helpers.commands import scores, state_of
from helpers.faults import sampled
from helpers.zoo import command, interrupt, program, python, same
from matplotlib.figure import Figure

from models.quantize.convert import find_twins
from models.quantize.finetuning.loop import supervised_layers
from models.quantize.finetuning.training_step import TrainingStep
from models.quantize.run import stages
from utils.qat.config.qat import EvalConfig
from utils.qat.config.tables import load_target
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.core.run_folder import LOCK, run_folder, writing
from utils.qat.core.text import literal
from utils.qat.run.report import conclusions, headline
from utils.qat.run.resume import read_state
from utils.qat.run.sensitivity_summary import FILE, read_summary
from utils.qat.run.state import STATE, Stage

FORK = multiprocessing.get_context('fork')
ON_CPU = ('--imgsz', 64, '--device', 'cpu')
QUICK = (*ON_CPU, *'--batch-size 4 --calib-images 4 --calib-method mse'.split())


def quantize(small, project, *more):
    given = '--weights', small.single, '--data', small.data, '--project', project
    return 'qat.py', 'quantize', *given, *QUICK, '--lr', '1e-4', *more


def evaluate(small, project, *more):
    return 'qat.py', 'eval', '--weights', small.quantized, '--data', small.data, *ON_CPU, '--project', project, *more


def started(small, project, *more):
    """Start a process that fine-tunes; returns it and its folder after its first epoch."""
    words = quantize(small, project, '--epochs', 1000, '--no-eval-origin', *more)
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=TREE,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not list(project.glob('exp/weights/qat_ep_1_*')):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    return process, project / 'exp'


def children(process):
    found = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True).stdout
    return list(map(int, found.split()))


def refusal(file, *arguments):
    """The last line of a command that ends with exit code 2."""
    said = command(file, *arguments, code=2)
    assert 'Traceback' not in said, said[-2000:]
    return said.strip().splitlines()[-1]


def content(folder):
    """Everything in a folder except its log: bytes, or the target of a link."""

    def of(path):
        if path.is_symlink():
            return path.readlink()
        return path.read_bytes() if path.is_file() else stat.S_IFMT(path.stat().st_mode)

    return {path: of(path) for path in folder.rglob('*') if path.name != 'log.txt'}


# ---- one writer ---------------------------------------------------------------------------------------------------------


def refused_beside(pid, small, folder):
    """Check that each command refuses to write to a run's folder while process `pid` does."""
    onnx = folder.parent / 'x.onnx'
    onnx.touch()
    named = '--project', folder.parent, '--name', folder.name, '--exist-ok'
    data = '--data', small.data
    for words in (
        ('qat.py', 'quantize', '--resume', folder),
        quantize(small, folder.parent, '--exist-ok'),
        ('qat.py', 'sensitive', '--weights', small.single, *data, *named),
        ('qat.py', 'eval', '--weights', small.quantized, *data, *named),
        ('val_trt.py', '--weights', onnx, *data, '--device', 'cpu', *named),
        ('compare_outputs.py', small.single, small.quantized, '--random', 1, '--device', 'cpu', *named),
        ('benchmark_trt.py', small.single, *ON_CPU, *named),
    ):
        line = refusal(*words)
        assert f'{folder}: process {pid} on ' in line and f'kill {pid}' in line, line


def hold(folder, begun, ended):
    with writing(folder, '--resume'):
        begun.set()
        ended.wait()


def test_a_folder_has_one_writer(small, interrupted, tmp_path):
    folder, begun, ended = shutil.copytree(interrupted, tmp_path / 'exp'), FORK.Event(), FORK.Event()
    writer = FORK.Process(target=hold, args=(folder, begun, ended))
    writer.start()
    begun.wait()
    try:
        refused_beside(writer.pid, small, folder)
    finally:
        ended.set()
        writer.join()


@pytest.mark.faults
def test_a_folder_has_one_writer_until_its_process_ends(small, tmp_path):
    """This holds for a killed process too, whose workers live on for some seconds."""
    process, folder = started(small, tmp_path, '--workers', 2)
    try:
        refused_beside(process.pid, small, folder)
        workers = children(process)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL and workers and (folder / LOCK).exists()
    with writing(folder, '--resume'):
        assert (folder / LOCK).read_text().split()[0] == str(os.getpid())
    process.stderr.close()


@pytest.mark.faults
def test_killed_workers_cost_an_epoch(small, tmp_path):
    process, folder = started(small, tmp_path, '--workers', 1)
    subprocess.run(['pkill', '-KILL', '-P', str(process.pid)], check=True)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 2 and 'Traceback' not in said, said
    line = said.strip().splitlines()[-1]
    assert 'data loading process was killed' in line and '--workers' in line, line
    assert line.endswith(f'go on with: python qat.py quantize --resume {folder}')
    assert [f.name for f in folder.rglob('.*')] == [LOCK]


def started_at_once(folder, gate, names):
    gate.wait()
    with run_folder(EvalConfig(Path('w.pt'), Path('d.yaml'), project=folder, name='exp')) as mine:
        (mine / 'file').write_text('')
        names.put(mine.name)


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path):
    gate, names = FORK.Barrier(8), FORK.Queue()
    arguments = tmp_path / 'new' / 'project', gate, names
    several = [FORK.Process(target=started_at_once, args=arguments) for _ in range(8)]
    for process in several:
        process.start()
    assert sorted(names.get() for _ in several) == ['exp', *(f'exp{n}' for n in range(2, 9))]
    for process in several:
        process.join()


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


def test_folders_of_another_user():
    if os.getuid():
        pytest.skip('only root can be another user')

    def answer_to_nobody():
        say = FORK.Queue()
        child = FORK.Process(target=as_nobody, args=(folder, say))
        child.start()
        answer = say.get(timeout=30)
        child.join()
        return answer

    folder = Path(tempfile.mkdtemp())  # pytest's own is closed to others
    try:
        folder.chmod(0o755)
        assert answer_to_nobody().startswith('PermissionError') and not list(folder.iterdir())
        folder.chmod(0o777)
        with writing(folder, '--resume'):
            assert f'process {os.getpid()} on ' in answer_to_nobody()
        (folder / LOCK).write_text('1 elsewhere\n')  # of a process that was killed
        assert answer_to_nobody() == 'taken'
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize('what', ['link', 'folder', 'pipe'])
def test_a_lock_file_that_is_none(tmp_path, what, small):
    lock, folder = tmp_path / 'exp' / LOCK, tmp_path / 'exp'
    folder.mkdir()
    (tmp_path / 'mine').write_text('mine')
    {'link': lambda: lock.symlink_to(tmp_path / 'mine'), 'folder': lock.mkdir, 'pipe': lambda: os.mkfifo(lock)}[what]()
    before = content(tmp_path)
    assert str(lock) in refusal(*quantize(small, tmp_path, '--exist-ok')) and content(tmp_path) == before


@pytest.mark.faults
def test_torchrun_beside_a_run(interrupted):
    torchrun = '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2
    with writing(interrupted, '--resume'):
        said = python(*torchrun, 'qat.py', 'quantize', '--resume', interrupted, code=1)
    line = next(line for line in said.splitlines() if ': error: ' in line)
    assert line.startswith(f'qat.py: error: --resume {interrupted}: process {os.getpid()} on ')
    assert 'exitcode  : 2 ' in said


# ---- folders that were tampered with ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def interrupted(small, tmp_path_factory):
    """The folder of a run of 3 epochs that was interrupted in the last. Do not write to it."""
    project = tmp_path_factory.mktemp('interrupted')
    interrupt('epoch 3/3', 0, *quantize(small, project, '--epochs', 3, '--iters', 1, '--workers', 0))
    return project / 'exp'


DELETED = object()


def put(place, value):
    """A change of the state: the value at `place`, such as 'epochs.0.ap'. A function gets the value that is there."""
    *parents, last = (int(key) if key.isdigit() else key for key in place.split('.'))

    def change(folder):
        state = part = torch.load(folder / STATE, weights_only=False)
        for key in parents:
            part = part[key]
        if value is DELETED:
            del part[last]
        else:
            part[last] = value(part[last]) if callable(value) else value
        torch.save(state, folder / STATE)

    return change


def put_each(values):
    """Changes of the state. values: place → the values that it gets, one after the other."""
    return {f'{place} is {value!r:.20}': put(place, value) for place in values for value in values[place]}


NO_FILES = (
    '/etc/passwd',
    '../x.pt',
    'weights/../../x.pt',
    'weights/.x.pt',
    'report.json',
    'weights/a/b.pt',
    'weights/x\0.pt',
)
OF_NO_RUN = {  # place → values; tests/unit/test_json_schema.py has what a kind of value finds
    'settings.epochs': ['3', 0],
    'settings.lr': [math.nan, 7],
    'settings.weights': [None, ['w.pt']],
    'settings.dry_run': [True],
    'settings.val_split': [0.5],
    'times.calibrate': [math.nan, 10**400],
    'epochs': [[]],  # one too few
    'epochs.0.epoch': [2, 0, 99],
    'epochs.0.ap': [1.5],
    'epochs.0.mask': [{}],
    'ptq': [None],
    'ptq.file': [3, ['weights/x.pt'], *NO_FILES],
    'training': [None],
    'images.held out': [3],
    'machine.cpu': [json.loads('[' * 200 + ']' * 200)],
    'more': [1],
    'format': [1],
    'calibration': [None],
    'resampled': [{'val': {}}],
}
RESAMPLED = {
    'cut': lambda values: values[1:],
    'wide': lambda values: np.repeat(values, 2, 1),
    'flat': lambda values: values[:, 0],
    'above 1': lambda values: values + 1,
    'NaN': lambda values: values * math.nan,
    'single': lambda values: values.astype('f4'),
    'list': lambda values: values.tolist(),
}
VALUES = {  # name → change
    **put_each(OF_NO_RUN),
    'epoch without AP': put('epochs.0.ap', DELETED),
    'too many epochs': put('epochs', lambda epochs: epochs * 1000),
    'epochs twice': put('epochs', lambda epochs: epochs + epochs[-1:]),
    'resampled elsewhere': put('resampled', lambda of: {'held out': of['val']}),
    **{f'resampled {name}': put('resampled.val.PTQ', change) for name, change in RESAMPLED.items()},
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


def first_tensor(change):
    """A change of the state: the first tensor that learns and is no number."""

    def changed(tensors):
        name = next(name for name in tensors if tensors[name].dim())
        return {**tensors, name: change(tensors[name])}

    return put('training.state.tensors', changed)


TRAININGS = {  # place → values
    'training': [3, {}],
    'training.number': [9, 1, 3],
    'training.loss': [torch.ones(1)],
    'training.state': [None, {'tensors': {}}, {'tensors': {}, 'optimizer': {}}, {'tensors': [], 'optimizer': {}}],
    'training.state.optimizer': [{}],
    'training.state.optimizer.0': [1],
    'training.state.optimizer.99999': [{}],  # moments of no tensor
}
STATES = {  # name → change of the training in the state
    **put_each(TRAININGS),
    'a list': put('training', lambda training: [training]),
    'shape': first_tensor(lambda t: t[:1]),
    'type': first_tensor(lambda t: t.double()),
    'NaN': first_tensor(lambda t: t * math.nan),
    'no tensor': first_tensor(lambda t: 3),
    'sparse': first_tensor(lambda t: t.to_sparse()),
    'a tensor gone': put('training.state.tensors', lambda tensors: dict(list(tensors.items())[1:])),
    'amax': put('training.state.tensors', lambda of: {k: -t if k.endswith('_amax') else t for k, t in of.items()}),
    'moment shape': put('training.state.optimizer.0.exp_avg', lambda t: t[:1]),
    'moment below 0': put('training.state.optimizer.0.exp_avg_sq', lambda t: t - 1),
    'moment NaN': put('training.state.optimizer.0.exp_avg', lambda t: t * math.nan),
    'moment step': put('training.state.optimizer.0.step', lambda t: t.expand(3)),
}


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
    **{name: STATES[name] for name in ('training is {}', 'training.number is 9', 'NaN', 'moment shape')},
}
SUMMARIES = {
    'a kind of value': lambda s: s['units'][0].update(distortion=math.nan),
    'no twins': lambda s: s['units'][0].update(twins=[]),
    'a unit twice': lambda s: s['units'].append(s['units'][0]),
    'no units': lambda s: s.update(units=[]),
    'a target that nobody has': lambda s: s['settings'].update(target='..x'),
    'no FLOPs': lambda s: s.update(flops=0),
    'setting gone': lambda s: s['settings'].pop('seed'),
    'kind': lambda s: s.update(kind=['x']),
    'another version': lambda s: s.update(version=99),
    'of another checkpoint': lambda s: s.update(weights_sha256='0'),
    'no unit model.99': lambda s: s['units'][0].update(unit='model.99', twins=['model.99.conv']),
}


def broken(folder, change, tmp_path):
    """The error line of `--resume` on a copy of `folder` after `change`; the command changes no file."""
    copy = tmp_path / 'exp'
    shutil.copytree(folder, copy)
    (copy / 'weights' / '.unscored.pt').write_text('half')  # what --resume would delete
    change(copy)
    before = content(tmp_path)
    line = refusal('qat.py', 'quantize', '--resume', copy)
    assert content(tmp_path) == before and len(line) < 600 + 2 * len(str(copy)), line
    return line


@pytest.mark.parametrize('name', sampled(VALUES, 3))
def test_values_that_no_run_writes(interrupted, tmp_path, name):
    assert f'--resume {tmp_path}/exp' in broken(interrupted, VALUES[name], tmp_path)


@pytest.mark.parametrize('name', sampled(FILES, 4))
def test_files_that_no_run_writes(interrupted, tmp_path, name):
    line = broken(interrupted, FILES[name], tmp_path)
    assert f'{tmp_path}/exp' in line and ('link' in line if 'link' in name else STATE in line), line


@pytest.fixture(scope='module')
def step(small):
    student = small.quantized_model()
    return TrainingStep(student, small.float_model(), supervised_layers(student, 1), 1e-4)


@pytest.mark.parametrize('name', sampled(STATES, 6))
def test_a_training_that_no_run_writes(interrupted, step, tmp_path, name):
    """Only the part of `--resume` that reads the state runs; FILES has some cases with the whole command."""
    folder = tmp_path / 'exp'
    (folder / STATE).parent.mkdir(parents=True)
    shutil.copy(interrupted / STATE, folder / STATE)
    before = read_state(folder).training['state']
    step.load_state_dict(before)
    STATES[name](folder)
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
    command('qat.py', 'quantize', '--resume', folder)
    assert sorted(p.name for p in folder.rglob('.*')) == ['.folder.12.tmp', '.link.12.tmp.json', LOCK, '.notes.tmp.txt']
    assert (tmp_path / 'mine').read_text() == 'mine'


@pytest.fixture(scope='module')
def summary(small, tmp_path_factory):
    """A summary of a sensitivity analysis, as text."""
    project = tmp_path_factory.mktemp('sensitive')
    given = '--weights', small.single, '--data', small.data, '--project', project
    command('qat.py', 'sensitive', *given, *QUICK, *'--workers 0 --num-image 2 --granularity layer'.split())
    return (project / 'exp' / FILE).read_text()


@pytest.fixture(scope='module')
def twins(small):
    return list(find_twins(small.float_model()))


@pytest.mark.parametrize('name', SUMMARIES)
def test_a_summary_that_no_analysis_writes(small, twins, summary, tmp_path, name):
    """Only the part of `--sensitive` that reads the summary runs."""
    path, spoilt = tmp_path / 'summary.json', json.loads(summary)

    def read():
        return read_summary(path, sha256(small.single), twins, load_target('tensorrt'))

    path.write_text(summary)
    assert read() == spoilt
    SUMMARIES[name](spoilt)
    path.write_text(json.dumps(spoilt))
    with pytest.raises(QatError, match=re.escape(f'--sensitive {path}: ')) as refused:
        read()
    assert not name.startswith(('of another', 'no unit model')) or name in str(refused.value)


def test_a_summary_that_the_command_refuses(small, summary, tmp_path):
    path = tmp_path / 'summary.json'
    spoilt = json.dumps({**json.loads(summary), 'units': []})
    for content, number, says in (
        (spoilt, 1, f'--sensitive {path}: '),
        (summary, 99, 'one at least must be quantized'),
    ):
        path.write_text(content)
        chosen = '--sensitive', path, '--keep-float', number
        assert says in refusal('qat.py', 'quantize', '--dry-run', '--weights', small.single, *chosen)


# ---- what the system refuses --------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_folder_that_is_deleted_meanwhile(small, tmp_path, monkeypatch):
    folder = tmp_path / 'exp'

    def bar(iterable, text, *_, **__):
        if text == 'epoch 1/1':
            shutil.rmtree(folder)
        return iterable

    monkeypatch.setattr(stages, 'bar', bar)
    line = refusal(*quantize(small, tmp_path, '--epochs', 1, '--iters', 1, '--workers', 0))
    assert 'No such file or directory; it or its folder was moved or deleted meanwhile' in line
    assert not folder.exists()


@pytest.mark.parametrize('name', ['loop', 'file', 'file/x', 'loop/x'])
def test_projects_that_are_no_folders(small, tmp_path, name):
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    (tmp_path / 'file').touch()
    assert f'{tmp_path}/{name.split("/")[0]}' in refusal(*evaluate(small, tmp_path / name))
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
        typed = shlex.join([sys.executable, *map(str, evaluate(small, tmp_path, '--workers', 1, *more))])
        done = subprocess.run(['sh', '-c', f'{typed} {closed}'], cwd=TREE, capture_output=True, text=True)
        assert done.returncode == code and 'Traceback' not in done.stdout + done.stderr, done.stderr
    made = 'metrics.json report.md classes.png log.txt predictions.json .lock'
    assert {p.name for p in (tmp_path / 'exp').iterdir()} == {*made.split()}
    assert json.loads((tmp_path / 'exp/metrics.json').read_text())['ap'] > 0
    assert 'Computed on' in (tmp_path / 'exp/report.md').read_text()


@pytest.mark.faults
def test_little_shared_memory(small, tmp_path):
    """A worker that cannot hand over its images gives an error; PyTorch alone would wait forever."""
    mount = 'mount -t tmpfs -o size=100k tmpfs /dev/shm && "$@"'
    mounting = ['unshare', '--mount', '--map-root-user', 'sh', '-c', mount, 'sh']
    if not shutil.which('unshare') or subprocess.run([*mounting, 'true'], capture_output=True).returncode:
        pytest.skip('no /dev/shm of another size can be mounted here')
    typed = [*mounting, sys.executable, *map(str, evaluate(small, tmp_path, '--workers', 2))]
    done = subprocess.run(typed, cwd=TREE, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and 'Traceback' not in done.stdout + done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert 'error: out of shared memory' in line and '--workers 0' in line


# ---- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_names_are_names(small, tmp_path, monkeypatch, capfd):
    """Braces, %, $, quotes, spaces and a dash first: in files, folders, pictures, and the commands that follow."""
    monkeypatch.chdir(tmp_path)
    name, project, run = '-{x} {score} %d %(a)s $y$ \'".pt', 'a {b} %s $c$', 'ü "q" {0}'
    shutil.copy(small.single, name)

    def next_of(file, *words):
        assert run_command(program(file).main, [*map(str, words)]) == 0
        *_, following = capfd.readouterr().out.strip().splitlines()
        return shlex.split(following)

    given = '--weights', f'./{name}', '--data', small.data, '--project', project, '--name', run
    following = next_of('qat.py', 'quantize', *given, *QUICK, *'--workers 0 --epochs 1 --iters 1'.split())
    folder = Path(project, run)
    best = folder / 'weights/best.pt'
    assert following[:5] == ['next:', 'python', 'export_qat.py', '--weights', str(best)] and best.is_file()
    assert (folder / 'weights' / f'qat_best_{name}').is_file()
    report = json.loads((folder / 'report.json').read_text())
    assert report['ptq']['file'] == f'weights/ptq_ap_{report["ptq"]["ap"]:.4f}_{name}'
    assert f'--weights={name}' in (folder / 'report.md').read_text().replace("'\"'\"'", "'")
    short = '--batch 1 --duration 0.01 --warmup 0'.split()
    assert next_of('benchmark_trt.py', f'./{name}', *ON_CPU, *short)[-1] == f'./{name}'


def test_names_in_pictures():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1], label=literal('_a $b$ {c} %d'))
    figure.canvas.draw()
    [shown] = axes.legend().get_texts()
    assert shown.get_text().strip().replace(r'\$', '$') == '_a $b$ {c} %d'


# ---- the first sentence of the report -----------------------------------------------------------------------------------


COSTS_NOTHING = 'INT8 costs nothing that these images show: AP 0.5000, -0.40 ± 0.50 points of AP, within the confidence interval, on 72 images'


@pytest.mark.parametrize(
    'difference, says',
    [
        (-0.004, COSTS_NOTHING),
        (-0.02, 'INT8 costs 2.00 points of AP, beyond the confidence interval: AP 0.5000'),
        (0.02, 'INT8 scores higher than float: AP 0.5000'),
    ],
)
def test_the_cost_in_one_sentence(difference, says):
    against = {'difference': difference, 'chance': 0.005}
    sentence = headline(state_of(ptq=Stage(scores(), 'weights/ptq.pt', against_float=against)))
    assert sentence.startswith(says) and sentence.endswith('; weights/best.pt is the model to export.')


def test_a_loss_by_other_activation_functions_is_not_booked_to_int8():
    lost = {'difference': -0.1, 'chance': 0.01}
    models = {
        'adapted': Stage(scores(0.4), 'a.pt', against_float=lost),
        'ptq': Stage(scores(0.4), 'p.pt', against_float=lost),
    }
    state = state_of(**models, resampled={'val': {'adapted': np.full((3, 1), 0.4), 'PTQ': np.full((3, 1), 0.4)}})
    state.settings['activation'] = 'relu'
    begin = 'INT8 costs nothing that these images show: AP 0.4000, against float with relu +0.00 ± 0.00 points of AP'
    assert headline(state).startswith(begin)
    said = ' '.join(conclusions(state))
    assert 'Float with relu against float: -10.00 ± 1.00' in said and 'INT8 against float: -10.00 ± 1.00' in said
    state.resampled['val'].clear()
    assert headline(state).startswith('INT8 with relu costs 10.00 points of AP, beyond the confidence interval')


@pytest.mark.parametrize(
    'ptq, says',
    [
        (Stage(scores(), 'f.pt'), 'The INT8 model has AP 0.5000 on 72 images, and the float model was not scored'),
        (Stage(file='f.pt'), 'The INT8 model was not scored'),
    ],
)
def test_what_was_not_scored_is_said_to_be_so(ptq, says):
    assert headline(state_of(ptq=ptq)) == f'{says}; weights/best.pt is the model to export.'


def test_a_run_without_a_calibrated_model_is_not_over():
    assert 'not over' in headline(state_of())
