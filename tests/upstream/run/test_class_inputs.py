"""Data and weights of classifiers as people bring them: folders that do not fit, weights of torchvision by file and by name."""

import os
import shutil

import pytest
import torch
from conftest import TREE
from helpers import classifiers
from helpers.zoo import command, load_float, same

from models.quantize import checkpoint
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256

SIZE = classifiers.SIZE
ON_CPU = ('--workers', 0, '--device', 'cpu')


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """A folder with data/ and a float checkpoint single.pt. Do not write to it."""
    folder = tmp_path_factory.mktemp('classes')
    classifiers.write_images(folder / 'data', train=3, val=2)
    classifiers.save(classifiers.build('resnet18'), folder / 'single.pt')
    return folder


def without(*names):
    """A change: these folders are removed."""
    return lambda data: [shutil.rmtree(data / name) for name in names]


def with_bytes(data):
    """A change: the name of each class folder begins with a byte that is not UTF-8."""
    for folder in [*data.glob('*/class*')]:
        folder.rename(folder.with_name(os.fsdecode(b'\xff' + folder.name.encode())))


OF_CLASS_6 = 'train/class 6', 'val/class 6'
SPOILT = {  # what the line says → what was done to the data
    'no folder val or test in it': without('val'),
    'no folder train in it': without('train'),
    'class 3 is a class in train/ and not in val/': without('val/class 3'),
    'class 3 is a class in val/ and not in train/': without('train/class 3'),
    '--data {}/train: needs a folder of images for each class': without(*(f'train/class {i}' for i in range(7))),
    'class 2: no images in it': lambda data: [file.unlink() for file in (data / 'val/class 2').iterdir()],
    '6 class folders, but the model': without(*OF_CLASS_6),
    'cat is no class of the model, which has class 6': (
        lambda data: [(data / name).rename((data / name).with_name('cat')) for name in OF_CLASS_6]
    ),
    'must be one line of printable characters': with_bytes,
    '0.png: cannot be read; mend or remove it': lambda data: (data / 'val/class 1/0.png').write_bytes(b''),
    'x.png: a pipe or a device, and no file; remove it': lambda data: os.mkfifo(data / 'val/class 1/x.png'),
}


@pytest.mark.parametrize('says', SPOILT)
def test_a_folder_that_does_not_fit_is_one_line(job, tmp_path, says):
    data = tmp_path / 'data'
    shutil.copytree(job / 'data', data)
    SPOILT[says](data)
    given = '--weights', job / 'single.pt', '--data', data, '--project', tmp_path
    said = command('qat.py', 'eval', *given, '--device', 'cpu', code=2)
    assert says.format(data) in said and 'Traceback' not in said and not (tmp_path / 'exp').exists()


@pytest.mark.skipif(torch.__version__ < '2.6', reason='refused there')
def test_weights_in_the_older_format(tmp_path):
    model, files = classifiers.build('resnet18'), (tmp_path / 'resnet18-1.pth', tmp_path / 'resnet18-2.pth')
    torch.save(model.state_dict(), files[0])
    torch.save(model.state_dict(), files[1], _use_new_zipfile_serialization=False)
    assert same(*(load_float(file).state_dict() for file in files))
    torch.save([1], files[1], _use_new_zipfile_serialization=False)
    with pytest.raises(QatError, match='other things than the tensors of resnet18'):
        load_float(files[1])
    torch.save({'model': model}, files[1], _use_new_zipfile_serialization=False)  # a pickled network
    with pytest.raises(QatError, match='it is of PyTorch before 1.6; if you trust it'):
        load_float(files[1])


def test_a_network_by_its_weights(job, tmp_path):
    """Every command takes a file of weights whose name begins with a network's, and writes no checkpoint of it."""
    file = tmp_path / 'resnet18-f37072fd.pth'
    model = classifiers.build('resnet18')
    torch.save(model.state_dict(), file)
    found = load_float(file)
    assert found.names == {i: str(i) for i in range(7)} and checkpoint.CheckpointFile(file).sha256 == sha256(file)
    assert torch.allclose(found(classifiers.images()), model(classifiers.images()), atol=1e-4)
    command('export_qat.py', '--weights', file, '--imgsz', SIZE)
    given = '--weights', file, '--data', job / 'data', '--imgsz', SIZE, '--project', tmp_path
    command('qat.py', 'quantize', *given, *ON_CPU, *'--epochs 0 --calib-images 8 --calib-method mse'.split())
    [made] = (tmp_path / 'exp/weights').glob('ptq_*')
    assert made.name.startswith('ptq_top1') and made.name.endswith('_resnet18-f37072fd.pt')
    assert {f.name for f in tmp_path.iterdir()} == {file.name, file.with_suffix('.onnx').name, 'exp'}
    other = file.rename(file.with_name('mobilenet_v2-1.pth'))
    assert 'not of mobilenet_v2' in command('export_qat.py', '--weights', other, code=2)
    other = other.rename(file.with_name('densenet121.pth'))
    assert 'densenet121 is no network that' in command('export_qat.py', '--weights', other, code=2)


def test_a_network_by_its_name_is_read_where_torchvision_keeps_it(job, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    kept = tmp_path / 'hub/checkpoints/resnet18-f37072fd.pth'
    kept.parent.mkdir(parents=True)
    torch.save(classifiers.build('resnet18').state_dict(), kept)
    scored = '--data', job / 'data', '--imgsz', SIZE, *ON_CPU, '--project', tmp_path
    assert 'top-1' in command('qat.py', 'eval', '--weights', 'resnet18', *scored)
    assert [f.name for f in kept.parent.iterdir()] == [kept.name] and not (TREE / 'resnet18.pt').exists()
    for name in ('https_proxy', 'HTTPS_PROXY'):
        monkeypatch.setenv(name, 'http://127.0.0.1:9')  # no internet
    for dry in ((), ('--dry-run',)):
        said = command('qat.py', 'quantize', '--weights', 'resnet34', *dry, code=2)
        assert 'cannot be fetched' in said and 'resnet34-b627a593.pth elsewhere' in said
    assert [f.name for f in kept.parent.iterdir()] == [kept.name]
