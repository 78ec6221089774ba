"""Laws of .tflite files: all that is quantized runs in integers with the numbers of the checkpoint, and others can read the file.

Without the packages of requirements-litert.txt only the tests above `needs_litert` run.
"""

import json
import sys
import zipfile

import numpy as np
import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.faults import answer, sampled
from helpers.zoo import DUAL, SEGMENT, SINGLE, SMALL, deployed

from models.deploy.decomposed import GriddedWeight, StoredWeight
from models.quantize.blocks import QuantResidual
from models.quantize.quantizers import UNIT_SCALE, named_quantizers
from test_targets import prepared
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError
from utils.qat.vendors.litert.session import METADATA, LiteRT, load_litert, read_metadata
from utils.qat.vendors.litert.write import load_converter

LITERT, CPU, SIDE = load_target('litert'), torch.device('cpu'), 64
try:
    load_litert('--include litert')
    load_converter('--include litert')
    MISSING = ''
except QatError as e:
    MISSING = str(e)
needs_litert = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_each_addend_has_a_scale_and_what_moves_values_has_one():
    """The kernel of ADD reads two scales, that of CONCATENATION wants one."""
    done, model = prepared('demo', LITERT, **SMALL)
    adds = [m for m in model.modules() if isinstance(m, QuantResidual)]
    assert adds and all(m.add_quantizer is not m.branch_quantizer for m in adds)
    assert {'SiLU', 'Conv2d'} <= set(done.swapped.values())
    activations = [q for _, q in named_quantizers(model) if q._axis is None]
    assert all(q.shifts for q in activations) and len({q._zero_point.item() for q in activations}) > 10


def test_weights_for_its_converter_are_the_checkpoints_but_for_the_lowest_integer():
    _, model = prepared('demo', LITERT, **SMALL)
    lowest = 0
    for m in model.modules():
        if hasattr(m, 'weight_quantizer'):
            stored, gridded = (kind(m.weight_quantizer, 1.5 * m.weight) for kind in (StoredWeight, GriddedWeight))
            scale = stored.scale.view(-1, *[1] * (m.weight.dim() - 1))
            assert torch.equal(gridded(None), torch.where(stored.int8 == -128, -127 * scale, stored(None)))
            lowest += (stored.int8 == -128).sum().item()
    assert lowest, 'half as much again is beyond the range'


