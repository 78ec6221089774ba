"""Laws of the comparison of two models: figures worked out by hand, and properties of real models."""

import json

import numpy as np
import pytest
import torch

from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import FLOAT_LIMITS, INT8_LIMITS, ExportConfig
from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.compare import Elements, compare
from utils.qat.evaluation.compare_detections import excess, tables
from utils.qat.evaluation.evaluate import evaluate

CPU = torch.device('cpu')
SIZE, CLASSES = 320, 3


# ---- all predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('rtol, atol', [(0, 0), (1e-5, 1e-8), (1e-3, 1e-3), (0.25, 0), (0, 0.5)])
def test_elements_are_close_as_numpy_says(rtol, atol):
    random = np.random.default_rng(0)
    reference = np.concatenate((random.normal(0, 10, 2000), [0, 0, 4, -4, 4, 1, 1]))
    error = random.choice([0, 1e-9, 1e-4, 1e-3, 0.1, 1], 2000) * random.normal(0, 1, 2000)
    other = reference + np.concatenate((error, [0, 1e-4, 1, -1, 1.5, 0.5, -0.5]))  # some exactly at a tolerance
    elements = Elements(rtol, atol)
    for part in (slice(0, 700), slice(700, None)):
        elements.update(torch.from_numpy(reference[part]), torch.from_numpy(other[part]))
    figures = elements.figures()
    assert figures['within'] == np.isclose(other, reference, rtol, atol).mean()
    assert figures['max'] == np.abs(other - reference).max()
    assert figures['mean'] == pytest.approx(np.abs(other - reference).mean(), rel=1e-12)


def test_one_number_that_is_none_spoils_the_figures():
    elements = Elements(1e-3, 1e-3)
    elements.update(torch.ones(3), torch.tensor([1, torch.nan, 1]))
    elements.update(torch.ones(1), torch.ones(1))
    figures = elements.figures()
    assert np.isnan(figures['max']) and np.isnan(figures['mean']) and figures['within'] == 0.75


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


def compared(first, second, **options):
    """Compare the predictions of two models for one image, or for several (lists of lists)."""
    first, second = ([x] if not x or isinstance(x[0], tuple) else x for x in (first, second))
    return compare(fixed(*first), fixed(*second), unlabelled(len(first)), CPU, **options)


A, B, C = (50, 50, 40, 40, 0, 0.9), (150, 150, 40, 40, 1, 0.8), (250, 250, 40, 40, 2, 0.7)


def change(row, x=0, c=None, score=None):
    return (row[0] + x, *row[1:4], row[4] if c is None else c, score or row[5])


BY_HAND = [  # reference, other: per rank whether they disagree, its score and box errors; the share matched, their score error
    ('the same', [A, B, C], [A, B, C], [0, 0, 0], [0, 0, 0], [0, 0, 0], 1, 0),
    ('another order', [A, B, C], [C, A, B], [0, 0, 0], [0, 0, 0], [0, 0, 0], 1, 0),
    ('another score', [A, B, C], [change(A, score=0.95), B, C], [0, 0, 0], [0.05, 0, 0], [0, 0, 0], 1, 0.05 / 3),
    (
        'two change ranks',
        [A, B, C],
        [change(A, score=0.8), change(B, score=0.9), C],
        [1, 1, 0],
        [0, 0, 0],
        [100, 100, 0],
        1,
        0.2 / 3,
    ),
    ('IoU 0.905', [A, B, C], [change(A, x=2), B, C], [0, 0, 0], [0, 0, 0], [1, 0, 0], 1, 0),
    ('IoU 0.667', [A, B, C], [change(A, x=8), B, C], [0, 0, 0], [0, 0, 0], [4, 0, 0], 4 / 6, 0),
    ('IoU 0.333', [A, B, C], [change(A, x=20), B, C], [1, 0, 0], [0, 0, 0], [10, 0, 0], 4 / 6, 0),
    ('another class', [A, B, C], [A, change(B, c=0), C], [0, 1, 0], [0, 0, 0], [0, 0, 0], 4 / 6, 0),
    ('the last is lost', [A, B, C], [A, B], [0, 0, 1], [0, 0, None], [0, 0, None], 4 / 5, 0),
    ('one more', [A, B], [A, B, C], [0, 0, 1], [0, 0, None], [0, 0, None], 4 / 5, 0),
    ('the first is lost', [A, B, C], [B, C], [1, 1, 1], [0.1, 0.1, None], [100, 100, None], 4 / 5, 0),
    ('all are lost', [A, B, C], [], [1, 1, 1], [None] * 3, [None] * 3, 0, None),
    ('nothing in both', [], [], [], [], [], None, None),
]


