"""Run the steps of a plan, each once: a step that has ended well leaves a stamp, and --resume keeps it."""

from __future__ import annotations

import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.deploy.ship.plan import LOADING, Step
from utils.qat.core.files import write_json
from utils.qat.core.log import LOGGER
from utils.qat.run.state import STATE
from utils.qat.untrusted.json_schema import NONE, NUMBER, read_json

STAMPS = 'steps.json'
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


class Failed(Exception):
    """A command has ended with this exit code; it has said why."""


def in_words(seconds: float) -> str:
    """Format a time as a person says it."""
    return (
        f'{max(seconds, 1):.0f} s'
        if seconds < 100
        else f'{seconds / 60:.0f} min'
        if seconds < 6000
        else f'{seconds / 3600:.1f} h'
    )


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
    """

    folder: Path
    digest: str
    resume: bool
    ahead: list[Step] = field(default_factory=list)
    done: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stamps: dict[str, dict] = {}
        self.expected = self.taken = 0.0
        kind = {str: {'command': str, 'digest': str, 'seconds': (NONE, NUMBER)}}
        if self.resume:
            try:
                self.stamps = read_json(self.folder / STAMPS, kind)
            except (OSError, ValueError):
                self.resume = False  # killed before the first step, or not ours

    def expect(self, steps: Sequence[Step]) -> str:
        """Say how long steps will take: what was expected, by how right that was so far."""
        right = self.taken / self.expected if self.expected else 1.0
        return in_words(right * sum(LOADING + step.seconds for step in steps))

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps, the first of those that are ahead. Raises Failed."""
        for step in steps:
            total, typed = len(self.done) + len(self.ahead), {'command': step.command, 'digest': self.digest}
            stamp = self.stamps.get(step.name, {})
            same = self.resume and {k: stamp.get(k) for k in typed} == typed
            if same and stamp['seconds'] is not None and step.result.exists():
                LOGGER.info(
                    f'[{len(self.done) + 1}/{total}] {step.title}: done before, in {in_words(stamp["seconds"])}'
                )
            else:
                LOGGER.info(
                    f'[{len(self.done) + 1}/{total}] {step.title}, about {self.expect([step])}; all that is left: {self.expect(self.ahead)}'
                )
                started = same and step.again and (step.result.parent / STATE).exists()
                self.resume = False  # what follows hangs on this step
                for later in self.ahead:
                    self.stamps.pop(later.name, None)
                self.stamps[step.name] = {**typed, 'seconds': None}
                write_json(self.folder / STAMPS, self.stamps)
                seconds = self._call(step.again if started else step.command)
                self.stamps[step.name]['seconds'] = seconds
                write_json(self.folder / STAMPS, self.stamps)
                self.expected, self.taken = self.expected + LOADING + step.seconds, self.taken + seconds
            self.ahead.remove(step)
            self.done.append(step)

    def _call(self, line: str) -> float:
        """Run a command; return its seconds. Its output goes to the log, its warnings, errors and bars to the terminal."""
        LOGGER.info(f'$ {line}')
        start = time.perf_counter()
        words = [sys.executable, *shlex.split(line)[1:]]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, errors='replace', preexec_fn=_end_with_parent
        ) as child:
            for said in child.stdout or ():
                mark, _, text = said.rstrip().partition('warning: ')
                if text and not mark:
                    LOGGER.warning(text)
                else:
                    LOGGER.debug(said.rstrip())
        if child.returncode:
            raise Failed(child.returncode)
        return time.perf_counter() - start
