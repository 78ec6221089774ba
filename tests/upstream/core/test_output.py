"""Output of the commands: --quiet, --verbose, bars and colours on a terminal only, reports, and the next command."""

import contextlib
import fcntl
import importlib
import io
import logging
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, TREE
from helpers import zoo
from helpers.commands import scores, state_of
from helpers.labelled import copied
from helpers.zoo import program
from PIL import Image

from utils.qat.config.settings import command_words
from utils.qat.config.tasks import load_task
from utils.qat.core.command import command, run_command
from utils.qat.core.log import LOGGER, RESULT, TERMINAL, bar, log_to, quiet_upstream
from utils.qat.core.text import markdown_table, width
from utils.qat.evaluation.score_tables import MOST, plot_classes
from utils.qat.run.report import write_report
from utils.qat.run.state import Stage
from utils.qat.vendors.tensorrt.engine.api import can_build


def parse_args(words):
    [config] = program('qat.py').parse_args(words)
    return config


SMALL = '--imgsz 128 --device cpu --workers 0'.split()
CHAIN = 'reparameterization.py', 'quantize', 'export_qat.py', 'eval'
NEXT = re.compile(r'(?m)^next: (.*)$')
LINK = re.compile(r'!?\[[^]]*\]\(([^)]+)\)')


@pytest.fixture(autouse=True)
def no_log_files(monkeypatch):
    monkeypatch.setattr(LOGGER, 'handlers', LOGGER.handlers[:])  # a run adds that of its log file


def say(file, *argv):
    """(stdout, stderr) of a command, run in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), 'utf-8', write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert run_command(program(file).main, list(map(str, argv))) == 0, err.buffer.getvalue().decode()
    return out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def in_terminal(*words, **environment):
    """Run `python WORDS...` in a fork, in the patched tree; returns its output on a terminal of 140 columns."""
    process, terminal = pty.fork()
    if not process:
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 140, 0, 0))
            os.chdir(TREE)
            os.environ.pop('NO_COLOR', None)
            os.environ.update({'TERM': 'xterm', **environment})
            sys.argv = list(map(str, words))
            sys.stdout, sys.stderr = (open(number, 'w', buffering=1) for number in (1, 2))
            run_command(program(words[0]).main, sys.argv[1:])
        finally:
            os._exit(0)
    got = b''
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(terminal, 1 << 16):
            got += part
    os.close(terminal)
    os.waitpid(process, 0)
    return got.decode()


def evaluation(small, folder):
    data = '--weights', small.quantized, '--data', copied(small.data, folder / 'data')
    return ['qat.py', 'eval', *data, *SMALL, '--project', folder / 'runs']


@pytest.fixture(scope='module')
def chain(small, tmp_path_factory):
    """The pipeline, each command taken from the `next:` line of the one before: {command: (options, stdout, stderr)}.

    The data are filled in, and options that make the commands quick.
    """
    folder = tmp_path_factory.mktemp('chain')
    said = {'folder': folder}
    short = '--epochs 1 --iters 2 --calib-method mse --batch-size 4 --calib-images 8'.split()
    quick = {
        'quantize': [*SMALL, *short, '--hyp', REPO / 'demo/hyp.yaml', '--project', folder / 'runs'],
        'eval': ['--device', 'cpu', '--workers', 0, '--project', folder / 'eval'],
    }
    first = 'python', 'reparameterization.py', '--weights', str(small.dual), '--save', str(folder / 'single.pt')
    following = shlex.join(first)
    for name in CHAIN:
        python, file, *words = shlex.split(following.replace('DATA.yaml', shlex.quote(str(small.data))))
        assert (python, [file, *words][name in quick]) == ('python', name)
        words += quick.get(name, [])
        said[name] = [words, *say(file, *words)]
        following = NEXT.findall(said[name][1])[-1]
    return said


def onnx_of(chain):
    return next((chain['folder'] / 'runs').rglob('*.onnx'))


def test_each_command_ends_with_the_next(chain):
    """The fixture ran them; the last one needs TensorRT."""
    for name in CHAIN:
        assert chain[name][1].rstrip().splitlines()[-1].startswith('next: python '), name
    engine = 'scripts/build_engine.py' if can_build() else 'scripts/audit_onnx.py'
    assert NEXT.findall(chain['eval'][1]) == [f'python {engine} {onnx_of(chain)}']
    [after] = NEXT.findall(chain['reparameterization.py'][1])
    assert after.endswith('--data DATA.yaml'), 'the checkpoint does not tell its data'


def other_commands(chain, small):
    """(file, options) of the other commands that run without a GPU."""
    folder, model = chain['folder'], onnx_of(chain)
    float_file, data = ('--weights', small.single), ('--data', small.data)
    quick = '--granularity layer --metric distortion --num-image 2 --calib-images 2 --calib-method mse'.split()
    plan = ['--exclude', r'model\.2', 'model.9', '--no-eval-ptq']
    short = '--backend onnxruntime --device cpu --duration 0.1 --warmup 0ms'.split()
    verify = '--verify', small.data, '--verify-images', 2, '--max-ap-diff', 1
    yield 'qat.py', ['sensitive', *float_file, *data, *SMALL, *quick, '--project', folder / 'sensitive']
    yield 'qat.py', ['quantize', '--dry-run', *float_file, *data, *plan]
    yield 'qat.py', ['eval', '--weights', small.quantized, *data, *SMALL, '--project', folder / 'checkpoint']
    yield 'val_trt.py', ['--weights', model, *data, *SMALL, '--project', folder / 'val']
    yield 'compare_outputs.py', [small.single, model, *data, *SMALL, '--project', folder / 'compare']
    yield 'benchmark_trt.py', [model, *short, '--project', folder / 'benchmark']
    yield 'scripts/audit_onnx.py', [model]
    yield 'export_qat.py', [*float_file, '--imgsz', 64, *verify]
    yield 'export_yoloV9.py', [*float_file, '--size', 64]
    if importlib.util.find_spec('tensorrt_rtx_bindings'):
        yield 'scripts/build_engine.py', [model, '--engine', folder / 'model.engine', '--backend', 'rtx']


@pytest.fixture(scope='module')
def others(chain, small, tmp_path_factory):
    """[(file, options, stdout, stderr, stdout with --quiet)] of `other_commands`."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp('here'))  # export_yoloV9.py writes into the current folder
    yield [
        (file, words, *say(file, *words), say(file, *words, '--quiet')[0])
        for file, words in other_commands(chain, small)
    ]
    os.chdir(before)


