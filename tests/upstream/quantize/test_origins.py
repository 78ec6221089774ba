"""Laws of checkpoints that another training wrote: upstream's network computes what theirs does, and nothing of them runs."""

import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.faults import Call, pickle_in, sampled, with_pickle
from helpers.fresh import fresh
from helpers.mutations import damage
from helpers.origins import gelan, mit_state, ultralytics_file
from helpers.zoo import command, image, load_any, load_dual_or_float, load_quantized, output, same, state

from models.quantize.checkpoint import CheckpointFile
from models.quantize.trainers import trainer
from utils.qat.core.errors import QatError

pytestmark = pytest.mark.full_tree
CORNERS = 1e-3  # pixels: rounding between two corners, which MultimediaTechLab/YOLO returns, and centre and size


def randomize(model):
    """Give a new model statistics and biases that are far from 0 and 1."""
    for name, tensor in model.state_dict().items():
        if name.endswith(('running_mean', 'bias')):
            tensor.normal_(0, 0.1)
        elif name.endswith(('running_var', 'bn.weight')):
            tensor.uniform_(0.8, 1.2)


def calibrated(file, data):
    """The INT8 checkpoint that `quantize` makes of a file of ten classes, in a folder beside it."""
    run = ('--epochs', 0, '--imgsz', 64, '--calib-images', 4, '--batch-size', 4, '--workers', 0, '--device', 'cpu')
    command('qat.py', 'quantize', '--weights', file, '--data', data, *run, '--project', file.parent)
    return file.parent / 'exp/weights/best.pt'


def lightning_file(path, model):
    """Write a model as MultimediaTechLab/YOLO's trainer does."""
    torch.save({'state_dict': {f'ema.model.{k}': v for k, v in mit_state(model).items()}}, path)


FILES = {  # head of upstream's model → file of another training
    'ultralytics': ({'head': 'Detect'}, ultralytics_file),
    'ultralytics, depthwise': ({'head': 'Detect', 'depthwise': True}, ultralytics_file),
    'mit': ({'head': 'DDetect'}, lambda path, model: torch.save(mit_state(model), path)),
    'mit, lightning': ({'head': 'DDetect'}, lightning_file),
}


@pytest.mark.parametrize('origin', sampled(FILES, 2))
def test_upstreams_programs_run_the_int8_checkpoint(origin, small, tmp_path):
    (head, write), file = FILES[origin], tmp_path / 'best.pt'
    write(file, gelan('t', 10, **head))
    weights = '--weights', calibrated(file, small.data), '--img', 64, '--device', 'cpu', '--project', tmp_path
    on_data = '--data', small.data, '--batch', 4, '--workers', 0
    assert re.search(r'(?m)^ +all +\d+ +\d+ ', fresh('val.py', *weights, *on_data))
    fresh('detect.py', *weights, '--source', small.data.parent / 'images/val', '--nosave')


# ---- Ultralytics


@pytest.mark.parametrize(
    ('size', 'classes'),
    [('t', 80), ('t', 1), ('s', 80), ('m', 3), ('c', 80), pytest.param('e', 20, marks=pytest.mark.slow)],
)
def test_a_model_of_ultralytics_computes_the_same(size, classes, tmp_path):
    """The class branch of t with 80 classes is narrower than upstream's."""
    theirs, loaded = gelan(size, classes, 'Detect'), {*sys.modules}
    _, ours = load_dual_or_float(ultralytics_file(tmp_path / 'best.pt', theirs))
    assert same(output(ours, image()), output(theirs, image())) and same(state(ours), state(theirs))
    assert ours.names == theirs.names and ours.stride.tolist() == [8, 16, 32] and ours.model[-1].nc == classes
    assert 'ultralytics' not in {*sys.modules} - loaded


