"""Helpers that need nothing of upstream: cases and settings, tensors, and our commands, called in this process or in one of their own."""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, TREE

from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.command import run_command
from utils.qat.core.log import LOGGER
from utils.qat.core.text import visible
from utils.qat.evaluation.metrics import DetectionMetrics
from utils.qat.run.state import State

SIZE = 64  # pixels; the strides end at 32
PATCH = 'patch_yolov9.sh'


def sampled(cases, every, first=0):
    """These cases as pytest parameters: cases first, first + every, ... run always, the others with --faults."""

    def later(case):
        if not hasattr(case, 'marks'):
            case = pytest.param(*(case if isinstance(case, tuple) else [case]))
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.faults], id=case.id)

    return [case if i % every == first else later(case) for i, case in enumerate(cases)]


def settings(**changes):
    """A QuantizeConfig for tests; the files it names are not read."""
    files = {'weights': Path('w.pt'), 'data': Path('d.yaml')}
    quick = {'batch_size': 4, 'imgsz': 128, 'calib_images': 8, 'calib_method': 'mse', 'amp': 'off', 'workers': 0}
    return QuantizeConfig(**{**files, **quick, **changes})


def scores(ap=0.5, **others):
    """The metrics of a detector."""
    return DetectionMetrics(
        **{'ap50': 0.5, 'precision': 0.5, 'recall': 0.5, 'images': 72, 'instances': 9, 'ap': ap, **others}
    )


def state_of(images=72, **results):
    """The State of a run that calibrates, with these results."""
    settled = {'settings': settings(epochs=0).plain(), 'versions': {'torch': '2'}, 'device': 'CPU', 'machine': {}}
    return State(**{**settled, 'classes': {}, 'images': {'val': images}, 'resampled': {'val': {}}, **results})


def image(size=SIZE, batch=1, seed=0):
    """Random images, FP32 [batch, 3, size, size] in 0..1."""
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def tensors(output):
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for part in (output.values() if isinstance(output, dict) else output) for t in tensors(part)]


def same(first, second):
    """Whether two outputs, or two state dicts, are equal bit for bit (same keys, shapes, dtypes and values)."""
    if isinstance(first, dict) and first.keys() != second.keys():
        return False
    first, second = tensors(first), tensors(second)
    return len(first) == len(second) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second))


def program(file):
    """A Python file of the repository as a module, its folder not on sys.path."""
    spec = importlib.util.spec_from_file_location(f'program_{Path(file).stem}', REPO / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(file, *arguments, code=0):
    """Run `python FILE ARGUMENTS...`, a command of ours, in this process, which saves its start; returns stdout + stderr.

    Fails unless it exits with `code`, or one of several.
    """
    said = io.TextIOWrapper(io.BytesIO(), 'utf-8', write_through=True)
    before, argv = os.getcwd(), [str(a) for a in arguments]
    os.chdir(TREE)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', [file, *argv])
            met = run_command(program(file).main, argv)
    finally:
        os.chdir(before)
        for handler in LOGGER.handlers[1:]:  # its log file
            LOGGER.removeHandler(handler)
            handler.close()
    text = said.buffer.getvalue().decode()
    assert met in (code if isinstance(code, tuple) else (code,)), f'{file} {argv}: exit code {met}\n{text[-3000:]}'
    return text


def python(*arguments, code=0, env=None, cwd=TREE, prefix=(), **options):
    """Run `PREFIX... python ARGUMENTS...` in the patched tree with one thread; returns stdout + stderr. Fails unless it exits with `code`."""
    done = subprocess.run(
        [*prefix, sys.executable, *map(str, arguments)],
        cwd=cwd,
        text=True,
        env={**(env or os.environ), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        **options,
    )
    assert done.returncode == code, f'{arguments}: exit code {done.returncode}\n{done.stdout[-3000:]}'
    return done.stdout


def call(command, argv):
    """Exit code of a command that is called in this process; a bug raises."""
    try:
        if command == PATCH:
            return subprocess.run([REPO / PATCH, *argv]).returncode
        main = program(command).main
        return run_command(main, argv)
    except SystemExit as e:
        return e.code


def judged(command, argv, code, out, err, left, allowed=(0, 2)):
    """The last line on stderr. Fails on a traceback, on another exit code, on a refusal that is not the last line or not the end of the
    work, and on a temporary file. left: the new files."""
    said = f'{command} {argv}: {code}\n{(out + err)[-3000:]}'
    assert 'Traceback' not in out + err and not (command == PATCH and re.search(r'line \d+: ', err)), said
    line = (err.strip().splitlines() or [''])[-1]
    assert not [f for f in left if f.name.startswith('.')], f'{said}\nleft {left}'
    assert code in allowed, said
    if code == 2:
        assert ': error: ' in line, said
        assert visible(line) == line, f'a terminal obeys it: {line!r}'
        assert not left, f'{said}\nleft {left}'
    return line


def answer(command, argv, capfd, folder, allowed=(0, 2), leaves=()):
    """Exit code, of `allowed`, and last line on stderr of a command called with `argv` in this process.

    Fails if it raises or shows a traceback, if a refusal is not its last line, and if it leaves in `folder` a temporary
    file or, without success, a result; files of the names `leaves` may be there.
    """
    argv, before = [str(a) for a in argv], set(folder.rglob('*'))
    capfd.readouterr()
    code = call(command, argv)
    left = {f for f in folder.rglob('*') if f.suffix != '.cache' and f.name not in (*leaves, '.lock')} - before
    return code, judged(command, argv, code, *capfd.readouterr(), left, allowed)