@pytest.mark.parametrize(
    'reference, other, differ, score, box, matched, matched_score',
    [row[1:] for row in BY_HAND],
    ids=[row[0] for row in BY_HAND],
)
def test_ranks_by_hand(reference, other, differ, score, box, matched, matched_score):
    result = compared(reference, other).plain()
    ranks = result['ranks']
    assert [r['rank'] for r in ranks] == list(range(1, len(differ) + 1)) and all(r['images'] == 1 for r in ranks)
    assert [r['disagreement'] for r in ranks] == differ
    for name, wanted in (('score_error', score), ('box_error', box)):
        assert [r[name] for r in ranks] == [w if w is None else pytest.approx(w, abs=1e-5) for w in wanted]
    assert result['disagreement'] == (pytest.approx(np.mean(differ)) if differ else None)
    assert result['matched'] == (matched if matched is None else pytest.approx(matched))
    assert result['matched_score'] == (
        matched_score if matched_score is None else pytest.approx(matched_score, abs=1e-6)
    )


def test_ranks_are_averaged_over_the_images_that_have_them():
    result = compared([[A, B], [A], []], [[A, change(B, c=0)], [change(A, score=0.7)], []])
    first, second = result.ranks
    assert (first['images'], first['disagreement'], second['images'], second['disagreement']) == (2, 0, 1, 1)
    assert first['score_error'] == pytest.approx(0.1) and first['score'] == pytest.approx(0.9)
    assert result.disagreement == pytest.approx(1 / 3) and result.matched == pytest.approx(4 / 6) and result.images == 3


def test_only_the_top_counts_but_a_match_may_stand_below_it():
    D = (50, 250, 40, 40, 0, 0.6)
    result = compared([A, B, C, D], [A, B, change(D, score=0.75), C], top=3)
    assert [r['disagreement'] for r in result.ranks] == [0, 0, 1] and result.matched == 1
    assert [r['unmatched'] for r in result.ranks] == [0, 0, 0]
    lost = compared([A, B, C], [A, C])
    assert [r['disagreement'] for r in lost.ranks] == [0, 1, 1] and [r['unmatched'] for r in lost.ranks] == [0, 0.5, 0]
    assert compared([A, B, C, D], [A, B, C, change(D, c=1)], top=3).disagreement == 0


def test_different_shapes_cannot_be_compared():
    with pytest.raises(QatError, match=r'\[\[1, 4, 8\].* and \[\[1, 4, 7\]'):
        compare(fixed([A]), lambda images: fixed([A])(images)[..., :7], unlabelled(1), CPU)


# ---- real models --------------------------------------------------------------------------------------------------------


def loader_of(small, limit=None, size=128):
    config = EvalConfig(small.single, small.data, batch_size=4, imgsz=size, workers=0)
    return val_loader(load_data(small.data), config, 32, square=True, limit=limit)


@pytest.fixture(scope='module')
def setup(small):
    """(loader, names, calibrated model, float model)."""
    return (
        loader_of(small),
        load_data(small.data).names,
        TorchModel(small.quantized_model()),
        TorchModel(small.float_model()),
    )


def test_a_model_is_equal_to_itself(setup):
    loader, names, model, _ = setup
    result = compare(model, model, loader, CPU, names, rtol=0, atol=0)
    assert result.boxes == result.scores == {'max': 0, 'mean': 0, 'within': 1}
    assert len(result.ranks) == 10 and all(r['images'] and r['score'] > 0 for r in result.ranks)
    assert all((r['score_error'], r['box_error'], r['disagreement']) == (0, 0, 0) for r in result.ranks)
    assert (result.disagreement, result.matched, result.matched_score, result.matched_box) == (0, 1, 0, 0)
    assert result.images == 12 and result.ap_difference == 0 and result.reference.ap > 0.05
    assert not excess(result.plain(), FLOAT_LIMITS)