def test_a_depthwise_class_branch_comes_along(tmp_path):
    theirs = gelan('t', 2, 'Detect', depthwise=True)
    _, ours = load_dual_or_float(ultralytics_file(tmp_path / 'best.pt', theirs))
    assert same(output(ours, image()), output(theirs, image()))
    assert [branch[0][0].conv.groups for branch in ours.model[-1].cv3] == [64, 96, 128]


def test_from_a_checkpoint_of_ultralytics_to_an_onnx_file(small, tmp_path):
    made = calibrated(ultralytics_file(tmp_path / 'best.pt', gelan('t', 10, 'Detect', depthwise=True)), small.data)
    command('export_qat.py', '--weights', made, '--include', 'onnx', '--simplify')
    assert load_any(made.with_suffix('.pt'))[1]['recipe'] and made.with_suffix('.onnx').is_file()
    said = command('reparameterization.py', '--weights', tmp_path / 'best.pt', code=2)
    assert 'has one branch (its head is Detect)' in said


@pytest.mark.parametrize('size', 'tsmce')
def test_the_package_itself(size, tmp_path):
    """Its own models, with random weights and statistics, in a file as its trainer saves it."""
    tasks = pytest.importorskip(
        'ultralytics.nn.tasks', reason='needs the package ultralytics (AGPL-3.0), which is no requirement'
    )
    torch.manual_seed(0)
    theirs = tasks.DetectionModel(f'yolov9{size}.yaml', nc=3, verbose=False)
    randomize(theirs)
    theirs.names = {0: 'a', 1: 'b', 2: 'c'}
    torch.save({'epoch': 0, 'model': None, 'ema': theirs.half().eval(), 'train_args': {}}, tmp_path / 'best.pt')
    _, ours = load_dual_or_float(tmp_path / 'best.pt')
    assert torch.equal(output(ours, image())[0], output(theirs.float(), image())[0]) and ours.names == theirs.names


# ---- MultimediaTechLab/YOLO


@pytest.mark.parametrize('size', 'tsmc')
def test_a_model_of_mit_computes_the_same(size, tmp_path):
    theirs = gelan(size, 5, 'DDetect')
    torch.save(mit_state(theirs), tmp_path / 'v9.pt')
    _, ours = load_dual_or_float(tmp_path / 'v9.pt')
    assert same(output(ours, image()), output(theirs, image())) and same(state(ours), state(theirs))


def test_a_checkpoint_of_lightning_gives_its_average(tmp_path):
    last, average = (mit_state(gelan('t', 5, 'DDetect')) for _ in range(2))
    last = {name: torch.zeros_like(tensor) for name, tensor in last.items()}
    keys = {'model.model.': last, 'ema.model.': average}
    content = {'epoch': 3, 'state_dict': {p + name: t for p, named in keys.items() for name, t in named.items()}}
    for file, wanted in (('both.ckpt', average), ('one.ckpt', last)):
        torch.save(content, tmp_path / file)
        _, ours = load_dual_or_float(tmp_path / file)
        assert same(ours.model[0].conv.weight, wanted['0.conv.weight'])
        content['state_dict'] = {name: t for name, t in content['state_dict'].items() if not name.startswith('ema')}


def test_classes_without_names_get_those_of_the_data(small, tmp_path):
    torch.save(mit_state(gelan('t', 10, 'DDetect')), tmp_path / 'v9-t.pt')
    data = yaml.safe_load(small.data.read_text())
    named = small.data.with_name('named.yaml')
    named.write_text(yaml.safe_dump({**data, 'names': [f'called {i}' for i in range(10)]}))
    assert load_quantized(calibrated(tmp_path / 'v9-t.pt', named))[0].names == {i: f'called {i}' for i in range(10)}


