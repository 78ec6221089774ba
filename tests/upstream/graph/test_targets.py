"""Laws of the targets: an engine runs all that is quantized for it in integers, and the file computes what PyTorch simulates."""

from collections import Counter

import onnx
import pytest
import torch
from conftest import REPO
from helpers.faults import sampled
from helpers.graphs import assert_same_outputs, averages, copy, in_onnxruntime, unread
from helpers.segmenters import BACKBONE, HEADS
from helpers.zoo import DUAL, SEGMENT, SINGLE, SMALL, build, calibrated, command, full, fuse, image, single
from models.common import CBFuse

from models.deploy.agreement import made_images
from models.deploy.formats.deepstream import deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import ACTIVATIONS
from models.quantize.convert import find_twins
from models.quantize.quantizers import named_quantizers
from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import option_of
from utils.qat.config.tables import DEFAULT_TARGET, TARGETS, load_target
from utils.qat.core.errors import QatError
from utils.qat.graph.audit import audit, finding_counts
from utils.qat.graph.audit_rules import HEAD
from utils.qat.graph.onnx_graph import QDQ, constants, count_qdq, has_zero_points, metadata_value
from utils.qat.graph.passes import unsigned_activations
from utils.qat.vendors.graphs import graph_of
from utils.qat.vendors.openvino.session import MeasuredOpenVINO, OpenVINO

TENSORRT, OPENVINO, ORT = map(load_target, ('tensorrt', 'openvino', 'onnxruntime'))
CPU = torch.device('cpu')


NETWORKS = {  # of three strides, beside those of upstream's configs
    'small': ('demo', SMALL),
    'small-seg': ('demo-seg', {'backbone': BACKBONE, 'head': HEADS['Segment']}),
    'small-dseg': ('demo-seg', {'backbone': BACKBONE, 'head': HEADS['DSegment']}),
}
ALWAYS = ['small', 'small-seg']
LARGE = sampled([*DUAL, *SINGLE, *full('yolov9', 'gelan'), *SEGMENT], 99, 98)  # all with --faults


def prepared(name, target=TENSORRT, tie=True, **changes):
    """(Conversion, model) of a network with random weights, quantized for `target` and calibrated."""
    name, smaller = NETWORKS.get(name, (name, {}))
    model = single(name, **smaller, **changes)
    return calibrated(model, [image(batch=2)], target, tie=tie), model


MADE = {}  # what was asked for → what was done, and the file


def exported(name, file, target=TENSORRT, **options):
    """(Conversion, graph) of such a network, exported to `file`; made once in a process."""
    asked = repr((name, target.name, options))
    if asked not in MADE:
        done, model = prepared(name, target, **options)
        export_onnx(model, file, (64, 64), simplify=True, target=target)
        MADE[asked] = done, file.read_bytes()
    file.write_bytes(MADE[asked][1])
    return MADE[asked][0], onnx.load(file)


def assert_nothing_to_improve(done, graph, masks=0):
    """TensorRT: all is INT8 but the coefficients of masks. DFL is no convolution."""
    found = audit(graph)
    assert found.findings == [] and set(finding_counts(found).values()) == {0} and done.unknown == {}
    assert sum(c.int8 for c in found.convs) == list(done.swapped.values()).count('Conv2d')
    assert [c.reason for c in found.convs if not c.int8] == [HEAD] * masks


@pytest.mark.parametrize('name', [*ALWAYS, *full('small-dseg'), *LARGE])
def test_nothing_is_left_to_improve(name, tmp_path):
    """The judge is the audit, which reads the ONNX file and knows nothing of how scales were shared."""
    assert_nothing_to_improve(*exported(name, tmp_path / 'model.onnx'), masks=3 * name.endswith('seg'))


@pytest.mark.parametrize('activation, op', sampled([('nn.ReLU()', 'Relu'), ('nn.LeakyReLU(0.1)', 'LeakyRelu')], 2, 1))
def test_other_activations(activation, op, tmp_path):
    done, graph = exported('small', tmp_path / 'model.onnx', activation=activation)
    assert_nothing_to_improve(done, graph)
    assert {n.op_type for n in graph.graph.node} & {'Relu', 'LeakyRelu'} == {op}


