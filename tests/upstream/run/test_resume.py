"""Laws of interrupted runs: a resumed run ends like one that was never interrupted."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import REPO
from helpers.labelled import copied
from helpers.zoo import command, interrupt, load_any, same, settings

from utils.qat.core.errors import QatError
from utils.qat.core.machine import versions
from utils.qat.data.dataset import load_data, load_hyp
from utils.qat.data.image_folders import ImageFolders, open_images
from utils.qat.data.loaders import Loaders
from utils.qat.run.state import STATE

CPU = torch.device('cpu')
HYP = {**load_hyp(REPO / 'demo/hyp.yaml'), 'mosaic': 0.7, 'mixup': 0.5, 'fliplr': 0.5, 'flipud': 0.5, 'hsv_h': 0.1}


def training(small, data=None, hyp=HYP, shard=(0, 1), **changes):
    """TrainingImages of 12 images."""
    config = settings(**{'batch_size': 5, 'imgsz': 64, **changes})
    return Loaders(data or load_data(small.data), config, 32, CPU, shard).training(hyp, labels=bool(config.task_loss))


def epoch_of(images, epoch):
    """The batches of one epoch."""
    images.epoch = epoch
    return list(images)


# ---- the images of an epoch ---------------------------------------------------------------------------------------------


def test_workers_change_no_image(small):
    """Two passes, because workers live on and remember the first; and a pass after one that was broken off."""
    passes = []
    for workers in (0, 1, 3):
        images = training(small, workers=workers)
        passes.append([*images, *images])
        next(iter(images))
        passes[-1] += images
    assert len(passes[0]) == 9 and same(passes[0], passes[1]) and same(passes[0], passes[2])


def test_without_hyp_images_are_as_they_are(small):
    """They equal the calibration's images, each once, in another order each epoch."""
    images = training(small, hyp=None)
    plain = torch.cat(list(Loaders(load_data(small.data), settings(imgsz=64, calib_images=12), 32, CPU).calibration()))
    orders = []
    for epoch in (0, 1):
        shown = torch.cat(epoch_of(images, epoch))
        orders.append([next(i for i, p in enumerate(plain) if torch.equal(p, x)) for x in shown])
        assert sorted(orders[-1]) == list(range(12))
    assert orders[0] != orders[1]


def test_fewer_images_are_spread_over_the_set(small):
    """For the calibration, of which some compare; test_compare.py has those for scores."""
    whole, four = (Loaders(load_data(small.data), settings(imgsz=64, calib_images=n), 32) for n in (12, 4))
    images, few = torch.cat(list(whole.calibration())), four.calibration()
    assert same([torch.cat(list(few)), torch.cat(list(few.spread(2)))], [images[::3], images[::6]])


def test_images_without_labels_are_augmented_alike(small, tmp_path):
    labelled = load_data(small.data)
    shutil.copytree(labelled.train[0], tmp_path / 'images')
    unlabelled = replace(labelled, train=[str(tmp_path / 'images')])
    assert same(list(training(small)), list(training(small, unlabelled)))


def test_an_epoch_does_not_depend_on_those_before(small):
    images = training(small)
    in_order = [list(images) for _ in range(3)]
    np.random.seed(1)
    torch.manual_seed(1)
    assert same(epoch_of(training(small), 2), in_order[2]) and same(epoch_of(training(small), 1), in_order[1])
    assert not same(in_order[0], in_order[1]) and not same(in_order[1], in_order[2])


def test_what_is_seen_follows_from_the_seed(small):
    first, again, other = (list(training(small, seed=seed)) for seed in (3, 3, 4))
    assert same(first, again) and not same(first, other)


def test_the_augmentation_of_an_image_is_its_own(small):
    """It does not depend on the other images of the batch."""
    assert same([torch.cat(list(training(small, batch_size=5)))], [torch.cat(list(training(small, batch_size=3)))])


