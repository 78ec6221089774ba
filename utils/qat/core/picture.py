"""What all pictures share. Matplotlib without pyplot: no global state, no display needed."""

import warnings

from utils.qat.core.files import atomic


def literal(text):
    """`text` for Matplotlib, which takes $ for the beginning of a formula, and leaves labels that begin with _ out of a legend."""
    text = text.replace('$', r'\$')
    return f' {text}' if text.startswith('_') else text


def save(figure, path):
    """Write a picture, whole at any moment. The suffix of `path` chooses the format."""
    with atomic(path) as tmp, warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing from')  # of a class name in a script that its font lacks
        figure.savefig(tmp, dpi=120)
