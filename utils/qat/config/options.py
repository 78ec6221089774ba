"""The command line of a command, made of its settings: fields of a dataclass → options, typed words → the dataclass."""

from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from utils.qat.config.settings import Option, Settings, Sides, flag_of, kind_of, option_of
from utils.qat.core.command import Parser
from utils.qat.core.next_command import typed_sides

T = TypeVar('T', bound=Settings)


def read(kind: type[T], argv: Sequence[str] | None, description: str, epilog: str | None = None) -> T:
    """Turn a command line into settings of the class `kind`. argv: None = the words of this process."""
    (settings,) = read_each(kind, argv, description, epilog)
    return settings


def read_each(kind: type[T], argv: Sequence[str] | None, description: str, epilog: str | None = None) -> list[T]:
    """Turn a command line into settings, see `each`. argv: None = the words of this process."""
    parser = Parser(description=description, epilog=epilog)
    add_options(parser, kind)
    return each(kind, vars(parser.parse_args(argv)))


def each(kind: type[T], typed: dict[str, Any]) -> list[T]:
    """Make settings of typed values: one, or one for each value of the option that takes several so (`each` of Option)."""
    for f in fields(kind):
        option = option_of(kind, f.name)
        if option and option.each and f.name in typed:
            return [kind(**{**typed, f.name: value}) for value in typed[f.name]]
    return [kind(**typed)]


def add_options(parser: Parser, kind: type[Settings], may_lack: Collection[str] = ()) -> None:
    """Give a parser the options of a dataclass, the positional fields of its constructor first.

    Only what is typed shall be in the parsed arguments: the defaults stand in the dataclass. may_lack: fields without a default
    that need not be typed.
    """
    groups: dict[str | None, Any] = {None: parser}
    for f in sorted(fields(kind), key=lambda f: bool(f.kw_only)):
        option = option_of(kind, f.name)
        if option is None or not option.help:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        names, how = [f.name], {**_how(f, option), 'help': _help(f, option), 'default': SUPPRESS}
        if not option.positional:
            names = [flag_of(f.name, False if f.default is True else None), *option.flags]
            names.sort(key=lambda name: name.startswith('--'))  # -w before --weights
            how |= {'dest': f.name, 'required': f.default is MISSING and f.name not in may_lack}
        groups[option.group].add_argument(*names, **how)


def _how(field: Field, option: Option) -> dict[str, Any]:
    """Say how argparse reads the words of a field."""
    one, several = kind_of(field.type)
    if one is bool:
        return {
            'action': BooleanOptionalAction if option.negatable else 'store_false' if field.default else 'store_true'
        }
    how = {'type': option.parse or one, 'metavar': option.metavar}
    if option.parse:
        return how
    if isinstance(option.allowed, tuple) and not option.metavar:
        how['metavar'] = f'{{{",".join(map(str, option.allowed))}}}'
    return {**how, 'nargs': '+'} if several or option.each else how


def _help(field: Field, option: Option) -> str:
    """Return the help text, with the default if it does not tell it."""
    default = field.default
    if 'default' in option.help.lower() or isinstance(default, bool) or default in (MISSING, None, '', ()):
        return option.help
    words = typed_sides(default) if field.type == Sides else default if isinstance(default, tuple) else [default]
    return f'{option.help}; default: {" ".join(map(str, words))}'
