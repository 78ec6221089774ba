"""The page of ship: one list of parts → ship.md, and ship.html, which opens without a network and runs nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from PIL import Image

from utils.qat.core.files import write_document, write_text
from utils.qat.core.text import code, escaped, image, markdown_table, visible

# A part: ('title' | 'text' | 'strong', text), ('table', header, rows), ('code', lines), ('picture', text, file), ('fold', title, parts)
Part = tuple[Any, ...]
TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70em; margin: 0 auto; padding: 1em; color: #222; background: #fff; }
.strong { font-size: 1.25em; font-weight: 600; border-left: .3em solid #1f77b4; padding: .2em .8em; }
div { overflow-x: auto; }
table { border-collapse: collapse; margin: .5em 0; }
td, th { border-bottom: 1px solid #ccc; padding: .25em .7em; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f4f4f4; padding: .7em; white-space: pre-wrap; overflow-wrap: anywhere; }
img { width: 100%; min-width: 44em; }
p, h1, h2, summary { overflow-wrap: anywhere; }
summary { font-size: 1.3em; font-weight: 600; cursor: pointer; margin: .7em 0; }
@media print { div { overflow: visible; } table { font-size: .7em; } pre { font-size: .75em; } tr, img { break-inside: avoid; } img { min-width: 0; max-height: 24cm; width: auto; max-width: 100%; } details::details-content { content-visibility: visible; block-size: auto; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% macro show(parts) %}{% for part in parts %}{% set kind, first = part[0], part[1] %}
{% if kind == 'title' %}<h2>{{ first|shown }}</h2>
{% elif kind == 'table' %}<div><table><tr>{% for cell in first %}<th>{{ cell|shown }}</th>{% endfor %}</tr>
{% for row in part[2] %}<tr>{% for cell in row %}<td>{{ cell|shown }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% elif kind == 'code' %}<pre>{% for line in first %}{{ line|shown }}
{% endfor %}</pre>
{% elif kind == 'picture' %}<div><img alt="{{ first|shown }}" src="{{ part[2]|embedded }}"></div>
{% elif kind == 'fold' %}<details><summary>{{ first|shown }}</summary>{{ show(part[2]) }}</details>
{% else %}<p{% if kind == 'strong' %} class="strong"{% endif %}>{{ first|shown }}</p>
{% endif %}{% endfor %}{% endmacro %}{{ show(parts) }}
</body>
</html>
"""


def embedded(file: Path) -> str:
    """Return a picture as the address that holds it, as JPEG, which is smaller."""
    buffer = io.BytesIO()
    with Image.open(file) as picture:
        picture.convert('RGB').save(buffer, 'JPEG', quality=85)
    return f'data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}'


def markdown(parts: Iterable[Part], folder: Path) -> list[str]:
    """Format parts as Markdown for a file in `folder`."""
    found: list[str] = []
    for kind, first, *rest in parts:
        if kind == 'table':
            found.append(markdown_table(first, rest[0]))
        elif kind == 'code':
            found.append(code(*first))
        elif kind == 'picture':
            found.append(image(escaped(first), rest[0].relative_to(folder)))
        elif kind == 'fold':
            found += [f'## {escaped(first)}', *markdown(rest[0], folder)]
        else:
            found.append({'title': '## {}', 'strong': '**{}**'}.get(kind, '{}').format(escaped(first)))
    return found


def write_page(folder: Path, title: str, parts: Sequence[Part]) -> None:
    """Write ship.md and ship.html. All texts are data: they are escaped, so that the name of a class is only shown."""
    write_document(folder / 'ship.md', title, markdown(parts, folder))
    environment = Environment(autoescape=True)
    environment.filters |= {'embedded': embedded, 'shown': visible}
    page = environment.from_string(TEMPLATE).render(title=visible(title), parts=parts)
    write_text(folder / 'ship.html', page)