def test_an_epoch_shows_every_image_once_in_another_order(small):
    """Each image also gets another augmentation, because the seeds differ."""
    batches = training(small).loader.batch_sampler
    orders = []
    for batches.epoch in range(3):
        items = [item for batch in batches for item in batch]
        assert sorted(i for i, _ in items) == list(range(12)) and len({seed for _, seed in items}) == 12
        orders.append(items)
    assert len({tuple(i for i, _ in items) for items in orders}) == 3
    assert len({dict(items)[0] for items in orders}) == 3


@pytest.mark.parametrize('batch_size, ranks', [(2, 1), (2, 2), (2, 4), (5, 2), (1, 5)])
@pytest.mark.parametrize('epoch', [0, 2])
def test_ranks_share_the_batches_of_one_process(small, batch_size, ranks, epoch):
    """Rank r gets batches r, r + W, ...; an incomplete batch or round is left out. See also test_distributed.py."""
    alone = epoch_of(training(small, batch_size=batch_size), epoch)
    loaders = [training(small, batch_size=batch_size, shard=(rank, ranks)) for rank in range(ranks)]
    shares, rounds = [epoch_of(loader, epoch) for loader in loaders], 12 // batch_size // ranks
    assert [len(share) for share in shares] == [rounds] * ranks == [len(loader) for loader in loaders]
    assert same([batch for group in zip(*shares) for batch in group], alone[: rounds * ranks])
    assert ranks == 1 or {len(batch) for share in shares for batch in share} == {batch_size}


def test_too_few_images_for_a_batch_of_each_rank(small):
    with pytest.raises(QatError, match='--batch-size 5: 3 processes need 3 full batches.*12 training images'):
        training(small, shard=(0, 3))


def test_albumentations_with_a_random_state_of_their_own(small):
    """Newer versions ignore NumPy's random state."""
    pytest.importorskip('albumentations')
    images = training(small)
    dataset = images.loader.dataset.dataset
    for transform in dataset.albumentations.transform.transforms:
        transform.p = 0.5 if type(transform).__name__ in ('Blur', 'ToGray', 'CLAHE') else 0.0
    assert same(epoch_of(images, 0), epoch_of(images, 0))


# ---- --val-split --------------------------------------------------------------------------------------------------------


def files_of(dataset):
    return sorted(dataset.im_files)


@pytest.mark.parametrize('share, n', [(0.1, 1), (0.25, 3), (0.5, 6), (0.9, 11)])
def test_the_split_takes_from_training_and_calibration(small, share, n):
    data = replace(load_data(small.data), val_split=share)
    config = settings()
    held_out = files_of(Loaders(data, config, 32).scored(split='held out').dataset)
    trained = files_of(training(small, data).loader.dataset.dataset)
    everything = files_of(training(small).loader.dataset.dataset)
    assert len(held_out) == n and sorted(held_out + trained) == everything
    assert files_of(Loaders(data, config, 32, CPU).calibration().loader.dataset.dataset) == trained
    val, without_split = (files_of(Loaders(d, config, 32).scored().dataset) for d in (data, load_data(small.data)))
    assert val == without_split
    places = [everything.index(f) for f in held_out]
    assert all(abs((b - a) - 12 / n) < 1 for a, b in itertools.pairwise(places)), 'evenly spread'


@pytest.fixture
def classes(tmp_path):
    """Folders of four classes with 3 images each."""
    for name in 'abcd':
        for i in range(3):
            image = tmp_path / 'train' / name / f'{i}.png'
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(b'an image is not read here, an empty file is refused')
    return ImageFolders(tmp_path, tmp_path / 'train', tmp_path / 'train', dict(enumerate('abcd')))