def test_what_is_next_can_be_typed(chain, others):
    for said in (chain['eval'][1], *(out for _, _, out, _, _ in others)):
        following = NEXT.findall(said)
        assert following and said.rstrip().endswith(following[-1]), said[-500:]
        for line in following:
            python, file, *words = shlex.split(line)
            if python == 'cp':
                assert [Path(word).name for word in words] == [
                    'labels.txt',
                    'config_infer_primary_yoloV9.txt',
                    'DeepStream-Yolo',
                ]
                assert all(Path(f).is_file() for f in (file, *words[:-1]))
                continue
            assert python == 'python'
            program(file).parse_args(words)  # raises QatError if they are wrong
            files = [Path(word) for word in words if word.endswith(('.pt', '.onnx', '.json', '.yaml'))]
            assert all(path.is_file() for path in files if path.name != 'DATA.yaml')


def test_quiet_is_the_result_alone(others):
    def without_times(text):
        return {re.sub(r'[\d.]+ s', '', line) for line in text.splitlines()}

    for file, words, said, _, quiet in others:
        assert 'next: ' not in quiet and 0 < len(quiet) < len(said), file
        if 'benchmark' not in file:  # whose figures differ
            added = without_times(quiet) - without_times(said)
            named = ('results', 'report', 'summary', '.json', 'timing cache')  # names of files
            assert all(not line or any(word in line for word in named) for line in added), file
    quiet = {(file, str(words[0])): quiet for file, words, _, _, quiet in others}
    of_eval = quiet['qat.py', 'eval']
    assert re.match(r'\n\d+ images as .*\n\n\| class ', of_eval) and 'report ' in of_eval
    assert len(quiet['export_yoloV9.py', '--weights'].splitlines()) == 3


