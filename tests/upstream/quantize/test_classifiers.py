"""Classifiers keep the laws of detectors: quantizers off, reload, scale groups, audit, ONNX Runtime, OpenVINO."""

import shutil
from copy import deepcopy

import onnx
import pytest
import torch
from helpers import classifiers
from helpers.classifiers import NETWORKS, images
from helpers.faults import sampled
from helpers.graphs import averages, in_onnxruntime
from helpers.zoo import deployed

from models.deploy.agreement import Reference
from models.deploy.formats.onnx import export_onnx
from models.quantize import checkpoint
from models.quantize.blocks import QuantResidual, WeightedTwin
from models.quantize.convert import float_blocks
from models.quantize.network import layers
from models.quantize.quantizers import named_quantizers, quantizers_off
from models.quantize.scales import shared_scales
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError
from utils.qat.core.machine import int8_sums_overflow
from utils.qat.graph.audit import audit
from utils.qat.vendors.graphs import graph_of
from utils.qat.vendors.load import open_file
from utils.qat.vendors.openvino.session import MeasuredOpenVINO, OpenVINO
from utils.qat.vendors.pytorch.aoti import compiled_layers


def int8_convs(quantized):
    return sum(isinstance(m, torch.nn.Conv2d) and isinstance(m, WeightedTwin) for m in quantized.modules())


@pytest.fixture(params=NETWORKS, scope='module')
def network(request, tmp_path_factory):
    """Name of a network, its float model, and the calibrated one."""
    model = classifiers.loaded(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, model, classifiers.quantized(deepcopy(model))


@torch.no_grad()
def test_loading_folds_batch_norms_and_changes_no_score(network):
    name, model, _ = network
    expected = classifiers.build(name)(images())
    torch.testing.assert_close(model(images()), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert model.names == {i: f'class {i}' for i in range(classifiers.CLASSES)} and [*layers(model)]


@torch.no_grad()
def test_quantizers_off_is_float_and_a_reload_is_the_same(network, tmp_path):
    _, model, quantized = network
    with quantizers_off(quantized):
        assert torch.equal(quantized(images()), model(images()))
    assert not torch.equal(quantized(images()), model(images()))
    file = tmp_path / 'q.pt'
    checkpoint.save_model(file, quantized, {}, '0' * 64)
    again, _ = checkpoint.CheckpointFile(file).load_quantized()
    assert torch.equal(again(images()), quantized(images()))
    assert shared_scales(again) == shared_scales(quantized)


def test_exported_graph_has_no_finding_and_runs_in_integers(network, tmp_path):
    """In ONNX Runtime it equals PyTorch, in OpenVINO each quantized layer is in integers."""
    _, model, quantized = network
    kept = list(float_blocks(quantized))
    done = export_onnx(quantized, tmp_path / 'q.onnx', (classifiers.SIZE,) * 2, simplify=True, kept_float=kept)
    assert not audit(onnx.load(tmp_path / 'q.onnx')).findings
    assert done.errors['logits'] < done.limit
    file = open_file(tmp_path / 'q.onnx')
    assert file.by_toolkit and file.task.name == 'classify' and file.names == model.names
    assert file(images(1)).shape == (1, classifiers.CLASSES)
    if not MeasuredOpenVINO.missing('openvino', torch.device('cpu')):
        file = open_file(tmp_path / 'q.onnx', backend='openvino')
        file(images(1))
        assert f'INT8: {int8_convs(quantized)} of' in '\n'.join(file.notes)


def test_every_weighted_layer_is_int8_or_has_a_reason(network):
    _, _, quantized = network
    kept = float_blocks(quantized)
    for path, m in quantized.named_modules():
        if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear)):
            assert isinstance(m, WeightedTwin) != (path in kept), path


@pytest.mark.parametrize(
    'change, says',
    [
        (lambda model: setattr(model, 'names', {0: 'a', 1: 'b'}), '2 names of classes and 7 scores'),
        (lambda model: setattr(model, 'fc', torch.nn.Unflatten(1, (8, 8, 8))), 'one score for each class'),
    ],
    ids=['names', 'maps'],
)
def test_what_is_no_classifier_is_refused(change, says, tmp_path):
    model = classifiers.build('resnet18')
    change(model)
    with pytest.raises(QatError, match=says):
        checkpoint.CheckpointFile(classifiers.save(model, tmp_path / 'model.pt')).load_float()


FOR_ENGINES = {'resnet18', 'mobilenet_v2', 'mobilenet_v3_small'}  # the others with --faults


@pytest.fixture(
    params=[n if n in FOR_ENGINES else pytest.param(n, marks=pytest.mark.faults) for n in NETWORKS], scope='module'
)
def model(request, tmp_path_factory):
    return classifiers.loaded(request.param, tmp_path_factory.mktemp(request.param))


