"""Settings: what is typed and what is made by hand is checked alike, and -h has every option."""

import inspect
import math
import re
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from helpers.commands import settings

from utils.qat.config import common, deploy, export, qat
from utils.qat.config.settings import (
    RUN,
    WHAT,
    Range,
    Settings,
    add_options,
    flag_of,
    is_sides,
    kind_of,
    option_of,
    read,
)
from utils.qat.core.command import Parser
from utils.qat.core.errors import QatError
from utils.qat.core.files import in_tree

KINDS = sorted(
    {
        kind
        for module in (common, deploy, export, qat)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Settings) and kind is not Settings
    },
    key=lambda kind: kind.__name__,
)
NEEDED = {  # what has to be typed
    deploy.BuildConfig: ['m.onnx'],
    deploy.AuditConfig: ['m.onnx'],
    deploy.DrawConfig: ['--layer', 'l.json'],
    deploy.BenchmarkConfig: ['m.onnx'],
    deploy.InferConfig: ['m.onnx', 'images'],
    deploy.CompareConfig: ['a.pt', 'b.pt', '--random', '1'],
    deploy.VerifyConfig: ['--weights', 'w.pt', '--float', 'f.pt', '--data', 'd.yaml'],
}
each_kind = pytest.mark.parametrize('kind', KINDS, ids=lambda kind: kind.__name__)


def needed(kind):
    weights = any(f.name == 'weights' for f in fields(kind))
    return NEEDED.get(kind, ['--weights', 'w.pt'] if weights else [])


@each_kind
def test_what_is_not_typed_is_the_default(kind):
    made = read(kind, needed(kind), '')
    assert sum(f.default is MISSING for f in fields(kind)) <= 3, 'the rest need not be typed'
    for f in fields(kind):
        if f.default is not MISSING and f.name not in ('engine', 'timing_cache', 'opset', 'random'):
            default = in_tree(f.default) if isinstance(f.default, Path) else f.default
            assert getattr(made, f.name) == default, f.name
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(kind)[0].name, None)


@each_kind
def test_help_has_every_option_and_its_default(kind, monkeypatch):
    """But those that are accepted for old command lines: what -h does not show can be typed."""
    monkeypatch.setenv('COLUMNS', '1000')  # no line is broken
    parser = Parser(add_help=False)
    add_options(parser, kind)
    text = parser.format_help()
    titles = re.findall(r'(?m)^(\S.*):$', text)
    assert titles[0] == WHAT and titles[-1] == RUN and len(titles) == len(set(titles))
    for f in fields(kind):
        option, number = option_of(kind, f.name), type(f.default) in (int, float)
        if option and option.help and not option.positional:
            told = option.help if 'default' in option.help or not number else f'{option.help}; default: {f.default}'
            flag = flag_of(f.name, False if f.default is True else None)
            shown = re.search(rf'(?m)^  (-\w \S+.*, )?{flag}\b.*\n?.* {re.escape(told)}(; default: |$)', text)
            assert bool(shown) == (f.name not in kind.HIDDEN), f.name
            assert flag in parser._option_string_actions


BAD = [
    (qat.QuantizeConfig, 'lr', 'nan'),
    (qat.QuantizeConfig, 'amp', 'fp8'),
    (qat.EvalConfig, 'imgsz', '31'),
    (export.ExportConfig, 'include', 'engine'),
    (deploy.BenchmarkConfig, 'precision', ','),
]


@pytest.mark.parametrize('kind, name, word', BAD, ids=[f'{kind.__name__} {name} {word}' for kind, name, word in BAD])
def test_one_check_for_what_is_typed_and_what_is_made_by_hand(kind, name, word):
    with pytest.raises(QatError, match=f'^{flag_of(name)} .*: must ') as typed:
        read(kind, [*needed(kind), f'{flag_of(name)}={word}'], '')
    parser = Parser(add_help=False)
    add_options(parser, kind)
    value = vars(parser.parse_args([*needed(kind), f'{flag_of(name)}={word}']))[name]
    with pytest.raises(QatError) as by_hand:
        replace(read(kind, needed(kind), ''), **{name: value})
    assert str(typed.value) == str(by_hand.value)


def not_allowed(kind):
    """(name of an option, a value that it does not take, what must be said) for each kind of such values."""
    for f in fields(kind):
        option, several = option_of(kind, f.name), kind_of(f.type)[1]
        allowed = option.allowed if option else None
        if isinstance(allowed, Range):
            for value in (allowed.low - 1, allowed.high + 1, math.nan):
                yield f.name, (value,) * (1 + is_sides(f)) if several else value, f': must {allowed}'
        elif allowed:
            yield f.name, ('another',) if several else 'another', f': must be {"of" if several else "one of"} '


@each_kind
def test_every_option_refuses_what_is_not_allowed(kind):
    """So the table of test_bad_input.py has combinations alone, and what a file or this machine does not allow."""
    made = read(kind, needed(kind), '')
    for name, value, words in not_allowed(kind):
        with pytest.raises(QatError, match=re.escape(words)) as refused:
            replace(made, **{name: value})
        assert f'{flag_of(name)} ' in str(refused.value)


def test_everything_wrong_is_said_at_once():
    with pytest.raises(QatError, match='^--iters 0: .*; --amp fp8: .*; --val-split 0.1: with --epochs 0'):
        settings(epochs=0, iters=0, amp='fp8', val_split=0.1)


def test_integers_alone_leave_no_layer_in_float():
    with pytest.raises(
        QatError, match='^--exclude, --only: leaves layers in float, and --target edge computes integers alone'
    ):
        settings(target='edge', exclude=('model.0',), only=('model.1',))


@pytest.mark.parametrize(
    'allowed, inside, outside, words',
    [
        (Range(1), (1, 10**400), (0, -1, math.inf, math.nan), 'be 1 or more'),
        (Range(0, 5), (0, 5), (-1, 6), 'lie in 0 to 5'),
        (Range(0.0, 1.0), (0, 0.5, 1), (-1e-9, 1.1, math.nan), 'lie in [0, 1]'),
        (Range(0.0, 1.0, without=0), (1e-9, 1), (0, 2), 'lie in (0, 1]'),
        (Range(0.0, 1.0, without=1), (0, 0.9), (1, -1), 'lie in [0, 1)'),
    ],
)
def test_ranges(allowed, inside, outside, words):
    assert all(n in allowed for n in inside) and not any(n in allowed for n in outside) and str(allowed) == words


def test_one_number_is_height_and_width():
    made = export.ExportConfig(Path('w.pt'), imgsz=[320])
    assert made.imgsz == (320, 320) == read(export.ExportConfig, ['--weights', 'w.pt', '--img', '320'], '').imgsz
    with pytest.raises(QatError, match='^--imgsz 64 64 64: one number, or height and width$'):
        replace(made, imgsz=(64, 64, 64))
