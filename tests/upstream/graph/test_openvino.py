"""The law of OpenVINO: all that is quantized in a file runs in integers there, and is computed as ONNX Runtime computes it.

The judge is the compiled model, which says what each layer computes in (openvino_layers.py). Whether the values are right is asked of the
demo's trained models: rounding moves the outputs of random weights too far.
"""

import os
import platform
import subprocess
import sys
from functools import partial

import numpy as np
import onnx
import pytest
import torch
import yaml
from conftest import TREE
from helpers.faults import sampled
from helpers.fresh import fresh
from helpers.graphs import assert_same_outputs, copy, graph_of, run_onnx
from helpers.segmenters import segmenter
from helpers.zoo import FLIPS, command, image, share_of_float

from models.deploy.agreement import made_images, output_differences
from models.deploy.formats.deepstream import deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.deploy.formats.onnx_end2end import export_end2end
from models.quantize.calibration.calibrate import calibrate_weights
from models.quantize.checkpoint import CheckpointFile, save_model
from test_targets import exported
from utils.qat.backends.file_model import FileModel
from utils.qat.config.export import Nms
from utils.qat.core.errors import QatError
from utils.qat.core.machine import VNNI, instruction_flags
from utils.qat.graph import passes
from utils.qat.graph.audit import audit
from utils.qat.graph.decoding import boxes_by_rows, decode_apart
from utils.qat.graph.onnx_graph import attribute, count_qdq, is_half
from utils.qat.vendors.load import open_file
from utils.qat.vendors.openvino.graph import fake_quantize
from utils.qat.vendors.openvino.layers import INTEGERS
from utils.qat.vendors.openvino.session import OVERFLOW, MeasuredOpenVINO, OpenVINO

CPU = torch.device('cpu')
NO_OPENVINO = MeasuredOpenVINO.missing('openvino', CPU)
pytestmark = pytest.mark.skipif(bool(NO_OPENVINO), reason=NO_OPENVINO)
SIDE = 64


def compiled(file, batch=1):
    """The session of a file that has run once."""
    session = OpenVINO(file, CPU)
    (name,) = session.signature().inputs
    session.run({name: made_images(batch, (SIDE, SIDE))})
    return session


def assert_integers(file, batch=1):
    """The law. Returns the session."""
    session = compiled(file, batch)
    found, audited = session.int8, audit(onnx.load(file)).convs
    assert not found.lost and not found.moves, (found.lost, found.moves)
    assert len(found.convs) == len(audited) and len(found.by_design) == sum(not c.int8 for c in audited)
    assert {layer.name for layer in found.by_design} == {c.name for c in audited if not c.int8}
    assert all(layer.precision in INTEGERS for layer in found.convs if layer not in found.by_design)
    repeated = [layer for layer in found.reencoded if layer.kind != 'Reorder']
    assert not repeated, 'Q/DQ that repeat a scale are layers again'
    assert len(found.reencoded) <= 4, [layer.name for layer in found.reencoded]
    pools = [layer.name for layer in found.layers if layer.kind == 'Pooling' and 'AveragePool' in layer.name]
    assert not pools or is_half(onnx.load(file)), pools
    return session


# ---- in integers ----------------------------------------------------------------------------------------------------------


KINDS = {
    'plain': {},
    'simplified': {'simplify': True},
    'TensorRT 8': {'opset': 13},
    'dynamic': {'dynamic': True},
    'half': {'half': True, 'opset': 19},
    'DeepStream': {'layout': deepstream_layout},
}


