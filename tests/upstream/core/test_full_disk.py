"""A full disk: the error line names the file, the free space and the next step; every file is whole or absent.

A limit on the size of files stands in for the disk where a file system of its own cannot be mounted: the write itself fails half-way.
"""

import errno
import os
import re
import resource
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import TREE
from helpers import zoo
from helpers.graphs import model_of
from helpers.zoo import program
from onnx import helper

from test_killed import FORK, arguments, require_alike, require_whole, whole  # noqa: F401  a fixture
from utils.qat.core.command import run_command
from utils.qat.core.log import LOGGER
from utils.qat.core.run_folder import LOCK

pytestmark = pytest.mark.faults

KB = 1000


def in_child(command, argv, limit=resource.RLIM_INFINITY):
    """Run a command in a child whose files may have `limit` bytes at most; returns exit code and last line."""
    read, write = os.pipe()

    def run():
        os.dup2(write, 1)
        del LOGGER.handlers[1:]  # log files of earlier runs in this process
        sys.stdout = sys.stderr = open(1, 'w', buffering=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.exit(run_command(program(command).main, [str(a) for a in argv]))

    child = FORK.Process(target=run)  # it prints what is raised
    child.start()
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    child.join()
    assert 'Traceback' not in said and 'Logging error' not in said, said[-3000:]
    return child.exitcode, said.strip().splitlines()[-1]


LIMITS = {  # bytes → the file that the line names, and whether --resume can go on
    1 * KB: ('report.json', False),
    500 * KB: ('.unscored.pt', False),
    6000 * KB: ('resume.pt', True),
}


@pytest.mark.parametrize('limit', LIMITS)
def test_quantize(demo, whole, tmp_path, limit):
    name, resumes = LIMITS[limit]
    folder = tmp_path / 'exp'
    code, line = in_child('qat.py', arguments(demo, tmp_path), limit)
    says = rf'error: {folder}/\S*{name}: File too large, for ulimit -f .*allow more'
    assert code == 2 and re.search(says, line), line
    assert [f.name for f in folder.rglob('.*')] == [LOCK]
    require_whole(folder)
    if resumes:
        assert line.endswith(f'go on with: python qat.py quantize --resume {folder}')
        assert in_child('qat.py', ['quantize', '--resume', folder])[0] == 0
        require_alike(folder, whole)


RUN = '--imgsz 64 --device cpu --project OUT'
OTHERS = {  # command → its arguments, the limit
    'reparameterization.py': ('--weights DUAL --save OUT/x.pt', 500 * KB),
    'export_qat.py': ('--weights OUT/w.pt --imgsz 64', 500 * KB),
    'export_yoloV9.py': ('--weights OUT/w.pt --size 64', 500 * KB),
    'qat.py sensitive': (
        f'sensitive --weights SINGLE --data DATA {RUN} --workers 0 --calib-images 2 --num-image 1 --metric distortion '
        '--granularity layer --calib-method max',
        2 * KB,
    ),
    'qat.py eval': (f'eval --weights QUANTIZED --data DATA {RUN} --workers 0', 2 * KB),
    'compare_outputs.py': (f'SINGLE QUANTIZED --random 1 {RUN}', KB),
    'benchmark_trt.py': (f'SINGLE --batch 1 --duration 0.01 {RUN}', KB),
    'scripts/audit_onnx.py': ('OUT/x.onnx --json OUT/audit.json', KB),
}


@pytest.mark.parametrize('command', OTHERS)
def test_other_commands(demo, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    words, limit = OTHERS[command]
    names = {'DUAL': demo.dual, 'SINGLE': demo.single, 'QUANTIZED': demo.quantized, 'DATA': demo.data}
    shutil.copy(demo.single, tmp_path / 'w.pt')
    if 'audit' in command:
        zoo.command('export_qat.py', '--weights', tmp_path / 'w.pt', '--imgsz', 64)
        (tmp_path / 'w.onnx').rename(tmp_path / 'x.onnx')
    before = {f: f.read_bytes() for f in tmp_path.rglob('*.*')}
    argv = [str(names.get(word, word)).replace('OUT', str(tmp_path)) for word in words.split()]
    code, line = in_child(command.split()[0], argv, limit)
    assert code == 2 and re.search(rf'error: {tmp_path}/\S+: File too large, for ulimit -f', line), line
    left = set(tmp_path.rglob('*.*')) - before.keys()
    hidden = {f for f in left if f.name.startswith('.') and f.name != LOCK}
    empty = {f for f in left if f.suffix in ('.pt', '.onnx', '.json') and not f.stat().st_size}
    assert not hidden and not empty, left
    assert all(f.read_bytes() == content for f, content in before.items())


def test_a_file_that_openvino_writes(tmp_path):
    """Its writer gives no reason, the system does."""
    pytest.importorskip('openvino')
    from utils.qat.vendors.openvino.model import write_ir

    weights = np.ones((512, 512), np.float32)
    node = helper.make_node('MatMul', ['x', 'w'], ['y'])
    model = model_of([node], {'x': [1, 512]}, {'y': [1, 512]}, {'w': weights})

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 * KB, 100 * KB))
        try:
            write_ir(model, tmp_path / 'x.xml')
        except OSError as e:
            sys.exit(e.errno)

    child = FORK.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == errno.EFBIG


def test_a_disk_of_six_megabytes(demo, whole, small_disk):
    """The calibrated model fits, the files of the first epoch do not; with more room the run continues."""
    disk = small_disk(6)
    code, line = in_child('qat.py', arguments(demo, disk))
    folder = disk / 'exp'
    assert code == 2 and 'No space left on device' in line and f'MB are free in {folder}' in line, line
    assert line.endswith(f'go on with: python qat.py quantize --resume {folder}')
    assert [f.name for f in folder.rglob('.*')] == [LOCK]
    require_whole(folder)
    subprocess.run(['mount', '-o', 'remount,size=99M', disk], check=True)
    assert in_child('qat.py', ['quantize', '--resume', folder])[0] == 0
    require_alike(folder, whole)


def test_a_terminal_that_takes_nothing(tmp_path):
    """/dev/full is a disk without room; a pipe that nobody reads is `| head` when it has enough."""
    axes, weight = [1, 1, 4, 4], np.ones((1, 1, 1, 1), np.float32)
    onnx.save(model_of('y = Conv(x, w)', {'x': axes}, {'y': axes}, {'w': weight}), tmp_path / 'x.onnx')
    command = [sys.executable, 'scripts/audit_onnx.py', tmp_path / 'x.onnx']
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command, cwd=TREE, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, 'audit_onnx.py: error: output: No space left on device\n')
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=TREE, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, '')
