"""Laws of the benchmark: statistics, inputs, counts, cases that a sweep leaves out, and files.

No time is judged, only relations between figures.
"""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import TREE
from helpers.graphs import model_of
from helpers.zoo import program, reading_parts
from onnx import TensorProto

from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import without_groups
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.pytorch import TorchModel
from utils.qat.benchmark.model_files import give_sizes, read_model_files, shapes_of, with_float_beside
from utils.qat.benchmark.run import LEAST_QUERIES, TURNS
from utils.qat.benchmark.sweep import measurements_of
from utils.qat.benchmark.timing import HostEvent, Timing, in_line
from utils.qat.benchmark.usage import PERIOD, Usage
from utils.qat.config.deploy import BenchmarkConfig, milliseconds
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.vendors.load import measured_by
from utils.qat.vendors.measured import BATCHES, Conditions, Measurement, ModelFile
from utils.qat.vendors.openvino.model import write_ir
from utils.qat.vendors.openvino.session import MeasuredOpenVINO
from utils.qat.vendors.tensorrt.measured import MeasuredTensorRT

CPU = torch.device('cpu')
NO_OPENVINO = MeasuredOpenVINO.missing('openvino', CPU)
FLOATS = () if NO_OPENVINO else MeasuredOpenVINO.precisions(ModelFile(None, {}, 'FP32', ()), CPU)  # that this CPU has
needs_openvino = pytest.mark.skipif(bool(NO_OPENVINO), reason=NO_OPENVINO)
SIZE = 64  # pixels


@pytest.fixture(scope='module')
def files(exports, tmp_path_factory):
    """The exports, and net.onnx, a classifier of open image size without a checkpoint."""
    folder = shutil.copytree(exports, tmp_path_factory.mktemp('models') / 'exports')
    export(classifier(), folder / 'net.onnx', {'image': {0: 'n', 2: 'h', 3: 'w'}, 'scores': {0: 'n'}})
    return folder


def export(net, file, axes):
    """torch.onnx.export of a network without batch norms: image → scores."""
    options = {'dynamo': False} if 'dynamo' in inspect.signature(torch.onnx.export).parameters else {}
    torch.onnx.export(
        net,
        (torch.zeros(1, 3, SIZE, SIZE),),
        str(file),
        input_names=['image'],
        output_names=['scores'],
        dynamic_axes=axes,
        **options,
    )


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    ).eval()


def described(file):
    return read_model_files([file], lambda file: CheckpointFile(file).kind)[0]


def open_checkpoint(file, device):
    return TorchModel(*CheckpointFile(file).load_any(device))


def opened(file, backend, shapes=None):
    """A file as a benchmark runs it, prepared for shapes: (batch, 3, SIZE, SIZE) unless others are given."""
    model = described(file)
    inputs = shapes or {'images': (torch.float32, (1, 3, SIZE, SIZE))}
    measurement = Measurement(model, backend, model.precision, None, 1, inputs)
    measured = measured_by(backend)(measurement, file, Conditions(BenchmarkConfig([file]), CPU, open_checkpoint))
    measured.prepare(inputs)
    return measured


def benchmark(files, options, project):
    """Run benchmark_trt.py briefly on a CPU; options: as typed. Returns its exit code."""
    short = f'--device cpu --warmup 0 --duration 0.02 --project {project}'
    return run_command(program('benchmark_trt.py').main, [*map(str, files), *short.split(), *options.split()])


# ---- figures --------------------------------------------------------------------------------------------------------------


def test_figures_of_a_measurement_belong_together(files):
    timing, measured = Timing(), opened(files / 'float.onnx', 'onnxruntime')
    for _ in range(2):
        timing.turn(measured, warmup=0, duration=0.001, least=5)
    found = timing.figures()
    assert found['queries'] >= 10 and found['qps'] * found['host_seconds'] == pytest.approx(found['queries'])
    assert 0 < found['compute_seconds'] <= found['host_seconds']
    assert found['compute']['mean'] * found['queries'] == pytest.approx(1000 * found['compute_seconds'])
    assert found['latency'] == found['compute'] and found['h2d'] is found['d2h'] is found['enqueue'] is None
    ordered = [found['compute'][k] for k in ('min', 'median', 'p90', 'p95', 'p99', 'max')]
    assert ordered == sorted(ordered)


