"""Laws of interval.py: AP of a resample equals upstream's, and what is said follows from it."""

import json
import re

import numpy as np
import pytest
from helpers.commands import scores, state_of
from helpers.labelled import CPU, val_images, words
from helpers.zoo import command
from utils.metrics import ap_per_class

from test_differences import images_of
from utils.qat.backends.pytorch import TorchModel
from utils.qat.data.dataset import load_data
from utils.qat.evaluation import interval
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.interval import draw_resamples, resampled_ap, within_interval
from utils.qat.evaluation.metrics import DetectionMetrics, from_json
from utils.qat.evaluation.score_tables import interval_table
from utils.qat.run.report import conclusions
from utils.qat.run.state import LAST, STATE, Stage


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


def test_the_mean_of_the_classes_is_the_whole():
    """On each resample, over the classes that have labels in it; the interval of a class is wider than that of the mean."""
    [images], by_class = images_of(40, seed=3, wrong=2), {}
    images[0] = (*images[0][:3], np.array([0, 1, 3], np.float32))  # class 3 has one label
    found = resampled_ap(images, by_class)
    classes = np.stack(list(by_class.values()))
    assert np.isnan(classes).any() and found == pytest.approx(np.nanmean(classes, 0), abs=1e-12)
    assert found == pytest.approx(resampled_ap(images), abs=0)
    assert max(interval.half_widths(ap)[0] for ap in classes) > interval.half_widths(found)[0] > 0
    assert interval.half_widths(found[:1]) == [interval.UNKNOWN]


def test_a_class_with_few_labels_has_no_interval():
    """All resamples of one image are that image, and half a width of 0 would be a lie."""
    figures = {'ap': 0.5, 'ap50': 0.9, 'precision': 0.8, 'recall': 0.7}
    rows = [{'class': i, 'name': f'c{i}', 'instances': n, 'chance': 0.01, **figures} for i, n in enumerate((4, 5))]
    metrics = DetectionMetrics(**figures, images=9, instances=9, per_class=rows)
    few, enough = interval_table({'model': metrics}).splitlines()[-2:]
    assert '0.5000 ± ? ' in few and '0.5000 ± 0.0100 ' in enough


@pytest.mark.parametrize('kept', [0, 1])
def test_without_detections_ap_is_0(kept):
    """No image has a detection, or only one image has."""
    [images] = images_of(20, seed=2)
    images = [
        image if i < kept else (image[0][:0], image[1][:0], image[2][:0], image[3]) for i, image in enumerate(images)
    ]
    found = resampled_ap(images)
    assert found.shape == (1 + interval.RESAMPLES, 1) and np.isfinite(found).all() and (found.max() > 0) == bool(kept)
    assert found[0, 0] == pytest.approx(upstream(images) if kept else 0, abs=1e-12)


@pytest.mark.parametrize('steps', [0, 16], ids=['scores', 'tied scores'])
def test_the_order_of_the_images_does_not_matter(small, steps):
    """Nor does that in which a sort leaves equal scores, such as those of a file of integers."""
    names, model = load_data(small.data).names, TorchModel(small.float_model())

    def predict(images):
        output = model(images)
        if steps:
            output[:, 4:] = (output[:, 4:] * steps).ceil() / steps
        return output

    batches = list(val_images(small.data))
    first, second = (evaluate(predict, order, names, CPU, resample=True) for order in (batches, batches[::-1]))
    assert np.array_equal(first.resampled, second.resampled) and first.resampled[1:].std() > 0.001
    assert first.resampled[0, 0] == pytest.approx(first.ap, abs=1e-9) and first.ap == second.ap
    assert evaluate(predict, batches, names, CPU).resampled is None


def test_masks_are_resampled_with_the_boxes(demo_seg):
    predict, loader = TorchModel(demo_seg.float_model()), val_images(demo_seg.data, masks=True)
    found = evaluate(predict, loader, load_data(demo_seg.data).names, CPU, resample=True)
    assert found.resampled[0] == pytest.approx([found.ap, found.mask['ap']], abs=1e-9)


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
    assert report['gain']['difference'] == pytest.approx(from_json(best).merit - from_json(ptq).merit, abs=1e-9)
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
        (
            2,
            (0.001, 0.002),
            'against PTQ: +0.10 ± 0.20 points of AP, within the confidence interval: whether it helped is not known.',
        ),
        (2, (0.003, 0.002), 'against PTQ: +0.30 ± 0.20 points of AP, beyond the confidence interval.'),
    ],
)
def test_whether_fine_tuning_helped_is_said(best, gain, says):
    epochs = [Stage(scores(ap=0.4 + 0.2 * (number == best)), epoch=number) for number in (1, 2)]
    difference, deviation = gain[0], gain[1] / 1.96
    after = np.array([[difference], [difference + deviation], [difference - deviation]])
    resampled = {'val': {'PTQ': np.zeros((3, 1)), 'epoch 2': after}}
    assert f'Fine-tuning {says}' in conclusions(state_of(ptq=Stage(scores()), epochs=epochs, resampled=resampled))


def test_no_layer_is_left_in_float_for_a_loss_within_chance(small, tmp_path):
    qat('sensitive', '--name sensitive --granularity layer --num-image 4', small, tmp_path)
    text = (tmp_path / 'sensitive/sensitivity.md').read_text()
    summary = json.loads((tmp_path / 'sensitive/summary-sensitive-analysis.json').read_text())
    found = [unit['measured']['without']['against_int8'] for unit in summary['units'] if unit['measured']]
    assert len(found) == 9 and all(rounded(each) in text for each in found)
    options = '--epochs 0 --sensitive {f}/sensitive/summary-sensitive-analysis.json --max-drop 0'
    qat('quantize', options, small, tmp_path)
    report, log = json.loads((tmp_path / 'exp/report.json').read_text()), (tmp_path / 'exp/log.txt').read_text()
    assert within_interval(report['ptq']['against_float']) and report['kept_float'] == []
    assert (
        'warning: --max-drop 0.0: within the confidence interval, which is ± ' in log
        and 'points on these 12 images' in log
    )
    assert log.count('more images (val in --data)') == 1
