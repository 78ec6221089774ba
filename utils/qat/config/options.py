"""The command line of a command, from its settings: fields of a dataclass → options, typed words → the dataclass."""

from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from utils.qat.config.settings import RUN, WHAT, Option, Settings, Sides, flag_of, kind_of, option_of
from utils.qat.core.command import Parser, typed_sides

T = TypeVar('T', bound=Settings)
METAVARS = {int: 'N', float: 'X'}  # of values without a name of their own


def read(kind: type[T], argv: Sequence[str] | None, description: str, epilog: str | None = None) -> T:
    """Parse a command line into settings of the class `kind`. argv: None = the words of this process."""
    (settings,) = read_each(kind, argv, description, epilog)
    return settings


def read_each(kind: type[T], argv: Sequence[str] | None, description: str, epilog: str | None = None) -> list[T]:
    """Parse a command line into settings, see `settings_of`. argv: None = the words of this process."""
    parser = Parser(description=description, epilog=epilog, add_help=False)
    add_options(parser, kind)
    return settings_of(kind, vars(parser.parse_args(argv)))


def settings_of(kind: type[T], typed: dict[str, Any]) -> list[T]:
    """Make settings from typed values: one, or one per value of an option with `each` (see Option)."""
    for f in fields(kind):
        option = option_of(kind, f.name)
        if option and option.each and f.name in typed:
            return [kind(**{**typed, f.name: value}) for value in typed[f.name]]
    return [kind(**typed)]


def grouped(kind: type[Settings]) -> dict[str, list[tuple[Field, Option]]]:
    """Group the fields that can be typed, by the titles of -h in its order. A constructor's positional fields come first."""
    groups: dict[str, list[tuple[Field, Option]]] = {WHAT: []}
    for f in sorted(fields(kind), key=lambda f: bool(f.kw_only)):
        option = option_of(kind, f.name)
        if option and option.help:
            groups.setdefault(option.group, []).append((f, option))
    last = groups.pop(RUN, [])
    return {**groups, RUN: last}


def flags_of(field: Field, option: Option) -> list[str]:
    """Spell all flags of a field, the short ones first."""
    flags = [flag_of(field.name, False if field.default is True else None), *option.flags]
    return sorted(flags, key=lambda flag: flag.startswith('--'))  # -w before --weights


def add_options(parser: Parser, kind: type[Settings], may_lack: Collection[str] = ()) -> Any:
    """Give a parser without -h the options of a dataclass, then -h; return the last group, for further options.

    The parsed arguments contain only typed options; the dataclass has the defaults. may_lack: fields without a default that
    may be omitted.
    """
    needed = []
    for title, found in grouped(kind).items():
        group = parser.add_argument_group(title)
        for f, option in found:
            how = {**_how(f, option), 'default': SUPPRESS, 'help': help_of(f, option)}
            if f.name in kind.HIDDEN:
                how['help'] = SUPPRESS
            names = [f.name]
            if not option.positional:
                names = flags_of(f, option)
                how |= {'dest': f.name, 'required': f.default is MISSING and f.name not in may_lack}
            group.add_argument(*names, **how)
            if f.default is MISSING:
                needed += [names[0]] * (not option.positional) + [option.metavar or f.name.upper()]
    parser.usage = ' '.join(['%(prog)s', *needed, '[options]'])
    parser.add_common(group)
    return group


def _how(field: Field, option: Option) -> dict[str, Any]:
    """Return the argparse settings of a field."""
    one, several = kind_of(field.type)
    if one is bool:
        return {
            'action': BooleanOptionalAction if option.negatable else 'store_false' if field.default else 'store_true'
        }
    how: dict[str, Any] = {'type': option.parse or one, 'metavar': option.metavar or METAVARS.get(one)}
    if option.parse:
        return how
    if isinstance(option.allowed, tuple) and not option.metavar:
        how['metavar'] = f'{{{",".join(map(str, option.allowed))}}}'
    return {**how, 'nargs': '+'} if several or option.each else how


def help_of(field: Field, option: Option) -> str:
    """Return the help text, and append the default unless the text has it."""
    default = field.default
    if 'default' in option.help.lower() or isinstance(default, bool) or default in (MISSING, None, '', ()):
        return option.help
    words = typed_sides(default) if field.type == Sides else default if isinstance(default, tuple) else [default]
    return f'{option.help}; default: {" ".join(map(str, words))}'