def test_every_query_in_line_is_waited_for(files, monkeypatch):
    waited = []
    monkeypatch.setattr(HostEvent, 'synchronize', lambda event: waited.append(event.seconds))
    times, seconds = in_line(opened(files / 'float.onnx', 'onnxruntime'), 0.001, 10)
    assert len(times) == len(waited) >= 10 and waited == sorted(waited) and 0 < sum(times) / 1000 <= seconds


# ---- what a file is -------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_module(files, small, tmp_path):
    net = described(files / 'net.onnx')
    assert net.parameters == sum(p.numel() for p in classifier().parameters()) and net.layers == 5
    own = sum(p.numel() for p in small.float_model().parameters())
    with reading_parts:  # without weights of 0 for the rest of a tensor
        export_onnx(small.float_model(), tmp_path / 'float.onnx', (SIZE, SIZE), dynamic=True)
        export_onnx(small.quantized_model(), tmp_path / 'int8.onnx', (SIZE, SIZE), dynamic=True)
    dense = sum(p.numel() for p in without_groups(small.quantized_model()).parameters())
    decoding = 4 * 64 - 16 + 3  # a matrix in place of DFL; the exporter writes the three strides as a constant
    found = [described(tmp_path / f'{name}.onnx').parameters for name in ('float', 'int8')]
    assert found == [own + decoding, dense + decoding]
    assert [described(files / f'{name}.onnx').types for name in ('float', 'int8', 'half')] == [
        'FP32',
        'INT8 and FP32',
        'INT8 and FP16',
    ]


@needs_openvino
def test_a_single_int8_file_is_compared_with_the_float_file_beside_it(files, tmp_path):
    """If there is one, with the same inputs; of several none is chosen, and what is no model is passed by."""

    def names():
        return [file.name for file in with_float_beside([tmp_path / 'int8.onnx'])]

    shutil.copy(files / 'int8.onnx', tmp_path)
    (tmp_path / 'broken.onnx').write_bytes(b'no model')
    assert names() == ['int8.onnx']
    shutil.copy(files / 'float.onnx', tmp_path)
    assert names() == ['float.onnx', 'int8.onnx']
    shutil.copy(files / 'float.onnx', tmp_path / 'another.onnx')
    assert names() == ['int8.onnx']


@pytest.mark.parametrize('name', ['float', 'int8', 'net'])
def test_a_file_of_openvino_is_described_as_the_onnx_file_that_it_was_made_of(files, tmp_path, name):
    write_ir(onnx.load(files / f'{name}.onnx'), tmp_path / f'{name}.xml')
    ours, theirs = described(tmp_path / f'{name}.xml'), described(files / f'{name}.onnx')
    assert (ours.inputs, ours.types, ours.batches) == (theirs.inputs, theirs.types, theirs.batches)


def by_hand(folder, nodes, inputs, rank, constants=()):
    """ONNX file of `nodes` that returns 'y' of so many axes. inputs: {name: (type, shape)}."""
    onnx.save(model_of(nodes, inputs, {'y': [None] * rank}, constants), folder / 'by hand.onnx')
    return folder / 'by hand.onnx'


def test_weights_stored_in_int8_are_parameters_and_scales_are_not(tmp_path):
    nodes = """
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        dw = DequantizeLinear<axis = 0>(w, ws, wz) db = DequantizeLinear<axis = 0>(b, ws, bz)
        c = Conv(d, dw, db) y = Reshape(c, shape)"""
    constants = {'w': np.ones((4, 3, 1, 1), np.int8), 'b': np.ones(4, np.int32), 'shape': np.int64([0, -1])}
    constants |= {'ws': np.ones(4, np.float32), 'wz': np.zeros(4, np.int8), 'bz': np.zeros(4, np.int32)}
    constants |= {'s': np.float32(0.1), 'z': np.int8(0)}
    net = described(by_hand(tmp_path, nodes, {'x': ['n', 3, 8, 8]}, 2, constants))
    assert (net.parameters, net.layers, net.precision, net.batches) == (4 * 3 + 4, 2, 'int8', BATCHES)


