"""Run the steps of a plan, each once: a step that has ended well leaves its time, and --resume keeps it."""

import ctypes
import fcntl
import os
import re
import shlex
import signal
import sys
import termios
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from logging import DEBUG, WARNING
from pathlib import Path
from subprocess import PIPE, Popen

from models.deploy.ship.plan import Step
from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.files import delete_unfinished, write_json
from utils.qat.core.log import LOGGER
from utils.qat.core.text import in_words
from utils.qat.run.state import STATE
from utils.qat.untrusted.json_schema import SECONDS, read_json

STAMPS = 'steps.json'
MARK = 'warning: '  # how a line of a command begins that is one
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
TRUST = 60  # seconds of steps that say as much of this machine's pace as the plan does: one slow start must not double all that is left


def _end_with_parent() -> None:
    """Let the system end this process when ship ends, however it ends: a command without it would go on, and hold its folder."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def last_run(path: Path, digest: str) -> tuple[Path | None, dict[str, float]]:
    """Find the last run on files with this digest, in the folder `path` or one with a number behind its name.

    Returns its folder, and what its Runner has `taken`.
    """
    kind = {'digest': lambda known: known == digest, 'taken': {str: SECONDS}}
    runs: list[tuple[float, Path | None, dict[str, float]]] = [(0, None, {})]
    for folder in path.parent.glob('*'):
        if re.fullmatch(rf'{re.escape(path.name)}\d*', folder.name):
            with suppress(OSError, ValueError):  # killed before the first step, not ours, or of other files
                taken = read_json(folder / STAMPS, kind)['taken']
                runs.append(((folder / STAMPS).stat().st_mtime, folder, taken))
    return max(runs, key=lambda run: run[0])[1:]


def _is_whole(file: Path) -> bool:
    """Tell whether a file is there, and if it is named so, is JSON."""
    try:
        return file.exists() and (file.suffix != '.json' or read_json(file) is not None)
    except (OSError, ValueError):
        return False


@dataclass
class Runner:
    """Runs steps in a folder, and knows those of an earlier run there.

    Attributes:
        digest: of the files that all results hang on.
        taken: command of a step → its seconds, 0 until it has ended well; at first those of the run that goes on.
        again: the command that goes on after a failure.
        done: steps that have ended well in this run or before, in their order.
    """

    folder: Path
    digest: str
    taken: dict[str, float]
    again: str = ''
    done: list[Step] = field(default_factory=list)

    def has(self, step: Step) -> bool:
        """Tell whether a step has ended well before, and all that it left is there."""
        return bool(self.taken.get(step.command)) and all(map(_is_whole, step.files))

    def expect(self, steps: Sequence[Step]) -> str:
        """Say how long those of the steps will take that are left: what was expected, by how right that was so far."""
        taken, expected = sum(self.taken[step.command] for step in self.done), sum(step.seconds for step in self.done)
        left = sum(step.seconds for step in steps if not self.has(step))
        return in_words((taken + TRUST) / (expected + TRUST) * left)

    def run(self, steps: Sequence[Step], later: Sequence[Step] = ()) -> None:
        """Run steps, each unless it has ended well before. later: those that come behind them. Raises QatError if one fails."""
        for i, step in enumerate(steps):
            ahead, folder = [*steps[i:], *later], step.files[0].parent
            position = f'[{len(self.done) + 1}/{len(self.done) + len(ahead)}] {step.title}'
            if self.has(step):
                LOGGER.info(f'{position}: done before, in {in_words(self.taken[step.command])}')
            else:
                LOGGER.info(f'{position}, about {self.expect([step])}; all that is left: {self.expect(ahead)}')
                delete_unfinished(folder)
                line = step.command
                if line in self.taken and (folder / STATE).exists():  # `quantize` has begun with these words
                    line = command('qat.py', 'quantize', '--resume', folder)
                if step.needed:
                    self.taken = {one.command: self.taken[one.command] for one in self.done}
                self.note(step, 0)
                self.note(step, self.call(line))
            self.done.append(step)

    def call(self, line: str) -> float:
        """Run a command; return its seconds. Its output goes to the log, warnings, errors and bars to the terminal too.

        Raises QatError if it fails.
        """
        LOGGER.info(f'$ {line}')
        start, words = time.perf_counter(), [sys.executable, *shlex.split(line)[1:]]
        ours, its = _terminal() if os.isatty(2) else os.pipe()
        with (
            Popen(words, stdout=PIPE, stderr=its, text=True, errors='replace', preexec_fn=_end_with_parent) as child,
            ThreadPoolExecutor(1) as pool,
        ):
            os.close(its)
            errors = pool.submit(_show, ours)
            for said in child.stdout or ():
                text = said.rstrip()
                LOGGER.log(WARNING if text.startswith(MARK) else DEBUG, text.removeprefix(MARK))
        if said := errors.result():
            LOGGER.debug(said)
        if status := child.returncode:
            why = 'its message is above' if status > 0 else f'signal {-status}, which is 9 if memory ran out'
            raise QatError(f'this step failed ({why}): {line}; go on with: {self.again}')
        return time.perf_counter() - start

    def note(self, step: Step, seconds: float) -> None:
        """Keep the time of a step; 0: --resume runs it again."""
        self.taken[step.command] = seconds
        write_json(self.folder / STAMPS, {'digest': self.digest, 'taken': self.taken})


def _terminal() -> tuple[int, int]:
    """Open a terminal as wide as ours, without which a command shows no bars. Returns the ends that are read and written."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
    return ours, its


def _show(source: int) -> str:
    """Copy what a command says on its stderr to ours as it comes; return its lines as they were in the end, without colours."""
    said = b''
    with suppress(OSError), open(source, 'rb', 0) as stream:  # a terminal ends with an error
        while part := stream.read(2**12):
            said += part
            os.write(2, part)
    return re.sub(r'.*\r|\033\[[\d;]*[A-Za-z]', '', said.decode(errors='replace').replace('\r\n', '\n')).rstrip()