def test_no_bars_and_no_colours_in_a_pipe(chain, others):
    of_chain = [(file, *chain[file]) for file in ('quantize', 'eval', 'export_qat.py')]
    for file, _, out, err, *_ in (*of_chain, *others):
        assert not re.search('[\r\033]', out) and not err, (file, err[:300])
    log = (chain['folder'] / 'runs/exp/log.txt').read_text()
    assert not re.search('[\r\033]', log) and 'calibrating: 2 batches' in log and 'next: ' in log
    assert chain['quantize'][1].count('epoch 1/1: ') == 1


def test_nor_in_the_pipe_of_a_process(small, tmp_path):
    """Labels are read for the first time, and output that bypasses sys.stderr counts too."""
    words = evaluation(small, tmp_path)
    done = subprocess.run([sys.executable, *words, '--verbose'], cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 0 and 'Scanning' not in done.stderr
    assert not re.search('[\r\033]', done.stdout + done.stderr)
    assert re.search(r'(?m)^qat.py took [\d.]+ s$', done.stdout)


def test_upstream_speaks_with_verbose_only(small):
    from utils.general import LOGGER as upstream

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    upstream.addHandler(handler)
    try:
        for more in ([], ['--quiet'], ['--verbose']):
            heard.clear()
            say('qat.py', 'quantize', '--dry-run', '--weights', small.single, *more)
            assert bool(heard) == (more == ['--verbose']), heard
    finally:
        upstream.removeHandler(handler)


def test_quiet_or_verbose():
    """All commands have one parser."""
    said = zoo.command('qat.py', 'eval', '--quiet', '--verbose', code=2)
    assert 'argument --verbose: not allowed with argument --quiet' in said
    TERMINAL.setLevel(logging.INFO)


# ---- a terminal ---------------------------------------------------------------------------------------------------------


def test_bars_and_colours_on_a_terminal(small, tmp_path):
    words = [*evaluation(small, tmp_path), '--batch-size', 3]
    seen = in_terminal(*words)
    # the time left and the rate are '?' on a machine that is done before the bar is drawn again
    assert re.search(r'evaluating +\d+% \|.* \d/4 \[\d+:\d+, [\d:?]+ left, +[\d.?]+ batches/s\]', seen)
    assert seen.count('Scanning') >= 1 and '100%|' not in seen, 'one bar of upstream, which does not stay'
    assert '\033[1mnext: python export_qat.py' in seen and 'evaluating: 4' not in seen
    assert '\033[' not in (tmp_path / 'runs/exp/log.txt').read_text()

    seen = in_terminal(*words, '--quiet', NO_COLOR='1')
    assert '| class ' in seen and not re.search('evaluating|Scanning|next|\033', seen)


@pytest.mark.parametrize('environment, red', [({}, True), ({'NO_COLOR': '1'}, False), ({'TERM': 'dumb'}, False)])
def test_an_error_is_red(environment, red):
    seen = in_terminal('qat.py', 'eval', '--weights', 'none.pt', **environment)
    assert ('\033[31merror:\033[0m' in seen) == red == ('qat.py: error: ' not in seen)
    assert 'none.pt: no such file' in seen


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_warnings_are_called_so(tmp_path, monkeypatch):
    monkeypatch.delenv('NO_COLOR', raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    log_to(tmp_path / 'log.txt')
    with contextlib.redirect_stdout(Terminal()) as seen:
        LOGGER.warning('careful')
        LOGGER.log(RESULT, 'warning: is not for results')
    assert seen.getvalue() == '\033[33mwarning:\033[0m careful\nwarning: is not for results\n'
    logged = (tmp_path / 'log.txt').read_text()
    assert re.fullmatch(r'[\d:]+ warning: careful\n[\d:]+ warning: is not for results\n', logged)


def test_lines_appear_above_a_bar():
    TERMINAL.setLevel(logging.INFO)
    with contextlib.redirect_stdout(Terminal()) as seen, contextlib.redirect_stderr(seen):
        for _ in bar([1, 2], 'working', unit='steps'):
            LOGGER.info('a line')
    lines = [re.split('\r', line)[-1] for line in seen.getvalue().split('\n')]
    assert lines[:2] == ['a line', 'a line'] and 'working ' in seen.getvalue()


def test_only_bars_are_taken_from_stderr(monkeypatch):
    from tqdm import tqdm

    TERMINAL.setLevel(logging.INFO)
    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        with contextlib.redirect_stderr(stream), quiet_upstream():
            print('before', file=sys.stderr)
            list(tqdm(range(3), desc='Scanning', bar_format='{l_bar}{bar:10}| {n_fmt}/{total_fmt}', mininterval=0))
            print('\nafter', file=sys.stderr)
        assert stream.getvalue().startswith('before\n') and stream.getvalue().endswith('\nafter\n')
        assert ('Scanning' in stream.getvalue()) == shown and '100%' not in stream.getvalue()


# ---- reports ------------------------------------------------------------------------------------------------------------


def links(file):
    return LINK.findall(file.read_text())


def test_reports_show_their_pictures(chain, others):
    folder = chain['folder']
    reports = {
        'runs/exp/report.md': {'ap.png', 'classes.png'},
        'eval/exp/report.md': {'classes.png'},
        'checkpoint/exp/report.md': {'classes.png'},
        'val/exp/report.md': {'classes.png'},
        'compare/exp/report.md': {'ranks.png'},
        'sensitive/exp/sensitivity.md': {'sensitivity.png'},
        'benchmark/exp/benchmark.md': {'latency.png', 'throughput.png', 'usage.png'},
    }
    for name, pictures in reports.items():
        found = links(folder / name)
        assert pictures <= set(found) and all((folder / name).parent.joinpath(f).is_file() for f in found), name
        for picture in pictures:
            assert np.array(Image.open((folder / name).parent / picture).convert('L')).std() > 5, 'not blank'


def test_the_report_of_quantize(chain):
    folder = chain['folder'] / 'runs/exp'
    text = (folder / 'report.md').read_text()
    first = text.splitlines()[2]
    assert first.startswith('**INT8 ') and first.endswith(' is the model to export.**') and first.count('weights/') == 1
    assert (
        '| `--epochs`' in text
        and '`--lr`' not in text
        and re.search(r'Ranges of activations by mse on \d+ images, ', text)
        and 'on calibration images that neither fisher nor the biases were fitted to' in text
    )
    made_by = shlex.split(re.search(r'(?m)^python qat.py quantize .*$', text)[0])[3:]
    config, again = (parse_args(['quantize', *map(str, words)]) for words in (chain['quantize'][0][1:], made_by))
    assert config == again, 'the command in it is the one that was typed'
    models = {f'weights/{f.name}' for f in (folder / 'weights').glob('*.pt')}
    assert NEXT.findall(chain['quantize'][1])[0] in text and models <= set(links(folder / 'report.md'))


def test_reports_list_only_settings_that_were_typed(chain, others):
    """Not those that the model or the device decides, such as --imgsz of a file, and --amp."""
    words = {file: words for file, words, *_ in others}
    typed = {
        'runs/exp/report.md': chain['quantize'][0],
        'eval/exp/report.md': chain['eval'][0],
        'val/exp/report.md': words['val_trt.py'],
        'compare/exp/report.md': words['compare_outputs.py'],
    }
    for name, given in typed.items():
        rows = re.findall(r'(?m)^\| `(--[\w-]+)`', (chain['folder'] / name).read_text())
        assert len(rows) > 2 and set(rows) <= {*map(str, given)}, name


def test_a_report_before_and_without_any_score(tmp_path):
    state = state_of()
    write_report(tmp_path, state, load_task('detect'))
    assert links(tmp_path / 'report.md') == [] and '## Next' not in (tmp_path / 'report.md').read_text()
    state.calibration = {'method': 'l2.4', 'biases': 'none', 'divergence': {'mse': 0.02, 'l2.4': 0.01}}
    state.ptq, state.kept_float = Stage(file='weights/ptq.pt'), ['model.3']
    write_report(tmp_path, state, load_task('detect'))
    text = (tmp_path / 'report.md').read_text()
    assert links(tmp_path / 'report.md') == ['weights/best.pt', 'weights/ptq.pt'] and not list(tmp_path.glob('*.png'))
    assert 'Left in float: model.3.' in text
    assert re.search(r'(?m)^\| l2\.4 +\| +0.01000 \| chosen \|$', text)


def test_tables_align_with_wide_names():
    table = markdown_table(('class', 'AP'), [('猫', '0.5'), ('cafe\u0301', '0.25'), ('a|b', '1'), ('two\nlines', '')])
    lines = table.splitlines()
    assert len({width(line) for line in lines}) == 1 and len(lines) == 6
    assert lines[2] == '| 猫        |  0.5 |' and r'a\|b' in lines[4] and 'two lines' in lines[5]


def test_a_picture_of_any_class_names(tmp_path, recwarn):
    """A dollar sign starts no formula, missing glyphs give no warning, and thousands of classes fit."""
    rows = [{'name': f'{n} ${n}$ 猫', 'ap': n / 2000} for n in range(2000)]
    models = {name: scores(per_class=rows, mask={'ap': 0.4}) for name in ('float', 'INT8')}
    plot_classes(tmp_path / 'classes.png', models)
    assert Image.open(tmp_path / 'classes.png').height < 120 * 0.4 * (MOST + 5) and not recwarn.list


LINES = [
    'quantize',
    'quantize --overlap --mask-ratio 4 --exclude model.1 a.b --no-bias-correction --no-eval-ptq --lr 1e-4 --compile',
    'quantize --epochs 3 --val-split 0.1 --amp bf16 --name "two words"',
    'quantize --sensitive s.json --max-drop 0.2 --calib-method percentile --percentile 99',
    'sensitive --granularity conv --num-image 0',
]


@pytest.mark.parametrize('line', LINES)
def test_settings_as_options(line):
    verb, *words = shlex.split(line)
    config = parse_args([verb, '--weights', 'w.pt', '--data', 'd.yaml', *words])
    reached = [replace(config, **needs) for needs in ({'only_task': 'classify'}, {'only_task': 'segment'})]
    for values in (vars(config), config.plain(), *map(vars, reached)):
        assert parse_args([verb, *command_words(values, type(config))]) == config


def test_a_command_is_named_as_it_was_reached(tmp_path, monkeypatch):
    file = tmp_path / 'two words.onnx'
    shorter = min(str(TREE), os.path.relpath(TREE, REPO), key=len)
    reached = [  # current folder, typed, folder in the command
        (REPO, 'qat.py', ''),
        (REPO, f'{TREE}/segment/qat_seg.py', f'{shorter}/'),
        (REPO, 'elsewhere/own.py', ''),
        (TREE, f'{TREE}/scripts/../export_qat.py', ''),  # as scripts/val_trt.sh types it
        (TREE, 'scripts/audit_onnx.py', ''),
        (TREE / 'scripts', 'audit_onnx.py', '../'),
        (TREE / 'scripts', '../qat.py', '../'),
    ]
    for here, typed, folder in reached:
        monkeypatch.chdir(here)
        monkeypatch.setattr(sys, 'orig_argv', ['python', '-u', typed, '--weights', 'x.pt'])
        assert command('val_trt.py', '--weights', file) == f"python {folder}val_trt.py --weights '{file}'", typed
        assert command('val_trt.py', Path('-x.onnx')).endswith('val_trt.py ./-x.onnx'), 'no option'


def test_after_a_picture_of_an_engine(tmp_path):
    following = program('scripts/draw_engine.py').next_commands
    layer, engine = tmp_path / 'model.layer.json', tmp_path / 'model.engine'
    assert following(layer) == []
    engine.touch()
    assert following(layer) == [f'python benchmark_trt.py {engine}']
