"""Laws of the kinds of untrusted values: what does not fit is found, and its place is told."""

import json
import math

import pytest

from utils.qat.untrusted.json_schema import COUNT, INDEX, NONE, NUMBER, SECONDS, SHARE, SQNR, items, misfit

DEEP = json.loads('[' * 200 + ']' * 200)
KINDS = [  # kind, values that fit, values that do not
    (str, ['a', ''], [3, None, ['a'], b'a']),
    (bool, [True], [1, 'true', None]),
    (COUNT, [1], [0, -1, True, 1.0, 10**400, '3']),
    (INDEX, [0], [-1, False, 2.5]),
    (SHARE, [0, 0.5, 1], [1.5, -1e-9, math.nan, '0.5', None, True]),
    (SECONDS, [0.5], [-1, math.nan, math.inf, 10**400, [1], True]),
    (NUMBER, [-3, 1e30], [math.inf, '1', None]),
    (SQNR, [{}, {'boxes': math.inf}], [{'boxes': math.nan}, {'boxes': 5}, 3]),
    ([INDEX], [[], [1, 2]], [3, [1, 'a'], {}, DEEP]),
    (items(INDEX, 1, 2), [[1], [1, 2]], [[], [1, 2, 3], [64.0], 'model', DEEP]),
    ((NONE, {'only': NUMBER}), [None, {'only': 1}], [3, {}, {'only': 'x'}, {'only': 1, 'more': 1}]),
]
SCORES = {'stages': [{'ap': SHARE, 'mask?': {'ap': SHARE}}], 'times': {str: SECONDS}}
PLACES = {  # place of what is wrong → the value
    'all of it': [],
    'stages': {'times': {}},
    'stages[1]': {'stages': [{'ap': 0}, 3], 'times': {}},
    'stages[0].mask.ap': {'stages': [{'ap': 0, 'mask': {}}], 'times': {}},
    'times.a': {'stages': [], 'times': {'a': 'b'}},
    'times.?': {'stages': [], 'times': {3: 1}},
    r'times.\x1b[2J': {'stages': [], 'times': {'\x1b[2J': -1}},
    'more': {'stages': [], 'times': {}, 'more': 1},
}


@pytest.mark.parametrize('kind, fits, others', KINDS)
def test_only_values_of_a_kind_fit(kind, fits, others):
    assert [value for value in fits if misfit(value, kind)] == []
    assert [value for value in others if not misfit(value, kind)] == []


@pytest.mark.parametrize('place', PLACES)
def test_the_place_is_told(place):
    assert misfit(PLACES[place], SCORES) == place