@pytest.mark.parametrize('kind', sampled([*KINDS, 'end2end'], 3))
@pytest.mark.parametrize('task', ['detect', 'segment'])
def test_each_kind_of_export(small, task, kind, tmp_path):
    if (task, kind) == ('segment', 'DeepStream'):
        pytest.skip('a layout of detectors')
    model, file = small.quantized_model() if task == 'detect' else segmenter(quantized=True), tmp_path / 'model.onnx'
    export_onnx(model, file, (SIDE, SIDE), **KINDS.get(kind, {}))
    if kind == 'end2end':
        export_end2end(file, file, Nms('standard'))
    assert_integers(file)
    joined = onnx.load(file)
    apart = decode_apart(copy(joined))
    assert apart != joined and decode_apart(copy(apart)) == apart
    assert_same_outputs(joined, apart, {joined.graph.input[0].name: image(SIDE).numpy()})
    rows = boxes_by_rows(copy(apart))
    softmax = [attribute(node, 'axis') for node in rows.graph.node if node.op_type == 'Softmax']
    assert softmax == [2 if is_half(rows) else 3] and boxes_by_rows(copy(rows)) == rows
    if kind == 'dynamic':
        session = assert_integers(file, batch=3)
        assert session.run({'images': made_images(2, (SIDE, SIDE))})['output0'].shape[0] == 2


# ---- rightly --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('task', ['detect', 'segment'])
def test_it_computes_what_onnx_runtime_computes(small, task, tmp_path):
    """An .onnx file, its .xml, and the float model. Read as it is, the .onnx file is computed wrong on CPUs without AMX."""
    models = small.float_model(), small.quantized_model()
    if task == 'segment':
        models = segmenter(), segmenter(quantized=True)
    images, outputs = image(SIDE, batch=16), {}
    calibrate_weights(models[1], MeasuredOpenVINO.overflows())
    for name, model in zip(('float', 'int8'), models, strict=True):
        file = tmp_path / f'{name}.onnx'
        export_onnx(model, file, (SIDE, SIDE))
        session = compiled(file)
        assert not session.saturates
        outputs[name] = FileModel(session)(images), open_file(file)(images)
    figures = output_differences(*outputs['float'])
    assert max(figures.values()) < 1e-4, figures
    assert share_of_float(*outputs['int8'], outputs['float'][1]) < FLIPS


@pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='instruction sets of x86')
@pytest.mark.parametrize(('allowed', 'reduced'), [('AVX2', False), ('AVX2', True), ('ALL', False)])
def test_an_export_is_compared_unless_sums_overflow(small, tmp_path, allowed, reduced):
    """Only instructions for INT8, or small weights, keep sums from overflowing. A variable can forbid the instructions on any CPU."""
    if allowed == 'ALL' and not instruction_flags():
        pytest.skip('the system does not tell the instructions of this CPU')
    model = small.quantized_model()
    calibrate_weights(model, reduced)
    save_model(tmp_path / 'model.pt', model, {'imgsz': [SIDE, SIDE]}, '')
    environment = {**os.environ, 'ONEDNN_MAX_CPU_ISA': allowed}
    arguments = '--weights', tmp_path / 'model.pt', '--include', 'openvino', 'onnx', '--imgsz', SIDE
    said = fresh('export_qat.py', *arguments, env=environment)
    audited = fresh('scripts/audit_onnx.py', tmp_path / 'model.onnx', '--openvino', env=environment)
    sums_fit = reduced or (allowed == 'ALL' and VNNI & {*instruction_flags()})
    assert (OVERFLOW not in said) == ('without a comparison' not in said) == bool(sums_fit)
    assert (OVERFLOW not in audited) == bool(sums_fit)
    assert (tmp_path / 'model.xml').is_file()


@pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='instruction sets of x86')
@pytest.mark.parametrize('flag', [[], ['--reduce-range']])
def test_quantize_warns_where_sums_overflow(small, tmp_path, flag):
    extra = '--calib-images 2 --calib-method max --imgsz 64 --workers 0 --epochs 0 --no-eval-origin --no-eval-ptq --device cpu'
    words = 'quantize', '--weights', small.single, '--data', small.data, '--target', 'openvino', '--project', tmp_path
    said = fresh('qat.py', *words, *extra.split(), *flag, env={**os.environ, 'ONEDNN_MAX_CPU_ISA': 'AVX2'})
    assert ('right on this CPU only with --reduce-range' in said) == (not flag)


