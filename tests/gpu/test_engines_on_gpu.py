"""Laws of files that run on a GPU: what is timed there, and what an engine finds."""

import json

import cv2
import pytest
from helpers.commands import command, program
from helpers.labelled import val_images

from models.deploy.formats.onnx import export_onnx
from utils.qat.backends.detections import detect
from utils.qat.vendors.load import open_file

pytestmark = pytest.mark.gpu
SIZE, IOU = 128, 0.6


def benchmark(file, options, project, code=0):
    """Return what benchmark_trt.py measures, briefly, on the GPU."""
    command('benchmark_trt.py', file, *options.split(), '--device', 0, '--project', project, code=code)
    return [] if code else json.loads((project / 'exp' / 'benchmark.json').read_text())['results']


def test_on_a_gpu_transfers_are_measured_too(exports, tmp_path):
    results = benchmark(exports / 'float.pt', '--imgsz 64 --batch 1,2 --duration 1', tmp_path)
    assert [(r['types'], r['batch']) for r in results] == [('FP32', 1), ('FP32', 2), ('FP16', 1), ('FP16', 2)]
    for r in results:
        assert min(r[part]['min'] for part in ('h2d', 'compute', 'd2h', 'enqueue')) > 0
        assert r['latency']['mean'] > r['h2d']['mean'] + r['d2h']['mean']


def test_tensorrt_is_measured_where_it_is(exports, tmp_path):
    pytest.importorskip('tensorrt')
    results = benchmark(exports / 'int8.onnx', '--backend tensorrt --batch 1,4 --duration 1', tmp_path)
    assert [(r['backend'], r['batch']) for r in results] == [('TensorRT', 1), ('TensorRT', 4)]
    engine = next((tmp_path / 'engines').glob('*-b4.engine'))
    benchmark(engine, '--batch 8', tmp_path, code=2)


def test_the_engine_finds_what_the_onnx_file_finds(small, tmp_path):
    pytest.importorskip('tensorrt')
    pytest.importorskip('cuda.bindings.runtime')
    from utils.qat.config.deploy import BuildConfig
    from utils.qat.vendors.tensorrt.engine.build import EngineFromOnnx

    engine = program('examples/infer_engine.py')
    export_onnx(small.quantized_model(), tmp_path / 'plain.onnx', (SIZE, SIZE))
    EngineFromOnnx(BuildConfig(tmp_path / 'plain.onnx', engine=tmp_path / 'plain.engine')).build()
    predict = open_file(tmp_path / 'plain.onnx')
    model = engine.EngineModel(tmp_path / 'plain.engine')
    assert model.shape == [1, 3, SIZE, SIZE] and len(model.names) == 10
    for images, _, [path], _ in val_images(small.data, SIZE, square=True, batch_size=1):
        pixels, *_ = engine.letterbox(cv2.imread(path), SIZE, SIZE)
        ours = engine.read_outputs(model(pixels), 0.5, IOU)
        theirs = detect(predict(images.float() / 255), (SIZE, SIZE), 0.5, IOU)[0].rows
        assert abs(len(ours) - len(theirs)) <= 1 + len(theirs) // 5