@pytest.mark.parametrize('package', ['ai_edge_litert', 'litert_torch'])
def test_a_missing_package_is_one_line_that_installs_it(package, small, tmp_path, capfd, monkeypatch):
    for name in [name for name in sys.modules if name.partition('.')[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    weights = tmp_path / 'float.pt'
    weights.write_bytes(small.single.read_bytes())
    code, line = answer(
        'export_qat.py', ('--weights', weights, '--include', 'litert', '--imgsz', SIDE), capfd, tmp_path
    )
    assert code == 2 and line.endswith('pip install --no-deps -r requirements-litert.txt')
    assert (REPO / 'requirements-litert.txt').is_file()


def with_metadata(file, member=METADATA, content=b'{"stride": "32", "names": "{0: \'a\'}"}'):
    """A file with a zip file behind it, as .tflite files carry their metadata."""
    file.write_bytes(b'\x1c\0\0\0TFL3' + bytes(100))
    with zipfile.ZipFile(file, 'a') as archive:
        archive.writestr(member, content)
    return file


def test_metadata_are_texts(tmp_path):
    """Values of Ultralytics' files, which are of any type, become texts too."""
    assert read_metadata(with_metadata(tmp_path / 'a.tflite')) == {'stride': '32', 'names': "{0: 'a'}"}
    other = with_metadata(tmp_path / 'b.tflite', content=json.dumps({'stride': 32, 'names': {'0': 'a'}}))
    assert read_metadata(other) == {'stride': '32', 'names': "{0: 'a'}"}


@pytest.mark.parametrize('content', [b'', b'[1, 2]', b'{', b'\xff\xfe', b'[' * 100_000, b'7'])
def test_metadata_that_are_none_are_left_out(content, tmp_path):
    assert read_metadata(with_metadata(tmp_path / 'a.tflite', content=content)) == {}
    assert read_metadata(with_metadata(tmp_path / 'b.tflite', 'other.json')) == {}


class Read:
    """The operators of a file as LiteRT lists them, (name, tensors), tensors with their type, scales, zero points and values."""

    def __init__(self, file):
        self.session = LiteRT(file, CPU)
        model = self.session.model
        self.tensors = {t['index']: t for t in model.get_tensor_details()}
        self.operators = [
            (op['op_name'], [self.tensors[i] for i in op['inputs'] if i >= 0], [self.tensors[i] for i in op['outputs']])
            for op in model._get_ops_details()
            if op['op_name'] != 'DELEGATE'
        ]

    def named(self, *names):
        return [op for op in self.operators if op[0] in names]

    def integers(self, names):
        """The weights of integer convolutions, channel by channel: scale and integers as bytes."""
        found = []
        for _, (_, weight, *_), _ in self.named(*names):
            if weight['dtype'] is np.int8 and weight['quantization_parameters']['scales'].size > 1:
                values, axis = (
                    self.session.model.get_tensor(weight['index']),
                    weight['quantization_parameters']['quantized_dimension'],
                )
                channels = np.moveaxis(values, axis, 0)
                found += [
                    (float(scale), sorted(channel.flatten().tolist()))
                    for scale, channel in zip(weight['quantization_parameters']['scales'], channels)
                ]
        return found


def exported(name, file, **changes):
    """(Conversion, model, what LiteRT says of its file) of a network with random weights."""
    done, model = prepared(name, LITERT, **changes)
    deployed('litert', model, file, imgsz=(SIDE, SIDE), target='litert')
    return done, model, Read(file)


@needs_litert
@pytest.mark.parametrize('name', sampled([*DUAL, *SINGLE, *SEGMENT], 14))
def test_all_that_is_quantized_runs_in_integers(name, tmp_path):
    """And no tensor is written in two scales: the only QUANTIZE is that of the images."""
    done, _, read = exported(name, tmp_path / 'model.tflite', **(SMALL if name == 'demo' else {}))
    kinds = list(done.swapped.values())
    convs = read.named('CONV_2D')
    integer = [op for op in convs if {t['dtype'] for t in (*op[1][:2], *op[2])} == {np.int8}]
    assert len(integer) == kinds.count('Conv2d') and len(convs) - len(integer) == len(done.kept_float)
    assert sum(ins[0]['dtype'] is np.int8 for _, ins, _ in read.named('LOGISTIC')) == kinds.count('SiLU')
    assert [ins[0]['dtype'] for _, ins, _ in read.named('QUANTIZE')] == [np.float32]
    assert not read.named('AVERAGE_POOL_2D') and read.session.notes == [
        f'INT8: {len(integer) + len(read.named("DEPTHWISE_CONV_2D"))} of {read.session.weighted} convolutions'
    ]


@needs_litert
def test_scales_zero_points_and_weights_are_the_checkpoints(tmp_path):
    """Bit for bit; the sigmoid's scale is fixed. An integer of -128 becomes -127."""
    _, model, read = exported('demo', tmp_path / 'model.tflite', **SMALL)
    wanted = {(q.scale.item(), q._zero_point.item()) for _, q in named_quantizers(model) if q._axis is None}
    found = {
        t['quantization']
        for name, ins, outs in read.operators
        for t in (ins[0], *outs)
        if t['dtype'] is np.int8 and name != 'DEQUANTIZE'
    }
    assert found == wanted | {(UNIT_SCALE, -128)}
    convs = [m for m in model.modules() if hasattr(m, 'weight_quantizer')]
    stored = [StoredWeight(m.weight_quantizer, m.weight) for m in convs]
    channels = [
        (scale.item(), sorted(channel.flatten().clamp(min=-127).tolist()))
        for each in stored
        for scale, channel in zip(each.scale, each.int8)
    ]
    assert sorted(read.integers(['CONV_2D'])) == sorted(channels)


@pytest.fixture(scope='module')
def written(small, tmp_path_factory):
    """A .tflite file of the small float model."""
    file = tmp_path_factory.mktemp('litert') / 'good.tflite'
    deployed('litert', small.float_model(), file, imgsz=(SIDE, SIDE))
    return file


@needs_litert
@pytest.mark.parametrize('share', [0, 0.1, 0.9])
def test_a_file_that_is_cut_short_is_refused_in_one_line(share, written, small, capfd, tmp_path):
    cut = tmp_path / 'cut.tflite'
    cut.write_bytes(written.read_bytes()[: int(share * written.stat().st_size)])
    scored = '--weights', cut, '--data', small.data, '--imgsz', SIDE, '--project', tmp_path / 'runs'
    code, line = answer('val_trt.py', (*scored, '--device', 'cpu'), capfd, tmp_path, leaves=['runs'])
    assert code == 2 and f'{cut}: LiteRT' in line


@needs_litert
def test_an_operator_that_litert_lacks_is_refused(written, tmp_path):
    """Custom operators are code of others."""
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(written))
    code = model.operatorCodes[0]
    code.builtinCode = code.deprecatedBuiltinCode = 32  # CUSTOM
    code.customCode = b'evil'
    flatbuffer_utils.write_model(model, str(tmp_path / 'custom.tflite'))
    with pytest.raises(QatError, match='LiteRT cannot run it: .*evil'):
        LiteRT(tmp_path / 'custom.tflite', CPU)


@needs_litert
def test_a_damaged_file_runs_or_is_refused(written, tmp_path):
    """Never a crash, for LiteRT meets a file in a process apart first."""
    rng, whole, file = np.random.default_rng(0), written.read_bytes(), tmp_path / 'damaged.tflite'
    refused = 0
    for _ in range(8):
        damaged = bytearray(whole)
        for at in rng.integers(0, min(len(whole), 60_000), 20):
            damaged[at] = rng.integers(256)
        file.write_bytes(damaged)
        try:
            LiteRT(file, CPU)
        except QatError as e:
            refused += str(e).startswith(f'{file}: LiteRT cannot run it: ')
    assert refused


@needs_litert
@pytest.mark.parametrize('name', sampled(['resnet18', 'mobilenet_v3_small', 'yolo'], 3))
def test_a_classifier_returns_what_pytorch_computes(name, tmp_path):
    """The export compares; its images are normalized, so they are not in 0..1."""
    model = classifiers.quantized(classifiers.loaded(name, tmp_path), target='litert')
    deployed('litert', model, tmp_path / 'model.tflite', imgsz=(SIDE, SIDE), target='litert')
    read = Read(tmp_path / 'model.tflite')
    assert read.session.int8 and list(read.session.signature().outputs.values()) == [[1, classifiers.CLASSES]]
