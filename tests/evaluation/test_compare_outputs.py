"""compare_outputs.py: models of different kinds, detectors and classifiers; figures of small cases are worked out by hand."""

import json
import re

import numpy as np
import onnx
import pytest
import torch
from graphs import graph_of, node
from PIL import Image
from zoo import command as run
from zoo import program

from models.deploy.formats.onnx import export_onnx
from utils.qat.config.tasks import load_task
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.data.class_folders import outputs_of
from utils.qat.evaluation.compare import compare

SIZE = 64


def test_top_accuracy_and_ranks_by_hand():
    """Three images, six classes. The second model is right once less at first, and once less among the first five."""
    first = torch.tensor([[9.0, 8, 7, 6, 5, 0], [0, 9, 8, 7, 6, 5], [9, 8, 7, 6, 5, 0]])
    second = torch.tensor([[8.0, 9, 7, 6, 5, 0], [0, 9, 8, 7, 6, 5], [9, 0, 7, 6, 5, 8]])
    labels = torch.tensor([0, 1, 1])
    batches = [(torch.zeros(2, 3, 4, 4), labels[:2], 'ab'), (torch.ones(1, 3, 4, 4), labels[2:], 'c')]

    def answering(scores):
        return lambda images: scores[2:] if images.max() else scores[:2]

    names = dict(enumerate('abcdef'))
    found = compare(
        answering(first), answering(second), batches, torch.device('cpu'), names, top=3, task=load_task('classify')
    )
    assert (
        found.images == 3
        and found.reference == {'top1': 2 / 3, 'top5': 1.0}
        and found.other == {'top1': 1 / 3, 'top5': 2 / 3}
    )
    assert [r['disagreement'] for r in found.ranks] == pytest.approx([1 / 3, 2 / 3, 0])
    assert [r['score'] for r in found.ranks] == pytest.approx([9, 8, 7]) and found.disagreement == pytest.approx(1 / 3)
    assert (
        found.scores['max'] == 8
        and found.scores['mean'] == pytest.approx((1 + 1 + 8 + 8) / 18)
        and found.scores['within'] == pytest.approx(14 / 18)
    )


NAMES = {0: 'tench', 1: 'crane', 2: 'hot_dog', 3: 'crane'}


