"""What all reports are made of: figures, Markdown tables and documents, files that are whole at any moment.

The report of a command is in a file of its own: run/report.py (quantize), sensitivity_summary.py (sensitive), score_report.py (eval, val_trt.py),
compare_report.py, benchmark/report.py.
"""
import json
import platform
import re
import unicodedata
from importlib import metadata
from urllib.parse import quote

from utils.qat.core.errors import atomic
from utils.qat.core.printable import visible

PACKAGES = ('torch', 'torchvision', 'numpy', 'pytorch-quantization')  # whose versions decide the numbers
COLUMNS = ('AP', 'AP50', 'P', 'R')
MASK_COLUMNS = tuple(f'mask {c}' for c in COLUMNS)


def write_text(path, text):
    """`path` with `text`, in UTF-8, whole at any moment."""
    with atomic(path) as tmp:
        tmp.write_text(text, encoding='utf-8', errors='backslashreplace')


def write_json(path, content):
    write_text(path, json.dumps(content, indent=2, default=str) + '\n')


class Markdown(str):
    """Text with a meaning in Markdown, of ours: a cell of a table that is not escaped."""


# What GitHub gives a meaning: some signs anywhere, brackets of a link, an underscore at the edge of a word, an address
MEANINGFUL = re.compile(r'[\\`*|~$]|!?\[(?=.*\][(\[])|\](?=[(\[])|(?<=\])[(\[]|(?<![^\W_])_|_(?![^\W_])|(?<=[A-Za-z]):(?=//)|'
                        r'(?<=\bwww)\.|(?<=\w)@(?=\w)')


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


def versions():
    """Versions of what decides the numbers."""
    return {'python': platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def figures(metrics, masks=False):
    """AP, AP50, P and R of plain metrics, to four digits; '-' where there are none. With `masks` those of masks as well."""
    of_boxes = [f'{metrics[k]:.4f}' if metrics and k in metrics else '-' for k in ('ap', 'ap50', 'precision', 'recall')]
    return of_boxes + figures((metrics or {}).get('mask')) if masks else of_boxes


def columns(*metrics):
    """(titles of the columns of `figures`, whether some of the plain metrics have masks)."""
    masks = any(m and m.get('mask') for m in metrics)
    return COLUMNS + MASK_COLUMNS * masks, masks


def merit(metrics):
    """What models are chosen by: AP of plain metrics, of a segmentation model the mean of that of boxes and of masks."""
    return (metrics['ap'] + metrics['mask']['ap']) / 2 if 'mask' in metrics else metrics['ap']


def width(text):
    """Columns that a terminal gives `text`: Chinese, Japanese and Korean characters take two, accents of their own none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in 'WF') for c in text)


def markdown_table(header, rows, right=True):
    """A Markdown table whose columns also align as plain text; the first column is left-aligned, the rest right, if `right`.

    A cell is text, which is escaped, or Markdown.
    """
    cells = [[cell if isinstance(cell, Markdown) else escaped(' '.join(str(cell).split())) for cell in row] for row in (header, *rows)]
    widths = [max(width(row[i]) for row in cells) for i in range(len(header))]
    left = 1 if right else len(header)  # columns

    def line(row):
        padded = ((c, ' ' * (w - width(c))) for c, w in zip(row, widths))
        return '| ' + ' | '.join(c + space if i < left else space + c for i, (c, space) in enumerate(padded)) + ' |'

    rule = '|' + '|'.join('-' * (w + 1) + ('-' if i < left else ':') for i, w in enumerate(widths)) + '|'
    return '\n'.join([line(cells[0]), rule, *map(line, cells[1:])])


def class_table(metrics):
    """Metrics over all classes and per class."""
    titles, masks = columns(metrics)
    rows = [['all', metrics['instances'], *figures(metrics, masks)]]
    rows += [[c['name'], c['instances'], *figures(c, masks)] for c in metrics['per_class']]
    return markdown_table(('class', 'instances', *titles), rows)
