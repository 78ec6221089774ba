"""Settings of a command, as dataclass fields with their options, help texts and allowed values; and as typed words.

Annotations are read as types, so a file with settings has no `from __future__ import annotations`.
"""

import math
from argparse import SUPPRESS, ArgumentTypeError, BooleanOptionalAction, _ArgumentGroup
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from utils.qat.core.command import Parser, sides_words
from utils.qat.core.errors import QatError, refuse
from utils.qat.core.text import Markdown, code, escaped, markdown_table

Sides = tuple[int, int]  # height, width in pixels; one number stands for both
WHAT, RUN = 'what and where', 'run'  # the first and the last group of -h
METAVARS = {int: 'N', float: 'X'}  # of values without a name of their own
UNNAMED = 'resume', 'exist_ok', 'dry_run'  # they change no result


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`. Infinity and NaN never belong to them."""

    low: float
    high: float = math.inf
    without: float | None = None  # an excluded end
    words: str = ''  # the range in an error message, after 'must'; '' = from the bounds

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value not in (self.without, math.inf)

    def __str__(self) -> str:
        if self.words or self.high == math.inf:
            return self.words or f'be {self.low:g} or more'
        if isinstance(self.low, int):
            return f'lie in {self.low} to {self.high}'
        return f'lie in {"[("[self.without == self.low]}{self.low:g}, {self.high:g}{"])"[self.without == self.high]}'


@dataclass(frozen=True)
class Option:
    """The command-line option of a setting, and its allowed values; see `option`."""

    help: str  # of a switch what it does when it is true; see `help_of`. Empty = it cannot be typed
    flags: tuple[str, ...]  # other flags, such as '-w'
    allowed: Range | tuple | None = None  # Range of a number, or choices; of several values, each one is checked
    metavar: str | None = None
    group: str = WHAT  # its title in -h
    parse: Callable[[str], object] | None = None  # word → value, where the type of the field does not do it
    positional: bool = False  # typed without a flag
    negatable: bool = False  # a switch with a --no- form too
    each: bool = False  # several values can be typed; each makes its own settings


def option(default: object, help: str, *flags: str, **how: Any) -> Any:
    """Make a dataclass field that can be typed. Its flag is its name: `batch_size` is --batch-size.

    The default MISSING: it must be typed. `how` has other fields of Option.
    """
    return field(default=default, metadata={'option': Option(help, flags, **how)})


run = partial(option, group=RUN)


def option_of(kind: type, name: str) -> Option | None:
    """Find the Option of a field. A subclass that only changes the default keeps the option of its base."""
    inherited = (base.__dict__.get('__dataclass_fields__', {}).get(name) for base in kind.__mro__)
    return next((f.metadata['option'] for f in inherited if f and f.metadata), None)


def flag_of(name: str, value: object = None) -> str:
    """Return the flag of a setting: --NAME, or --no-NAME for the value False. A field for_ is --for, a word of Python."""
    return f'--{"no-" * (value is False)}{name.rstrip("_").replace("_", "-")}'


def kind_of(annotation: object) -> tuple[type, bool]:
    """Read an annotation, without its `| None`: the type of one value, and whether there can be several."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    [kind] = (kind for kind in kinds if kind is not NoneType)
    several = get_origin(kind) is tuple
    return (get_args(kind)[0] if several else kind), several


def is_sides(field: Field[object]) -> bool:
    """Tell whether a field is a height and a width."""
    return field.type in (Sides, Sides | None)


def plain(value: object) -> object:
    """Return a setting as JSON has it: a path as text, several values as a list."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, (list, tuple)) else value


def require_multiples(imgsz: Sides, stride: int, flag: str = '--imgsz') -> None:
    """Raise QatError unless the sides are multiples of the model's largest stride; other feature maps do not fit together."""
    below = [max(1, side // stride) * stride for side in imgsz]
    above = [max(1, -(-side // stride)) * stride for side in imgsz]
    if below == above == list(imgsz):
        return
    given, *near = (' '.join(map(str, sides_words(sides))) for sides in (imgsz, below, above))
    raise QatError(
        f'{flag} {given}: must be multiples of {stride}, the stride of the model, such as {" or ".join(dict.fromkeys(near))}'
    )


def image_size(asked: Sides | None, *models: Any, flag: str = '--imgsz') -> Sides:
    """Decide height and width of the images of models, see file_model.py, in pixels.

    It is the only size of a file, else the one that was asked for, else that of the quantization, else the usual one of the task.
    Raises QatError if the models do not take it.
    """
    own = {model.imgsz: model for model in models if model.imgsz}
    if len(own) > 1:
        raise QatError(
            f'the models take images of {" and ".join(f"{h} x {w}" for h, w in sorted(own))}; one size is needed, '
            'export with the same --imgsz'
        )
    for (height, width), model in own.items():
        if asked not in (None, (height, width)):
            typed = ' '.join(map(str, sides_words(asked)))
            raise QatError(
                f'{flag} {typed}: {model.path} takes {height} x {width}; leave the flag out, or export again with {flag} {typed}'
            )
    size = next(filter(None, (*own, asked, *(model.quantized_for for model in models), models[0].task.imgsz)))
    for model in models:
        require_multiples(size, model.stride, flag)
    return size


@dataclass(frozen=True)
class Settings:
    """Settings of a command. The constructor raises one QatError that names every wrong setting by its flag."""

    HIDDEN: ClassVar[tuple[str, ...]] = ()  # accepted for command lines of earlier tools, but not shown by -h

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list):
                value = tuple(value)
            if is_sides(f) and isinstance(value, int):
                value = (value,)
            if is_sides(f) and value and len(value) == 1:
                value = value * 2
            object.__setattr__(self, f.name, value)
        refuse([*(p for f in fields(self) for p in _not_allowed(self, f)), *self.problems()])

    def problems(self) -> Iterable[tuple[object, str]]:
        """Yield (whether it is wrong, message) for combinations of settings."""
        return ()

    def given(self, names: Iterable[str]) -> str:
        """List the flags of those settings `names` that are not their defaults."""
        return ', '.join(flag_of(name) for name in names if getattr(self, name) != getattr(type(self), name))

    def plain(self) -> dict[str, object]:
        """Return the settings as JSON has them."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}


def _not_allowed(settings: Settings, field: Field[object]) -> Iterator[tuple[object, str]]:
    """Yield (whether it is wrong, message) for a single setting."""
    option, value, flag = option_of(type(settings), field.name), getattr(settings, field.name), flag_of(field.name)
    if option is None or value is None:
        return
    several = kind_of(field.type)[1]
    if is_sides(field):
        yield len(value) != 2, f'{flag} {" ".join(map(str, value))}: one number, or height and width'
    if option.allowed is not None:
        bad = [v for v in (value if several else [value]) if v not in option.allowed]
        wrong = f'{flag} {" ".join(map(str, bad))}: must'
        if isinstance(option.allowed, tuple):
            one = 'of' if several else 'one of'
            yield bad or (several and not value), f'{wrong} be {one} {", ".join(map(str, option.allowed))}'
        else:
            yield bad, f'{wrong} {option.allowed}'


T = TypeVar('T', bound=Settings)


def read(kind: type[T], argv: Sequence[str] | None, description: str, **options: str) -> T:
    """Parse a command line into settings of the class `kind`. argv: None = the words of this process. options: of Parser."""
    (settings,) = read_each(kind, argv, description, **options)
    return settings


def read_each(kind: type[T], argv: Sequence[str] | None, description: str, **options: str) -> list[T]:
    """Parse a command line into settings, see `settings_of`, as `read` does."""
    parser = Parser(description=description, add_help=False, **options)
    add_options(parser, kind)
    return settings_of(kind, vars(parser.parse_args(argv)))


def settings_of(kind: type[T], typed: Mapping[str, object]) -> list[T]:
    """Make settings from typed values: one, or one per value of an option with `each` (see Option)."""
    for f in fields(kind):
        option, values = option_of(kind, f.name), typed.get(f.name)
        if option and option.each and isinstance(values, list):
            return [kind(**{**typed, f.name: value}) for value in values]
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


def add_options(parser: Parser, kind: type[Settings], may_lack: Collection[str] = ()) -> _ArgumentGroup:
    """Give a parser without -h the options of a dataclass, then -h; return the last group, for further options.

    The parsed arguments contain only typed options; the dataclass has the defaults. may_lack: fields without a default that
    may be omitted.
    """
    needed = []
    for title, options in grouped(kind).items():
        group = parser.add_argument_group(title)
        for f, option in options:
            how = {**_how(f, option), 'default': SUPPRESS, 'help': help_of(f, option)}
            if f.name in kind.HIDDEN:
                how['help'] = SUPPRESS
            names = [f.name]
            if not option.positional:
                names = [flag_of(f.name, False if f.default is True else None), *option.flags]
                names.sort(key=lambda flag: flag.startswith('--'))  # -w before --weights
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
    read = partial(_path, option.parse or Path) if one is Path else option.parse or one
    how: dict[str, object] = {'type': read, 'metavar': option.metavar or METAVARS.get(one)}
    if option.parse:
        return how
    if isinstance(option.allowed, tuple) and not option.metavar:
        how['metavar'] = f'{{{",".join(map(str, option.allowed))}}}'
    return {**how, 'nargs': '+'} if several or option.each else how


def _path(read: Callable[[str], object], word: str) -> object:
    """Read a path: an empty word, such as of an unset variable, would be the current folder."""
    if not word:
        raise ArgumentTypeError('must not be empty')
    return read(word)


def help_of(field: Field, option: Option) -> str:
    """Return the help text of the flag; the default is appended unless the text has it."""
    default = field.default
    if (
        default is True and not option.negatable
    ):  # its flag is --no-NAME, and the text says what it does when it is true
        return f'do not {option.help}'
    if 'default' in option.help.lower() or isinstance(default, bool) or default in (MISSING, None, '', ()):
        return option.help
    words = sides_words(default) if field.type == Sides else default if isinstance(default, tuple) else [default]
    return f'{option.help}; default: {" ".join(map(str, words))}'


def unlike_defaults(settings: Mapping[str, Any], kind: type[Settings]) -> dict[str, tuple[object, object]]:
    """Find the typed settings that differ from their defaults in `kind`: name → (value, default or None), plain.

    Settings named in settings['decided'] were not typed.
    """
    unnamed = {*UNNAMED, *settings.get('decided', ())}
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(kind) if option_of(kind, f.name)}
    pairs = {name: (plain(settings[name]), plain(default)) for name, default in defaults.items() if name in settings}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in unnamed}


def command_words(settings: Mapping[str, object], kind: type[Settings]) -> list[str]:
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


def typed(value: object, kind: type[Settings], name: str) -> list[str]:
    """Return a plain setting as command-line words."""
    if not isinstance(value, list):
        return [str(value)]
    sides = next(is_sides(f) for f in fields(kind) if f.name == name)
    return list(map(str, sides_words(value) if sides else value))


def closing(
    settings: Mapping[str, object], kind: type[Settings], versions: Mapping[str, str], following: str | None = None
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
