"""Laws of the targets: an engine runs all that is quantized for it in integers, and the file computes what PyTorch simulates."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from faults import sampled
from zoo import DUAL, SEGMENT, SINGLE, SMALL, build, command, fuse, image, settings

from models.deploy.onnx_export import export_onnx
from models.quantize.calibration.calibrate import calibrate
from models.quantize.convert import quantize_model
from models.quantize.reparameterize import reparameterize
from models.quantize.scales import tie_scales
from utils.qat.config.targets import TARGETS
from utils.qat.core.errors import QatError
from utils.qat.graph.audit import audit
from utils.qat.graph.onnx_graph import constants, count_qdq
from utils.qat.graph.passes import unsigned_activations
from utils.qat.targets.target import load_target, target_of

ORT = load_target('onnxruntime')


def exported(name, file, target=ORT, **changes):
    """(Conversion, graph) of a model with random weights, quantized for `target` and exported to `file`."""
    model = build(name, **changes)
    if type(model.model[-1]).__name__.startswith(('Dual', 'Triple')):
        model = reparameterize(model).model
    done = quantize_model(fuse(model), activations=target.activations)
    tie_scales(model)
    calibrate(model, [image(batch=2)], settings())
    export_onnx(model, file, (64, 64), simplify=True, target=target)
    return done, onnx.load(file)


def in_onnxruntime(file, folder):
    """How often each operator stands in the graph that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / 'optimized.onnx'), 3
    onnxruntime.InferenceSession(file, options, providers=['CPUExecutionProvider'])
    return Counter(node.op_type for node in onnx.load(folder / 'optimized.onnx').graph.node)


def assert_in_integers(done, graph, file, folder):
    assert audit(graph, ORT.checks).findings == []
    ran, kinds = in_onnxruntime(file, folder), Counter(done.swapped.values())
    assert ran['QLinearConv'] == kinds['Conv2d'] and ran['QLinearSigmoid'] == kinds['SiLU']
    assert ran['Conv'] == len(done.kept_float), 'float by design: outputs of the head, and DFL'
    assert not ran['QuickGelu'] and not ran['AveragePool']


@pytest.mark.parametrize('name', sampled([*DUAL, *SINGLE, *SEGMENT], 14, 1))
def test_onnxruntime_computes_every_quantized_convolution_in_integers(name, tmp_path):
    """But for networks with ReLU (the configs yolov9 and gelan), which stay in float there: docs/onnxruntime.md."""
    done, graph = exported(name, tmp_path / 'model.onnx')
    assert_in_integers(done, graph, tmp_path / 'model.onnx', tmp_path)


def test_a_file_for_tensorrt_stays_in_float_there(tmp_path):
    """Without Q/DQ around SiLU: the reason for the target. Its audit names each convolution."""
    done, graph = exported('demo', tmp_path / 'model.onnx', load_target('tensorrt'), **SMALL)
    assert not in_onnxruntime(tmp_path / 'model.onnx', tmp_path)['QLinearConv']
    open_ends = [finding for finding in audit(graph, ORT.checks).findings if finding.kind == 'open end']
    assert len(open_ends) == Counter(done.swapped.values())['Conv2d'] and audit(graph).findings == []


def test_unsigned_is_the_same_number(tmp_path):
    """The same outputs to the bit: q + 128 with zero point 128 stands for the same value."""
    _, graph = exported('demo', tmp_path / 'model.onnx', load_target('tensorrt'), **SMALL)
    images = image(64).numpy()

    def run(model):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
        return session.run(None, {'images': images})[0]

    signed, before = run(graph), count_qdq(graph)
    graph = unsigned_activations(graph)
    onnx.checker.check_model(graph, full_check=True)
    assert np.array_equal(run(graph), signed) and count_qdq(graph) == before
    values = constants(graph)
    assert {values[n.input[2]].dtype.name for n in graph.graph.node if n.op_type == 'QuantizeLinear'} == {
        'int8',
        'uint8',
    }


@pytest.mark.parametrize('name', TARGETS)
def test_a_file_names_its_target(name, tmp_path):
    _, graph = exported('demo', tmp_path / 'model.onnx', load_target(name), **SMALL)
    assert target_of(graph).checks == load_target(name).checks


@pytest.mark.parametrize('name', ['../other', 'target', '', 7, ['tensorrt'], None])
def test_a_target_that_a_file_makes_up_is_refused(name):
    """No module is imported by a name from a file."""
    with pytest.raises(QatError, match='not tensorrt, openvino, onnxruntime'):
        load_target(name)


def test_from_checkpoint_to_file(small, tmp_path):
    """quantize, export, audit, eval; what is for TensorRT alone is refused in one line."""
    data, size = ('--data', small.data, '--imgsz', 64, '--device', 'cpu'), ('--imgsz', 64)
    command(
        *('qat.py', 'quantize', '--weights', small.single, *data, '--target', 'onnxruntime', '--calib-images', 6),
        *('--epochs', 1, '--iters', 1, '--batch-size', 4, '--workers', 0, '--project', tmp_path, '--name', 'run'),
    )
    said = command(
        *('qat.py', 'sensitive', '--weights', small.single, *data, '--target', 'onnxruntime', '--calib-images', 6),
        *('--metric', 'distortion', '--num-image', 2, '--workers', 0, '--project', tmp_path, '--name', 'costs'),
    )
    assert '--max-drop 0.2 --target onnxruntime' in said, 'the next command is for the same engine'
    best = tmp_path / 'run/weights/qat_best_single.pt'
    said = command('export_qat.py', '--weights', best, *size, '--dynamic', '--simplify')
    assert 'engine: ONNX Runtime; TensorRT reads no unsigned INT8' in said and 'trtexec' not in said
    file = best.with_suffix('.onnx')
    assert target_of(onnx.load(file)).name == 'onnxruntime'
    assert 'for ONNX Runtime' in command('scripts/audit_onnx.py', file, '--strict')
    aps = [
        command(
            'qat.py',
            'eval',
            '--weights',
            f,
            *data,
            '--square',
            '--workers',
            0,
            '--project',
            tmp_path,
            '--name',
            f.suffix,
        )
        for f in (best,)
    ]
    assert 'AP' in aps[0]
    for argv in (
        ('export_qat.py', '--weights', best, *size, '--trt', 11),
        ('export_yoloV9.py', '--weights', best, '--size', 64),
    ):
        assert '--target tensorrt' in command(*argv, code=2)


def test_scales_of_the_file_are_the_models(tmp_path):
    """The exporter checks it; here the fixed scale of the sigmoid is seen in the graph."""
    _, graph = exported('demo', tmp_path / 'model.onnx', **SMALL)
    values = constants(graph)
    behind = {n.output[0] for n in graph.graph.node if n.op_type == 'Sigmoid'}
    scales = {
        float(values[n.input[1]]) for n in graph.graph.node if n.op_type == 'QuantizeLinear' and n.input[0] in behind
    }
    assert scales == {1 / 256}


@torch.no_grad()
def test_values_far_below_zero_widen_no_range():
    """SiLU is nearly 0 there."""
    model = build('demo', **SMALL)
    model = reparameterize(model).model
    quantize_model(fuse(model), activations=ORT.activations)
    first = model.model[0]
    first.conv.bias.data[0] = -1000.0
    calibrate(model, [image(batch=2)], settings(calib_method='max'))
    assert first.act.input_quantizer._amax < 100