def test_batches_and_order_do_not_matter(exports):
    model, floating = (open_file(exports / f'{name}.onnx', CPU, 'openvino') for name in ('int8', 'float'))
    images = image(SIDE, batch=16)
    alone, together = torch.cat([model(one) for one in images.split(1)]), model(images)
    assert torch.equal(model(images), together)
    assert share_of_float(together, alone, floating(images)) < FLIPS, 'other shapes may take other kernels'


XS = np.linspace(-15, 15, 64, dtype=np.float32).reshape(1, 4, 4, 4)
by_hand = partial(graph_of, shape=(1, 4, 4, 4), returns=(1, None, None, None))
POOL = 'm = MaxPool<kernel_shape = [1, 1]>(a)'
REPEATED = {  # a graph → the pairs that are left: a scale is repeated, another one is not
    f'a = QDQ(x) {POOL} b = QDQ(m, "same scale") y = Relu(b)': 1,
    f'a = QDQ(x) {POOL} b = QDQ(m, "other scale") y = Relu(b)': 2,
    'a = QDQ(x) m = Relu(a) b = QDQ(m) y = Relu(b)': 2,
    'a = QDQ(x) m = Concat<axis = 1>(a, x) b = QDQ(m) y = Relu(b)': 2,
    'a = QDQ(x) b = QDQ(a) f = Transpose(b) c = QDQ(f) y = Relu(c)': 1,
}


@pytest.mark.parametrize('text, left', REPEATED.items())
def test_only_a_repeated_scale_is_dropped(text, left):
    model = graph_of(text, shape=(1, 4, 4, 4), returns=(None,) * 4)
    dropped = passes.drop_repeated_qdq(copy(model))
    assert count_qdq(dropped) == (left, left)
    onnx.checker.check_model(dropped, full_check=True)
    assert_same_outputs(dropped, model, {'x': XS})


@pytest.mark.parametrize('scale, tolerance', [('scale', 0), ('other scale', 1e-6)])
def test_fake_quantize_has_the_limits_of_the_pair(scale, tolerance, tmp_path):
    """Bit for bit as ONNX Runtime computes Q and DQ, beyond both limits too; the last bit may differ if their scales do."""
    model = by_hand(
        f'a = QDQ(x) i = QuantizeLinear(x, scale, zero) k = DequantizeLinear(i, "{scale}", zero) y = Add(a, k)'
    )
    onnx.save(model, tmp_path / 'model.onnx')
    ops = [n.op_type for n in fake_quantize(copy(model)).graph.node]
    assert ops.count('FakeQuantize') == 2 and not {'QuantizeLinear', 'DequantizeLinear'} & set(ops)
    (found,) = OpenVINO(tmp_path / 'model.onnx', CPU).run({'x': torch.from_numpy(XS)}).values()
    np.testing.assert_allclose(found.numpy(), run_onnx(model, {'x': XS})[0], rtol=tolerance, atol=0)


def test_fake_quantize_of_fp16_has_its_limits_in_fp32(tmp_path):
    model = by_hand(
        'f = Cast<to = 10>(x) a = QDQ(f) y = Cast<to = 1>(a)', initializers={'scale': np.float16(0.1)}, opset=19
    )
    onnx.save(model, tmp_path / 'model.onnx')
    typed = fake_quantize(copy(model))
    limits = [i for i in typed.graph.initializer if i.name.startswith('limit')]
    assert len(limits) == 2 and {i.data_type for i in limits} == {onnx.TensorProto.FLOAT}
    (found,) = OpenVINO(tmp_path / 'model.onnx', CPU).run({'x': torch.from_numpy(XS)}).values()
    np.testing.assert_allclose(found.numpy(), run_onnx(model, {'x': XS})[0], rtol=2**-10)


# ---- telemetry, threads, what is missing ----------------------------------------------------------------------------------

