"""Tables that are texts, a row a line: cases of a test that are read as they are typed."""

import re

import pytest


def rows(text):
    """The cells of each row, between ' | '. A line that begins with spaces goes on with the row above; one that begins with # is a comment."""
    lines = []
    for line in filter(str.strip, text.splitlines()):
        if line[0] == ' ':
            lines[-1] += f' {line.strip()}'
        elif line[0] != '#':
            lines.append(line)
    return [[cell.strip() for cell in re.split(r'\s\|(?=\s)', f'{line} ')] for line in lines]


def named_rows(text, *kinds):
    """Rows as pytest parameters, with the first cell for a name; `kinds` are functions that read the others, text by default."""
    table = rows(text)
    assert len({row[0] for row in table}) == len(table), 'two rows of one name'
    return [
        pytest.param(*(read(cell) for read, cell in zip([*kinds, *[str] * 9], row[1:])), id=row[0]) for row in table
    ]
