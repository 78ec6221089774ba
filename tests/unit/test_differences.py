"""Laws of interval.py: intervals of differences are as wide as they must be."""

import numpy as np
import pytest
from helpers.commands import scores

from utils.qat.evaluation import interval
from utils.qat.evaluation.interval import difference, points_lost, resampled_ap, within_interval

LEVELS = np.arange(10)  # of IoU


def images_of(number, seed, classes=4, found=(0.8,), wrong=3, parts=1):
    """Matches of images for a model of each probability in `found` of seeing an object: [models][images]. Objects and how hard they are,
    and so the detections, are alike for the models; 'classes - 1' is rare, and detections of the class `classes` have no label."""
    generator, models = np.random.default_rng(seed), [[] for _ in found]
    share = np.array([*([1.0] * (classes - 1)), 0.03])
    for _ in range(number):
        labels = generator.choice(classes, generator.poisson(2), p=share / share.sum())
        ease, exactness, score = generator.random((3, len(labels)))
        false = generator.poisson(wrong)
        others, scores = generator.integers(classes + 1, size=false), generator.random(false) * 0.8
        for images, skill in zip(models, found):
            seen = ease < skill
            correct = np.zeros((seen.sum() + false, parts, 10), bool)
            for part in range(parts):
                correct[: seen.sum(), part] = LEVELS < (12 - 2 * part) * exactness[seen, None]
            found_scores = score[seen] * 0.9 + generator.random(seen.sum()) * 0.1
            of_detections = np.concatenate((found_scores, scores)), np.concatenate((labels[seen], others))
            images.append((correct, *(x.astype(np.float32) for x in (*of_detections, labels))))
    return models


def test_blocks_change_nothing(monkeypatch):
    [images] = images_of(60, seed=1)
    whole = resampled_ap(images)
    monkeypatch.setattr(interval, 'AT_ONCE', 5000)
    assert np.allclose(whole, resampled_ap(images), rtol=0, atol=1e-12), 'sums over other shapes may end otherwise'


# ---- differences --------------------------------------------------------------------------------------------------------


def compared(*args, **options):
    return difference(*map(resampled_ap, images_of(*args, **options)))


def test_a_model_is_no_better_than_itself():
    assert compared(50, 0, found=(0.8, 0.8), wrong=0) != {'difference': 0, 'chance': 0}, 'another noise of the scores'
    [images] = images_of(50, 0)
    assert difference(resampled_ap(images), resampled_ap(images)) == {'difference': 0, 'chance': 0}


def test_swapping_models_swaps_the_sign():
    one, other = map(resampled_ap, images_of(50, 0, found=(0.9, 0.7), parts=2))
    forth, back = difference(one, other), difference(other, one)
    for a, b in ((forth, back), (forth['mask'], back['mask'])):
        assert a['difference'] == -b['difference'] < 0 and 0 < a['chance'] == pytest.approx(b['chance'])
    boxes = {key: pytest.approx(forth[key]) for key in ('difference', 'chance')}
    assert difference(one, other[:, :1]) == boxes, 'one has no masks'


def test_one_image_tells_nothing():
    found = compared(1, 3, found=(0.9, 0.2))
    assert found['chance'] == 1 and within_interval(found) and points_lost(found) == 0


def test_the_interval_holds_the_truth_about_95_times_in_100(monkeypatch):
    """The truth: the difference on very many images."""
    options = {'classes': 1, 'found': (0.85, 0.78), 'wrong': 2}
    monkeypatch.setattr(interval, 'RESAMPLES', 1)
    truth = compared(20000, 99, **options)['difference']
    monkeypatch.setattr(interval, 'RESAMPLES', 150)
    trials = [compared(60, seed, **options) for seed in range(150)]
    held = np.mean([abs(found['difference'] - truth) <= found['chance'] for found in trials])
    spread = np.std([found['difference'] for found in trials])
    assert 0.89 <= held <= 0.99 and truth < -0.01
    assert np.mean([found['chance'] for found in trials]) == pytest.approx(1.96 * spread, rel=0.2)


GAIN, LOSS, NOTHING = ({'difference': d, 'chance': c} for d, c in ((0.02, 0.01), (-0.02, 0.01), (-0.02, 0.03)))
LARGE = {'difference': -0.1, 'chance': 0.01}


@pytest.mark.parametrize(
    'found, lost',
    [
        (LOSS, 2),
        (NOTHING, 0),
        (GAIN, -2),
        ({**NOTHING, 'mask': {'difference': -0.01, 'chance': 0.005}}, 1),
        ({**LOSS, 'mask': LARGE}, 10),
        ({**LARGE, 'mask': LOSS}, 10),
    ],
)
def test_within_chance_nothing_is_lost_and_masks_count_as_boxes(found, lost):
    assert points_lost(found) == pytest.approx(lost)


def test_the_best_is_chosen_by_boxes_and_masks_alike():
    assert scores(mask={'ap': 0.3}).merit == 0.4 and scores().merit == 0.5