def test_inputs_of_several_types_and_ranks(tmp_path):
    """A batch of tokens, a flag per token and a single factor: integers are ones, which every table of tokens has."""
    nodes = 'e = Gather(table, tokens) f = Mul(e, factor) y = Where(mask, f, e)'
    given = {'tokens': (TensorProto.INT64, ['n', 7]), 'mask': (TensorProto.BOOL, ['n', 7, 1]), 'factor': []}
    file = by_hand(tmp_path, nodes, given, 3, {'table': np.ones((2, 4), np.float32)})
    inputs = shapes_of(described(file).inputs, 3, None, file)
    assert inputs == {'tokens': (torch.int64, (3, 7)), 'mask': (torch.bool, (3, 7, 1)), 'factor': (torch.float32, ())}
    assert opened(file, 'onnxruntime', inputs).binding.get_outputs()[0].shape() == [3, 7, 4]


def test_an_axis_that_is_neither_batch_nor_image_size_is_refused(tmp_path):
    file = by_hand(tmp_path, 'y = Relu(x)', {'x': ['n', 'length']}, 2)
    with pytest.raises(QatError, match=r'by hand.onnx: input x \[None, None\] has an open axis'):
        shapes_of(described(file).inputs, 1, None, file)


# ---- what runs ------------------------------------------------------------------------------------------------------------


