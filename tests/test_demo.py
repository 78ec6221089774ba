"""Laws of demo/: the data set is reproducible and its boxes fit, the config holds every block kind, weights survive the trip."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

DEMO = Path(__file__).resolve().parents[1] / 'demo'


def program(name):
    """demo/NAME.py as a module, without putting demo/ on sys.path."""
    spec = importlib.util.spec_from_file_location(f'demo_{name}', DEMO / f'{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_data, weights = program('make_data'), program('weights')


def content(folder):
    """{relative path: bytes} of a data set, its own place in data.yaml left out."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    files['data.yaml'] = files['data.yaml'].replace(str(folder).encode(), b'.')
    return files


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A small data set: 12 train and 6 val images."""
    folder = tmp_path_factory.mktemp('demo') / 'data'
    assert make_data.make_data(folder, train=12, val=6)
    return folder


# --- data ---------------------------------------------------------------------------------------------------------

def test_same_arguments_same_bytes(data, tmp_path):
    make_data.make_data(tmp_path / 'again', train=12, val=6)
    assert content(tmp_path / 'again') == content(data)


def test_other_seed_other_pictures(data, tmp_path):
    make_data.make_data(tmp_path / 'other', train=12, val=6, seed=1)
    ours, other = content(data), content(tmp_path / 'other')
    assert not any(ours[name] == other[name] for name in ours if name.endswith('.jpg'))


def test_more_training_images_change_no_other_image(data, tmp_path):
    make_data.make_data(tmp_path / 'more', train=15, val=6)
    more = content(tmp_path / 'more')
    assert all(more[name] == what for name, what in content(data).items() if name.endswith(('.jpg', '.txt')))


def test_second_run_skips_and_other_arguments_are_refused(data):
    before = {path: path.stat().st_mtime_ns for path in data.rglob('*')}
    assert not make_data.make_data(data, train=12, val=6)
    with pytest.raises(ValueError, match='was made with'):
        make_data.make_data(data, train=13, val=6)
    assert {path: path.stat().st_mtime_ns for path in data.rglob('*')} == before


def test_moved_folder_finds_itself(data, tmp_path):
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


def test_labels_are_valid(data):
    for split, count in (('train', 12), ('val', 6)):
        files = sorted((data / 'labels' / split).iterdir())
        assert len(files) == len(list((data / 'images' / split).iterdir())) == count
        for file in files:
            labels = np.loadtxt(file, ndmin=2)
            assert labels.shape[1] == 5 and len(labels)
            assert set(labels[:, 0]) <= set(range(10))
            low, high = labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2
            assert (labels[:, 3:] > 0).all() and (low >= -1e-6).all() and (high <= 1 + 1e-6).all()


def test_boxes_are_tight(monkeypatch):
    """What a lone digit changes on its canvas spans the box, to a pixel or two of soft edge."""
    monkeypatch.setattr(make_data, 'DIGITS_PER_IMAGE', (1, 1))
    source = make_data.load_digits()
    for i in range(20):
        image, [(_, x1, y1, x2, y2)] = make_data.make_image(np.random.default_rng(i), source.images, source.target, 320)
        rng = np.random.default_rng(i)  # the same stream again, up to the canvas
        rng.integers(len(make_data.ASPECTS))
        canvas = make_data.texture(rng, *image.shape[:2])
        changed = np.abs(image - canvas.clip(0, 255)).max(2) > 30
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        found = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert np.abs(found - [x1, y1, x2, y2]).max() <= 2, (i, found, (x1, y1, x2, y2))


@pytest.mark.parametrize('arguments, word', [
    ([], '--out'), (['--out', 'x', '--train', '0'], '--train'), (['--out', 'x', '--val', '-1'], '--val'),
    (['--out', 'x', '--size', 'big'], '--size'), (['--out', str(DEMO)], 'choose another folder')])
def test_bad_arguments_get_one_line_and_code_2(arguments, word):
    run = subprocess.run([sys.executable, str(DEMO / 'make_data.py'), *arguments], capture_output=True, text=True)
    assert run.returncode == 2 and word in run.stderr and run.stderr.count('\n') == 1 and not run.stdout


# --- model --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def upstream():
    import models.yolo
    return models.yolo


@pytest.fixture
def model(upstream):
    """The demo model with statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = upstream.DetectionModel(str(DEMO / 'yolov9-demo.yaml'))
    model.train()(torch.rand(2, 3, 64, 64))
    model.names, model.nc = {i: str(i) for i in range(10)}, 10
    return model.eval()


