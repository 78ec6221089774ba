"""Laws of chance.py: AP of a resample equals upstream's, and intervals of differences are as wide as they must be."""

import json
import re

import numpy as np
import pytest
from utils.metrics import ap_per_class
from zoo import command

from labelled import CPU, val_images, words
from utils.qat.backends.pytorch import TorchModel
from utils.qat.data.dataset import load_data
from utils.qat.evaluation import chance
from utils.qat.evaluation.chance import difference, draw_resamples, points_lost, resampled_ap, within_chance
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.score_tables import merit
from utils.qat.run.report import conclusions
from utils.qat.run.state import LAST, STATE

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


def upstream(images, part=0):
    correct, score, predicted, true = map(np.concatenate, zip(*images))
    return ap_per_class(correct[:, part], score, predicted, true, names={})[5].mean()


# ---- AP on resamples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('number, wrong', [(1, 3), (2, 1), (30, 0), (30, 5), (200, 30)])
def test_as_they_are_images_have_upstreams_ap(number, wrong):
    [images] = images_of(number, seed=number, wrong=wrong, parts=2)
    for part in (0, 1):
        assert resampled_ap(images)[0, part] == pytest.approx(upstream(images, part), abs=1e-12)


@pytest.mark.parametrize('number', [2, 5, 40])
def test_a_resample_has_upstreams_ap_of_the_images_drawn(number):
    """Also if a class has no label in it, and if an image is drawn several times."""
    [images] = images_of(number, seed=3, wrong=2)
    images[0] = (*images[0][:3], np.array([0, 1, 3], np.float32))
    counts, found, classes = draw_resamples(number), resampled_ap(images), set()
    assert (counts.sum(0) == number).all() and counts.max() > 1 == counts[:, 0].max()
    for column in range(60):
        drawn = [image for image, n in zip(images, counts[:, column]) for _ in range(int(n))]
        labels = np.concatenate([image[3] for image in drawn])
        classes.add(len(np.unique(labels)))
        assert found[column, 0] == pytest.approx(upstream(drawn) if len(labels) else 0, abs=1e-12)
    assert len(classes) > 1


def test_blocks_change_nothing(monkeypatch):
    [images] = images_of(60, seed=1)
    whole = resampled_ap(images)
    monkeypatch.setattr(chance, 'AT_ONCE', 5000)
    assert np.allclose(whole, resampled_ap(images), rtol=0, atol=1e-12), 'sums over other shapes may end otherwise'


@pytest.mark.parametrize('kept', [0, 1])
def test_without_detections_ap_is_0(kept):
    """No image has a detection, or only one image has."""
    [images] = images_of(20, seed=2)
    images = [
        image if i < kept else (image[0][:0], image[1][:0], image[2][:0], image[3]) for i, image in enumerate(images)
    ]
    found = resampled_ap(images)
    assert found.shape == (1 + chance.RESAMPLES, 1) and np.isfinite(found).all() and (found.max() > 0) == bool(kept)
    assert found[0, 0] == pytest.approx(upstream(images) if kept else 0, abs=1e-12)


def test_the_order_of_the_images_does_not_matter(small):
    names, predict = load_data(small.data).names, TorchModel(small.float_model())
    batches = list(val_images(small.data))
    first, second = (evaluate(predict, order, names, CPU, resample=True) for order in (batches, batches[::-1]))
    assert np.array_equal(first.resampled, second.resampled) and first.resampled[1:].std() > 0.001
    assert first.resampled[0, 0] == pytest.approx(first.ap, abs=1e-9)
    assert evaluate(predict, batches, names, CPU).resampled is None


def test_masks_are_resampled_with_the_boxes(demo_seg):
    predict, loader = TorchModel(demo_seg.float_model()), val_images(demo_seg.data, masks=True)
    found = evaluate(predict, loader, load_data(demo_seg.data).names, CPU, resample=True)
    assert found.resampled[0] == pytest.approx([found.ap, found.mask['ap']], abs=1e-9)


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
    assert found['chance'] == 1 and within_chance(found) and points_lost(found) == 0


def test_the_interval_holds_the_truth_about_95_times_in_100(monkeypatch):
    """The truth: the difference on very many images."""
    monkeypatch.setattr(chance, 'RESAMPLES', 150)
    options = {'classes': 1, 'found': (0.85, 0.78), 'wrong': 2}
    one, other = images_of(20000, 99, **options)
    truth = upstream(other) - upstream(one)
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
    assert merit({'ap': 0.5, 'mask': {'ap': 0.3}}) == 0.4 and merit({'ap': 0.5}) == 0.5


