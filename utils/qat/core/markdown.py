"""What all reports are made of: Markdown tables, links, pictures and documents.

The report of a command is in a file of its own: run/report.py (quantize), sensitivity_summary.py (sensitive), score_report.py (eval, val_trt.py),
compare_report.py, benchmark/report.py.
"""

import re
import unicodedata
from urllib.parse import quote

from utils.qat.core.files import write_text
from utils.qat.core.printable import visible


class Markdown(str):
    """Text with a meaning in Markdown, of ours: a cell of a table that is not escaped."""


# What GitHub gives a meaning: some signs anywhere, brackets of a link, an underscore at the edge of a word, an address
MEANINGFUL = re.compile(
    r'[\\`*|~$]|!?\[(?=.*\][(\[])|\](?=[(\[])|(?<=\])[(\[]|(?<![^\W_])_|_(?![^\W_])|(?<=[A-Za-z]):(?=//)|'
    r'(?<=\bwww)\.|(?<=\w)@(?=\w)'
)


def escaped(text):
    """Markdown that shows `text` as it is typed, on one line: a name of a file, a class or a layer is no link, no picture and no HTML."""
    text = MEANINGFUL.sub(lambda found: ''.join(f'\\{sign}' for sign in found[0]), visible(text))
    return Markdown(re.sub(r'&(?=[#\w]+;)', '&amp;', text).replace('<', '&lt;'))  # `\<` is not known to all readers


def link(file):
    """Markdown that leads to a file beside the document."""
    return Markdown(f'[{escaped(file)}]({quote(str(file))})')


def code(*lines):
    """Markdown that shows lines as they are typed."""
    fence = '`' * max(3, *(1 + len(run) for run in re.findall('`+', ' '.join(lines))), 0)
    return Markdown('\n'.join((fence, *map(visible, lines), fence)))


def document(path, title, parts):
    """A Markdown file: a title, which is text, and paragraphs, tables and pictures, which are Markdown, with an empty line between."""
    write_text(path, '\n\n'.join((f'# {escaped(title)}', *parts)) + '\n')


def image(text, file):
    """Markdown that shows a picture which lies beside the document."""
    return f'![{text}]({file})'


def width(text):
    """Columns that a terminal gives `text`: Chinese, Japanese and Korean characters take two, accents of their own none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in 'WF') for c in text)


def markdown_table(header, rows, right=True):
    """A Markdown table whose columns also align as plain text; the first column is left-aligned, the rest right, if `right`.

    A cell is text, which is escaped, or Markdown.
    """
    cells = [
        [cell if isinstance(cell, Markdown) else escaped(' '.join(str(cell).split())) for cell in row]
        for row in (header, *rows)
    ]
    widths = [max(width(row[i]) for row in cells) for i in range(len(header))]
    left = 1 if right else len(header)  # columns

    def line(row):
        padded = ((c, ' ' * (w - width(c))) for c, w in zip(row, widths))
        return '| ' + ' | '.join(c + space if i < left else space + c for i, (c, space) in enumerate(padded)) + ' |'

    rule = '|' + '|'.join('-' * (w + 1) + ('-' if i < left else ':') for i, w in enumerate(widths)) + '|'
    return '\n'.join([line(cells[0]), rule, *map(line, cells[1:])])