def test_main_branch_holds_every_block_kind(model):
    head = model.model[-1]
    assert type(head).__name__ == 'DualDDetect' and head.stride.tolist() == [8, 16, 32]
    reached, todo = set(), list(head.f[head.nl:])
    while todo:
        i = todo.pop()
        if i >= 0 and i not in reached:
            reached.add(i)
            source = model.model[i].f
            todo += [j if j >= 0 else i + j for j in (source if isinstance(source, list) else [source])]
    kinds = {type(model.model[i]).__name__ for i in reached}
    assert kinds == {'Silence', 'Conv', 'RepNCSPELAN4', 'AConv', 'ADown', 'SPPELAN', 'Upsample', 'Concat', 'CBLinear', 'CBFuse'}
    assert set(range(len(model.model) - 1)) - reached == set(range(22, 29))  # the auxiliary branch, as the config says
    assert sum(p.numel() for p in model.parameters()) < 1.5e6


def test_round_trip_is_strict_and_exact(model, upstream, tmp_path):
    torch.save({'model': torch.nn.Module(), 'ema': model}, tmp_path / 'trained.pt')
    weights.pack(tmp_path / 'trained.pt', tmp_path / 'packed.pt')
    packed = torch.load(tmp_path / 'packed.pt', weights_only=True)
    assert set(packed) == {'state_dict', 'yaml', 'names'} and (tmp_path / 'packed.pt').stat().st_size < 4e6

    weights.build(tmp_path / 'packed.pt', tmp_path / 'built.pt', upstream)
    from models.experimental import attempt_load
    built = attempt_load(str(tmp_path / 'built.pt'), device='cpu', fuse=False)
    expected = {key: value.half().float() if value.is_floating_point() else value for key, value in model.state_dict().items()}
    assert built.state_dict().keys() == expected.keys()
    assert all(torch.equal(built.state_dict()[key], value) for key, value in expected.items())
    assert built.names == model.names and built.nc == 10 and built.yaml['nc'] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ['built.pt', 'packed.pt', 'trained.pt']  # no left-overs


@pytest.mark.parametrize('spoil', [lambda state: state.pop(next(iter(state))), lambda state: state.update(extra=torch.zeros(1))])
def test_missing_and_surplus_keys_are_errors(model, upstream, tmp_path, spoil):
    state = weights.state_of(model)
    spoil(state['state_dict'])
    torch.save(state, tmp_path / 'packed.pt')
    with pytest.raises(weights.Mistake, match='(Missing|Unexpected) key'):
        weights.build(tmp_path / 'packed.pt', tmp_path / 'built.pt', upstream)
    assert not (tmp_path / 'built.pt').exists()


def test_not_finite_is_refused(model):
    next(model.parameters()).data[0] = 1e6  # beyond FP16
    with pytest.raises(weights.Mistake, match='not finite'):
        weights.state_of(model)


def test_wrong_files_are_mistakes(upstream, tmp_path):
    (tmp_path / 'text.pt').write_text('hello')
    torch.save({'optimizer': 1}, tmp_path / 'other.pt')
    for name in 'none.pt', 'text.pt', 'other.pt':
        for call in (lambda: weights.pack(tmp_path / name, tmp_path / 'out.pt'),
                     lambda: weights.build(tmp_path / name, tmp_path / 'out.pt', upstream)):
            with pytest.raises(weights.Mistake, match=name):
                call()
    assert not (tmp_path / 'out.pt').exists()


@pytest.mark.skipif(not (DEMO / 'demo-weights.pt').is_file(), reason='demo/demo-weights.pt is not there')
def test_committed_weights_fit_the_committed_config(upstream, tmp_path):
    import yaml
    packed = torch.load(DEMO / 'demo-weights.pt', weights_only=True)
    config = yaml.safe_load((DEMO / 'yolov9-demo.yaml').read_text())
    assert {key: packed['yaml'][key] for key in config} == config
    assert (DEMO / 'demo-weights.pt').stat().st_size <= weights.MAX_BYTES
    weights.build(DEMO / 'demo-weights.pt', tmp_path / 'built.pt', upstream)
