"""`qat.py ship`: steps run once and go on after any end; on a real model the page, the JSON and the verdict fit what was measured."""

import fcntl
import json
import multiprocessing
import os
import re
import shlex
import signal
import struct
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.zoo import command, program

from models.deploy.ship import plan as planned
from models.deploy.ship import results as concluded
from models.deploy.ship import run as decided
from models.deploy.ship.look import choose_activation
from models.deploy.ship.plan import Step
from models.deploy.ship.results import ways
from models.deploy.ship.steps import STAMPS, Runner, last_run
from models.deploy.ship.verdict import Outcome, against_int8
from models.quantize.run.run import open_inputs
from utils.qat.benchmark.baseline import Gain
from utils.qat.config.deploy import InferConfig
from utils.qat.config.export import OPSETS
from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import read
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import TARGETS
from utils.qat.config.tasks import load_task
from utils.qat.core.errors import QatError
from utils.qat.core.log import log_to
from utils.qat.run.state import STATE
from utils.qat.vendors.openvino.session import MeasuredOpenVINO

# a step: notes that it was called, says a line and a warning, and leaves its result
SCRIPT = """
import os, sys, time
folder, name, how = sys.argv[1:]
with open(f'{folder}/calls', 'a') as calls:
    calls.write(f'{name} {how}\\n')
print('a line')
print('warning: a warning')
if how == 'waits':
    open(f'{folder}/pid', 'w').write(str(os.getpid()))
    time.sleep(10_000)
if how == 'fails':
    bar, red, plain = ('\\r 40% |##   | 2/5\\r', '\\033[31m', '\\033[0m') if sys.stderr.isatty() else ('', '', '')
    print(f'{bar}{red}error:{plain} no space', file=sys.stderr)
    print(os.get_terminal_size(2)[0] if sys.stderr.isatty() else 'no terminal')
    sys.exit(3)
open(f'{folder}/{name}', 'w').close()
"""


@pytest.fixture
def made(tmp_path):
    """A function that makes the steps a, b and c; `how` has other words for some of them."""
    (tmp_path / 'step.py').write_text(SCRIPT)

    def steps(**how):
        lines = {name: f'python {tmp_path}/step.py {tmp_path} {name} {how.get(name, "-")}' for name in 'abc'}
        return [Step(name, name, (tmp_path / name,), 1.0, line) for name, line in lines.items()]

    return steps


def run(folder, steps, digest='1', resume=True):
    """Run steps; return those that were called."""
    (folder / 'calls').unlink(missing_ok=True)
    runner = Runner(folder, digest, last_run(folder, digest)[1] if resume else {})
    try:
        runner.run(steps)
    finally:
        called = (folder / 'calls').read_text() if (folder / 'calls').exists() else ''
    assert runner.done == steps
    return ''.join(line[0] for line in called.splitlines())


def test_a_finished_step_does_not_run_again(made, tmp_path):
    assert run(tmp_path, made(), resume=False) == 'abc'
    assert run(tmp_path, made()) == ''
    assert run(tmp_path, made(b='otherwise')) == 'bc', 'what follows a step that ran hangs on it'
    assert run(tmp_path, made(b='otherwise'), digest='2') == 'abc', 'other images or weights'
    a, b, c = made(b='measured')
    assert run(tmp_path, [a, b._replace(needed=False), c], digest='2') == 'b', 'nothing hangs on a measurement'
    (tmp_path / 'c').unlink()
    assert run(tmp_path, made(b='otherwise'), digest='2') == 'c'
    assert run(tmp_path, made(b='otherwise'), digest='2', resume=False) == 'abc', 'without --resume'


