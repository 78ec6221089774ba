"""Settings that differ from their defaults, for reports and for command lines."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from utils.qat.config.settings import Settings, flag_of, is_sides, option_of, plain
from utils.qat.core.command import typed_sides
from utils.qat.core.text import Markdown, code, escaped, markdown_table

UNNAMED = 'resume', 'exist_ok', 'dry_run'  # they change no result


def unlike_defaults(settings: Mapping[str, Any], kind: type[Settings]) -> dict[str, tuple[Any, Any]]:
    """Find the typed settings that differ from their defaults in `kind`: name → (value, default or None), plain."""
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(kind) if option_of(kind, f.name)}
    pairs = {name: (plain(settings[name]), plain(default)) for name, default in defaults.items() if name in settings}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in UNNAMED}


def options(settings: Mapping[str, Any], kind: type[Settings]) -> list[str]:
    """Return the command-line words for these settings; see `unlike_defaults`."""
    words = []
    for name, (value, _) in unlike_defaults(settings, kind).items():
        flag = flag_of(name, value)
        if isinstance(value, bool):
            words.append(flag)
        else:
            values = typed(value, kind, name)
            words += [f'{flag}={values[0]}'] if len(values) == 1 and values[0].startswith('-') else [flag, *values]
    return words


def typed(value: Any, kind: type[Settings], name: str) -> list[str]:
    """Return a plain setting as command-line words."""
    if not isinstance(value, list):
        return [str(value)]
    sides = next(is_sides(f) for f in fields(kind) if f.name == name)
    return list(map(str, typed_sides(value) if sides else value))


def closing(
    settings: Mapping[str, Any], kind: type[Settings], versions: Mapping[str, str], following: str | None = None
) -> list[str]:
    """Return the end of every report, as Markdown: settings that are not the defaults, versions, and the next command."""
    rows = [
        (
            Markdown(f'`{flag_of(name)}`'),
            ' '.join(typed(value, kind, name)),
            ' '.join(typed(default, kind, name)) if default not in (None, []) else '-',
        )
        for name, (value, default) in unlike_defaults(settings, kind).items()
    ]
    return [
        '## Settings that are not the defaults',
        markdown_table(('setting', 'value', 'default'), rows, right=False),
        '## Versions',
        escaped(', '.join(f'{name} {version}' for name, version in versions.items())),
        *(['## Next', code(following)] if following else []),
    ]