@pytest.mark.parametrize('share, n', [(0.1, 1), (0.25, 3), (0.4, 5), (0.5, 6), (0.7, 8), (0.9, 11)])
def test_the_split_takes_its_share_of_each_class(classes, share, n):
    data = replace(classes, val_split=share)
    held_out, trained = (open_images(data, split, settings()) for split in ('held out', 'train'))
    everything = files_of(open_images(data, 'val', settings()))
    assert len(held_out) == n and sorted(held_out.im_files + trained.im_files) == everything
    assert all(abs(held_out.labels.count(label) - 3 * n / 12) < 1 for label in range(4))
    assert [Path(file).parent.name for file in held_out.im_files] == ['abcd'[label] for label in held_out.labels]


@pytest.mark.parametrize('share', [0.01, 0.04, 0.99])
def test_a_split_that_leaves_one_side_empty(small, classes, share):
    refused = rf'--val-split {share}: the training set has 12 images, of which \d+ would be held out'
    with pytest.raises(QatError, match=refused):
        training(small, replace(load_data(small.data), val_split=share))
    with pytest.raises(QatError, match=refused):
        open_images(replace(classes, val_split=share), 'train', settings())


@pytest.fixture
def shapes(small, tmp_path):
    """A data set with training images of many shapes."""
    data = copied(small.data, tmp_path / 'data')
    for i, file in enumerate(sorted((tmp_path / 'data/images/train').glob('*.jpg'))):
        cv2.imwrite(str(file), cv2.resize(cv2.imread(str(file)), (200 + 20 * i, 320 - 12 * i)))
    return load_data(data)


def test_held_out_images_without_labels_choose_nothing(shapes):
    def held_out():
        return Loaders(replace(shapes, val_split=0.1), settings(), 32).scored(split='held out').dataset

    for file in held_out().label_files:
        Path(file).write_text('')
    with pytest.raises(QatError, match='--val-split 0.1: none of the 1 images held out has a label'):
        held_out()


@pytest.mark.parametrize('square', [False, True])
def test_held_out_images_are_batched_as_a_val_set_of_them_is(shapes, tmp_path, square):
    config = settings(batch_size=2)
    ours = Loaders(replace(shapes, val_split=0.5), config, 32).scored(square, split='held out')
    listing = tmp_path / 'list.txt'
    listing.write_text('\n'.join(files_of(ours.dataset)))
    theirs = Loaders(replace(shapes, val=[listing]), config, 32).scored(square)
    ours, theirs = list(ours), list(theirs)
    assert [batch[2:] for batch in ours] == [batch[2:] for batch in theirs]
    assert same([batch[:2] for batch in ours], [batch[:2] for batch in theirs])
    assert (len({batch[0].shape for batch in ours}) > 1) != square


def test_no_augmentation_shows_a_held_out_image(shapes):
    """Mosaic and mixup choose among all images of a set. A colour that only held-out images have never appears."""
    split = replace(shapes, val_split=0.5)
    for file in Loaders(split, settings(), 32).scored(split='held out').dataset.im_files:
        cv2.imwrite(file, np.full_like(cv2.imread(file), (255, 0, 255)))
    hyp = {**HYP, 'mosaic': 1.0, 'mixup': 0.5, 'hsv_h': 0, 'hsv_s': 0, 'hsv_v': 0}

    def purple(data):
        images = training(None, data, hyp)
        pixels = torch.cat([batch for epoch in range(3) for batch in epoch_of(images, epoch)])
        return ((pixels[:, 0] - pixels[:, 1] > 0.4) & (pixels[:, 2] - pixels[:, 1] > 0.4)).float().mean()

    assert purple(split) < 1e-3 and purple(shapes) > 0.1


# ---- --resume -----------------------------------------------------------------------------------------------------------


def quantize(small, project, *more):
    given = '--weights', small.single, '--data', small.data, '--hyp', REPO / 'demo/hyp.yaml', '--project', project
    quick = '--imgsz 64 --batch-size 4 --iters 2 --epochs 3 --device cpu --workers 0 --lr 1e-4 --calib-method mse'
    return 'qat.py', 'quantize', *given, *quick.split(), '--val-split', 0.25, *more