def test_a_step_runs_again_if_a_file_of_it_is_gone_or_no_json(made, tmp_path):
    a, b, c = made()
    weights = tmp_path / 'b.bin'
    steps = [
        a,
        b._replace(files=(*b.files, weights)),
        c._replace(files=(tmp_path / 'c.json',), command=c.command.replace(' c ', ' c.json ')),
    ]
    weights.touch()
    (tmp_path / 'c.json').write_text('{}')
    known = Runner(tmp_path, '1', {})
    for step in steps:
        known.note(step, 1.0)
    for name in 'ab':
        (tmp_path / name).touch()
    assert [known.has(step) for step in steps] == [True, True, True]
    weights.unlink()
    (tmp_path / 'c.json').write_text('{"ap": 0.5')
    assert [known.has(step) for step in steps] == [True, False, False]


@pytest.mark.parametrize('content', ['', '[]', '{"a": 1}', '{"a": {"command": "x", "digest": "1", "seconds": "1"}}'])
def test_damaged_stamps_are_none(made, tmp_path, content):
    run(tmp_path, made())
    (tmp_path / STAMPS).write_text(content)
    assert run(tmp_path, made()) == 'abc'


def test_a_step_that_fails_stops_the_run_and_keeps_what_was_finished(made, tmp_path):
    with pytest.raises(QatError) as failed:
        run(tmp_path, made(b='fails'), resume=False)
    assert 'step.py' in str(failed.value)
    assert run(tmp_path, made()) == 'bc'


def test_a_step_that_keeps_a_state_goes_on_with_it(made, tmp_path):
    """By --resume, if it was started with the same words."""
    steps = made(b='fails')
    with pytest.raises(QatError):
        run(tmp_path, steps, resume=False)
    state = tmp_path / STATE
    state.parent.mkdir()
    state.touch()
    with pytest.raises(QatError, match=re.escape(f'qat.py quantize --resume {tmp_path}')):
        run(tmp_path, steps)
    assert run(tmp_path, made()) == 'bc', 'other words start over'


def test_what_is_finished_takes_no_time(made, tmp_path):
    steps = made(c='fails')
    with pytest.raises(QatError):
        run(tmp_path, steps, resume=False)
    _, taken = last_run(tmp_path, '1')
    assert Runner(tmp_path, '1', taken).expect(steps) == Runner(tmp_path, '1', {}).expect(steps[2:])


def test_resume_goes_on_in_the_last_run_of_the_same_files(made, tmp_path):
    for name, digest in (('exp', '1'), ('exp2', '2'), ('exp3', '2'), ('other', '2')):
        (tmp_path / name).mkdir()
        Runner(tmp_path / name, digest, {}).note(made()[0], 1.0)
    found = [last_run(tmp_path / 'exp', digest)[0] for digest in '123']
    assert found == [tmp_path / 'exp', tmp_path / 'exp3', None]
    assert last_run(tmp_path / 'there' / 'is none', '1') == (None, {})


def test_warnings_are_shown_and_the_rest_is_in_the_log(made, tmp_path, capfd):
    run(tmp_path, made())
    out, _ = capfd.readouterr()
    assert out.count('warning: a warning') == 3 and 'a line' not in out


@pytest.mark.parametrize('shown', ['plain', 'on a terminal'])
def test_the_error_of_a_step_is_on_the_screen_and_in_the_log(made, tmp_path, shown):
    """On a terminal the step has one too, as wide, for its bars; the log has neither bars nor colours."""
    ours, its = os.openpty() if shown == 'on a terminal' else os.pipe()
    if shown == 'on a terminal':
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack('4H', 40, 123, 0, 0))

    def fails():
        os.dup2(its, 2)
        log_to(tmp_path / 'log.txt')
        with pytest.raises(QatError):
            run(tmp_path, made(a='fails'), resume=False)

    work = multiprocessing.get_context('fork').Process(target=fails)
    work.start()
    work.join()
    assert work.exitcode == 0
    screen, log = os.read(ours, 2**12).decode(), (tmp_path / 'log.txt').read_text()
    assert 'no space' in screen and ('40%' in screen) == ('\033[31m' in screen) == (shown == 'on a terminal')
    assert log.count('error: no space') == 1 and '40%' not in log and r'\r' not in log and r'\x1b' not in log
    assert ('123' if shown == 'on a terminal' else 'no terminal') in log