def exported(model, file, target):
    """The model quantized for `target`, and its graph in `file`. PyTorch and ONNX Runtime agree, else there is none."""
    quantized = classifiers.quantized(deepcopy(model), target=target.name)
    kept = list(float_blocks(quantized, target))
    export_onnx(quantized, file, (classifiers.SIZE,) * 2, simplify=True, target=target, kept_float=kept)
    assert not audit(onnx.load(file), graph_of(target.name).RULES).findings
    return quantized


def test_onnxruntime_computes_every_quantized_convolution_in_integers(model, tmp_path):
    quantized = exported(model, tmp_path / 'q.onnx', load_target('onnxruntime'))
    ran = in_onnxruntime(tmp_path / 'q.onnx', tmp_path)
    convs = sum(isinstance(m, torch.nn.Conv2d) for m in quantized.modules())
    assert ran['QLinearConv'] == int8_convs(quantized) + averages(onnx.load(tmp_path / 'q.onnx'))
    assert ran['Conv'] + ran['FusedConv'] == convs - int8_convs(quantized), 'float by design'
    assert ran['QLinearAdd'] == sum(isinstance(m, QuantResidual) for m in quantized.modules())


def test_openvino_takes_unsigned_integers_behind_a_relu_and_fuses_each_sum(model, tmp_path):
    """As NNCF's files do. All else is signed with zero point 0, and each quantized layer is in integers."""
    pytest.importorskip('openvino')
    quantized = exported(model, tmp_path / 'q.onnx', load_target('openvino'))
    signs = {}

    def note(quantizer, inputs):
        signs.setdefault(quantizer, set()).update((inputs[0] < 0).unique().tolist())

    quantizers = [q for _, q in named_quantizers(quantized) if q._axis is None]
    hooks = [q.register_forward_pre_hook(note) for q in quantizers]
    quantized(images(8, seed=1))
    for hook in hooks:
        hook.remove()
    for q in quantizers:
        assert q._zero_point == (-128 if q.shifts else 0) and (True not in signs[q] if q.shifts else True)
    if any(isinstance(m, (torch.nn.ReLU, torch.nn.ReLU6)) for m in quantized.modules()):
        assert any(q.shifts for q in quantizers)
    for unsigned in (q for q in quantizers if q.shifts):
        assert unsigned(torch.tensor([-1.0, 1e9])).tolist() == pytest.approx([0, 255 * unsigned.scale.item()])
    session = OpenVINO(tmp_path / 'q.onnx', torch.device('cpu'))
    session.run({'images': images(1)})
    assert not session.int8.lost and len(session.int8.convs) - len(session.int8.by_design) == int8_convs(quantized)
    sums = sum(isinstance(m, QuantResidual) for m in quantized.modules())
    alone = [
        layer
        for layer in session.int8.layers
        if layer.kind in ('Subgraph', 'Eltwise') and any(name.endswith('/Add') for name in layer.operators)
    ]
    assert not sums or not alone, 'a convolution takes each Add along'


@pytest.mark.parametrize('name', sampled(NETWORKS, 9))
def test_an_exported_program_computes_what_pytorch_computes(name, tmp_path):
    model = classifiers.quantized(classifiers.loaded(name, tmp_path))
    deployed('pt2', model, tmp_path / 'q.pt2', imgsz=(classifiers.SIZE,) * 2, dynamic=True)
    file = open_file(tmp_path / 'q.pt2')
    assert file.by_toolkit and file.task.name == 'classify' and file.names == model.names
    reference = Reference(model, 3, (classifiers.SIZE,) * 2)
    reference.require_agreement(file(reference.images), 'the program', 'FP32')


@pytest.mark.faults
@pytest.mark.skipif(not shutil.which('g++'), reason='no g++')
@pytest.mark.skipif(int8_sums_overflow(), reason='AOTInductor has no INT8 on a CPU without VNNI')
def test_a_package_computes_every_quantized_layer_in_integers(tmp_path):
    """Convolutions, depthwise ones and linear layers."""
    pytest.importorskip('torchao')
    model = classifiers.quantized(classifiers.loaded('mobilenet_v3_small', tmp_path))
    _, said, _ = deployed('aoti', model, tmp_path / 'q.pt2', imgsz=(classifiers.SIZE,) * 2).lines
    number = sum(isinstance(m, WeightedTwin) for m in model.modules())
    assert compiled_layers(tmp_path / 'q.pt2')[0] == number and said.startswith(f'INT8: {number} of ')


def test_a_network_that_is_not_known_is_refused_in_one_line(tmp_path):
    import torchvision

    file = classifiers.save(torchvision.models.squeezenet1_0(num_classes=7), tmp_path / 's.pt')
    with pytest.raises(QatError, match='torchvision.models.squeezenet.SqueezeNet'):
        checkpoint.CheckpointFile(file).load_float()
