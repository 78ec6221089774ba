"""`quantize` killed, at points that are chosen and not timed: no finished file is damaged, and `--resume` ends as if nothing had happened.

A process of its own does the work and sends itself SIGKILL, which no handler sees, at a call of one of the functions of the run. It is
forked from this one, which has the libraries loaded. docs/faults.md has the table.
"""

import importlib
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest
from helpers.zoo import command, load_quantized, program, same
from PIL import Image

from models.quantize import checkpoint
from utils.qat.core.command import run_command
from utils.qat.core.run_folder import LOCK
from utils.qat.run.resume import read_state
from utils.qat.run.state import STATE

pytestmark = pytest.mark.faults

# what --resume does, or says
RESUME, EMPTY, START = None, 'no report of a run there', 'before the calibrated model was saved'
FORK = multiprocessing.get_context('fork')
POINTS = {  # name → (function, which call, how; what --resume says then)
    'writing the first report': ('pathlib.Path.write_text', 1, 'half', EMPTY),
    'observing': ('models.quantize.calibration.calibrate.Histogram.collect', 50, 'before', START),
    'searching amax': ('models.quantize.calibration.ptq.histogram_amax', 1, 'before', START),
    'saving the calibrated model': ('pathlib.Path.write_bytes', 1, 'half', START),
    'scoring the calibrated model': ('utils.qat.evaluation.detection_scores.Scorer.update', 3, 'before', START),
    'keeping the calibration': ('pathlib.Path.write_bytes', 2, 'half', START),
    'reporting the calibrated model': ('pathlib.Path.write_text', 3, 'half', RESUME),
    'in epoch 1': ('models.quantize.finetuning.training_step.TrainingStep.__call__', 2, 'after', RESUME),
    'keeping epoch 1': ('pathlib.Path.write_bytes', 3, 'half', RESUME),
    'scoring epoch 1': ('utils.qat.evaluation.detection_scores.Scorer.metrics', 3, 'before', RESUME),
    'naming the best model': ('os.link', 1, 'after', RESUME),
    'in epoch 2': ('models.quantize.finetuning.training_step.TrainingStep.__call__', 3, 'after', RESUME),
    'reporting epoch 2': ('pathlib.Path.write_text', 7, 'half', RESUME),
    'drawing': ('utils.qat.run.report.plot_ap', 1, 'before', RESUME),
    'finishing': ('models.quantize.run.run.Run.finish', 1, 'before', RESUME),
}


def arguments(demo, project):
    given = '--weights', demo.single, '--data', demo.data, '--project', project
    quick = '--imgsz 64 --batch-size 6 --iters 2 --epochs 2 --calib-images 8 --calib-method mse --lr 1e-4'
    return list(map(str, ('quantize', *given, *quick.split(), '--device', 'cpu', '--workers', 0)))


@pytest.fixture(scope='module')
def whole(demo, tmp_path_factory):
    """The content of a run that was not killed."""
    project = tmp_path_factory.mktemp('whole')
    command('qat.py', *arguments(demo, project))
    return content(project / 'exp')


def owner_of(target):
    """(module or class that has the function at the dotted path `target`, the function's name)."""
    path, name = target.rsplit('.', 1)
    module, _, cls = (path, '', '') if not path.rsplit('.', 1)[-1][0].isupper() else path.rpartition('.')
    found = importlib.import_module(module)
    return (getattr(found, cls) if cls else found), name


def deadly(function, number, how, folder):
    """`function`, whose call `number` is the process's last. how: it dies 'before' the call, 'after' it, or when 'half' of the file is there
    that the call writes, the last of its arguments that is a Path; only the files in `folder` count."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        file = next((a for a in reversed(args) if isinstance(a, Path)), None)
        calls += how != 'half' or folder in file.parents
        if calls == number and how == 'before':
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == number:
            if how == 'half':
                os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def run_to_death(argv, target, number, how, log):
    """qat.py with `argv` in a child process, which must be killed by `deadly`; its output goes to the file `log`, beside the run's folder."""

    def run():
        out = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        owner, name = owner_of(target)
        setattr(owner, name, deadly(getattr(owner, name), number, how, log.parent))
        run_command(program('qat.py').main, argv)

    child = FORK.Process(target=run)  # it prints what is raised
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, f'{target} was not reached\n{log.read_text()[-3000:]}'


def require_whole(folder):
    """Check that each file with a final name is complete."""
    for file in folder.rglob('*'):
        if file.name.startswith('.') or not file.is_file():
            continue  # hidden: what a killed process was writing
        if file.name == Path(STATE).name:
            assert read_state(folder).ptq
        elif file.suffix == '.pt':
            assert load_quantized(file)[1]['format'] == checkpoint.FORMAT
        elif file.suffix == '.json':
            assert json.loads(file.read_text())['settings']
        elif file.suffix == '.png':
            Image.open(file).load()
        else:
            assert file.name in ('report.md', 'log.txt') and file.read_text().strip()


def content(folder):
    """What a run left: names of its files; the report but for times and where it is; likewise its Markdown, and its pictures; the models."""
    report = json.loads((folder / 'report.json').read_text())
    del report['times'], report['settings']['project'], report['settings']['exist_ok']
    text = re.sub(r'(## Times\n\n).*', r'\1', (folder / 'report.md').read_text()).replace(str(folder.parent), 'PROJECT')
    text = re.sub('-+:?|  +', ' ', text)  # a table is as wide as the path
    pictures = [(folder / name).read_bytes() for name in ('ap.png', 'classes.png')]
    models = {f.name: load_quantized(f)[0].state_dict() for f in (folder / 'weights').iterdir()}
    return sorted(p.name for p in folder.iterdir()), report, text, *pictures, models


def require_alike(folder, whole):
    """Check that a run left what `whole`, of `content`, has, and no temporary file."""
    (*ours, models), (*theirs, others) = content(folder), whole
    assert ours == theirs and models.keys() == others.keys()
    assert all(same(models[name], others[name]) for name in models)
    assert [f.name for f in folder.rglob('.*')] == [LOCK]


@pytest.mark.parametrize('point', POINTS)
def test_killed(demo, whole, tmp_path, point):
    target, number, how, says = POINTS[point]
    run_to_death(arguments(demo, tmp_path), target, number, how, tmp_path / 'log')
    folder = tmp_path / 'exp'
    require_whole(folder)
    if says:
        assert says in command('qat.py', 'quantize', '--resume', folder, code=2).splitlines()[-1]
        command('qat.py', *arguments(demo, tmp_path), '--exist-ok')
    else:
        command('qat.py', 'quantize', '--resume', folder)
    require_alike(folder, whole)
