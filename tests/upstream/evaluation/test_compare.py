"""Laws of the comparison of detectors: figures worked out by hand, and properties of real models."""

import json

import numpy as np
import pytest
import torch
from helpers.commands import scores
from helpers.labelled import CPU, val_images

from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import FLOAT_LIMITS, INT8_LIMITS, ExportConfig
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.evaluation.compare import ElementDifferences, compare_models
from utils.qat.evaluation.compare_detections import beyond_limits, details, in_a_clause, scores_table
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.score_tables import Columns

SIZE, CLASSES = 320, 3


# ---- all predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('rtol, atol', [(0, 0), (1e-5, 1e-8), (1e-3, 1e-3), (0.25, 0), (0, 0.5)])
def test_elements_are_close_as_numpy_says(rtol, atol):
    random = np.random.default_rng(0)
    reference = np.concatenate((random.normal(0, 10, 2000), [0, 0, 4, -4, 4, 1, 1]))
    error = random.choice([0, 1e-9, 1e-4, 1e-3, 0.1, 1], 2000) * random.normal(0, 1, 2000)
    other = reference + np.concatenate((error, [0, 1e-4, 1, -1, 1.5, 0.5, -0.5]))  # some exactly at a tolerance
    differences = ElementDifferences(rtol, atol)
    for part in (slice(0, 700), slice(700, None)):
        differences.update(torch.from_numpy(reference[part]), torch.from_numpy(other[part]))
    found = differences.summary()
    assert found['within'] == np.isclose(other, reference, rtol, atol).mean()
    assert found['max'] == np.abs(other - reference).max()
    assert found['mean'] == pytest.approx(np.abs(other - reference).mean(), rel=1e-12)


def test_one_number_that_is_none_spoils_the_figures():
    differences = ElementDifferences(1e-3, 1e-3)
    differences.update(torch.ones(3), torch.tensor([1, torch.nan, 1]))
    differences.update(torch.ones(1), torch.ones(1))
    found = differences.summary()
    assert np.isnan(found['max']) and np.isnan(found['mean']) and found['within'] == 0.75


# ---- the top detections, by hand ----------------------------------------------------------------------------------------


def fixed(*images):
    """A model that predicts for image i the rows (x, y, w, h, class, score) of images[i]."""
    out = torch.zeros(len(images), 4 + CLASSES, 8)
    for i, rows in enumerate(images):
        for j, (*box, c, score) in enumerate(rows):
            out[i, :4, j] = torch.tensor(box)
            out[i, 4 + c, j] = score
    return lambda batch: out


def unlabelled(count):
    """A loader of one batch of black images without labels."""
    return [(torch.zeros(count, 3, SIZE, SIZE, dtype=torch.uint8), torch.zeros(0, 6), ['x.jpg'] * count, None)]


def compared(first, second, top=10):
    """Compare the predictions of two models for several images."""
    [found] = compare_models(fixed(*first), [fixed(*second)], unlabelled(len(first)), CPU, top=top)
    return found


A, B, C, D = (
    (50, 50, 40, 40, 0, 0.9),
    (150, 150, 40, 40, 1, 0.8),
    (250, 250, 40, 40, 2, 0.7),
    (50, 250, 40, 40, 0, 0.6),
)


def change(row, x=0, c=None, score=None):
    return (row[0] + x, *row[1:4], row[4] if c is None else c, score or row[5])


SWAPPED = [change(A, score=0.8), change(B, score=0.9), C]
BY_HAND = {  # reference, other: per rank whether they disagree, its score and box errors; the share matched, their score error
    'the same': ([A, B, C], [A, B, C], [0, 0, 0], [0, 0, 0], [0, 0, 0], 1, 0),
    'another order': ([A, B, C], [C, A, B], [0, 0, 0], [0, 0, 0], [0, 0, 0], 1, 0),
    'another score': ([A, B, C], [change(A, score=0.95), B, C], [0, 0, 0], [0.05, 0, 0], [0, 0, 0], 1, 0.05 / 3),
    'two change ranks': ([A, B, C], SWAPPED, [1, 1, 0], [0, 0, 0], [100, 100, 0], 1, 0.2 / 3),
    'IoU 0.905': ([A, B, C], [change(A, x=2), B, C], [0, 0, 0], [0, 0, 0], [1, 0, 0], 1, 0),
    'IoU 0.667': ([A, B, C], [change(A, x=8), B, C], [0, 0, 0], [0, 0, 0], [4, 0, 0], 4 / 6, 0),
    'IoU 0.333': ([A, B, C], [change(A, x=20), B, C], [1, 0, 0], [0, 0, 0], [10, 0, 0], 4 / 6, 0),
    'another class': ([A, B, C], [A, change(B, c=0), C], [0, 1, 0], [0, 0, 0], [0, 0, 0], 4 / 6, 0),
    'the last is lost': ([A, B, C], [A, B], [0, 0, 1], [0, 0, None], [0, 0, None], 4 / 5, 0),
    'one more': ([A, B], [A, B, C], [0, 0, 1], [0, 0, None], [0, 0, None], 4 / 5, 0),
    'the first is lost': ([A, B, C], [B, C], [1, 1, 1], [0.1, 0.1, None], [100, 100, None], 4 / 5, 0),
    'all are lost': ([A, B, C], [], [1, 1, 1], [None] * 3, [None] * 3, 0, None),
    'nothing in both': ([], [], [], [], [], None, None),
}