def test_metrics_are_those_of_evaluate_and_each_model_runs_once_per_batch(setup):
    loader, names, *models = setup
    alone = [evaluate(model, loader, names, CPU).plain() for model in models]
    calls = []

    def counted(model):
        return lambda images: calls.append((model, len(images))) or model(images)

    result = compare(*map(counted, models), loader, CPU, names)
    assert [result.reference.plain(), result.other.plain()] == alone and alone[0] != alone[1]
    assert calls == [(model, 4) for _ in range(3) for model in models]
    assert result.ap_difference == alone[1]['ap'] - alone[0]['ap']


def test_without_labels_there_is_closeness_only(setup):
    loader, names, *models = setup
    with_labels, without = compare(*models, loader, CPU, names).plain(), compare(*models, loader, CPU).plain()
    assert without['reference'] is without['other'] is without['ap_difference'] is None
    assert {**with_labels, **dict.fromkeys(('reference', 'other', 'ap_difference', 'against_reference'))} == without


def with_boxes(change):
    return lambda out: torch.cat((change(out[:, :4]), out[:, 4:]), 1)


AP, MATCHED, SCORES = 'AP differs', 'are matched', 'scores differ'
DISTURBED = [  # what is done to the output of the other model, which limits that exceeds, and which it may exceed by chance
    (lambda out: out, [], []),
    (lambda out: torch.cat((out[:, :4], out[:, 4:] * 0.9), 1), [SCORES], []),  # which AP alone would not see
    (
        with_boxes(lambda boxes: boxes * torch.tensor((1, 1, 0.8, 0.8)).view(1, 4, 1)),
        [AP, MATCHED],
        [SCORES],  # of the few that are matched all the same
    ),
    (lambda out: torch.cat((out[:, :4], out[:, 4:].roll(1, 1)), 1), [AP, MATCHED, SCORES], []),
    (with_boxes(lambda boxes: boxes * torch.nan), [AP, MATCHED], []),
]


@pytest.mark.parametrize('disturb, says, may', DISTURBED, ids=['not', 'scores', 'size', 'classes', 'not a number'])
def test_a_disturbed_model_exceeds_the_limits(setup, disturb, says, may):
    loader, names, model, _ = setup
    result = compare(model, lambda images: disturb(model(images)), loader, CPU, names)
    plain = json.loads(json.dumps(result.plain(), allow_nan=False))
    said = excess(plain, INT8_LIMITS)
    found = {text for text in (AP, MATCHED, SCORES) for line in said if text in line}
    assert {*says} <= found <= {*says, *may} and len(found) == len(said), said
    text = tables(plain, ('PyTorch', 'the other'))
    assert f'{result.other.ap:.4f}' in text and f'{result.matched:.2%}' in text and 'nan' not in text


def test_models_that_see_nothing_are_not_verified(setup):
    loader, names, model, _ = setup
    blind = [lambda images: model(images) * 1e-6] * 2
    for labels in (names, None):
        assert 'neither model detects anything' in excess(compare(*blind, loader, CPU, labels).plain(), INT8_LIMITS)[0]


def test_an_ap_limit_of_the_users_replaces_the_default(small):
    export = ExportConfig(small.quantized, max_ap_diff=0)
    assert export.limits(True).ap == export.limits(False).ap == 0 and export.limits(True).matched == INT8_LIMITS.matched
    assert (
        ExportConfig(small.quantized).limits(True)
        == INT8_LIMITS
        != ExportConfig(small.quantized).limits(False)
        == FLOAT_LIMITS
    )


def test_a_limit_of_images_spreads_over_the_set(small):
    everything = [path for _, _, paths, _ in loader_of(small) for path in paths]
    assert [p for _, _, paths, _ in loader_of(small, limit=5) for p in paths] == [
        everything[i] for i in (0, 2, 4, 7, 9)
    ]
    assert [p for _, _, paths, _ in loader_of(small, limit=100) for p in paths] == everything
