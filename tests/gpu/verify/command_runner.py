"""Where rows are checked: a folder, a deadline, and our commands as processes of their own.

A command that fails, hangs or crashes the interpreter, as a fault of TensorRT can, ends its row and no other.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock

import pytest
from conftest import TREE

from utils.qat.config.deploy import VerifyConfig

LOG = Lock()  # of log.txt, which several jobs write
ERROR = re.compile(r'error: (.*)')


@dataclass
class CommandRunner:
    config: VerifyConfig
    machine: dict  # see machine_facts.py
    folder: Path  # current folder of the commands; all files are made there
    deadline: float  # by time.monotonic
    commands: list[str]  # of the present row, as a user would type them
    found: str = ''  # figures of the present row, in words
    builds: dict = field(
        default_factory=dict
    )  # row that builds an engine, such as 'build plain' → its job, see builds.py
    processes: set = field(default_factory=set)  # that run now

    def need(self, row):
        """Skip the present row unless this row, such as 'build plain' or 'trtexec plain', has left an engine."""
        wait(self.builds[row][:1] if row in self.builds else [])
        if not (self.folder / engine_of(*reversed(row.split()))).exists():
            pytest.skip(f'needs {row}' + '; name it in --only too' * (row not in self.builds))

    def need_gpu(self):
        if self.machine['gpu'] is None:
            pytest.skip('PyTorch sees no NVIDIA GPU, and an engine runs on nothing else')

    def run(self, file, *words, code=0):
        """The standard output and errors of one of our commands, such as 'val_trt.py', run in `folder`; fails unless it ends with `code`."""
        line = [str(TREE / file), *map(str, words)]
        self.commands.append(shlex.join(['python', str(file), *line[1:]]))
        paths = [str(TREE), *filter(None, [os.environ.get('PYTHONPATH')])]
        with TemporaryFile('w+', encoding='utf-8', errors='backslashreplace') as out:
            process = subprocess.Popen(
                [sys.executable, *line],
                cwd=self.folder,
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers end with it
            )
            self.processes.add(process)
            try:
                ended = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f'{file} had not ended when the time for all rows was over (--minutes)', pytrace=False)
            finally:
                self.end(process)
                out.seek(0)
                said = out.read()
                with LOG, (self.folder / 'log.txt').open('a', encoding='utf-8') as log:
                    log.write(f'\n$ {self.commands[-1]}\n{said}')
        if ended != code:
            pytest.fail(reason(file, ended, code, said), pytrace=False)
        return said

    def end(self, process):
        """End a process and its children, if it still runs."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.discard(process)

    def json(self, file):
        """The content of a JSON file in `folder` that a command has written."""
        return json.loads((self.folder / file).read_text(encoding='utf-8'))


def engine_of(name, by='build'):
    """File name of the engine of a kind, built by the Python package or by 'trtexec'."""
    return f'{name}.engine' if by == 'build' else f'{name}-{by}.engine'


def reason(file, ended, code, said):
    """The wrong end of a command in words: its last error message, else the last line of its output."""
    if ended < 0:
        return f'{file} was ended by {signal.Signals(-ended).name}'
    lines = [' '.join(line.split()) for line in said.splitlines() if line.strip()]
    last = (ERROR.findall('\n'.join(lines)) or lines or ['no output'])[-1]
    return f'{file}: exit code {ended}, not {code}: {last}'
