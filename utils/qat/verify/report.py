"""The rows as a table: verify.json with everything, verify.md to attach to a report."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.qat.config.verify import VerifyConfig
from utils.qat.core.files import write_json
from utils.qat.core.machine import machine_table
from utils.qat.core.markdown import code, document, markdown_table
from utils.qat.verify.bench import Machine

PASSED, FAILED, SKIPPED = 'pass', 'fail', 'skip'
LONGEST = 200  # characters of a reason in the table of verify.md; verify.json has all of it


@dataclass(frozen=True)
class Outcome:
    """The result of a checked row: passed, failed or skipped, with its figures or its reason."""

    name: str
    title: str
    status: str  # PASSED, FAILED or SKIPPED
    found: str  # figures, or the reason
    seconds: float
    commands: tuple[str, ...]  # as typed, in the run's folder


def verdict(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Say in one sentence how many rows passed, failed and were skipped."""
    count = Counter(outcome.status for outcome in outcomes)
    return (
        f'{machine.product} on {machine.gpu or "a machine without a GPU"}: {count[PASSED]} passed, {count[FAILED]} failed, '
        f'{count[SKIPPED]} skipped.'
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Lay out the rows as a Markdown table for a terminal: without figures and reasons, which are too long for it."""
    return markdown_table(
        ('row', 'result', 'what', 's'), ((o.name, o.status, o.title, f'{o.seconds:.0f}') for o in outcomes), right=False
    )


def write_report(folder: Path, config: VerifyConfig, machine: Machine, outcomes: Sequence[Outcome]) -> None:
    """Write verify.json and verify.md, after each row, so that an interrupted run leaves what it has found.

    Args:
        folder: where to write.
        config: settings of the command.
        machine: the facts about the machine.
        outcomes: the rows so far.
    """
    said = verdict(machine, outcomes)
    report = {
        'verdict': said,
        'machine': asdict(machine),
        'settings': asdict(config),
        'rows': list(map(asdict, outcomes)),
    }
    write_json(folder / 'verify.json', report)
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    columns = ('row', 'result', 'what', 'found, or the reason', 's')
    rows = [
        (o.name, o.status, o.title, textwrap.shorten(o.found, LONGEST, placeholder=' ...'), f'{o.seconds:.0f}')
        for o in outcomes
    ]
    document(
        folder / 'verify.md',
        'scripts/verify_tensorrt.py',
        [
            said,
            markdown_table(columns, rows, right=False),
            machine_table(machine.described),
            *(part for o in failed for part in (f'## {o.name}: failed', o.found, code(*o.commands))),
            'All output is in log.txt.',
        ],
    )