@pytest.mark.parametrize('size', 'tsmc')
def test_the_repository_itself(size, tmp_path):
    folder = os.environ.get('MIT_YOLO_DIR')
    if not folder:
        pytest.skip('needs a clone of MultimediaTechLab/YOLO and its libraries: set MIT_YOLO_DIR')
    sys.path.append(folder)
    from omegaconf import OmegaConf
    from yolo.model.yolo import create_model
    from yolo.utils.bounding_box_utils import create_converter

    settings = OmegaConf.load(Path(folder, 'yolo', 'config', 'model', f'v9-{size}.yaml'))
    torch.manual_seed(0)
    theirs = create_model(settings, weight_path=False, class_num=5).eval()
    randomize(theirs)
    torch.save(theirs.model.state_dict(), tmp_path / 'v9.pt')
    _, ours = load_dual_or_float(tmp_path / 'v9.pt')
    with torch.no_grad():
        scores, _, corners = create_converter(settings.name, theirs, settings.anchor, [64, 64], 'cpu')(
            theirs(image())['Main']
        )[:3]
    found = output(ours, image())[0].transpose(1, 2)
    centre, sides = found[..., :2], found[..., 2:4]
    assert (found[..., 4:] - scores.sigmoid()).abs().max() < 1e-6  # the last bits: sums of other layouts
    assert (torch.cat((centre - sides / 2, centre + sides / 2), 2) - corners).abs().max() < CORNERS


# ---- what is refused


def refused(file):
    """The one line that a file is answered with."""
    with pytest.raises(QatError) as error:
        CheckpointFile(file).load_float()
    assert '\n' not in str(error.value) and str(error.value).startswith(f'--weights {file}: ')
    return str(error.value)


def test_other_models_are_named(tmp_path, monkeypatch):
    theirs, file = gelan('t', 3, 'Detect'), tmp_path / 'best.pt'
    assert 'transposed convolution' in refused(ultralytics_file(file, theirs, 'SegmentationModel'))
    assert 'a PoseModel; only its YOLOv9 detectors' in refused(ultralytics_file(file, theirs, 'PoseModel'))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, 'NETWORKS', 'missing-?.yaml')
        assert 'this YOLOv9 tree has no models/detect/missing-?.yaml; use a full clone' in refused(
            ultralytics_file(file, theirs)
        )
    with monkeypatch.context() as patch:
        (tmp_path / 'detect').mkdir()
        (tmp_path / 'detect/gelan-t.yaml').write_text('nc: 80\nbackbone: []\n')
        patch.setattr(trainer, 'models', SimpleNamespace(__path__=[tmp_path]))
        with pytest.raises(QatError, match=r'^upstream .*detect/gelan-t\.yaml: needs backbone: and head:'):
            CheckpointFile(ultralytics_file(file, theirs)).load_float()
    theirs.model[0].conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    assert 'Ultralytics, and its network, yolov9x.yaml, is another than YOLOv9 c, e, m, s, t' in refused(
        ultralytics_file(file, theirs)
    )
    torch.save({**mit_state(gelan('t', 3, 'DDetect')), '0.conv.weight': torch.zeros(8, 3, 3, 3)}, file)
    assert 'MultimediaTechLab/YOLO, and its network is another than YOLOv9' in refused(file)


def test_nothing_in_a_file_runs(tmp_path):
    theirs, file = gelan('t', 1, 'Detect'), tmp_path / 'best.pt'
    for place in ('_buffers', '_modules', 'names', 'yaml'):
        code = Call(open, str(tmp_path / 'ran'), 'w')
        ultralytics_file(file, theirs, **{place: {'more': code} if place.startswith('_') else code})
        assert 'not loaded' in refused(file) and not (tmp_path / 'ran').exists()


def test_damaged_files_get_one_line(tmp_path):
    whole = ultralytics_file(tmp_path / 'best.pt', gelan('t', 1, 'Detect')).read_bytes()
    file, read, chance = tmp_path / 'damaged.pt', 0, random.Random(0)
    for _, content in (damage(pickle_in(whole), chance) for _ in range(10)):
        file.write_bytes(with_pickle(whole, content))
        try:
            CheckpointFile(file).load_float()
            read += 1
        except QatError as e:
            assert str(e).startswith(f'--weights {file}: ') and '\n' not in str(e)
    assert read < 8
