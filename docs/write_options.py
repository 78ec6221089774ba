#!/usr/bin/env python3
"""Write docs/options.md, the options of the commands, as their -h has them.

    python docs/write_options.py

Needs Python alone. A test compares the page with what this script writes.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.qat.config.deploy import BenchmarkConfig, BuildConfig, CompareConfig
from utils.qat.config.export import DeepStreamConfig, ExportConfig
from utils.qat.config.qat import EvalConfig, FileEvalConfig, QuantizeConfig, SensitiveConfig
from utils.qat.config.settings import WHAT, Option, Settings, flag_of, grouped, help_of
from utils.qat.config.ship import ShipConfig

PAGE = Path(__file__).with_name('options.md')
COMMANDS: dict[str, type[Settings]] = {
    'qat.py quantize': QuantizeConfig,
    'qat.py ship': ShipConfig,
    'export_qat.py': ExportConfig,
    'qat.py eval': EvalConfig,
    'qat.py sensitive': SensitiveConfig,
    'val_trt.py': FileEvalConfig,
    'compare_outputs.py': CompareConfig,
    'benchmark_trt.py': BenchmarkConfig,
    'export_yoloV9.py': DeepStreamConfig,
    'scripts/build_engine.py': BuildConfig,
}
INTRODUCTION = """# Options

Each option in a clause, with its default in brackets; `-h` of the command says more. All commands have `--quiet` and `--verbose` too. `segment/qat_seg.py` and
`classify/qat_cls.py` are `qat.py` for one task. [Files and exit codes](results.md). [Options that `-h` leaves out, such as `--no-eval-ptq`](migration.md).

<!-- docs/write_options.py writes this page. -->"""


def flag(field: Field, option: Option) -> str:
    """Name an option: its flag, and the values that it takes if it has them or a name for them."""
    choices = option.allowed if isinstance(option.allowed, tuple) and not option.parse else ()
    values = option.metavar or (f'{{{",".join(map(str, choices))}}}' if choices else '')
    names = [] if option.positional else [flag_of(field.name, False if field.default is True else None)]
    return ' '.join([*names, values]).strip()


def clause(text: str) -> str:
    """Shorten a help text to its first clause, and keep what 0 means."""
    return re.split(r'[.;:] (?!0 = )|, such as ', text)[0]


def section(command: str, known: dict[tuple[str, str], tuple[str, str]]) -> Iterator[str]:
    """Describe the options of a command as blocks of text, group by group.

    `known` has (option, its text) → (the first command that has them, the default there); these are only named again, new ones added.
    """
    kind = COMMANDS[command]
    yield f'## {command}'
    same: dict[str, list[str]] = {}  # command → options
    for title, options in grouped(kind).items():
        items = []
        for field, option in options:
            if field.name in kind.HIDDEN:
                continue
            name = flag(field, option)
            text, _, default = help_of(field, option).partition('; default: ')
            default = default and f' ({default})'
            first, told = known.setdefault((name, text), (command, default))
            if first == command:
                items.append(f'- `{name}`: {clause(text)}{default}')
            else:
                same.setdefault(first, []).append(f'`{name.split()[0]}`{default if default != told else ""}')
        if items and title != WHAT:
            yield f'{title[0].upper()}{title[1:]}:'
        if items:
            yield '\n'.join(items)
    for first, names in same.items():
        yield f'As `{first}`: {", ".join(names)}.'


def page() -> str:
    """Make the content of the page."""
    known: dict[tuple[str, str], tuple[str, str]] = {}
    return '\n\n'.join([INTRODUCTION, *(block for command in COMMANDS for block in section(command, known))]) + '\n'


if __name__ == '__main__':
    PAGE.write_text(page(), encoding='utf-8')
