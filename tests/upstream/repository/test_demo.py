"""Laws of demo/: data is reproducible, boxes and outlines fit, the configs hold every block kind, weights survive the trip."""

import numpy as np
import pytest
import sklearn.datasets
import torch
import yaml
from conftest import REPO
from helpers.zoo import program

from models import yolo
from utils.qat.core.errors import QatError

DEMO = REPO / 'demo'


make_data, weights = program('demo/make_data.py'), program('demo/weights.py')


def content(folder):
    """{relative path: bytes} of a data set, its own place in data.yaml left out."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    return {name: what.replace(str(folder).encode(), b'.') for name, what in files.items()}


@pytest.fixture(scope='module', params=make_data.TASKS)
def task(request):
    return request.param


@pytest.fixture(scope='module')
def data(tmp_path_factory, task):
    """A small data set: 12 train and 6 val images."""
    folder = tmp_path_factory.mktemp('demo') / 'data'
    assert make_data.make_data(folder, task, train=12, val=6)
    return folder


# --- data ---------------------------------------------------------------------------------------------------------


def test_same_arguments_same_bytes(data, task, tmp_path):
    make_data.make_data(tmp_path / 'again', task, train=12, val=6)
    assert content(tmp_path / 'again') == content(data)


def test_what_changes_with_the_arguments(data, task, tmp_path):
    """Another seed gives other pictures, more training images change no other image."""
    make_data.make_data(tmp_path / 'other', task, train=12, val=6, seed=1)
    make_data.make_data(tmp_path / 'more', task, train=15, val=6)
    ours, other, more = map(content, (data, tmp_path / 'other', tmp_path / 'more'))
    assert not any(ours[name] == other.get(name) for name in ours if name.endswith('.jpg'))
    assert all(more[name] == what for name, what in ours.items() if name.endswith(('.jpg', '.txt')))


def test_second_run_skips_and_other_arguments_are_refused(data, task):
    before = {path: path.stat().st_mtime_ns for path in data.rglob('*')}
    assert not make_data.make_data(data, task, train=12, val=6)
    other = next(t for t in make_data.TASKS if t != task)
    for arguments in dict(task=task, train=13), dict(task=other, train=12):
        with pytest.raises(QatError, match='was made with'):
            make_data.make_data(data, **arguments, val=6)
    assert {path: path.stat().st_mtime_ns for path in data.rglob('*')} == before


def test_moved_folder_finds_itself(tmp_path):
    make_data.make_data(tmp_path / 'here', train=1, val=1)
    (tmp_path / 'here').rename(tmp_path / 'there')
    assert not make_data.make_data(tmp_path / 'there', train=1, val=1)
    assert str(tmp_path / 'there') in (tmp_path / 'there' / 'data.yaml').read_text()


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(make_data, 'make_image', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_data.make_data(tmp_path / 'data')
    assert not list(tmp_path.iterdir())


def test_train_and_val_share_no_source_digit():
    split = make_data.source_split(seed=0, count=1797)
    assert len(np.intersect1d(split['train'], split['val'])) == 0
    assert sorted(np.concatenate([split['train'], split['val']])) == list(range(1797))


def test_images_are_as_many_as_asked_for(data, task):
    for split, count in (('train', 12), ('val', 6)):
        if task == 'classify':  # the folder of an image is its label
            assert sorted(f.name for f in (data / split).iterdir()) == [str(c) for c in range(10)]
            assert len(list((data / split).glob('*/*.jpg'))) == count
        else:
            files = sorted((data / 'labels' / split).iterdir())
            assert len(files) == len(list((data / 'images' / split).iterdir())) == count
            assert all(file.read_text() for file in files), 'an object in each'


def test_boxes_are_tight(task, monkeypatch):
    """What a lone digit changes on its canvas spans the box, to a pixel or two of soft edge."""
    monkeypatch.setitem(make_data.TASKS, task, make_data.TASKS[task]._replace(per_image=(1, 1)))
    source = sklearn.datasets.load_digits()
    for i in range(8):
        image, [(_, x1, y1, mask)] = make_data.make_image(
            np.random.default_rng(i), source.images, source.target, 320, make_data.TASKS[task]
        )
        x2, y2 = x1 + mask.shape[1], y1 + mask.shape[0]
        rng = np.random.default_rng(i)  # the same stream again, up to the canvas
        rng.integers(len(make_data.ASPECTS))
        canvas = make_data.texture(rng, *image.shape[:2])
        changed = np.abs(image - canvas.clip(0, 255)).max(2) > 30
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        found = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert np.abs(found - [x1, y1, x2, y2]).max() <= 2, (i, found, (x1, y1, x2, y2))


def test_upstream_reads_the_very_masks_and_their_boxes(tmp_path):
    from utils.segment.dataloaders import LoadImagesAndLabelsAndMasks

    make_data.make_data(tmp_path / 'data', 'segment', train=1, val=12)
    source, split = sklearn.datasets.load_digits(), make_data.source_split(0, 1797)['val']
    loaded = LoadImagesAndLabelsAndMasks(str(tmp_path / 'data' / 'images' / 'val'), 320)
    for i, (image, labels, _, (_, (_, pad)), masks) in enumerate(loaded):
        _, things = make_data.make_image(
            np.random.default_rng([0, 1, i]),
            source.images[split],
            source.target[split],
            320,
            make_data.TASKS['segment'],
        )
        assert len(things) == len(labels) == len(masks)
        whole = np.zeros((len(things), *image.shape[1:]), bool)
        for (c, x, y, mask), here, (_, label, *box) in zip(things, whole, labels.tolist()):
            x, y, (h, w) = x + int(pad[0]), y + int(pad[1]), mask.shape
            here[y : y + h, x : x + w] = mask
            assert label == c and np.allclose(np.array(box) * 320, [x + w / 2, y + h / 2, w - 1, h - 1], atol=0.01)
        assert np.array_equal(masks.numpy() > 0, whole), i
        assert whole.sum(0).max() == 1  # no sticker covers another


# --- model --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=['DetectionModel', 'SegmentationModel'])
def model(request):
    """A demo model with statistics that are not the initial ones."""
    torch.manual_seed(0)
    config = 'yolov9-demo.yaml' if request.param == 'DetectionModel' else 'yolov9-demo-seg.yaml'
    model = getattr(yolo, request.param)(str(DEMO / config))
    model.train()(torch.rand(2, 3, 64, 64))
    model.names, model.nc = {i: str(i) for i in range(10)}, 10
    return model.eval()


def blocks_of_main_branch(model):
    """Indices of the blocks that the main branch's outputs are made of, the names of their kinds, and the head."""
    head = model.model[-1]
    reached, todo = set(), list(head.f[-head.nl :])
    while todo:
        i = todo.pop()
        if i >= 0 and i not in reached:
            reached.add(i)
            source = model.model[i].f
            todo += [j if j >= 0 else i + j for j in (source if isinstance(source, list) else [source])]
    return reached, {type(model.model[i]).__name__ for i in reached}, head


