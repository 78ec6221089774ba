"""Laws of the tables of a benchmark: changes against a baseline, accuracy beside speed, several image sizes."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.labelled import CPU, val_images
from helpers.zoo import assert_same_ap
from helpers.zoo import command as run

from models.deploy.formats.onnx import export_onnx
from test_benchmark import opened
from utils.qat.benchmark.baseline import baseline_of, int8_gains, speed_conclusions
from utils.qat.benchmark.tables import precision_table
from utils.qat.config.deploy import BenchmarkConfig, image_sizes
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.vendors.load import open_file
from utils.qat.vendors.vendor import SIMULATED

SIZE = 64


@pytest.fixture(scope='module')
def files(small, exports, tmp_path_factory):
    """The exports but int8.pt, and fixed.onnx, INT8 of batch 2."""
    folder = tmp_path_factory.mktemp('models') / 'exports'
    shutil.copytree(exports, folder, ignore=shutil.ignore_patterns('int8.pt'))
    export_onnx(small.quantized_model(), folder / 'fixed.onnx', (SIZE, SIZE), batch=2)
    return folder


def measured(files, names, *more):
    given = [files / name for name in names]
    short = '--duration', 0.05, '--warmup', 0, '--device', 'cpu', '--workers', 0
    run('benchmark_trt.py', *given, *short, '--project', files, '--name', 'runs', '--exist-ok', *more)
    return json.loads((files / 'runs/benchmark.json').read_text())['results'], files / 'runs'


def test_changes_are_those_of_the_figures_in_the_json(files):
    results, _ = measured(
        files, ['float.onnx', 'int8.onnx', 'fixed.onnx'], '--backend', 'onnxruntime', '--batch', '1,2'
    )
    found = {(r['given'].rsplit('/')[-1], r['batch'], r['open_batch']): r for r in results}
    assert list(found) == [
        ('float.onnx', 1, True),
        ('float.onnx', 2, True),
        ('int8.onnx', 1, True),
        ('int8.onnx', 2, True),
        ('fixed.onnx', 2, False),
    ]
    for (_, batch, _), r in found.items():
        base, against = found['float.onnx', batch, True], r['against']
        latency, rate = base['latency']['median'] / r['latency']['median'], r['images_per_s'] / base['images_per_s']
        assert against['model'] == base['model'] and against['points'] is None
        assert (against['latency_speed_up'], against['images_per_s_speed_up']) == pytest.approx((latency, rate))
        assert against['latency_percent'] == pytest.approx(100 / latency - 100)
        assert against['images_per_s_percent'] == pytest.approx(100 * rate - 100)


def test_accuracy_of_each_row_is_that_of_eval(files, small):
    data, backends = ('--data', small.data), ('--backend', 'onnxruntime,pytorch', '--baseline', 'pytorch')
    results, folder = measured(files, ['float.onnx', 'int8.onnx'], *data, *backends, '--batch', '1')
    assert [r['backend'] for r in results] == ['ONNX Runtime', 'PyTorch', 'ONNX Runtime']
    exact, base, int8 = results
    scored = '--imgsz', SIZE, '--device', 'cpu', '--workers', 0, '--project', files, '--name', 'eval', '--exist-ok'
    run('val_trt.py', '--weights', exact['model'], *data, *scored)
    wanted = json.loads((files / 'eval/metrics.json').read_text())
    for key in ('ap', 'ap50', 'precision', 'recall', 'images'):
        assert exact['accuracy'][key] == pytest.approx(wanted[key], rel=1e-4), key
    # fused kernels round other values
    fused, simulated = opened(files / 'int8.onnx', 'onnxruntime').predicting(), open_file(files / 'int8.onnx')
    images, names = val_images(small.data, SIZE, square=True, batch_size=10), load_data(small.data).names
    first, second = (evaluate(model, images, names, CPU, resample=True) for model in (simulated, fused))
    assert_same_ap(first, second)
    assert int8['accuracy'].items() <= second.to_json().items()
    assert base['accuracy']['ap'] == pytest.approx(exact['accuracy']['ap'], abs=1e-3) and base['accuracy']['ap'] > 0
    for r in results:
        assert r['against']['backend'] == 'PyTorch'
        assert r['against']['points']['ap'] == pytest.approx(100 * (r['accuracy']['ap'] - base['accuracy']['ap']))
    text = (folder / 'benchmark.md').read_text()
    assert f'{int8["accuracy"]["ap"]:.4f}' in text and '| device ' in text and 'CPU cores' in text


def test_several_sizes(files):
    folder = files / 'sizes'
    more = '--imgsz', '64,96x64', '--batch', 1, '--duration', 0.05, '--warmup', 0
    said = run('benchmark_trt.py', files / 'float.pt', *more, '--device', 'cpu', '--project', files, '--name', 'sizes')
    assert re.search(r'\| +latency \(ms\) \|', said) and 'speed-up' not in said, 'a table of changes needs another row'
    results = json.loads((folder / 'benchmark.json').read_text())
    assert [r['imgsz'] for r in results['results']] == [[64, 64], [96, 64]]
    assert [r['against']['latency_speed_up'] for r in results['results']] == [1, 1], 'each size has its own baseline'
    rows = list(csv.DictReader((folder / 'benchmark.csv').open()))
    assert [(row['height'], row['width'], row['batch axis']) for row in rows] == [
        ('64', '64', 'open'),
        ('96', '64', 'open'),
    ]
    assert [float(row['latency median (ms)']) for row in rows] == [r['latency']['median'] for r in results['results']]
    assert {'cpu', 'cores', 'threads', 'instructions', 'versions'} <= set(results['machine'])


@pytest.mark.parametrize(
    'given, sizes',
    [
        (['640'], ((640, 640),)),
        (['480', '640'], ((480, 640),)),
        (['320,480x640,320'], ((320, 320), (480, 640))),
        (['640x640'], ((640, 640),)),
    ],
)
def test_image_sizes(given, sizes):
    assert BenchmarkConfig(['m.pt'], imgsz=given).sizes == sizes


@pytest.mark.parametrize('given', [['1', '2', '3'], ['640,0'], [','], ['640', 'm.onnx'], ['1x2x3']])
def test_no_image_sizes(given):
    with pytest.raises(QatError, match='--imgsz .*: must be'):
        image_sizes(given)


def row(given, backend='ONNX Runtime', precision='fp32', batch=1, size=(64, 64)):
    return {'given': given, 'backend': backend, 'precision': precision, 'batch': batch, 'imgsz': size, 'outputs': 1}


def result(backend, precision, batch, ms, size=(64, 64), types=None, model=None):
    """A plain result of so many ms per query, as far as tables and speed_conclusions read it."""
    return {
        **row(f'{precision}.onnx', backend, precision, batch, size),
        'model': model or f'{precision}.onnx',
        'types': types or precision.upper(),
        'open_batch': True,
        'against': None,
        'latency': {'min': ms, 'median': ms, 'p90': ms},
        'images_per_s': 1000 * batch / ms,
        'h2d': None,
        'compute': {'median': ms},
        'parameters': None,
        'size_bytes': 1,
    }


def test_a_file_with_nms_inside_is_compared_with_its_like():
    """Not with a faster float file that leaves NMS to the program; without its like it has no gain."""
    plain = result('OpenVINO', 'fp32', 1, 30.0), result('OpenVINO', 'bf16', 1, 20.0)
    inside = {**result('OpenVINO', 'int8', 1, 40.0, model='end2end.onnx'), 'outputs': 4}
    its_like = {**result('OpenVINO', 'bf16', 1, 60.0, model='float-end2end.onnx'), 'outputs': 4}
    assert [*int8_gains([*plain, inside])] == []
    (gain,) = int8_gains([*plain, inside, its_like])
    assert gain.times == 1.5
    assert baseline_of(inside, [*plain, inside, its_like]) is its_like and baseline_of(inside, [*plain, inside]) is None


def test_int8_is_compared_with_the_fastest_float_precision():
    results = [
        result('OpenVINO', 'fp32', 1, 80.0),
        result('OpenVINO', 'bf16', 1, 40.0),
        result('OpenVINO', 'int8', 1, 40.0),
        result('OpenVINO', 'bf16', 4, 160.0),
        result('OpenVINO', 'int8', 4, 80.0),
        result('ONNX Runtime', 'fp32', 1, 50.0),
        result('ONNX Runtime', 'int8', 1, 20.0, types=SIMULATED),
    ]
    assert speed_conclusions(results) == [
        'In OpenVINO, INT8 against the fastest float precision: 1.00 times as fast as BF16 at batch 1 (not faster: ship BF16), 2.00 times as '
        'fast as BF16 at batch 4.',
        f'Least latency 20 ms at batch 1: int8.onnx in ONNX Runtime, {SIMULATED}. Most images/s 50.0 at batch 4: int8.onnx in OpenVINO, INT8.',
    ]
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in precision_table(results).splitlines()]
    assert lines[0][3:] == [
        *('FP32 (ms)', 'BF16 (ms)', 'INT8 (ms)', 'latency speed-up'),
        *('FP32 (images/s)', 'BF16 (images/s)', 'INT8 (images/s)', 'images/s speed-up'),
    ]
    assert lines[2:] == [
        ['64 px', 'OpenVINO', '1', '80', '40', '40', '1.00', '12.5', '25.0', '25.0', '1.00'],
        ['64 px', 'OpenVINO', '4', '-', '160', '80', '2.00', '-', '25.0', '50.0', '2.00'],
        ['64 px', 'ONNX Runtime', '1', '50', '-', '-', '-', '20.0', '-', '-', '-'],
    ]
    several = [*results[:3], result('OpenVINO', 'int8', 1, 32.0, model='other.onnx')]
    said = [line.partition(' the fastest')[0] for line in speed_conclusions(several)]
    assert said[:2] == ['In OpenVINO, other.onnx against', 'In OpenVINO, int8.onnx against']
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in precision_table(several).splitlines()]
    assert [(line[3], line[7]) for line in lines[2:]] == [('int8.onnx', '1.00'), ('other.onnx', '1.25')]
    assert precision_table(results[:1]) == '' and len(speed_conclusions(results[:1])) == 1


FLOAT, INT8 = row('a/f.onnx'), row('a/q.onnx', precision='int8')
TORCH, VINO = row('a/f.onnx', 'PyTorch'), row('a/q.onnx', 'OpenVINO', 'int8')
HALF, OTHER = row('a/f.onnx', precision='fp16'), row('g.onnx')


@pytest.mark.parametrize(
    'rows, wanted, baseline',
    [
        ([INT8, FLOAT], None, FLOAT),
        ([INT8, HALF, FLOAT], None, FLOAT),
        ([INT8, HALF], None, HALF),
        ([INT8, TORCH, VINO], None, None),  # no float file in its backend
        ([INT8, FLOAT, OTHER], None, None),  # two could be it
        ([FLOAT, OTHER], None, FLOAT),  # itself
        ([INT8, row('a/f.onnx', batch=2), row('a/f.onnx', size=(32, 32))], None, None),
        ([INT8, FLOAT, TORCH], 'pytorch', TORCH),
        ([INT8, FLOAT], 'pytorch', None),
        ([INT8, FLOAT, OTHER], 'g.onnx', OTHER),
        ([VINO, FLOAT], 'a/f.onnx', FLOAT),  # it ran in one backend only
        ([VINO, FLOAT, TORCH], 'f.onnx', None),
        ([FLOAT, INT8], 'q.onnx', INT8),
    ],
)
def test_which_row_is_the_baseline(rows, wanted, baseline):
    assert baseline_of(rows[0], rows, wanted) is baseline


def test_a_baseline_that_is_no_model_is_measured_too():
    assert list(map(str, BenchmarkConfig([Path('a/q.onnx')], baseline='a/f.onnx').files)) == ['a/f.onnx', 'a/q.onnx']
    for known in ('a/q.onnx', 'q.onnx', 'pytorch', None):
        assert list(map(str, BenchmarkConfig([Path('a/q.onnx')], baseline=known).files)) == ['a/q.onnx']
    with pytest.raises(QatError, match='--baseline pytorch: not among --backend openvino'):
        BenchmarkConfig([Path('a/q.onnx')], baseline='pytorch', backend=['openvino'])