def resume(folder, *more, code=0):
    """Resume the run of a folder; returns the command's output."""
    return command('qat.py', 'quantize', '--resume', folder, *more, code=code)


def result(folder):
    """The report of a run without times and the folder's name, and the model in each file of weights/."""
    report = json.loads((folder / 'report.json').read_text())
    del report['times'], report['settings']['name'], report['settings']['project']
    models = {f.name: load_any(f)[0].state_dict() for f in (folder / 'weights').iterdir()}
    return report, models


def alike(first, second):
    """Whether two runs left equal files."""
    (report, models), (other, others) = result(first), result(second)
    return report == other and models.keys() == others.keys() and all(same(models[k], others[k]) for k in models)


@pytest.fixture(scope='module')
def whole(small, tmp_path_factory):
    """The folder of a run that was not interrupted. Do not write to it."""
    project = tmp_path_factory.mktemp('whole')
    command(*quantize(small, project))
    return project / 'exp'


def test_interrupted_and_gone_on_with_is_the_same_run(small, whole, tmp_path):
    """Interrupted three times: inside an epoch, after learning but before scoring, and at the very end."""
    folder, words = tmp_path / 'exp', quantize(small, tmp_path)
    again = '--workers', 1, '--device', 'cpu', '--epochs', 3
    for at, number in (('epoch 1/3', 1), ('evaluating epoch 2', 0), ('evaluating best, val', 0)):
        said = interrupt(at, number, *words)
        assert said.endswith(f'; go on with: python qat.py quantize --resume {folder}\n')
        words = 'qat.py', 'quantize', '--resume', folder, *again
    resume(folder, *again)
    assert alike(folder, whole)
    report = json.loads((folder / 'report.json').read_text())
    assert {f'fine-tune epoch {n}' for n in (1, 2, 3)} <= report['times'].keys() and 'changed' not in report


def test_the_report_says_what_was_scored_on_which_images(whole):
    report, models = result(whole)
    assert report['chosen_on'] == 'held out' and report['images'] == {'val': 12, 'held out': 3, 'train': 9}
    stages = report['origin'], report['ptq'], report['best'], *report['epochs']
    assert [stage['images'] for stage in stages] == [3] * 6
    assert report['best']['ap'] == max(e['ap'] for e in (report['ptq'], *report['epochs']))
    assert f'qat_ep_2_ap_{report["epochs"][1]["ap"]:.4f}_single.pt' in models
    assert {k: v['images'] for k, v in report['val'].items()} == {'origin': 12, 'ptq': 12, 'best': 12}
    held_out, val = (whole / 'report.md').read_text().split('12 images of val')
    assert '3 images held out of train' in held_out and f'| {report["best"]["ap"]:.4f}' in held_out
    assert f'| {report["val"]["best"]["ap"]:.4f}' in val and 'QAT epoch' not in val.split('![')[0]


# ---- what cannot be gone on with ----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def stopped(small, tmp_path_factory):
    """A run that was interrupted in its second epoch. Do not write to it."""
    project = tmp_path_factory.mktemp('stopped')
    interrupt('epoch 2/3', 0, *quantize(small, project))
    return project / 'exp'


def edit_state(folder, change):
    state = torch.load(folder / STATE, weights_only=False)
    change(state)
    torch.save(state, folder / STATE)


def other_source(folder):
    """The checkpoint of the run was replaced: same model, another date."""
    weights = torch.load(folder / STATE, weights_only=False)['settings']['weights']
    torch.save({**torch.load(weights, weights_only=False), 'date': 'today'}, folder / 'single.pt')
    setting(weights=str(folder / 'single.pt'))(folder)


def without_state(folder, **changes):
    (folder / STATE).unlink()
    report = json.loads((folder / 'report.json').read_text())
    (folder / 'report.json').write_text(json.dumps({**report, **changes}))


def before_ptq(folder):
    without_state(folder, ptq=None, epochs=[], best=None)


