"""The settings of a command against their defaults: what differs is what a report names, and what one would have to type."""

from dataclasses import MISSING, fields
from pathlib import Path

from utils.qat.core.markdown import Markdown, code, escaped, markdown_table

UNNAMED = 'needs_masks', 'resume', 'exist_ok', 'dry_run'  # no settings of a result


def _plain(value):
    """As it is written to JSON: paths as text, sequences as lists."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, (list, tuple)) else value


def unlike_defaults(settings, kind):
    """{name: (value, default)} of what differs. settings: name → value, plain or not, of the dataclass `kind`; what has no default
    differs from None."""
    defaults = {
        f.name: None if f.default is MISSING else f.default for f in fields(kind) if f.default_factory is MISSING
    }
    pairs = {name: (_plain(settings[name]), _plain(default)) for name, default in defaults.items() if name in settings}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in UNNAMED}


def options(settings, kind):
    """The words of a command line that give these settings (see `unlike_defaults`)."""
    words = []
    for name, (value, _) in unlike_defaults(settings, kind).items():
        flag = name.replace('_', '-')
        if isinstance(value, bool):
            words.append(f'--{"no-" * (not value)}{flag}')
        else:
            values = list(map(str, value if isinstance(value, list) else [value]))
            words += (
                [f'--{flag}={values[0]}'] if len(values) == 1 and values[0].startswith('-') else [f'--{flag}', *values]
            )
    return words


def closing(settings, kind, versions, following=None):
    """What every report ends with, as Markdown: the settings that are not the defaults, see `unlike_defaults`; versions (name → version);
    and the next command, if there is one already."""
    rows = [
        (Markdown(f'`--{name.replace("_", "-")}`'), value, '-' if default is None else default)
        for name, (value, default) in unlike_defaults(settings, kind).items()
    ]
    return [
        '## Settings that are not the defaults',
        markdown_table(('setting', 'value', 'default'), rows, right=False),
        '## Versions',
        escaped(', '.join(f'{name} {version}' for name, version in versions.items())),
        *(['## Next', code(following)] if following else []),
    ]