WATCHED = """
import socket, sys
def refused(*_, **__):
    raise SystemExit('it uses a socket')
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refused
from pathlib import Path
import torch
from utils.qat.vendors.openvino.session import OpenVINO
session = OpenVINO(Path(sys.argv[1]), torch.device('cpu'))
session.run({'images': torch.zeros(1, 3, 64, 64)})
print(sys.modules['openvino_telemetry'], session.settings['INFERENCE_NUM_THREADS'])
print(session.compiled.get_property('INFERENCE_NUM_THREADS'), session.compiled.get_property('INFERENCE_PRECISION_HINT'))
"""


def test_it_tells_nobody(exports, tmp_path):
    """No file under the home folder, no look-up, no telemetry; threads are as many as PyTorch's, and the precision is stated."""
    home = tmp_path / 'home'
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if k != 'CI'}
    environment = {**kept, 'HOME': str(home), 'OMP_NUM_THREADS': '1', 'MPLCONFIGDIR': str(tmp_path / 'mpl')}
    words = [sys.executable, '-c', WATCHED, exports / 'float.onnx']
    done = subprocess.run(words, cwd=TREE, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr[-2000:]
    assert done.stdout.split('\n')[:2] == ['None 1', "1 <Type: 'float32'>"]
    assert not list(home.rglob('*'))


FORGOTTEN = """
import signal, sys, threading
from pathlib import Path
import torch
from utils.qat.vendors.openvino.session import OpenVINO
sessions = [OpenVINO(Path(sys.argv[1]), torch.device('cpu'))]
sessions[0].run({'images': torch.zeros(1, 3, 64, 64)})
thread = threading.Thread(target=sessions.clear)
thread.start()
thread.join()
signal.signal(signal.SIGUSR1, lambda *_: print('alive'))
signal.raise_signal(signal.SIGUSR1)
"""


def test_a_signal_is_harmless_after_a_session_ends_in_another_thread(exports):
    """OpenVINO alone crashes here, see one_core."""
    assert fresh('-c', FORGOTTEN, exports / 'float.onnx').strip() == 'alive'


ALL_INT8 = 'INT8: 42 of 42 convolutions'  # of the small model


@pytest.fixture(scope='module')
def whole(small, tmp_path_factory):
    """Folder of model.onnx and of model.xml with its model.bin."""
    folder = tmp_path_factory.mktemp('openvino')
    (folder / 'model.pt').write_bytes(small.quantized.read_bytes())
    arguments = ['--include', 'onnx', 'openvino', 'openvino_end2end', '--imgsz', SIDE, '--simplify']
    said = command('export_qat.py', '--weights', folder / 'model.pt', *arguments)
    assert said.count(ALL_INT8) == 2 and 'batch 1 only' in said
    return folder


def test_files_of_openvino(whole, small):
    """Weights in INT8, the metadata of the export, the values of the .onnx file; and nothing else is left."""
    assert {f.suffix for f in whole.iterdir()} == {'.pt', '.onnx', '.xml', '.bin', ''}
    weights = sum(i.numel() for i in CheckpointFile(whole / 'model.pt').load_quantized()[0].parameters())
    assert weights < (whole / 'model.bin').stat().st_size < 1.5 * weights
    ours, theirs = (FileModel(compiled(whole / f'model.{suffix}')) for suffix in ('xml', 'onnx'))
    images = made_images(1, (SIDE, SIDE))
    assert ours.names == theirs.names == small.quantized_model().names and ours.stride == theirs.stride == 32
    assert torch.equal(ours(images), theirs(images))
    assert str(ours.session.int8) == str(theirs.session.int8)
    inside = open_file(whole / 'model-end2end.xml')
    assert inside.end2end and len(inside(images)) == 1


def test_the_folder_for_ultralytics(whole, small, tmp_path):
    """The same pair, and the metadata as YAML; such a folder of another program is not replaced."""
    folder = whole / 'model_openvino_model'
    assert {f.name for f in folder.iterdir()} == {'model.xml', 'model.bin', 'metadata.yaml'}
    assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in ('model.xml', 'model.bin'))
    names = small.quantized_model().names
    found = yaml.safe_load((folder / 'metadata.yaml').read_text())
    assert (found['stride'], found['task'], found['names']) == (32, 'detect', names)
    assert (found['batch'], found['channels'], found['imgsz'], found['dynamic']) == (1, 3, [SIDE, SIDE], False)
    (tmp_path / 'mine.pt').write_bytes(small.quantized.read_bytes())
    (tmp_path / 'mine_openvino_model').mkdir()
    theirs = tmp_path / 'mine_openvino_model' / 'metadata.yaml'
    theirs.write_text('author: another program')
    said = command('export_qat.py', '--weights', tmp_path / 'mine.pt', '--include', 'openvino', '--imgsz', SIDE, code=2)
    assert f'{theirs}: is there already' in said and not (tmp_path / 'mine.xml').exists()
    theirs.unlink()
    again = 'export_qat.py', '--weights', tmp_path / 'mine.pt', '--imgsz', SIDE, '--include', 'openvino'
    command(*again, 'onnx')
    command(*again, '--dynamic')
    assert yaml.safe_load(theirs.read_text())['dynamic'], 'the folder of the same model is replaced'


