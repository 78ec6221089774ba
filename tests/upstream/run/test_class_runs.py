"""Classifiers end to end: each command, its files, equal figures from all, and wrong input."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import TREE
from helpers import classifiers
from helpers.fresh import fresh
from helpers.zoo import (
    assert_same_ap,
    assert_verdicts,
    command,
    interrupt,
    load_float,
    load_quantized,
    same,
    settings,
)

from models.quantize import checkpoint
from models.quantize.calibration.divergence import ClassScores
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.classes import distance
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import open_file

SIZE = classifiers.SIZE
CPU = torch.device('cpu')
OF_DETECTORS = re.compile(
    r'.*\b(?:detections?|m?AP|AP50|box(?:es)?|masks?|letterbox(?:ed)?|rectangles?|squares?|NMS)\b.*', re.I
)


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """A folder with data/, a float checkpoint resnet18.pt that has learnt it, and run/, a finished run of quantize."""
    folder = tmp_path_factory.mktemp('classes')
    data = classifiers.write_images(folder / 'data', train=8, val=5)
    classifiers.save(classifiers.learnt(classifiers.build('resnet18'), data), folder / 'resnet18.pt')
    quantize(folder, 'run')
    return folder


ON_CPU = ('--workers', 0, '--device', 'cpu')


def line_of(folder, name, *more):
    given = '--weights', folder / 'resnet18.pt', '--data', folder / 'data', '--project', folder, '--name', name
    quick = '--epochs 2 --iters 2 --batch-size 8 --task-loss 0.1 --calib-images 24 --calib-method mse'.split()
    return 'qat.py', 'quantize', *given, '--imgsz', SIZE, *ON_CPU, *quick, *more


def quantize(*arguments):
    return command(*line_of(*arguments))


def read(file):
    return json.loads(file.read_text())


def speaks_of_classes(folder, *texts):
    """No word of detectors in what a command printed, its log and its reports."""
    files = [*folder.glob('*.md'), *folder.glob('log.txt')]
    assert files
    for text in (*texts, *(file.read_text() for file in files)):
        assert not OF_DETECTORS.findall(text.replace('--square', ''))


def score(model, folder):
    # the batches of the commands here: other shapes may take other kernels, whose sums end otherwise
    loader = Loaders(model.task.load_data(folder / 'data', model), settings(imgsz=SIZE, batch_size=8), 32).scored()
    return evaluate(model, loader, model.names, CPU, resample=True)


@pytest.mark.full_tree
def test_figures_are_those_of_upstream(job):
    found = score(TorchModel(load_float(job / 'resnet18.pt')), job)
    assert (found.top1, found.top5) == pytest.approx(upstream(job), abs=1e-3) and 0.5 < found.top1 < found.top5


def upstream(job):
    """Top-1 and top-5 by upstream's classify/val.py, in a process of its own: its imports replace ours."""
    code = (
        'import sys, utils.qat; sys.path.insert(0, "classify"); import val\n'
        f'print("FOUND", *val.run({str(job / "data")!r}, {str(job / "resnet18.pt")!r}, batch_size=8, imgsz={SIZE}, device="cpu", '
        f'workers=0, verbose=False, project={str(job)!r}, name="upstream")[:2])'
    )
    line = next(line for line in fresh('-c', code).splitlines() if line.startswith('FOUND'))
    return tuple(map(float, line.split()[1:]))


def test_a_run_reports_the_figures_of_its_files(job):
    report = read(job / 'run' / 'report.json')
    assert report['settings']['imgsz'] == [SIZE, SIZE] and len(report['epochs']) == 2
    assert report['ptq']['file'].startswith('weights/ptq_top1_') and report['best']['top1'] >= report['ptq']['top1']
    models = (
        TorchModel(*load_quantized(job / 'run' / report['ptq']['file'])),
        TorchModel(load_float(job / 'resnet18.pt')),
    )
    found, floating = (score(model, job) for model in models)
    assert found.to_json() == {k: v for k, v in report['ptq'].items() if k in found.to_json()}
    apart = distance(found.scores, floating.scores)
    assert {key: report['ptq'][key] for key in apart} == pytest.approx(apart)
    assert found.top1 > 0.5, 'by chance half of 35 images are right once in ten million'
    assert found.mean_class == pytest.approx(np.mean([row['top1'] for row in found.per_class]))
    assert {p.name for p in (job / 'run').glob('*.png')} == {'top1.png', 'classes.png'}
    speaks_of_classes(job / 'run')


def test_an_interrupted_run_ends_as_one_that_was_not(job):
    interrupt('epoch 2/2', 0, *line_of(job, 'again'))
    command('qat.py', 'quantize', '--resume', job / 'again')
    first, second = (read(job / name / 'report.json') for name in ('run', 'again'))
    assert first['epochs'] == second['epochs'] and first['best'] == second['best']
    models = (load_quantized(job / name / first['best']['file'])[0].state_dict() for name in ('run', 'again'))
    assert same(*models)


@pytest.fixture(scope='module')
def best(job):
    """The checkpoint that the run delivers."""
    return job / 'run' / read(job / 'run' / 'report.json')['best']['file']


def test_what_openvino_loses_is_said_of_a_classifier(best):
    pytest.importorskip('openvino')
    said = command('export_qat.py', '--weights', best, '--include', 'openvino', '--imgsz', SIZE)
    assert 'INT8: 20 of 20 convolutions' in said, 'the outputs too'
    [loses] = re.findall(r'(?m)^quantized for TensorRT: (.*) \(--target openvino\)$', said)
    assert 'ReLU' in loses and 'head' not in loses


