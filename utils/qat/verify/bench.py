"""The place where rows are checked: a folder, a deadline, and our commands as processes of their own.

A command that fails, hangs or crashes the interpreter, as a fault of TensorRT can, ends its row and no other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.qat.config.verify import VerifyConfig

ROOT = Path(__file__).absolute().parents[3]  # of the patched tree, also where this file is a link to the toolkit's
ERROR = re.compile(r'error: (.*)')


class Failed(Exception):
    """The reason why a row fails."""


class Skipped(Exception):
    """The reason why a row cannot be checked here."""


@dataclass(frozen=True)
class Machine:
    """The facts about this machine that decide which rows can be checked, see machine.py."""

    product: str  # such as 'TensorRT 10.13.3'
    major: int  # of TensorRT, whose files are exported; TensorRT-RTX takes the files of 11
    gpu: str | None  # name of the GPU; None if PyTorch sees none
    trtexec: str | None  # its TensorRT, such as 'TensorRT 10.13.3'; None if it is not installed
    table: dict[str, str]  # for the report


@dataclass
class Bench:
    """The place where rows are checked.

    Attributes:
        config: settings of the command.
        machine: facts about this machine.
        folder: current folder of the commands; all files are made there.
        deadline: when the time is over, by time.monotonic.
        done: names of the rows that passed.
        commands: lines that the present row has run, as a user would type them.
    """

    config: VerifyConfig
    machine: Machine
    folder: Path
    deadline: float
    done: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)

    def need(self, *rows: str) -> None:
        """Skip the present row unless these rows have passed."""
        missing = [row for row in rows if row not in self.done]
        if missing:
            raise Skipped(f'needs {", ".join(missing)}')

    def need_gpu(self) -> None:
        """Skip the present row if there is no GPU."""
        if self.machine.gpu is None:
            raise Skipped('PyTorch sees no NVIDIA GPU, and an engine runs on nothing else')

    def run(self, file: str, *words: object, code: int = 0) -> str:
        """Run one of our commands in `folder`.

        Args:
            file: its file, such as 'val_trt.py', or -m and a module as one string.
            *words: its arguments.
            code: exit code that is right.

        Returns:
            Its standard output and errors.

        Raises:
            Failed: another exit code, with the last error message; or it did not end before the deadline.
        """
        start = file.split() if file.startswith('-m ') else [str(ROOT / file)]
        line = [sys.executable, *start, *map(str, words)]
        self.commands.append(
            shlex.join(['python', *(file.split() if file.startswith('-m ') else [file]), *line[len(start) + 1 :]])
        )
        environment = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]),
        }
        log = self.folder / 'log.txt'
        with log.open('a+', encoding='utf-8', errors='backslashreplace') as out:
            out.write(f'\n$ {self.commands[-1]}\n')
            out.flush()
            begin = out.tell()
            # a session of its own, so that its workers end with it
            process = subprocess.Popen(
                line,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(
                    f'{file} had not ended when the {self.config.minutes:g} minutes (--minutes) were over'
                ) from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            out.seek(begin)
            said = out.read()
        if ended != code:
            raise Failed(reason(file, ended, code, said))
        return said

    def json(self, file: str | Path) -> Any:
        """Read a JSON file in `folder` that a command has written."""
        return json.loads((self.folder / file).read_text(encoding='utf-8'))


def reason(file: str, ended: int, code: int, said: str) -> str:
    """Put the wrong end of a command into words.

    Args:
        file: the command.
        ended: its exit code; negative = the number of the signal that ended it.
        code: the exit code that is right.
        said: its output; its last error message is taken, else its last line.
    """
    if ended < 0:
        return f'{file} was ended by {signal.Signals(-ended).name}'
    lines = [' '.join(line.split()) for line in said.splitlines() if line.strip()]
    last = (ERROR.findall('\n'.join(lines)) or lines or ['no output'])[-1]
    return f'{file}: exit code {ended}, not {code}: {last}'