def test_the_audit_names_what_is_in_float(tmp_path):
    """Here the coefficients of masks."""
    exported('small-seg', tmp_path / 'model.onnx')
    said = command('scripts/audit_onnx.py', tmp_path / 'model.onnx', '--openvino', '--json', tmp_path / 'audit.json')
    assert 'In float, as the file has it: 3' in said and 'output of the head' in said
    assert 'In float, though quantized in the file: 0' in said and '| Convolution ' in said


def test_lost_convolutions_are_named(whole, tmp_path):
    """A convolution whose weight is quantized and whose data is not."""
    model = onnx.load(whole / 'model.onnx')
    conv = next(n for n in model.graph.node if n.name == '/model.1/conv/Conv')
    made = {name: n for n in model.graph.node for name in n.output}
    conv.input[0] = made[made[conv.input[0]].input[0]].input[0]
    onnx.save(model, tmp_path / 'lost.onnx')
    found = compiled(tmp_path / 'lost.onnx').int8
    assert [layer.name for layer in found.lost] == ['/model.1/conv/Conv']
    assert str(found).endswith('(1 that should not be float: /model.1/conv/Conv)')


def cut(content):
    return content[: len(content) // 2]


BAD_FILES = {  # name → the .xml and the .bin, made of whole ones, and what the line says
    'alone': (lambda xml, weights: (xml, None), 'alone.bin, which has its weights, is not beside it'),
    'page': (lambda xml, weights: (b'<html></html>', b''), "no model of OpenVINO's"),
    'cut': (lambda xml, weights: (xml, cut(weights)), 'OpenVINO cannot read it'),
    'torn': (lambda xml, weights: (cut(xml), weights), 'OpenVINO cannot read it'),
}


@pytest.mark.parametrize('name', BAD_FILES)
def test_bad_files_are_one_line(whole, small, tmp_path, name):
    make, says = BAD_FILES[name]
    contents = make(*((whole / f'model.{suffix}').read_bytes() for suffix in ('xml', 'bin')))
    for suffix, content in zip(('xml', 'bin'), contents):
        if content is not None:
            (tmp_path / f'{name}.{suffix}').write_bytes(content)
    file = tmp_path / f'{name}.xml'
    said = command('val_trt.py', '--weights', file, '--data', small.data, '--device', 'cpu', code=2)
    assert says in said and file.name in said and 'src/' not in said


def test_the_plugin_is_refused_with_the_way_out(exports, tmp_path):
    export_end2end(exports / 'int8.onnx', tmp_path / 'model.onnx', Nms('plugin'))
    with pytest.raises(QatError, match='which TensorRT alone has; for OpenVINO export it with --nms standard'):
        OpenVINO(tmp_path / 'model.onnx', CPU)
