"""compare_outputs.py: models of different kinds, detectors and classifiers; figures of small cases are worked out by hand."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from helpers.graphs import graph_of
from helpers.labelled import words
from helpers.zoo import command
from PIL import Image

from utils.qat.config.export import INT8_LIMITS
from utils.qat.config.tasks import load_task
from utils.qat.core.errors import QatError
from utils.qat.data.other_classifiers import outputs_of
from utils.qat.evaluation.compare import compare_models
from utils.qat.evaluation.compare_classes import beyond_limits

SIZE = 64


def top(metrics):
    return metrics['top1'], metrics['top5']


def test_top_accuracy_and_ranks_by_hand():
    """Three images, six classes. The second model is right once less at first, and once less among the first five."""
    first = torch.tensor([[9.0, 8, 7, 6, 5, 0], [0, 9, 8, 7, 6, 5], [9, 8, 7, 6, 5, 0]])
    second = torch.tensor([[8.0, 9, 7, 6, 5, 0], [0, 9, 8, 7, 6, 5], [9, 0, 7, 6, 5, 8]])
    labels = torch.tensor([0, 1, 1])
    batches = [(torch.zeros(2, 3, 4, 4), labels[:2], 'ab'), (torch.ones(1, 3, 4, 4), labels[2:], 'c')]

    def answering(scores):
        return lambda images: scores[2:] if images.max() else scores[:2]

    names, task = dict(enumerate('abcdef')), load_task('classify')
    models = answering(first), [answering(second)]
    [found] = compare_models(*models, batches, torch.device('cpu'), names, top=3, task=task)
    assert found['images'] == 3
    assert top(found['reference']) == (2 / 3, 1) and top(found['other']) == (1 / 3, 2 / 3)
    assert [r['disagreement'] for r in found['ranks']] == pytest.approx([1 / 3, 2 / 3, 0])
    assert [r['score'] for r in found['ranks']] == pytest.approx([9, 8, 7])
    assert [r['rank'] for r in found['ranks']] == [1, 2, 3]
    assert found['disagreement'] == pytest.approx(1 / 3)
    assert found['scores'] == pytest.approx({'max': 8, 'mean': (1 + 1 + 8 + 8) / 18, 'within': 14 / 18})
    for ap, matched, beyond in ((0.34, 0.6, []), (0.3, 0.6, ['top-1 differs']), (0.34, 0.7, ['the best class'])):
        said = beyond_limits(found, replace(INT8_LIMITS, ap=ap, matched=matched))
        assert len(said) == len(beyond) and all(text in line for text, line in zip(beyond, said)), said


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
        pooled = 'p = GlobalAveragePool(x) f = Flatten(p) y = Mul(f, factor)'
        factor, shape = {'factor': np.float32([1, 1, last])}, ('n', 3, side, side)
        onnx.save(graph_of(pooled, shape=shape, returns=('n', 3), initializers=factor), folder / f'{name}.onnx')
    colours = {
        'data/0': [(250, 0, 0), (200, 10, 150)],
        'data/1': [(0, 250, 0), (0, 100, 60), (0, 0, 255)],
        'some/n01': [(0, 0, 0)],
    }
    for label, images in colours.items():
        (folder / label).mkdir(parents=True)
        for i, colour in enumerate(images):
            Image.new('RGB', (90, 70), colour).save(folder / label / f'{i}.png')
    return folder


def compared(folder, line, **more):
    """Output of compare_outputs.py with these words, where {f} is `folder`, and its report with the first comparison in it."""
    line += ' --device cpu --workers 0 --project {f} --name runs --exist-ok --batch-size 2'
    said = command('compare_outputs.py', *words(line, f=folder, **more))
    report = json.loads((folder / 'runs/compare.json').read_text())
    return said, {**report, **report['comparisons'][0]}


def test_classifiers_on_a_folder_of_classes(folder):
    """b doubles blue: what has 60 of it and 100 of green becomes blue, as has 150 and 200 of red."""
    out, found = compared(folder, '{f}/a.onnx {f}/b.onnx --data {f}/data')
    assert found['images'] == 5 and found['ranks'][0]['disagreement'] == 2 / 5
    assert top(found['reference']) == (4 / 5, 1) and top(found['other']) == (2 / 5, 1)
    assert found['against_reference']['difference'] == pytest.approx(-2 / 5)
    assert re.search(r'\| a.onnx +\| 0.8000 \| 1.0000 \|', out)
    assert re.search(r'\| b.onnx +\| 0.4000 \| 1.0000 \| .* 60.0% \|', out)
    assert 'b.onnx - a.onnx, points | -40.00 | ' in out
    assert set(found['files']) == {str(folder / 'a.onnx'), str(folder / 'b.onnx')}
    assert '| rank' not in out and out.index('- b.onnx against a.onnx: ') < out.index('| model')


def test_ranks_of_several_models_stand_side_by_side_in_the_report(folder):
    compared(folder, '{f}/a.onnx {f}/b.onnx {f}/open.onnx --data {f}/data')
    report = (folder / 'runs/report.md').read_text()
    assert re.search(r'\| rank \| +a.onnx \| +b.onnx \| +open.onnx \|', report) and 'numpy.isclose' in report


def test_the_benchmark_scores_classifiers_alike(folder):
    line = (
        '{f}/a.onnx {f}/b.onnx --data {f}/data --baseline a.onnx --duration 0.01 --warmup 0 --batch 1 '
        '--backend onnxruntime --device cpu --workers 0 --project {f} --name benchmark'
    )
    command('benchmark_trt.py', *words(line, f=folder))
    a, b = json.loads((folder / 'benchmark/benchmark.json').read_text())['results']
    assert a['accuracy'].items() >= {'images': 5, 'top1': 4 / 5, 'top5': 1}.items() and b['accuracy']['top1'] == 2 / 5
    assert b['against']['points'].items() >= {'top1': pytest.approx(-40), 'top5': 0}.items() and a['open_batch']


@pytest.mark.parametrize('file, flag, size', [('a', '', None), ('open', f'--imgsz {SIZE}', [SIZE, SIZE])])
def test_a_file_of_open_size_takes_the_size_of_the_other_or_of_the_flag(folder, file, flag, size):
    _, found = compared(folder, '{f}/{file}.onnx {f}/open.onnx --random 2 ' + flag, file=file)
    assert found['scores']['max'] == 0 and found['settings']['imgsz'] == size


def test_one_file_in_several_backends_is_named_by_them(folder):
    backends = 'onnxruntime,onnxruntime,onnxruntime'
    out, _ = compared(folder, '{f}/a.onnx {f}/b.onnx {f}/a.onnx --random 2 --backend {b}', b=backends)
    assert '- a.onnx in ONNX Runtime against a.onnx in ONNX Runtime: ' in out


def test_classifiers_on_noise(folder):
    out, found = compared(folder, '{f}/a.onnx {f}/a.onnx --random 5')
    assert re.search(r'a.onnx \(2\) +\| +100.00% \| +0 \| +100.0% \| +0.0% \|', out) and 'top-1' not in out
    assert (found['images'], found['scores']['max'], found['disagreement'], found['reference']) == (5, 0, 0, None)


def test_images_are_normalised_as_the_flags_say(folder):
    _, found = compared(folder, '{f}/a.onnx {f}/a.onnx --data {f}/data --mean 0.5 0.5 0.5 --images 2')
    assert found['images'] == 2 and found['ranks'][0]['score'] < 0.5


def test_a_checkpoint_and_its_export(small, exports, tmp_path):
    _, near = compared(tmp_path, '{s.quantized} {e}/int8.onnx --data {s.data}', s=small, e=exports)
    _, far = compared(tmp_path, '{s.single} {e}/int8.onnx --data {s.data} --images 4 --top 3', s=small, e=exports)
    assert near['images'] == 12 and far['images'] == 4 and len(far['ranks']) == 3
    assert near['scores']['mean'] < far['scores']['mean'] and near['reference']['ap'] > 0 and far['other']['ap'] > 0
    _, noise = compared(tmp_path, '{s.single} {s.single} --random 3 --imgsz {size}', s=small, size=SIZE)
    assert noise['images'] == 3 and noise['boxes']['max'] == 0 and noise['reference'] is None