# ---- what is said -------------------------------------------------------------------------------------------------------


def qat(verb, options, files, folder):
    line = (
        '--weights {s.single} --data {s.data} --imgsz 64 --device cpu --workers 0 --batch-size 4 --calib-images 8 '
        '--calib-method mse --project {f} '
    )
    command('qat.py', verb, *words(line + options, s=files, f=folder))


def rounded(found):
    return f'{100 * found["difference"]:+.2f} ± {100 * found["chance"]:.2f}'.replace('-0.00', '+0.00')


@pytest.fixture(scope='module')
def finished(demo_seg, tmp_path_factory):
    """The folder of a run of four epochs. Do not write to it."""
    folder = tmp_path_factory.mktemp('chance')
    qat('quantize', '--epochs 4 --iters 1 --lr 1e-5', demo_seg, folder)
    return folder / 'exp'


def test_a_run_says_what_chance_is_good_for(finished):
    report, text = json.loads((finished / 'report.json').read_text()), (finished / 'report.md').read_text()
    float_, ptq, best, last = report['origin'], report['ptq'], report['best'], report['epochs'][-LAST:]
    assert 'against_float' not in float_
    for stage in (ptq, best, *report['epochs']):
        found = stage['against_float']
        assert found['difference'] == pytest.approx(stage['ap'] - float_['ap'], abs=1e-9) and found['chance'] > 0
        assert found['mask']['difference'] == pytest.approx(stage['mask']['ap'] - float_['mask']['ap'], abs=1e-9)
        assert re.search(rf'\| +{re.escape(rounded(found))} \| +{re.escape(rounded(found["mask"]))} \|', text)
    assert report['gain']['difference'] == pytest.approx(merit(best) - merit(ptq), abs=1e-9)
    assert report['gain']['difference'] >= 0
    mean = {'ap': sum(e['ap'] for e in last) / 3, 'mask': sum(e['mask']['ap'] for e in last) / 3}
    assert report['last_epochs']['difference'] == pytest.approx(mean['ap'] - float_['ap'], abs=1e-9)
    assert report['last_epochs']['mask']['difference'] == pytest.approx(mean['mask'] - float_['mask']['ap'], abs=1e-9)
    [row] = [line for line in text.splitlines() if 'mean of the last 3 epochs' in line]
    assert f'{mean["ap"]:.4f}' in row and f'{mean["mask"]:.4f}' in row and rounded(report['last_epochs']) in row
    assert 'The best is the highest of 5 on the 12 images (val)' in text and 'INT8 against float: ' in text
    assert ('Fine-tuning did not help' if not best['epoch'] else 'Fine-tuning against PTQ: ') in text
    assert (finished / 'log.txt').read_text().count('against float: ') == 6 and not (finished / STATE).exists()


@pytest.mark.parametrize(
    'best, gain, says',
    [
        (0, (0, 0), 'did not help: no epoch scores higher than PTQ, which is delivered.'),
        (2, (0.001, 0.002), 'against PTQ: +0.10 ± 0.20 points of AP, within chance: whether it helped is not known.'),
        (2, (0.003, 0.002), 'against PTQ: +0.30 ± 0.20 points of AP, beyond chance.'),
    ],
)
def test_whether_fine_tuning_helped_is_said(finished, best, gain, says):
    report = json.loads((finished / 'report.json').read_text())
    report['best']['epoch'], report['gain'] = best, dict(zip(('difference', 'chance'), gain))
    assert f'Fine-tuning {says}' in conclusions(report)


def test_no_layer_is_left_in_float_for_a_loss_within_chance(small, tmp_path):
    qat('sensitive', '--name sensitive --granularity layer --num-image 4', small, tmp_path)
    text = (tmp_path / 'sensitive/sensitivity.md').read_text()
    summary = json.loads((tmp_path / 'sensitive/summary-sensitive-analysis.json').read_text())
    found = [unit['measured']['without']['against_int8'] for unit in summary['units'] if unit['measured']]
    assert len(found) == 9 and all(rounded(each) in text for each in found)
    options = '--epochs 0 --sensitive {f}/sensitive/summary-sensitive-analysis.json --max-drop 0'
    qat('quantize', options, small, tmp_path)
    report, log = json.loads((tmp_path / 'exp/report.json').read_text()), (tmp_path / 'exp/log.txt').read_text()
    assert within_chance(report['ptq']['against_float']) and report['kept_float'] == []
    assert 'warning: --max-drop 0.0: less than chance, which is ' in log and 'points on these 12 images' in log
    assert log.count('more images (val in --data)') == 1