def of_version_before(folder):
    """The files of a run that was interrupted when report.json had a part of its state."""
    torch.save(torch.load(folder / STATE, weights_only=False)['training'], folder / STATE)
    (folder / 'weights/resampled.json').write_text('{}')


def setting(**values):
    return lambda folder: edit_state(folder, lambda state: state['settings'].update(values))


def unchanged(folder):
    pass


def without_setting(name):
    return lambda folder: edit_state(folder, lambda state: state['settings'].pop(name))


REFUSED = {  # what was done to the folder, options beside --resume, what the line must say
    'no folder': (shutil.rmtree, '', ['no report of a run there', 'report.json']),
    'no files': (lambda f: [p.unlink() for p in (f / 'report.json', f / STATE)], '', ['no report of a run there']),
    'other JSON': (lambda f: without_state(f, settings={}), '', ['no report of a run there']),
    'before PTQ': (before_ptq, '', ['before the calibrated model', 'without --resume']),
    'no state': (without_state, '', ['another version', STATE, 'is gone', 'start the run again']),
    'the version before': (of_version_before, '', ['another version', 'start the run again']),
    'other version': (without_setting('val_split'), '', ['another version', 'val_split']),
    'no source': (setting(weights='none.pt'), '', ['started with none.pt', 'not there']),
    'other source': (other_source, '', ['single.pt', 'SHA-256']),
    'other data': (lambda f: edit_state(f, lambda s: s['images'].update(train=13)), '', ["'train': 13", "'train': 9"]),
    'other option': (
        unchanged,
        '--epochs 5',
        ['--epochs contradicts the run, whose epochs is 3', '--device and --workers'],
    ),
    'other options': (unchanged, '--no-eval-origin --lr 0.5', ['--no-eval-origin contradicts', '--lr contradicts']),
}


def written(folder):
    """When each file of a run was written, but for its log and its lock."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob('*.*') if p.name not in ('log.txt', '.lock')}


@pytest.mark.parametrize('name', REFUSED)
def test_refused_in_one_line(stopped, tmp_path, name):
    folder, (prepare, options, says) = tmp_path / 'exp', REFUSED[name]
    shutil.copytree(stopped, folder)
    prepare(folder)
    before = written(folder)
    line = resume(folder, *options.split(), code=2).strip().splitlines()[-1]
    assert f': error: --resume {folder}: ' in line and all(text in line for text in says), line
    assert written(folder) == before


def test_a_finished_run_is_not_gone_on_with(whole):
    assert 'this run is finished' in resume(whole, code=2)


def test_other_versions_warn_and_are_noted(stopped, whole, tmp_path):
    shutil.copytree(stopped, tmp_path / 'exp')
    edit_state(tmp_path / 'exp', lambda s: s['versions'].update(torch='2.0'))
    resume(tmp_path / 'exp')
    now = versions()['torch']
    log = (tmp_path / 'exp/log.txt').read_text()
    assert re.search(rf'warning: not what the run was started with.*: torch 2\.0, now {re.escape(now)}\n', log)
    report, models = result(tmp_path / 'exp')
    expected, others = result(whole)
    assert report.pop('changed') == {'after epoch 1': {'torch': now}} and report['versions'].pop('torch') == '2.0'
    assert expected['versions'].pop('torch') == now and report == expected
    assert all(same(models[name], others[name]) for name in others)


def test_a_new_run_in_the_folder_forgets_the_old_one(small, stopped, tmp_path):
    """It is interrupted before its PTQ, and does not continue with the old files."""
    shutil.copytree(stopped, tmp_path / 'exp')
    said = interrupt('calibrating', 0, *quantize(small, tmp_path, '--exist-ok'))
    assert 'go on with' not in said and not (tmp_path / 'exp' / STATE).exists()
    assert 'before the calibrated model was saved' in resume(tmp_path / 'exp', code=2)