def near(value, abs):
    return None if value is None else pytest.approx(value, abs=abs)


@pytest.mark.parametrize('reference, other, differ, score, box, matched, matched_score', BY_HAND.values(), ids=BY_HAND)
def test_ranks_by_hand(reference, other, differ, score, box, matched, matched_score):
    result = compared([reference], [other])
    ranks = result['ranks']
    assert [r['rank'] for r in ranks] == list(range(1, len(differ) + 1)) and all(r['images'] == 1 for r in ranks)
    assert [r['disagreement'] for r in ranks] == differ
    assert [r['score_error'] for r in ranks] == [near(value, 1e-5) for value in score]
    assert [r['box_error'] for r in ranks] == [near(value, 1e-5) for value in box]
    assert result['disagreement'] == (pytest.approx(np.mean(differ)) if differ else None)
    assert result['matched'] == near(matched, 1e-6) and result['matched_score'] == near(matched_score, 1e-6)


def test_ranks_are_averaged_over_the_images_that_have_them():
    result = compared([[A, B], [A], []], [[A, change(B, c=0)], [change(A, score=0.7)], []])
    first, second = result['ranks']
    assert (first['images'], first['disagreement'], second['images'], second['disagreement']) == (2, 0, 1, 1)
    assert (first['score_error'], first['score']) == pytest.approx((0.1, 0.9))
    assert (result['disagreement'], result['matched'], result['images']) == pytest.approx((1 / 3, 4 / 6, 3))


@pytest.mark.parametrize(
    'reference, other, top, differ, unmatched',
    [
        ([A, B, C, D], [A, B, change(D, score=0.75), C], 3, [0, 0, 1], [0, 0, 0]),  # a match may stand below the top
        ([A, B, C], [A, C], 10, [0, 1, 1], [0, 0.5, 0]),
        ([A, B, C, D], [A, B, C, change(D, c=1)], 3, [0, 0, 0], [0, 0, 0]),
    ],
)
def test_only_the_top_counts(reference, other, top, differ, unmatched):
    ranks = compared([reference], [other], top)['ranks']
    assert [r['disagreement'] for r in ranks] == differ and [r['unmatched'] for r in ranks] == unmatched


def test_different_shapes_cannot_be_compared():
    with pytest.raises(QatError, match=r'\[\[1, 4, 8\].* and \[\[1, 4, 7\]'):
        compare_models(fixed([A]), [lambda images: fixed([A])(images)[..., :7]], unlabelled(1), CPU)


def test_differences_of_scores_are_in_points():
    before = scores(ap=0.5, ap50=0.75, precision=1.0, recall=None, mask={'ap': 0.25})
    after = scores(ap=0.4975, ap50=0.76, precision=1.0, mask={'ap': 0.5})
    assert Columns(scores()).differences(after, before) == ['-0.25', '+1.00', '+0.00', '-']
    columns = Columns(before, None)
    change = {'difference': -0.0025, 'chance': 0.001, 'mask': {'difference': 0.25, 'chance': 0.02}}
    assert columns.differences(after, before, change)[0::4] == ['-0.25 ± 0.10', '+25.00 ± 2.00']
    assert columns.differences(None, before) == columns.cells(None) == ['-'] * 8 and len(columns.titles) == 8


# ---- real models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def setup(small):
    """(loader, names, calibrated model, float model)."""
    models = TorchModel(small.quantized_model()), TorchModel(small.float_model())
    return val_images(small.data, square=True), load_data(small.data).names, *models


