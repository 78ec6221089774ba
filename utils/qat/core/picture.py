"""Pictures by Matplotlib without pyplot: no global state, no display needed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from utils.qat.core.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def literal(text: str) -> str:
    """Escape text for Matplotlib: $ begins a formula, and _ at its begin leaves a label out of a legend."""
    text = text.replace('$', r'\$')
    return f' {text}' if text.startswith('_') else text


def save(figure: Figure, path: str | Path) -> None:
    """Write a picture, complete at any moment; the suffix of `path` chooses the format."""
    with atomic(path) as tmp, warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing from')  # a class name in a script that the font lacks
        figure.savefig(tmp, dpi=120)