@pytest.mark.parametrize(
    'folders, outputs',
    [
        (['0', '10', '3'], [0, 10, 3]),  # by index, not in the order of their names
        (['Hot_Dog', 'tench'], [2, 0]),
        ([f'n{i:02}' for i in range(12)], list(range(12))),
        (['n01', 'n07'], None),
        (['crane', 'tench'], None),  # two outputs have that name
        (['12', '3'], None),  # beyond the last
    ],
)
def test_which_output_a_folder_of_images_is(tmp_path, folders, outputs):
    def found(listed=None):
        return outputs_of(folders, 12, NAMES, listed, 'data')

    if outputs:
        assert found() == outputs
    else:
        with pytest.raises(QatError, match='12 outputs; name each folder by the index'):
            found()
    listed = tmp_path / 'synsets.txt'
    listed.write_text('\n'.join(f'{name} a, b' for name in [*folders, *map(str, range(100, 112 - len(folders)))]))
    assert found(listed) == list(range(len(folders)))
    listed.write_text('n01\n')
    with pytest.raises(QatError, match='has 1 lines; expected 12'):
        found(listed)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Two classifiers of mean colours, which differ in the third class; images of red and green in a folder each."""
    folder = tmp_path_factory.mktemp('classes')
    for name, last, side in (('a', 1, SIZE), ('b', 2, SIZE), ('open', 1, 'side')):
        pooled = [node('GlobalAveragePool', 'x', 'p'), node('Flatten', 'p', 'f'), node('Mul', 'f', 'factor', 'y')]
        onnx.save(
            graph_of(
                pooled, shape=('n', 3, side, side), returns=('n', 3), initializers={'factor': np.float32([1, 1, last])}
            ),
            folder / f'{name}.onnx',
        )
    for label, colours in (
        ('0', [(250, 0, 0), (200, 10, 150)]),
        ('1', [(0, 250, 0), (0, 100, 60), (0, 0, 255)]),
    ):
        (folder / 'data' / label).mkdir(parents=True)
        for i, colour in enumerate(colours):
            Image.new('RGB', (90, 70), colour).save(folder / 'data' / label / f'{i}.png')
    (folder / 'some/n01').mkdir(parents=True)
    Image.new('RGB', (90, 70)).save(folder / 'some/n01/0.png')
    return folder


def results_of(folder):
    report = json.loads((folder / 'runs/compare.json').read_text())
    return {**report, **report['comparisons'][0]}


def command(folder, *more):
    return (
        'compare_outputs.py',
        *more,
        '--device',
        'cpu',
        '--workers',
        0,
        '--project',
        folder,
        '--name',
        'runs',
        '--exist-ok',
        '--batch-size',
        2,
    )


def test_classifiers_on_a_folder_of_classes(folder):
    """b doubles blue: what has 60 of it and 100 of green becomes blue, as has 150 and 200 of red."""
    out = run(*command(folder, folder / 'a.onnx', folder / 'b.onnx', '--data', folder / 'data'))
    found = results_of(folder)
    assert found['images'] == 5 and found['reference']['top1'] == 4 / 5 and found['other']['top1'] == 2 / 5
    assert found['reference']['top5'] == found['other']['top5'] == 1 and found['ranks'][0]['disagreement'] == 2 / 5
    assert (
        re.search(r'\| a.onnx +\| 0.8000 \| 1.0000 \|', out)
        and re.search(r'\| b.onnx +\| 0.4000 \| 1.0000 \| .* 60.0% \|', out)
        and 'b.onnx - a.onnx, points | -40.00 | ' in out
        and set(found['files'])
        == {
            str(folder / 'a.onnx'),
            str(folder / 'b.onnx'),
        }
    )


def test_the_benchmark_scores_classifiers_alike(folder):
    short = '--duration', 0.01, '--warmup', 0, '--batch', 1, '--backend', 'onnxruntime', '--formats', 'json'
    given = folder / 'a.onnx', folder / 'b.onnx', '--data', folder / 'data', '--baseline', 'a.onnx', *short
    run('benchmark_trt.py', *given, '--device', 'cpu', '--workers', 0, '--project', folder, '--name', 'benchmark')
    a, b = json.loads((folder / 'benchmark/benchmark.json').read_text())['results']
    assert a['accuracy'].items() >= {'images': 5, 'top1': 4 / 5, 'top5': 1}.items() and b['accuracy']['top1'] == 2 / 5
    assert b['against']['points'].items() >= {'top1': pytest.approx(-40), 'top5': 0}.items() and a['open_batch']


@pytest.mark.parametrize('file, size', [('a', ()), ('open', ('--imgsz', SIZE))])
def test_a_file_of_open_size_takes_the_size_of_the_other_or_of_the_flag(folder, file, size):
    run(*command(folder, folder / f'{file}.onnx', folder / 'open.onnx', '--random', 2, *size))
    assert results_of(folder)['scores']['max'] == 0 and results_of(folder)['settings']['imgsz'] == (
        [SIZE, SIZE] if size else None
    )


def test_one_file_in_several_backends_is_named_by_them(folder):
    models = folder / 'a.onnx', folder / 'b.onnx', folder / 'a.onnx'
    out = run(*command(folder, *models, '--random', 2, '--backend', 'onnxruntime,onnxruntime,onnxruntime'))
    assert '## a.onnx in ONNX Runtime against a.onnx in ONNX Runtime' in out


def test_classifiers_on_noise(folder):
    out = run(*command(folder, folder / 'a.onnx', folder / 'a.onnx', '--random', 5))
    found = results_of(folder)
    assert re.search(r'a.onnx \(2\) +\| +100.00% \| +0 \| +100.0% \| +0.0% \|', out) and 'top-1' not in out
    assert (found['images'], found['scores']['max'], found['disagreement'], found['reference']) == (5, 0, 0, None)
    run(
        *command(
            folder,
            folder / 'a.onnx',
            folder / 'a.onnx',
            '--data',
            folder / 'data',
            '--mean',
            0.5,
            0.5,
            0.5,
            '--images',
            2,
        )
    )
    assert results_of(folder)['images'] == 2 and results_of(folder)['ranks'][0]['score'] < 0.5, 'normalised'


def test_a_checkpoint_and_its_export(small, tmp_path):
    export_onnx(small.quantized_model(), tmp_path / 'int8.onnx', (SIZE, SIZE))
    run(*command(tmp_path, small.quantized, tmp_path / 'int8.onnx', '--data', small.data))
    near = results_of(tmp_path)
    run(*command(tmp_path, small.single, tmp_path / 'int8.onnx', '--data', small.data, '--images', 4, '--top', 3))
    far = results_of(tmp_path)
    assert near['images'] == 12 and far['images'] == 4 and len(far['ranks']) == 3
    assert near['scores']['mean'] < far['scores']['mean'] and near['reference']['ap'] > 0 and far['other']['ap'] > 0
    run(*command(tmp_path, small.single, small.single, '--random', 3, '--imgsz', SIZE))
    noise = results_of(tmp_path)
    assert noise['images'] == 3 and noise['boxes']['max'] == 0 and noise['reference'] is None


@pytest.mark.parametrize(
    'given, says',
    [
        ('{f}/a.onnx {f}/b.onnx', ['--data, --random', 'one of the two']),
        ('{f}/a.onnx {f}/b.onnx --random 0', ['--random 0']),
        ('{f}/a.onnx {f}/none.onnx --random 1', ['B', 'none.onnx', 'no such file']),
        ('{f}/a.onnx {f}/data --random 1', ['B', 'not a file']),
        ('{f}/a.onnx {f}/b.onnx --random 1 --imgsz 32', ['--imgsz 32', '64']),
        ('{f}/a.onnx {f}/b.onnx --data {f}/data/nothing', ['--data', 'one folder of images for each class']),
        ('{f}/a.onnx {f}/b.onnx --data {f}/some', ['--data', '1 folders (n01, ...)', '3 outputs', '--classes']),
        ('{f}/a.onnx {f}/b.onnx --random 1 --std 0 1 1', ['--std']),
        ('{f}/a.onnx {single} --random 1', ['one is a detector', 'classifier']),
    ],
)
def test_bad_input(folder, small, capsys, given, says):
    arguments = [word.format(f=folder, single=small.single) for word in given.split()]
    assert run_command(program('compare_outputs.py').main, [*arguments, '--device', 'cpu']) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and all(text in said for text in says), said


def test_a_classifier_is_not_evaluated_as_a_detector(folder, small, capsys):
    arguments = ['--weights', folder / 'a.onnx', '--data', small.data, '--imgsz', SIZE, '--device', 'cpu']
    assert run_command(program('val_trt.py').main, [*map(str, arguments)]) == 2
    assert 'a classifier' in capsys.readouterr().err