def test_the_exported_file_scores_as_the_checkpoint(job, best):
    file = best.with_suffix('.onnx')
    exported = '--weights', best, '--imgsz', SIZE, '--include', 'onnx', 'onnx_end2end', '--verify', job / 'data'
    said = command('export_qat.py', *exported, code=(0, 1))
    assert said.count('the best class the same in at least 95%') == 2, 'with its ends inside too'
    assert_verdicts(said, *(read(best.with_name(f'{best.stem}{end}.verify.json')) for end in ('', '-end2end')))
    models = TorchModel(*load_quantized(best)), open_file(file), TorchModel(load_float(job / 'resnet18.pt'))
    ours, theirs, floating = (score(model, job) for model in models)
    assert_same_ap(ours, theirs)
    common = '--data', job / 'data', *ON_CPU, '--project', job
    against = '--baseline', job / 'resnet18.pt'
    scored = command('qat.py', 'eval', '--weights', file, *against, *common, '--name', 'eval')
    metrics = read(job / 'eval' / 'metrics.json')
    assert metrics['top1'] == theirs.top1 and '| agreement |' in scored
    assert metrics['agreement'] == distance(theirs.scores, floating.scores)['agreement']
    several = command('qat.py', 'eval', '--weights', job / 'resnet18.pt', best, file, *common, '--name', 'several')
    table = re.findall(r'(?m)^\| (?:model|resnet18|best|qat_best).*$', several)[-6:]
    assert table[0].split()[1:8:2] == ['model', 'top-1', 'top-5', 'mean'] and sum('±' in row for row in table) == 2
    assert {*table} <= {*(job / 'several/report.md').read_text().splitlines()}
    speaks_of_classes(job / 'several', several)
    compared = command('compare_outputs.py', job / 'resnet18.pt', best, file, *common, '--name', 'compared')
    assert 'the best class is the same in' in compared and 'top-1' in compared
    speaks_of_classes(job / 'eval', scored)
    speaks_of_classes(job / 'compared', compared)


def test_the_benchmark_shows_images_of_the_classifiers_size(job):
    """A quantized checkpoint has its size, a float one takes that of the other files; alone it has 224 pixels."""
    report = read(job / 'run' / 'report.json')
    net, int8 = job / 'resnet18.pt', job / 'run' / report['ptq']['file']

    def measured(name, *files):
        short = '--batch 1 --duration 0.05 --warmup 0'.split()
        said = command('benchmark_trt.py', *files, *short, *ON_CPU, '--project', job, '--name', name)
        return read(job / name / 'benchmark.json')['results'], said

    results, said = measured('both', net, int8, '--data', job / 'data')
    assert [r['imgsz'] for r in results] == [[SIZE, SIZE]] * 2
    assert [r['accuracy']['top1'] for r in results] == [report[key]['top1'] for key in ('origin', 'ptq')]
    speaks_of_classes(job / 'both', said)
    (alone,), _ = measured('alone', net)
    assert alone['imgsz'] == [224, 224]
    command('export_qat.py', '--weights', shutil.copy(int8, job / 'given.pt'))
    results, _ = measured('exported', net, job / 'given.onnx', '--backend', 'pytorch,onnxruntime')
    assert {r['backend'] for r in results} == {'PyTorch', 'ONNX Runtime'} and [SIZE, SIZE] == results[0]['imgsz']


def test_sensitive_measures_the_divergence_of_the_scores(job):
    given = '--weights', job / 'resnet18.pt', '--data', job / 'data', '--imgsz', SIZE, '--project', job, '--name', 's'
    said = command('qat.py', 'sensitive', *given, *ON_CPU, '--num-image', 20, '--calib-images', 20)
    file = job / 's' / 'summary-sensitive-analysis.json'
    summary = read(file)
    assert {'conv1', 'layer1.0', 'avgpool', 'fc'} <= {unit['unit'] for unit in summary['units']}
    speaks_of_classes(job / 's', said)
    assert 'top1' in summary['int8'] and summary['int8']['divergence'] > 0
    said = quantize(job, 'kept', '--sensitive', file, '--max-drop', 50, '--epochs', 0)
    assert 'points lost beyond chance' in said


def test_the_square_of_a_projection_is_twice_the_divergence():
    """It holds for the mean of many probes and for a small change, as for detectors."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    change = 0.02 * torch.randn(3, 6, generator=generator, dtype=torch.float64)
    moved, _ = ClassScores(logits + change).divergence_sums(ClassScores(logits))
    squares = []
    for _ in range(4000):
        _, [vector], weight = ClassScores(logits).probe(0, lambda x: torch.rand(x, generator=generator).double())
        squares.append((vector * change).sum(1).square() / 2)
    assert weight == 3
    torch.testing.assert_close(torch.stack(squares).mean(0), moved, rtol=0.1, atol=0)


# ---- wrong input ----------------------------------------------------------------------------------------------------------


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
    given = '--weights', job / 'resnet18.pt', '--data', data, '--project', tmp_path
    said = command('qat.py', 'eval', *given, '--device', 'cpu', code=2)
    assert says.format(data) in said and 'Traceback' not in said and not (tmp_path / 'exp').exists()


def test_the_command_of_classifiers_refuses_a_detector(small):
    said = fresh('classify/qat_cls.py', 'quantize', '--weights', small.single, '--data', small.data, code=2)
    assert 'a detector' in said and 'this command is for a classifier' in said


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
    with pytest.raises(QatError, match='not begin as torch.save writes it since'):
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
