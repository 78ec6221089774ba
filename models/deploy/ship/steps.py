"""Run the steps of a plan, each once: a step that has ended well leaves a stamp, and --resume keeps it."""

from __future__ import annotations

import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import DEBUG, WARNING
from pathlib import Path

from models.deploy.ship.plan import Step
from utils.qat.core.command import command
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER
from utils.qat.core.text import in_words
from utils.qat.run.state import STATE
from utils.qat.untrusted.json_schema import NONE, NUMBER, read_json

STAMPS = 'steps.json'
MARK = 'warning: '  # how a line of a command begins that is one
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
TRUST = 60  # seconds of steps that say as much of this machine's pace as the plan does: one slow start must not double all that is left


class Failed(QatError):
    """A step has ended badly."""


def _end_with_parent() -> None:
    """Let the system end this process when ship ends, however it ends: a command without it would go on, and hold its folder."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Runner:
    """Runs steps in a folder, and knows those of an earlier run there.

    Attributes:
        digest: of the files that all results hang on.
        resume: whether to keep what an earlier run has finished.
        stamps: name of a step → its command, the digest, and its seconds, None until it has ended well.
    """

    folder: Path
    digest: str
    resume: bool
    ahead: list[Step] = field(default_factory=list)
    done: list[Step] = field(default_factory=list)
    stamps: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = {str: {'command': str, 'digest': str, 'seconds': (NONE, NUMBER)}}
        with suppress(OSError, ValueError):  # killed before the first step, or not ours
            self.stamps = read_json(self.folder / STAMPS, kind) if self.resume else {}

    def expect(self, steps: Sequence[Step]) -> str:
        """Say how long steps will take: what was expected, by how right that was so far."""
        expected, taken = (sum(of(step) for step in self.done) for of in (Step.whole, self.seconds))
        return in_words((taken + TRUST) / (expected + TRUST) * sum(map(Step.whole, steps)))

    def seconds(self, step: Step) -> float:
        """Return the time that a step has taken."""
        return self.stamps[step.name]['seconds']

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps, the first of those that are ahead. Raises Failed."""
        for step in steps:
            position = f'[{len(self.done) + 1}/{len(self.done) + len(self.ahead)}] {step.title}'
            typed, stamp = {'command': step.command, 'digest': self.digest}, self.stamps.get(step.name, {})
            same, folder = typed.items() <= stamp.items(), step.result.parent
            if same and stamp['seconds'] is not None and step.result.exists():
                LOGGER.info(f'{position}: done before, in {in_words(self.seconds(step))}')
            else:
                LOGGER.info(f'{position}, about {self.expect([step])}; all that is left: {self.expect(self.ahead)}')
                started = same and (folder / STATE).exists()
                line = command('qat.py', 'quantize', '--resume', folder) if started else step.command
                self.stamps = {one.name: self.stamps[one.name] for one in self.done}  # all others hang on this step
                stamp = self.stamps[step.name] = {**typed, 'seconds': None}
                write_json(self.folder / STAMPS, self.stamps)
                stamp['seconds'] = _call(line)
                write_json(self.folder / STAMPS, self.stamps)
            self.ahead.remove(step)
            self.done.append(step)


def _call(line: str) -> float:
    """Run a command; return its seconds. Its output goes to the log, its warnings, errors and bars to the terminal. Raises Failed."""
    LOGGER.info(f'$ {line}')
    start = time.perf_counter()
    words, out = [sys.executable, *shlex.split(line)[1:]], subprocess.PIPE
    with subprocess.Popen(words, stdout=out, text=True, errors='replace', preexec_fn=_end_with_parent) as child:
        for said in child.stdout or ():
            text = said.rstrip()
            LOGGER.log(WARNING if text.startswith(MARK) else DEBUG, text.removeprefix(MARK))
    if child.returncode:
        why = (
            f'signal {-child.returncode}, which is 9 if memory ran out'
            if child.returncode < 0
            else 'its message is above'
        )
        raise Failed(f'this step failed ({why}): {line}')
    return time.perf_counter() - start
