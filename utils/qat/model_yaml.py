"""The YAML of a network: upstream's parse_model runs `eval` on its strings, so that whoever hands it one first looks at them here."""
import re

from utils.qat.errors import QatError

# What upstream's own files have: names ('Conv', 'nn.Upsample', 'nc', 'nearest', 'None') and activations ('nn.LeakyReLU(0.1)').
PLAIN = re.compile(r'(nn\.)?[A-Za-z]\w*|nn\.[A-Za-z]\w*\([\w\s.,=+-]*\)', re.ASCII)


def require_plain(content, source):
    """Raise QatError, naming `source`, unless the YAML's content is a network whose strings are names."""
    if not isinstance(content, dict):
        raise QatError(f'{source}: describes no network')
    layers = [content.get('backbone'), content.get('head')]
    if not all(isinstance(rows, list) and rows and all(isinstance(row, list) and len(row) == 4 and isinstance(row[3], list) for row in rows)
               for rows in layers):
        raise QatError(f'{source}: needs backbone: and head:, each a list of layers [from, number, module, [arguments]]')
    strings = [content.get('activation') or 'None', *(text for rows in layers for row in rows for text in (row[2], *row[3]))]
    for text in strings:
        if isinstance(text, str) and not PLAIN.fullmatch(text):
            raise QatError(f'{source}: {text[:60]!r} is neither the name of a layer nor a value, and upstream would run it as code')