BLOCKS = {'Conv', 'RepNCSPELAN4', 'AConv', 'ADown', 'SPPELAN', 'Upsample', 'Concat'}


@pytest.mark.parametrize('model', ['DetectionModel'], indirect=True)
def test_main_branch_holds_every_block_kind(model):
    reached, kinds, head = blocks_of_main_branch(model)
    assert type(head).__name__ == 'DualDDetect' and head.stride.tolist() == [8, 16, 32]
    assert kinds == BLOCKS | {'Silence', 'CBLinear', 'CBFuse'}
    assert set(range(len(model.model) - 1)) - reached == set(range(22, 29))  # the auxiliary branch, as the config says
    assert sum(p.numel() for p in model.parameters()) < 1.5e6


def test_round_trip_is_strict_and_exact(model, tmp_path):
    torch.save({'model': torch.nn.Module(), 'ema': model}, tmp_path / 'trained.pt')
    weights.pack(tmp_path / 'trained.pt', tmp_path / 'packed.pt')
    packed = torch.load(tmp_path / 'packed.pt', weights_only=True)
    assert set(packed) == {'state_dict', 'yaml', 'names'} and (tmp_path / 'packed.pt').stat().st_size < 4e6

    weights.build(tmp_path / 'packed.pt', tmp_path / 'built.pt')
    from models.experimental import attempt_load

    built = attempt_load(str(tmp_path / 'built.pt'), device='cpu', fuse=False)
    expected = {
        key: value.half().float() if value.is_floating_point() else value for key, value in model.state_dict().items()
    }
    found = built.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())
    assert type(built) is type(model) and built.names == model.names and built.nc == 10 and built.yaml['nc'] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ['built.pt', 'packed.pt', 'trained.pt']  # no left-overs


@pytest.mark.parametrize(
    'spoil', [lambda state: state.pop(next(iter(state))), lambda state: state.update(extra=torch.zeros(1))]
)
def test_missing_and_surplus_keys_are_errors(model, tmp_path, spoil):
    state = weights.state_of(model)
    spoil(state['state_dict'])
    torch.save(state, tmp_path / 'packed.pt')
    with pytest.raises(QatError, match='missing, left over or of another shape'):
        weights.build(tmp_path / 'packed.pt', tmp_path / 'built.pt')
    assert not (tmp_path / 'built.pt').exists()


def test_not_finite_is_refused(model):
    next(model.parameters()).data[0] = 1e6  # beyond FP16
    with pytest.raises(QatError, match='not finite'):
        weights.state_of(model)


def test_wrong_files_are_mistakes(tmp_path):
    (tmp_path / 'text.pt').write_text('hello')
    torch.save({'optimizer': 1}, tmp_path / 'other.pt')
    for name in 'none.pt', 'text.pt', 'other.pt':
        for call in (
            lambda: weights.pack(tmp_path / name, tmp_path / 'out.pt'),
            lambda: weights.build(tmp_path / name, tmp_path / 'out.pt'),
        ):
            with pytest.raises(QatError, match=name):
                call()
    assert not (tmp_path / 'out.pt').exists()


@pytest.mark.parametrize('name', ['demo', 'demo-seg'])
def test_committed_weights_fit_the_committed_config(name, tmp_path):
    file = DEMO / f'{name}-weights.pt'
    packed = torch.load(file, weights_only=True)
    config = yaml.safe_load((DEMO / f'yolov9-{name}.yaml').read_text())
    assert {key: packed['yaml'][key] for key in config} == config
    assert file.stat().st_size <= weights.MAX_BYTES
    weights.build(file, tmp_path / 'built.pt')