def is_alive(pid):
    """Whether a process runs; one that has ended may wait for its parent to notice."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2][0] not in 'ZX'
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != 'linux', reason='prctl')
def test_killed_it_takes_its_step_along_and_goes_on(made, tmp_path):
    work = multiprocessing.get_context('fork').Process(
        target=run, args=(tmp_path, made(b='waits')), kwargs={'resume': False}
    )
    work.start()
    while not ((pid := tmp_path / 'pid').is_file() and pid.read_text()):
        time.sleep(0.05)
    step = int(pid.read_text())
    assert is_alive(step)
    os.kill(work.pid, signal.SIGKILL)
    work.join()
    while is_alive(step):
        time.sleep(0.05)
    left, own = tmp_path / f'.b.{step}.tmp.onnx', tmp_path / '.tmp'
    left.touch()
    own.touch()
    assert run(tmp_path, made()) == 'bc' and own.exists() and not left.exists()


# ---- plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('engine', 'trt'), [*(('tensorrt', trt) for trt in OPSETS), *((name, 0) for name in TARGETS if name != 'tensorrt')]
)
def test_each_step_is_a_command_that_its_program_takes(engine, trt, tmp_path):
    """Also of TensorRT, where there is none. What a step reads was named, or an earlier one has left it."""
    (tmp_path / 'model.pt').touch()
    config = ShipConfig(
        tmp_path / 'model.pt',
        tmp_path,
        imgsz=(64, 96),
        for_=engine,
        epochs=2,
        batch=3,
        names_from='data',
        workers=0,
        calib_images=5,
        device='cpu',
    )
    folder, numbers = tmp_path / 'run', {'val': 1, 'calibration': 1, 'train': 1}
    plan = planned.Plan(config, load_task('detect'), numbers, 0.1, 'cpu', trt, '', folder, engine == 'openvino')
    sensitive = plan.sensitive()
    steps = [*plan.first(), *plan.quantized('all')]
    reduced = ['--reduce-range' in step.command for step in (sensitive, next(plan.quantized('all')))]
    assert reduced == 2 * [engine == 'openvino']
    if not plan.target.integers:  # of a chip no block returns to float
        steps += [sensitive, *plan.quantized('b', sensitive=sensitive.files[0], max_drop=1)]
    relu = planned.Plan(replace(config, activation='relu'), load_task('detect'), numbers, 0.1, 'cpu', trt, '', folder)
    learnt = next(relu.quantized('all')).seconds - next(plan.quantized('all')).seconds
    images = (20 + 2) * 200 * config.batch_size  # two are of fine-tuning, and have one without ReLUs
    assert learnt == pytest.approx(planned.LEARNT * (images - 2) * 0.1), 'epochs that learn the ReLUs'
    taught = next(relu.quantized('b', tmp_path / 'relu.pt'))
    assert f'--weights {tmp_path / "relu.pt"} ' in taught.command and '--activation keep' in taught.command
    assert taught.seconds == next(plan.quantized('b')).seconds, 'it learns them once'
    left, results = {config.weights}, [folder / f'{run}/weights/best.pt' for run in ('all', 'b')]
    how = ways(plan, plan.file('all'), results[0])
    masks = ways(replace(plan, task=load_task('segment')), plan.file('all'), results[0])
    of_frigate = [yaml.safe_load(how[name]) for name in how.keys() - masks.keys()]
    assert [each['model']['height'] for each in of_frigate] == [64] * (engine in ('openvino', 'onnxruntime'))
    told = [line for line in how.values() if line.startswith('python ')]
    assert len(told) == 2 + (engine == 'tensorrt') and not any('{' in line for line in told)
    for line in told:
        file, *words = shlex.split(line)[1:]
        program(file).parse_args(words) if hasattr(program(file), 'parse_args') else read(InferConfig, words, '')
    for step in steps:
        file, *words = shlex.split(step.command)[1:]
        parse = program(file).parse_args
        parse(words)
        needed = {Path(word) for word in words if word.startswith(str(tmp_path)) and Path(word).suffix} - {folder}
        assert needed <= left, step.command
        assert step.files[0] not in left and step.seconds > 0
        left.update(step.files)
    assert {file.with_suffix('.bin') for file in left if file.suffix == '.xml'} <= left
    files = [plan.file('float'), *[plan.file(run) for run in ('all', 'b')[: 1 if plan.target.integers else 2]]]
    assert {*files} <= left and len({s.name for s in steps}) == len(steps)
    of_float, of_int8 = (step.command for step in steps if step.name in ('float-export', 'all-export'))
    assert ('--half' in of_float) == ('--trt 11' in of_float) == (trt >= 10), (
        'strongly typed FP16 where TensorRT has it'
    )
    assert '--half' not in of_int8 and (f'--trt {trt}' in of_int8) == bool(trt)


@pytest.mark.parametrize(
    ('changes', 'device', 'activation'),
    [
        ({}, 'cuda', 'relu'),
        ({}, 'cpu', 'keep'),
        ({'activation': 'keep'}, 'cuda', 'keep'),
        ({'epochs': 0}, 'cuda', 'keep'),
        ({'max_drop': 0.5}, 'cuda', 'keep'),
        ({'for_': 'openvino'}, 'cuda', 'polynomial'),
    ],
)
def test_relu_is_taken_where_a_gpu_teaches_it_for_little(small, changes, device, activation):
    config = ShipConfig(
        **{'weights': small.single, 'data': small.data, 'for_': 'tensorrt', 'epochs': 10, 'imgsz': 64} | changes
    )
    asked = {name: getattr(config, name) for name in ('weights', 'data', 'imgsz', 'activation')}
    inputs = open_inputs(QuantizeConfig(**asked, device='cpu', target=config.for_))
    assert choose_activation(config, inputs, device) == activation
    many = dict(enumerate(map(str, range(80))))
    inputs.images.data.names.update(many)
    assert choose_activation(config, inputs, device) == activation.replace('relu', 'keep'), (
        'with the classes of COCO it costs AP'
    )


# ---- on a model ---------------------------------------------------------------------------------------------------------

NAMES = '<script>alert(1)</script>', '<b>'  # of classes


@pytest.mark.slow
def test_from_a_checkpoint_of_two_branches_to_the_file(small, tmp_path, monkeypatch):
    """And again with another limit, for which nothing runs anew."""
    monkeypatch.setattr(planned, 'DURATION', 0.2)
    monkeypatch.setattr(concluded, 'disturbance', lambda rows: '')
    monkeypatch.setattr(MeasuredOpenVINO, 'overflows', lambda: True)  # on any CPU
    data = yaml.safe_load(small.data.read_text())
    data['names'] = [*NAMES, *map(str, range(2, 10))]
    hostile = tmp_path / 'data.yaml'
    hostile.write_text(yaml.safe_dump(data))
    words = f'--weights {small.dual} --data {hostile} --names-from data --imgsz 64 --calib-images 4 --workers 0 --device cpu'
    words = ['ship', *words.split(), '--for', 'openvino', '--max-drop', 100, '--project', tmp_path, '--name', 'a']
    said = command('qat.py', *words, '--min-speedup', 0)
    folder = tmp_path / 'a'
    report = json.loads((folder / 'ship.json').read_text())
    assert report['verdict'] == 'int8' and f'Ship {report["file"]}' in said and said.count('\n$ python ') == 6
    assert report['bytes'] == sum(Path(report['file']).with_suffix(s).stat().st_size for s in ('.xml', '.bin'))
    assert report['ap_difference'] == pytest.approx(report['ap'] - report['float_ap'], abs=1e-9)
    low, high = report['interval']
    assert low < report['ap_difference'] < high and report['engine'] == 'openvino' and report['speedup'] > 0
    for line in report['commands']:
        assert f'$ {line}\n' in said
    assert '--reduce-range' in report['commands'][2], 'without VNNI'
    html, plain = ((folder / f'ship.{kind}').read_text(encoding='utf-8') for kind in ('html', 'md'))
    assert '<script' not in html and '&lt;script&gt;alert(1)' in html and 'http' not in re.sub('http-equiv', '', html)
    assert '<script' not in plain and all(line in plain for line in report['commands'])
    assert not (small.dual.parent / f'{small.dual.stem}.xml').exists(), (
        'beside the weights of the user nothing is written'
    )

    said = command('qat.py', *words, '--min-speedup', 1000, '--resume')
    again = json.loads((folder / 'ship.json').read_text())
    assert said.count('done before') == 6 and '$ python' not in said
    assert again['verdict'] == 'float' and again['file'] == str(folder / 'float' / f'{small.dual.stem}.xml')
    assert again['reasons'] and again['would_change'] and again['speedup'] == report['speedup']
    found = {'difference': again['ap_difference'], 'chance': 0}
    outcome = Outcome(Gain('', '', '', 1, '', again['speedup']), 'AP', found)
    assert [*against_int8(outcome, 100, 1000)] == ['speed']

    monkeypatch.setattr(concluded, 'disturbance', lambda rows: 'the CPU was busy')
    said = command('qat.py', *words, '--resume')
    assert 'The CPU was busy; --resume measures again' in said and '$ python' not in said
    assert (
        'The CPU was busy' in (folder / 'ship.md').read_text()
        and json.loads((folder / 'ship.json').read_text())['disturbed']
    )
    monkeypatch.setattr(concluded, 'disturbance', lambda rows: '')
    said = command('qat.py', *words, '--resume')
    assert said.count('\n$ python ') == said.count('\n$ python benchmark_trt.py ') == 1

    monkeypatch.setattr(decided, 'within_interval', lambda part: False)
    reasons, noises = 2 * [{'accuracy': 'it loses'}, {}], ['the CPU was busy', '', '', '']
    monkeypatch.setattr(concluded, 'against_int8', lambda *of: reasons.pop(0))
    monkeypatch.setattr(concluded, 'disturbance', lambda rows: noises.pop(0))
    said = command('qat.py', *words, '--resume')
    without = json.loads((folder / 'ship.json').read_text())
    assert without['file'] == str(folder / 'quantize-silu/weights/best.xml') and without['verdict'] == 'int8'
    assert said.count('done before') == 6 and said.count('\n$ python ') == 4 and '--activation keep' in said
    assert 'and --activation polynomial it is' in without['tried'][1], 'what is left out by default if it costs AP'
    assert without['disturbed'] and 'The CPU was busy' in without['tried'][0], 'the speed of a run before the last'
    said = command('qat.py', *words, '--resume')
    assert said.count('\n$ python ') == said.count('\n$ python benchmark_trt.py ') == 1, 'and nothing else again'
    assert not json.loads((folder / 'ship.json').read_text())['disturbed']


def test_what_it_refuses(small, tmp_path):
    given = (
        f'ship --weights {small.single} --data {small.data} --imgsz 64 --workers 0 --device cpu --project {tmp_path}'
    )
    for words, said in {
        '--for tensorrt': '--for tensorrt: TensorRT: needs an NVIDIA GPU',
        '--for npu': 'must be one of tensorrt',
        '--max-drop -1': '--max-drop -1.0: must lie in [0, 100]',
        '--imgsz 65': 'multiples of 32',
        f'--weights {small.quantized}': 'is already quantized',
    }.items():
        out = command('qat.py', *given.split(), *words.split(), code=2)
        assert said in out and 'error:' in out and not list(tmp_path.iterdir()), words