def test_what_is_measured_is_the_described(files):
    inputs = {'images': (torch.float32, (2, 3, SIZE, SIZE))}
    exported, eager = opened(files / 'float.onnx', 'onnxruntime', inputs), opened(files / 'float.pt', 'pytorch', inputs)
    images = exported.inputs['images']
    assert torch.equal(images, eager.inputs['images']) and images.std() > 0.2
    session = onnxruntime.InferenceSession(files / 'float.onnx', providers=['CPUExecutionProvider'])
    wanted = session.run(None, {'images': images.numpy()})[0]
    np.testing.assert_allclose(exported.binding.copy_outputs_to_cpu()[0], wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(eager.outputs[0], wanted, rtol=1e-3, atol=1e-2)
    assert eager.parameters == sum(p.numel() for p in eager.model.parameters())


def test_what_a_typed_file_computes_in_is_said(files):
    """The latter as long as the fused Concat of ONNX Runtime does not load FP16 scales."""
    types = 'INT8 simulated', 'INT8 and FP16, Q/DQ not fused'
    assert opened(files / 'half.onnx', 'onnxruntime').types in types


def test_memory_and_load_of_a_process_are_sampled():
    with Usage(CPU) as usage:
        begun = usage.begin()
        kept = np.ones(64 << 17)  # 64 MiB
        while len(usage.samples) < 3:
            time.sleep(PERIOD)
        found = usage.added(begun)
        busy = usage.during([(usage.samples[0].seconds, usage.now())])
    assert kept.size and found['peak_mib'] > 64 and 32 < found['added_mib'] <= found['peak_mib']
    assert busy['percent'] >= 0 and usage.during([(0, 0)]) == {}
    count = len(usage.samples)
    time.sleep(3 * PERIOD)
    assert len(usage.samples) == count


# ---- what is left out -----------------------------------------------------------------------------------------------------


def swept(files, names, **options):
    config = BenchmarkConfig([files / name for name in names], **options)
    models = read_model_files(config.files, lambda file: CheckpointFile(file).kind)
    give_sizes(models, open_checkpoint)
    found, left_out = measurements_of(models, config, CPU)
    return [(m.file.name, m.backend, m.precision, m.batch) for m in found], left_out


@needs_openvino
def test_by_default_all_that_can_run_here_is_measured(files):
    found, out = swept(files, ['float.onnx', 'int8.onnx', 'half.onnx', 'int8.pt'])
    ours = [
        ('float.onnx', 'onnxruntime', 'fp32'),
        *[('float.onnx', 'openvino', precision) for precision in FLOATS],
        ('float.pt', 'pytorch', 'fp32'),
        ('int8.onnx', 'onnxruntime', 'int8'),
        ('int8.onnx', 'openvino', 'int8'),
    ]
    assert FLOATS[0] == 'fp32' and set(FLOATS) <= {'fp32', 'bf16', 'fp16'}
    assert found == [
        *[(*series, batch) for series in ours for batch in BATCHES],
        ('half.onnx', 'onnxruntime', 'int8', 1),
        ('half.onnx', 'openvino', 'int8', 1),
        *[('int8.pt', 'pytorch', 'int8', batch) for batch in BATCHES],
    ]
    assert [line.split(': ')[-1] for line in out] == [
        *['needs an NVIDIA GPU, and this is --device cpu'] * 2,
        f'PyTorch runs the checkpoint that a file was exported from, and {files / "int8.pt"} is measured by itself',
        'PyTorch runs the checkpoint that a file was exported from, and there is no half.pt beside it',
    ]


@needs_openvino
def test_a_checkpoint_of_another_precision_is_not_taken_for_the_file(files, tmp_path):
    for name, source in (('a.onnx', 'float.onnx'), ('a.pt', 'int8.pt')):
        (tmp_path / name).write_bytes((files / source).read_bytes())
    found, out = swept(tmp_path, ['a.onnx'], batch=(1,))
    assert {backend for _, backend, *_ in found} == {
        'onnxruntime',
        'openvino',
    } and 'a.pt beside it is no float one' in out[-1]


@pytest.mark.parametrize('suffix', ['.pt', '.pth'])
def test_pytorch_runs_the_checkpoint_beside_a_file(files, tmp_path, suffix):
    for name, source in (('a.onnx', 'float.onnx'), (f'a{suffix}', 'float.pt')):
        (tmp_path / name).write_bytes((files / source).read_bytes())
    found, _ = swept(tmp_path, ['a.onnx'], batch=(1,), backend=('pytorch',))
    assert found == [(f'a{suffix}', 'pytorch', 'fp32', 1)]


def test_a_sweep_leaves_out_what_a_file_cannot_and_says_so(files):
    options = {'precision': ('fp32', 'int8'), 'backend': ('onnxruntime',), 'batch': (1,)}
    found, out = swept(files, ['float.onnx', 'int8.onnx'], **options)
    assert [(name, precision) for name, _, precision, _ in found] == [('float.onnx', 'fp32'), ('int8.onnx', 'int8')]
    assert len(out) == 2 and 'float.onnx has no Q/DQ' in out[0]
    assert out[1].startswith('--precision fp32: ') and 'int8.onnx is INT8' in out[1]
    found, out = swept(files, ['half.onnx', 'float.onnx'], backend=('onnxruntime',), batch=(1, 4))
    assert [(name, batch) for name, *_, batch in found] == [('half.onnx', 1), ('float.onnx', 1), ('float.onnx', 4)]
    assert len(out) == 1 and '--batch 4' in out[0] and 'fixed batch of 1' in out[0]


@pytest.mark.parametrize('text, ms', [('500ms', 500), ('0.5s', 500), ('2s', 2000), ('250', 250), ('0', 0)])
def test_warmup_takes_a_unit(text, ms):
    assert milliseconds(text) == ms


# ---- the command ------------------------------------------------------------------------------------------------------------


def assert_in_turns(turns):
    """No file takes a turn while another does, nor its next one before all others have taken theirs."""
    ordered = sorted(
        (start, end, number, i) for i, spans in enumerate(turns) for number, (start, end) in enumerate(spans)
    )
    assert all(first[1] <= second[0] for first, second in pairwise(ordered))
    assert [number for *_, number, _ in ordered] == sorted(number for *_, number, _ in ordered)


@needs_openvino
def test_a_sweep_writes_its_files(files, tmp_path, capsys):
    models = [files / f'{name}.onnx' for name in ('float', 'int8', 'net')]
    options = f'--imgsz {SIZE} --batch 1,2 --duration 0.1 --warmup 10ms --precision fp32,int8 --name all'
    assert benchmark(models, options, tmp_path) == 0
    out = capsys.readouterr().out
    folder = tmp_path / 'all'
    pictures = {'latency.png', 'throughput.png', 'usage.png'}
    texts = {'.lock', 'benchmark.csv', 'benchmark.json', 'benchmark.md'}
    assert {p.name for p in folder.iterdir()} == texts | pictures
    report = json.loads((folder / 'benchmark.json').read_text())
    rows = [(Path(r['model']).name, r['backend'], r['types'], r['batch']) for r in report['results']]
    ran = [
        ('float.onnx', 'ONNX Runtime', 'FP32'),
        ('float.onnx', 'OpenVINO', 'FP32'),
        ('float.pt', 'PyTorch', 'FP32'),
        ('int8.onnx', 'ONNX Runtime', 'INT8 simulated'),
        ('int8.onnx', 'OpenVINO', 'INT8 and FP32'),
        ('int8.pt', 'PyTorch', 'INT8 simulated'),
        ('net.onnx', 'ONNX Runtime', 'FP32'),
        ('net.onnx', 'OpenVINO', 'FP32'),
    ]
    assert rows == [(*series, batch) for series in ran for batch in (1, 2)]
    for r in report['results']:
        assert r['images_per_s'] == pytest.approx(r['batch'] * r['qps']) and r['parameters'] > 0 and r['layers'] > 0
        assert r['size_bytes'] == os.path.getsize(r['model']) and r['usage']['peak_mib'] > 0
        assert len(r['usage']['turns']) == TURNS and r['queries'] >= TURNS * LEAST_QUERIES
    for batch in (1, 2):
        assert_in_turns([r['usage']['turns'] for r in report['results'] if r['batch'] == batch])
    assert len(report['left_out']) == 6 and all(f'left out: {line}' in out for line in report['left_out'])
    assert 'there is no net.pt beside it' in out
    assert len(out.splitlines()) < len(rows) + 30 and max(map(len, re.findall(r'(?m)^\|.*', out))) < 130
    assert 'for speed in ONNX Runtime: qat.py quantize --target onnxruntime' in out
    assert re.search(
        r'In OpenVINO, INT8 against the fastest float precision: [\d.]+ times as fast as FP32 at batch 1.*, .* at batch 2',
        out,
    )
    assert re.search(r'Least latency [\d.]+ ms at batch \d: .*\. Most images/s [\d.]+ at batch \d: ', out)
    text = (folder / 'benchmark.md').read_text()
    assert 'GPU compute (ms)' not in text
    assert re.search(r'\| int8.pt +\| +PyTorch \| +INT8 simulated \| +64 px \| +2 \| +open \|', text)
    for name in pictures:
        assert f'({name})' in text and (folder / name).read_bytes().startswith(b'\x89PNG')


@pytest.mark.faults
def test_what_was_measured_before_ctrl_c_is_written(files, tmp_path):
    options = f'--backend onnxruntime --batch 1,2,4 --duration 5 --device cpu --project {tmp_path}'
    running = subprocess.Popen(
        [sys.executable, 'benchmark_trt.py', str(files / 'float.onnx'), *options.split()],
        cwd=TREE,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell's background job, and so a CI job, may ignore SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in running.stdout:
        if line.startswith('2 of 3'):
            running.send_signal(signal.SIGINT)
            break
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130 and 'interrupted' in err and 'Traceback' not in err, err
    report = json.loads((tmp_path / 'exp' / 'benchmark.json').read_text())
    assert [r['batch'] for r in report['results']] == [1]
    assert (tmp_path / 'exp' / 'latency.png').exists() and 'results ' in out


# ---- engines ----------------------------------------------------------------------------------------------------------------


def test_an_engine_is_built_once_and_again_for_another_tensorrt(tmp_path, capsys):
    """TensorRT-RTX builds without a GPU."""
    pytest.importorskip(
        'tensorrt_rtx_bindings', reason='no TensorRT-RTX: ./install_dependencies.sh --tests (Linux x86_64 only)'
    )
    file = tmp_path / 'net.onnx'
    export(classifier(), file, {'image': {0: 'n'}})
    model = described(file)

    def engine(batch, **options):
        """Path of the engine, and whether it was built."""
        measurement = Measurement(model, 'rtx', 'fp32', None, batch, {})
        conditions = Conditions(BenchmarkConfig([file], project=tmp_path, **options), CPU, open_checkpoint)
        return MeasuredTensorRT.file_to_run(measurement, conditions), 'building ' in capsys.readouterr().out

    two, built = engine(2)
    assert two.parent == tmp_path / 'engines' and two.exists() and built
    sidecar = two.with_name(f'{two.name}.json')
    content = json.loads(sidecar.read_text())
    assert content['inputs']['image'] == {size: [2, 3, SIZE, SIZE] for size in ('min', 'opt', 'max')}
    assert engine(2) == (two, False)
    four, built = engine(4)
    assert four != two and built
    sidecar.write_text(json.dumps({**content, 'built_by': 'TensorRT-RTX 0.1'}))
    assert engine(2) == (two, True) and json.loads(sidecar.read_text())['built_by'] == content['built_by']
    assert engine(2, workspace=512) == (two, True)
