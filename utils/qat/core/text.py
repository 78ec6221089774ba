"""Text that is safe to print, and Markdown: tables, links, code blocks and pictures of reports."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

JOINERS = '\u200c\u200d'  # between letters of Persian and Hindi, and in emoji
# Categories of Unicode: control, format (bidirectional among them), half a character, line and paragraph separators
CONTROLS = ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
LONGEST = 2000  # characters of a message
# Characters with a meaning on GitHub: some anywhere, brackets of a link, an underscore at the edge of a word, an address
MEANINGFUL = re.compile(
    r'[\\`*|~$]|!?\[(?=.*\][(\[])|\](?=[(\[])|(?<=\])[(\[]|(?<![^\W_])_|_(?![^\W_])|(?<=[A-Za-z]):(?=//)|'
    r'(?<=\bwww)\.|(?<=\w)@(?=\w)'
)


def is_printable(text: str) -> bool:
    """Tell whether all of a text is visible: no line break, control character or bidirectional character."""
    return text.isprintable() or all(
        c.isprintable() or c in JOINERS or unicodedata.category(c) not in CONTROLS for c in text
    )


def visible(text: object, keep: str = '') -> str:
    r"""Replace each character of str(text) that is not printable by an escape, such as \x1b or \u202e; `keep` stays."""
    text = str(text)
    if text.isprintable():  # nearly always, and fast
        return text
    return ''.join(c if c in keep or is_printable(c) else c.encode('unicode_escape').decode() for c in text)


def cut(text: str) -> str:
    """Cut the middle of a text that is too long: its start tells where the mistake is, its end what to do."""
    return text if len(text) <= LONGEST else f'{text[: LONGEST * 3 // 4]} … {text[-LONGEST // 4 :]}'


def in_words(seconds: float) -> str:
    """Format a time as a person says it."""
    for limit, unit, name in ((100, 1, 's'), (6000, 60, 'min')):
        if seconds < limit:
            return f'{max(seconds / unit, 1):.0f} {name}'
    return f'{seconds / 3600:.1f} h'


class Markdown(str):
    """Text that is Markdown already: as a cell of a table it is not escaped."""


def escaped(text: object) -> Markdown:
    """Escape the str() of anything, so that Markdown shows it on one line as it is typed: no link, picture or HTML."""
    typed = MEANINGFUL.sub(lambda match: ''.join(f'\\{sign}' for sign in match[0]), visible(text))
    return Markdown(re.sub(r'&(?=[#\w]+;)', '&amp;', typed).replace('<', '&lt;'))  # some readers do not know `\<`


def link(file: str | Path) -> Markdown:
    """Make a link to a file beside the document."""
    return Markdown(f'[{escaped(file)}]({quote(str(file))})')


def code(*lines: str) -> Markdown:
    """Make a code block of lines."""
    fence = '`' * max(3, *(1 + len(run) for run in re.findall('`+', ' '.join(lines))), 0)
    return Markdown('\n'.join((fence, *map(visible, lines), fence)))


def image(text: str, file: str | Path) -> str:
    """Make the Markdown of a picture that lies beside the document."""
    return f'![{text}]({file})'


def width(text: str) -> int:
    """Count the columns of a text on a terminal: two for a Chinese, Japanese or Korean character."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in 'WF') for c in text)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], right: bool = True) -> str:
    """Make a Markdown table whose columns align as plain text too; cells that are not Markdown are escaped."""
    cells = [
        [cell if isinstance(cell, Markdown) else escaped(' '.join(str(cell).split())) for cell in row]
        for row in (header, *rows)
    ]
    widths = [max(width(row[i]) for row in cells) for i in range(len(header))]
    left = 1 if right else len(header)  # left-aligned columns

    def line(row: Sequence[str]) -> str:
        padded = ((c, ' ' * (w - width(c))) for c, w in zip(row, widths))
        return '| ' + ' | '.join(c + space if i < left else space + c for i, (c, space) in enumerate(padded)) + ' |'

    rule = '|' + '|'.join('-' * (w + 1) + ('-' if i < left else ':') for i, w in enumerate(widths)) + '|'
    return '\n'.join([line(cells[0]), rule, *map(line, cells[1:])])


def number(value: float | None, form: str = '.4f') -> str:
    """Format a number for a table; '-' for None."""
    return '-' if value is None else format(value, form)


def listed(title: str, lines: Sequence[str], limit: int | None) -> list[str]:
    """Make a list of a report: an empty line, the title with the number of `lines`, and the first `limit` of them (None = all)."""
    rest = len(lines) - len(lines[:limit])
    return [
        '',
        f'{title}: {len(lines)}',
        *(f'  {line}' for line in lines[:limit]),
        *[f'  ... and {rest} more'] * bool(rest),
    ]


def counted(number: int, noun: str) -> str:
    """Format a number of things: '1 image', '2 images'."""
    return f'{number} {noun}{"s" * (number != 1)}'


def literal(text: str) -> str:
    """Escape text for Matplotlib: $ begins a formula, and _ at its begin leaves a label out of a legend."""
    text = text.replace('$', r'\$')
    return f' {text}' if text.startswith('_') else text


def pixels(imgsz: Sequence[int] | None) -> str:
    """Format height and width in pixels: '640 px', '480 x 640 px'; '' for None."""
    return f'{" x ".join(map(str, dict.fromkeys(imgsz)))} px' if imgsz else ''