@pytest.mark.parametrize(
    'network',
    [*ALWAYS, *LARGE, *sampled(list(ACTIVATIONS), 4, 1)],
    ids=lambda network: network if isinstance(network, str) else network.__name__,
)
def test_onnxruntime_computes_every_quantized_convolution_in_integers(network, tmp_path):
    """In each network, and with each activation function. The configs yolov9 and gelan have ReLU, all others SiLU."""
    other = not isinstance(network, str)
    name, changes = ('small', {'activation': f'nn.{network.__name__}()'}) if other else (network, {})
    done, graph = exported(name, tmp_path / 'model.onnx', ORT, **changes)
    assert audit(graph, graph_of('onnxruntime').RULES).findings == [] and not unread(onnx.load(tmp_path / 'model.onnx'))
    ran, kinds = in_onnxruntime(tmp_path / 'model.onnx', tmp_path), Counter(done.swapped.values())
    assert ran['QLinearConv'] == kinds['Conv2d'] + averages(graph)
    assert ran['QLinearSigmoid'] == kinds['SiLU'] or kinds['Sigmoid']
    assert ran['Conv'] == len(done.kept_float) - 1, 'float by design: outputs of the head; DFL is no convolution there'
    assert not {'QuickGelu', 'AveragePool', 'QLinearAveragePool', 'Relu'} & ran.keys()
    assert not other or kinds[network.__name__] > 30, 'the network has it'


def test_a_file_for_tensorrt_stays_in_float_there(tmp_path):
    """Without Q/DQ around SiLU: the reason for the target. Its audit names each convolution."""
    done, graph = exported('small', tmp_path / 'model.onnx')
    assert not in_onnxruntime(tmp_path / 'model.onnx', tmp_path)['QLinearConv']
    open_ends = [
        finding for finding in audit(graph, graph_of('onnxruntime').RULES).findings if finding.kind == 'open end'
    ]
    convs = Counter(done.swapped.values())['Conv2d']
    assert len(open_ends) == convs - 6 and audit(graph).findings == [], 'the outputs of the head are no ends of it'


@pytest.mark.parametrize('name', [*ALWAYS, *LARGE])
def test_openvino_computes_all_of_the_head_in_integers(name, tmp_path):
    """And all else that is quantized. In float: the coefficients of masks, and DFL, which is no convolution there."""
    file = tmp_path / 'model.onnx'
    done, graph = exported(name, file, OPENVINO)
    assert audit(graph, graph_of('openvino').RULES).findings == []
    assert len(done.kept_float) == (4 if name.endswith('seg') else 1)
    if MeasuredOpenVINO.missing('openvino', CPU):
        pytest.skip('no OpenVINO')
    session = OpenVINO(file, CPU)
    session.run({'images': made_images(1, (64, 64))})
    assert not session.int8.lost and len(session.int8.by_design) == len(done.kept_float) - 1


def test_a_detector_has_unsigned_integers_for_openvino_only_behind_a_relu(tmp_path):
    """So a file of SiLU goes to TensorRT as well, a file of ReLU does not."""
    for activation, unsigned in (('nn.SiLU()', False), ('nn.ReLU()', True)):
        _, graph = exported('small', tmp_path / 'model.onnx', OPENVINO, activation=activation)
        assert has_zero_points(graph) == unsigned and audit(graph, graph_of('openvino').RULES).findings == []
        values = constants(graph)
        zeros = {values[n.input[2]].dtype.name: values[n.input[2]].max() for n in graph.graph.node if n.op_type in QDQ}
        assert zeros == {'int8': 0, **({'uint8': 0} if unsigned else {})}, 'any other is float on a CPU with AMX'
        assert any(finding.kind == 'zero point' for finding in audit(graph).findings) == unsigned
    with pytest.raises(QatError, match='behind ReLU; quantize with --target tensorrt'):
        OPENVINO.require_tensorrt('--half', zero_points=True)
    OPENVINO.require_tensorrt('--half', zero_points=False)


SUM = {  # the small network with a CBFuse, and a block behind it
    'backbone': [
        *SMALL['backbone'][:7],
        [4, 1, 'CBLinear', [[16]]],
        [[7, 3], 1, 'CBFuse', [[0]]],
        [-1, 1, 'RepNCSPELAN4', [16, 16, 8, 1]],
    ],
    'head': [[[9, 4, 6], 1, 'DDetect', ['nc']]],
}


BEHIND, SUM_ITSELF = 1, 0


@pytest.mark.parametrize(
    'target, which, simplify',
    [(OPENVINO, BEHIND, True), *((target, SUM_ITSELF, False) for target in (TENSORRT, OPENVINO, ORT))],
)
def test_what_is_in_float_by_choice_is_no_fault_and_neither_is_the_arithmetic_of_shapes(
    target, which, simplify, tmp_path
):
    """A sum; or the block behind it, where the sum reads INT8 and its reader wants float. Files that are not simplified have arithmetic."""
    model = fuse(build('demo', **SUM))
    layer = which + next(m.i for m in model.model if isinstance(m, CBFuse))
    kept = [path for path in find_twins(model, target) if f'{path}.'.startswith(f'model.{layer}.')]
    assert kept
    calibrated(model, [image()], target, kept)
    export_onnx(model, tmp_path / 'model.onnx', (64, 64), simplify=simplify, target=target, kept_float=kept)
    assert audit(onnx.load(tmp_path / 'model.onnx'), graph_of(target.name).RULES).findings == []


