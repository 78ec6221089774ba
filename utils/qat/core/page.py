"""A document of ours, Markdown → the same as an HTML page that opens without a network and runs nothing."""

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from utils.qat.core.files import write_document, write_text
from utils.qat.core.text import escaped, visible

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80em; margin: 0 auto; padding: 1em; color: #222; background: #fff; }}
strong {{ display: block; font-size: 1.25em; font-weight: 600; border-left: .3em solid #1f77b4; padding: .2em .8em; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .5em 0; }}
td, th {{ border-bottom: 1px solid #ccc; padding: .25em .7em; text-align: right; white-space: nowrap; }}
td:first-child, th:first-child {{ text-align: left; }}
pre {{ background: #f4f4f4; padding: .7em; white-space: pre-wrap; overflow-wrap: anywhere; }}
img {{ width: 100%; min-width: 44em; }}
p, h1, h2, strong, summary {{ overflow-wrap: anywhere; }}
summary {{ font-size: 1.3em; font-weight: 600; cursor: pointer; margin: .7em 0; }}
@media print {{
  div {{ overflow: visible; }} table {{ font-size: .7em; }} pre {{ font-size: .75em; }} tr, img {{ break-inside: avoid; }}
  img {{ min-width: 0; max-height: 24cm; width: auto; max-width: 100%; }}
  details::details-content {{ content-visibility: visible; block-size: auto; }}
}}
</style>
</head>
<body>
"""


def fold(title: str, *parts: str) -> list[str]:
    """Make parts that a reader opens by a click on the title."""
    text = html.escape(visible(title)).replace('](', ']&#40;')  # no link in Markdown
    return [f'<details><summary>{text}</summary>', *parts, '</details>']


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write `path`.md and `path`.html. parts: those of files.write_document, and of `fold`; pictures lie beside the file."""
    write_document(path.with_suffix('.md'), title, parts)
    body = '\n'.join(in_html(block, path.parent) for block in (f'# {escaped(title)}', *parts))
    write_text(path.with_suffix('.html'), f'{HEAD.format(_text(escaped(title)))}{body}\n</body>\n</html>\n')


def in_html(block: str, folder: Path) -> str:
    """Convert a block of our Markdown; all else in it is text, and only shown."""
    if block.startswith('```'):
        return f'<pre>{html.escape(block.partition(chr(10))[2].rpartition(chr(10))[0])}</pre>'
    if block.startswith('|'):
        header, _, *rows = block.split('\n')
        return f'<div><table>{_row(header, "th")}{"".join(_row(row, "td") for row in rows)}</table></div>'
    if picture := re.fullmatch(r'!\[(.*)\]\(([\w./-]+)\)', block):
        return f'<div><img alt="{_text(picture[1])}" src="{_embedded(folder / picture[2])}"></div>'
    if re.fullmatch(r'<details><summary>[^<]*</summary>|</details>', block):
        return block
    for start, tag in (('# ', 'h1'), ('## ', 'h2'), ('**', 'strong')):
        if block.startswith(start):
            return f'<{tag}>{_text(block.removeprefix(start).removesuffix("**"))}</{tag}>'
    return f'<p>{_text(block)}</p>'


def _text(markdown: str) -> str:
    """Undo `text.escaped`, and escape for HTML."""
    return html.escape(html.unescape(re.sub(r'\\([!-/:-@[-`{-~])', r'\1', markdown)))


def _row(line: str, tag: str) -> str:
    cells = re.split(r'(?<!\\)\|', line)[1:-1]
    return f'<tr>{"".join(f"<{tag}>{_text(cell.strip())}</{tag}>" for cell in cells)}</tr>\n'


def _embedded(file: Path) -> str:
    """Return a picture as the address that holds it, as JPEG, which is smaller."""
    buffer = io.BytesIO()
    with Image.open(file) as picture:
        picture.convert('RGB').save(buffer, 'JPEG', quality=85)
    return f'data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}'
