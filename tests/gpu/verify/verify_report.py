"""The report of scripts/verify_tensorrt.sh, a plugin of pytest: verify.json with everything, verify.md to attach to an issue.

Both are written after each row, so that an interrupted run leaves what it has found.
"""

import json
import os
import textwrap
from collections import Counter
from dataclasses import asdict

import pytest

from utils.qat.config.deploy import VerifyConfig
from utils.qat.config.settings import read
from utils.qat.core.files import write_document, write_json
from utils.qat.core.machine import machine_table
from utils.qat.core.text import code, markdown_table

LONGEST = 200  # characters of a reason in the table of verify.md; verify.json has all of it


def settings_of_the_command():
    """Settings that scripts/verify_tensorrt.py was called with; None = the tests were called by hand."""
    typed = os.environ.get('VERIFY_TENSORRT')
    return read(VerifyConfig, json.loads(typed), '') if typed else None


def row_of(item):
    """(name, what it checks) of a test that is a row."""
    return item.get_closest_marker('tensorrt').args


class Report:
    def __init__(self, only):
        """only: names of the rows to check; none = all."""
        self.only, self.rows, self.runner = only, [], None

    def pytest_collection_modifyitems(self, config, items):
        names = [row_of(item)[0] for item in items]
        unknown = [name for name in self.only if name not in names]
        if unknown:
            raise pytest.UsageError(f'--only {", ".join(unknown)}: allowed are {", ".join(names)}')
        if self.only:
            items[:] = [item for item in items if row_of(item)[0] in self.only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        runner = getattr(item, 'runner', None)
        if runner and (call.when == 'call' or call.excinfo):
            name, title = row_of(item)
            self.rows.append(
                {
                    'name': name,
                    'title': title,
                    'status': {'passed': 'pass', 'failed': 'fail', 'skipped': 'skip'}[report.outcome],
                    'found': reason_of(call.excinfo) if call.excinfo else runner.found,
                    'seconds': call.duration,
                    'commands': runner.commands,
                }
            )
            self.runner = runner
            self.write()
        return report

    def counts(self):
        machine, count = self.runner.machine, Counter(row['status'] for row in self.rows)
        return (
            f'{machine["product"]} on {machine["gpu"] or "a machine without a GPU"}: {count["pass"]} passed, {count["fail"]} failed, '
            f'{count["skip"]} skipped.'
        )

    def write(self):
        folder, machine = self.runner.folder, self.runner.machine
        settings = asdict(self.runner.config)
        write_json(
            folder / 'verify.json',
            {'verdict': self.counts(), 'machine': machine, 'settings': settings, 'rows': self.rows},
        )
        columns = ('row', 'result', 'what', 'found, or the reason', 's')
        cells = [
            (row['name'], row['status'], row['title'], shortened(row['found']), f'{row["seconds"]:.0f}')
            for row in self.rows
        ]
        failed = [row for row in self.rows if row['status'] == 'fail']
        write_document(
            folder / 'verify.md',
            'scripts/verify_tensorrt.sh',
            [
                self.counts(),
                markdown_table(columns, cells, right=False),
                machine_table(machine['described']),
                *(
                    part
                    for row in failed
                    for part in (f'## {row["name"]}: failed', row['found'], code(*row['commands']))
                ),
                'All output is in log.txt.',
            ],
        )

    def pytest_terminal_summary(self, terminalreporter):
        if self.rows:
            folder = self.runner.folder
            terminalreporter.write_line(f'\n{self.counts()}\nreport: {folder / "verify.md"}')
            terminalreporter.write_line(f'details: {folder / "verify.json"}, {folder / "log.txt"}')


def reason_of(excinfo):
    told = excinfo.errisinstance((pytest.fail.Exception, pytest.skip.Exception))
    return excinfo.value.msg if told else excinfo.exconly()


def shortened(text):
    return textwrap.shorten(text, LONGEST, placeholder=' ...')