@pytest.mark.parametrize(
    'options, there',
    [({}, True), ({'opset': 19, 'half': True}, False), ({'layout': deepstream_layout}, False)],
    ids=['OpenVINO', 'FP16', 'DeepStream'],
)
def test_files_for_tensorrt_have_no_groups_whatever_the_target(tmp_path, options, there):
    """FP16 files and DeepStream's are for TensorRT, which computes them wrongly."""
    _, model = prepared('small', OPENVINO)
    export_onnx(model, tmp_path / 'model.onnx', (64, 64), target=OPENVINO, **options)
    assert bool(finding_counts(audit(onnx.load(tmp_path / 'model.onnx')))['groups']) == there


def test_files_of_two_checkpoints_for_openvino(small, tmp_path):
    """One for TensorRT is as fast there as one for OpenVINO, and nothing is said; the first mistake shows before the work."""
    if MeasuredOpenVINO.missing('openvino', CPU):
        pytest.skip('no OpenVINO')
    for source, name in ((small.single, 'float.pt'), (small.quantized, 'int8.pt')):
        (tmp_path / name).write_bytes(source.read_bytes())
    weights = [tmp_path / 'float.pt', tmp_path / 'int8.pt']
    said = command('export_qat.py', '--weights', *weights, '--include', 'onnx', 'openvino', '--imgsz', 64)
    assert '--target openvino' not in said and said.count('.bin, ') == 2
    assert {f.name for f in tmp_path.iterdir()} >= {'float.onnx', 'float.xml', 'int8.onnx', 'int8.xml'}
    said = command('export_qat.py', '--weights', weights[0], tmp_path / 'none.pt', code=2)
    assert 'none.pt' in said and 'exporting' not in said, 'a mistake shows before the work'


def test_unsigned_is_the_same_number(tmp_path):
    """The same outputs to the bit: q + 128 with zero point 128 stands for the same value."""
    _, graph = exported('small', tmp_path / 'model.onnx')
    unsigned = unsigned_activations(copy(graph))
    onnx.checker.check_model(unsigned, full_check=True)
    assert_same_outputs(unsigned, graph, {'images': image(64).numpy()})
    assert count_qdq(unsigned) == count_qdq(graph)
    values = constants(unsigned)
    of_weights, of_activations = set(), set()
    for n in unsigned.graph.node:
        if n.op_type == 'DequantizeLinear':
            (of_weights if n.input[0] in values else of_activations).add(values[n.input[2]].dtype.name)
    assert (of_weights, of_activations) == ({'int8'}, {'uint8'})


@pytest.mark.parametrize('name', TARGETS)
def test_a_file_names_its_target(name, tmp_path):
    _, graph = exported('small', tmp_path / 'model.onnx', load_target(name))
    assert metadata_value(graph, 'target', 'tensorrt') == name


def test_the_page_that_help_names_describes_each_target_that_places_otherwise():
    said, default = option_of(QuantizeConfig, 'target').help, load_target(DEFAULT_TARGET)
    page = (REPO / 'docs/placement.md').read_text(encoding='utf-8')
    assert 'docs/placement.md' in said
    assert [
        name for name in TARGETS if not load_target(name).places_as(default) and f'--target {name}' not in page
    ] == []


@pytest.mark.parametrize('name', ['../other', 'target', '', 7, ['tensorrt'], None])
def test_a_target_that_a_file_makes_up_is_refused(name):
    """No module is imported by a name from a file."""
    with pytest.raises(QatError, match='not tensorrt, onnxruntime, openvino'):
        load_target(name)


def test_scales_and_zero_points_of_the_file_are_the_models(tmp_path):
    """Bit for bit, and the fixed scale of the sigmoid."""
    _, model = prepared('small', ORT)
    export_onnx(model, tmp_path / 'model.onnx', (64, 64), simplify=True, target=ORT)
    graph = onnx.load(tmp_path / 'model.onnx')
    values = constants(graph)
    wanted = {(q.scale.item(), q._zero_point.item() + 128) for _, q in named_quantizers(model) if q._axis is None}
    found = {
        tuple(values[name].item() for name in n.input[1:])
        for n in graph.graph.node
        if n.op_type == 'QuantizeLinear' and n.input[0] not in values
    }
    assert found == wanted | {(1 / 256, 0)} and len({zero for _, zero in wanted}) > 10
    behind = {n.output[0] for n in graph.graph.node if n.op_type == 'Sigmoid'}
    scales = {
        float(values[n.input[1]]) for n in graph.graph.node if n.op_type == 'QuantizeLinear' and n.input[0] in behind
    }
    assert scales == {1 / 256}


@torch.no_grad()
def test_values_far_below_zero_widen_no_range():
    """SiLU is nearly 0 there."""
    model = single('demo', **SMALL)
    model.model[0].conv.bias.data[0] = -1000.0
    calibrated(model, [image(batch=2)], ORT, tie=False, calib_method='max')
    assert model.model[0].act.input_quantizer._amax < 100