def test_a_model_is_equal_to_itself(setup):
    loader, names, model, _ = setup
    [result] = compare_models(model, [model], loader, CPU, names, rtol=0, atol=0)
    assert result['boxes'] == result['scores'] == {'max': 0, 'mean': 0, 'within': 1}
    assert len(result['ranks']) == 10 and all(r['images'] and r['score'] > 0 for r in result['ranks'])
    assert all((r['score_error'], r['box_error'], r['disagreement']) == (0, 0, 0) for r in result['ranks'])
    assert [result[f'matched{what}'] for what in ('', '_score', '_box')] == [1, 0, 0] and result['disagreement'] == 0
    assert result['images'] == 12 and result['ap_difference'] == 0 and result['reference']['ap'] > 0.05
    assert not beyond_limits(result, FLOAT_LIMITS)


def test_metrics_are_those_of_evaluate_and_each_model_runs_once_per_batch(setup):
    loader, names, *models = setup
    alone = [evaluate(model, loader, names, CPU, resample=True).to_json() for model in models]
    calls = []

    def counted(model):
        return lambda images: calls.append((model, len(images))) or model(images)

    reference, other = map(counted, models)
    [result] = compare_models(reference, [other], loader, CPU, names)
    assert [result['reference'], result['other']] == alone and alone[0] != alone[1]
    assert calls == [(model, 4) for _ in range(3) for model in models]
    assert result['ap_difference'] == alone[1]['ap'] - alone[0]['ap']
    [without] = compare_models(models[0], models[1:], loader, CPU)
    scores = dict.fromkeys(('reference', 'other', 'ap_difference', 'against_reference'))
    assert {**result, **scores} == without, 'without labels there is closeness only'


def with_boxes(change):
    return lambda out: torch.cat((change(out[:, :4]), out[:, 4:]), 1)


def with_scores(change):
    return lambda out: torch.cat((out[:, :4], change(out[:, 4:])), 1)


SMALLER = torch.tensor((1, 1, 0.8, 0.8)).view(1, 4, 1)
AP, MATCHED, SCORES = 'AP differs', 'are matched', 'scores differ'
DISTURBED = {  # what is done to the output of the other model, which limits that exceeds, and which it may exceed by chance
    'not': (lambda out: out, set(), set()),
    'scores': (with_scores(lambda scores: scores * 0.9), {SCORES}, set()),  # which AP alone would not see
    'size': (with_boxes(lambda boxes: boxes * SMALLER), {AP, MATCHED}, {SCORES}),  # of the few that are still matched
    'classes': (with_scores(lambda scores: scores.roll(1, 1)), {AP, MATCHED, SCORES}, set()),
    'not a number': (with_boxes(lambda boxes: boxes * torch.nan), {AP, MATCHED}, set()),
}


@pytest.mark.parametrize('disturb, exceeds, may', DISTURBED.values(), ids=DISTURBED)
def test_a_disturbed_model_exceeds_the_limits(setup, disturb, exceeds, may):
    loader, names, model, _ = setup
    [result] = compare_models(model, [lambda images: disturb(model(images))], loader, CPU, names)
    plain = json.loads(json.dumps(result, allow_nan=False))
    said = beyond_limits(plain, INT8_LIMITS)
    found = {text for text in (AP, MATCHED, SCORES) for line in said if text in line}
    assert exceeds <= found <= exceeds | may and len(found) == len(said), said
    names = 'PyTorch', 'the other'
    text = '\n'.join([in_a_clause(plain), scores_table([plain], names), *details([plain], names)])
    assert f'{result["other"]["ap"]:.4f}' in text and f'{result["matched"]:.2%}' in text and 'nan' not in text


def test_an_ap_limit_of_the_users_replaces_the_default(small):
    theirs, default = ExportConfig(small.quantized, max_ap_diff=0, verify=small.data), ExportConfig(small.quantized)
    assert theirs.limits(True).ap == theirs.limits(False).ap == 0 and theirs.limits(True).matched == INT8_LIMITS.matched
    assert default.limits(True) == INT8_LIMITS != default.limits(False) == FLOAT_LIMITS


@pytest.mark.parametrize('limit, wanted', [(5, (0, 2, 4, 7, 9)), (100, range(12))])
def test_a_limit_of_images_spreads_over_the_set(small, limit, wanted):
    everything, some = (
        [path for _, _, paths, _ in val_images(small.data, square=True, limit=n) for path in paths]
        for n in (None, limit)
    )
    assert some == [everything[i] for i in wanted]
