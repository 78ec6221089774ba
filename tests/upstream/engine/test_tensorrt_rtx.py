"""Every kind of exported graph through TensorRT-RTX: NVIDIA's ONNX parser and its compiler, which build an engine on a CPU.

Its networks are always strongly typed, as those of TensorRT 11. It does not read an engine back without a GPU (cudaError 35),
so what is looked at is the network that was parsed, and what the compiler says.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass

import onnx
import pytest
from helpers.faults import sampled
from helpers.graphs import FLOAT, INT8_BLOCK, between_quantized, copy, graph_of, node, with_values
from helpers.segmenters import CLASSES, NM, segmenter

from models.deploy.formats.deepstream import deepstream_layout
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from test_engine_layers import ends
from utils.qat.config.export import NMS_LIMITS, Nms, Pooling
from utils.qat.graph import onnx_graph
from utils.qat.graph.ends import add_nms
from utils.qat.vendors.tensorrt.engine.layer_rules import findings, is_qdq, is_reformat
from utils.qat.vendors.tensorrt.engine.layers import read_engine
from utils.qat.vendors.tensorrt.half import to_half

trt = pytest.importorskip(
    'tensorrt_rtx_bindings', reason='no TensorRT-RTX: ./install_dependencies.sh --tests (Linux x86_64 only)'
)
# A line of what the compiler lists when it is done; a convolution is a `correlation`, whatever its size and groups.
INT8_CONV = ('correlation', 'Int8')
KERNEL = re.compile(r'Name: .*?, LayerType: (\w+), Inputs: \[(.*?)\], Constants: ')


class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.said = []

    def log(self, severity, message):
        self.said.append((severity, message))


@dataclass
class Layer:
    """A layer of the parsed network, with the field names of an ONNX node."""

    op_type: str  # such as CONVOLUTION
    input: list  # names of tensors
    output: list
    types: list  # of the outputs, such as HALF


@dataclass
class Compiled:
    errors: list  # of the parser
    layers: list
    inputs: dict  # name → (type, shape)
    outputs: dict
    engine: int  # bytes, 0 if none was built
    kernels: list  # (kind, types of what it reads, constants aside) such as ('correlation', 'Int8')
    said: list  # by the compiler: warnings and errors
    listing: str  # of the kernels, among other notes


def tensors(get, number):
    """What `get` returns for 0 to `number` - 1, without the empty places."""
    return [t for t in map(get, range(number)) if t is not None]


def compile_graph(model):
    """Parse `model` and build an engine of it; an open batch axis gets a profile of 1 to 4."""
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(model.SerializeToString())
    layers = []
    for layer in tensors(network.get_layer, network.num_layers if parsed else 0):
        reads, makes = tensors(layer.get_input, layer.num_inputs), tensors(layer.get_output, layer.num_outputs)
        layers.append(
            Layer(layer.type.name, [t.name for t in reads], [t.name for t in makes], [t.dtype.name for t in makes])
        )
    inputs, outputs = (
        {t.name: (t.dtype.name, tuple(t.shape)) for t in found}
        for found in (tensors(network.get_input, network.num_inputs), tensors(network.get_output, network.num_outputs))
    )
    engine = None
    if parsed:
        config = builder.create_builder_config()
        profile = builder.create_optimization_profile()
        for name, (_, shape) in inputs.items():
            profile.set_shape(
                name, *((abs(shape[0]) * n, *shape[1:]) for n in ((1, 2, 4) if shape[0] == -1 else (1, 1, 1)))
            )
        config.add_optimization_profile(profile)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # list the kernels
        engine = builder.build_serialized_network(network, config)
    kernels = [
        (kind, *re.findall(r'Datatype: (\w+)', reads))
        for _, message in log.said
        for kind, reads in KERNEL.findall(message)
    ]
    said = [message for severity, message in log.said if severity <= trt.ILogger.Severity.WARNING]
    return Compiled(
        [str(parser.get_error(i)) for i in range(parser.num_errors)],
        layers,
        inputs,
        outputs,
        engine.nbytes if engine else 0,
        kernels,
        said,
        '\n'.join(message for _, message in log.said),
    )


def assert_compiled(graph, done, int8):
    """Check a compiled export; `int8`: its number of INT8 convolutions."""
    assert done.errors == [] and done.engine > 0
    kinds = Counter(layer.op_type for layer in done.layers)
    assert (kinds['QUANTIZE'], kinds['DEQUANTIZE']) == onnx_graph.count_qdq(graph)
    assert kinds['CONVOLUTION'] == [n.op_type for n in graph.graph.node].count('Conv')
    half = any(i.data_type == onnx.TensorProto.FLOAT16 for i in graph.graph.initializer)
    convs = [layer.types[0] for layer in done.layers if layer.op_type == 'CONVOLUTION']
    assert set(convs) == {'HALF' if half else 'FLOAT'}
    between = between_quantized(done.layers, 'DEQUANTIZE', 'QUANTIZE')
    dequantized = {name for layer in done.layers if layer.op_type == 'DEQUANTIZE' for name in layer.output}
    sums = [layer for layer in between if layer.op_type == 'ELEMENTWISE' and dequantized.issuperset(layer.input)]
    in_fp32 = {name for layer in sums for name in (*layer.input, *layer.output)}
    assert len(in_fp32) == 3 * len(sums) and bool(sums) == bool(int8)
    for layer in between:
        floats = 'FLOAT' if in_fp32.issuperset(layer.output) or not half else 'HALF'
        assert set(layer.types) <= {floats, 'INT8', 'INT64'}
    assert not int8 or {'CONVOLUTION', 'ELEMENTWISE', 'ACTIVATION', 'CONCATENATION'} <= {
        layer.op_type for layer in between
    }
    assert done.kernels.count(INT8_CONV) == int8
    assert [message for message in done.said if 'Converting conv' not in message] == []


# ---- whole models -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def exported(small, tmp_path_factory):
    """Function that exports the small network, each way once: (ONNX model, number of INT8 convolutions)."""
    done = {}

    def export(kind, **options):
        key = (kind, *options.items())
        if key not in done:
            model = small.float_model() if kind == 'float' else small.quantized_model()
            file = tmp_path_factory.mktemp('onnx') / 'model.onnx'
            export_onnx(model, file, (64, 64), **options)
            done[key] = onnx.load(file), sum(isinstance(m, QuantConv2d) for m in model.modules())
        return copy(done[key][0]), done[key][1]

    return export


DYNAMIC = {'opset': 20, 'dynamic': True}
DEMOS = [
    ('float', {}, 'fp32'),
    ('float', {}, 'fp16'),
    ('float', {**DYNAMIC, 'simplify': True}, 'fp16'),
    ('int8', {}, 'fp32'),
    ('int8', DYNAMIC, 'fp32'),
    ('int8', DYNAMIC, 'fp16'),
]
TYPED = {'fp32': lambda graph: graph, 'fp16': to_half}


LAYOUTS = {  # what a client reads → its input, its output, and the shape of the output of an image
    'YOLOv9': (lambda graph: graph, 'images', 'output0', (14, 84)),
    'DeepStream': (deepstream_layout, 'input', 'output', (84, 6)),
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize(
    'kind, options, typing',
    sampled(DEMOS, 7, 5),
    ids=lambda x: x if isinstance(x, str) else 'dynamic' if x else 'static',
)
def test_an_engine_of_a_whole_model(exported, kind, options, typing, layout):
    laid_out, given, made, shape = LAYOUTS[layout]
    graph, int8 = exported(kind, **options)
    graph = laid_out(TYPED[typing](graph))
    done = compile_graph(graph)
    assert_compiled(graph, done, int8)
    batch = -1 if options.get('dynamic') else 1
    assert done.inputs == {given: ('FLOAT', (batch, 3, 64, 64))}
    assert done.outputs == {made: ('FLOAT', (batch, *shape))}


# ---- NMS inside -----------------------------------------------------------------------------------------------------------


def with_nms(graph, **settings):
    return add_nms(copy(graph), Nms('standard', **{'topk_all': 20, **settings}))


def detections(batch):
    """Outputs of a file with NMS inside that keeps 20: name → (type, shape)."""
    numbers, boxes = ('INT32', (batch, 1)), ('FLOAT', (batch, 20, 4))
    scores, classes = ('FLOAT', (batch, 20)), ('INT32', (batch, 20))
    return {'num_dets': numbers, 'det_boxes': boxes, 'det_scores': scores, 'det_classes': classes}


def without(op, model, type_, shape):
    """A copy with an input of `shape` in place of its only node `op`."""
    model = copy(model)
    [found] = [n for n in model.graph.node if n.op_type == op]
    model.graph.node.remove(found)
    model.graph.input.append(onnx.helper.make_tensor_value_info(found.output[0], type_, shape))
    return model


def without_its_nms(model):
    """A copy with the boxes that NonMaxSuppression selects as an input of any length."""
    return without('NonMaxSuppression', model, onnx.TensorProto.INT64, ['selected', 3])


INSIDE = [
    ('float', {}, 'fp32', {}),
    ('float', DYNAMIC, 'fp16', {}),
    ('int8', DYNAMIC, 'fp32', {'class_agnostic': True}),
    ('int8', DYNAMIC, 'fp16', {}),
]


@pytest.mark.parametrize(
    'kind, options, typing, settings',
    sampled(INSIDE, 3, 1),
    ids=lambda x: x if isinstance(x, str) else '-'.join(x) or 'defaults',
)
def test_engines_with_nms_inside(exported, kind, options, typing, settings):
    """All but NonMaxSuppression builds: TensorRT has it, TensorRT-RTX has not (NVIDIA/TensorRT-RTX issue 5, open)."""
    graph, int8 = exported(kind, **options)
    graph = with_nms(TYPED[typing](copy(graph)), **settings)
    done, batch = compile_graph(graph), -1 if options else 1
    assert done.errors == [] and [layer.op_type for layer in done.layers].count('NMS') == 1
    assert done.outputs == detections(batch)
    assert done.engine or any(
        'NonMaxSuppression' in message and 'no runners that implement it' in message for message in done.said
    )
    done = compile_graph(without_its_nms(graph))
    done.said = [message for message in done.said if 'has Int64 binding' not in message]  # of the list that it is given
    assert_compiled(graph, done, int8)


@pytest.mark.parametrize('batch, typing', [(1, 'fp32'), (2, 'fp16')])
def test_engines_with_masks_inside(tmp_path, batch, typing):
    """The parser accepts all but RoiAlign, a plugin of TensorRT that needs a GPU even to be parsed."""
    export_onnx(segmenter(quantized=True), tmp_path / 'model.onnx', (64, 64), batch=batch, opset=19)
    plain = TYPED[typing](onnx.load(tmp_path / 'model.onnx'))
    done = compile_graph(plain)
    assert done.errors == [] and done.engine
    assert done.outputs == {
        'output0': ('FLOAT', (batch, 4 + CLASSES + NM, 84)),
        'output1': ('FLOAT', (batch, NM, 16, 16)),
    }

    graph = add_nms(copy(plain), Nms('standard', 20), Pooling(28))
    done = compile_graph(graph)
    assert done.errors == [] or 'ROIAlign plugin was not found' in done.errors[0]
    graph = without('RoiAlign', graph, FLOAT, [batch * 20, 1, 28, 28])
    done = compile_graph(graph)
    assert done.errors == [] and [layer.op_type for layer in done.layers].count('NMS') == 1
    assert done.outputs == {**detections(batch), 'det_masks': ('FLOAT', (batch, 20, 28 * 28))}
    assert compile_graph(without_its_nms(graph)).engine


def test_the_plugin_is_not_there(exported):
    done = compile_graph(add_nms(copy(exported('float')[0]), Nms('plugin', 20)))
    assert not done.engine and 'EfficientNMS_TRT' in done.errors[0] and 'Plugin not found' in done.errors[0]


@pytest.mark.parametrize('more, builds', [(0, True), (1, False)])
def test_the_most_detections_are_what_topk_takes(more, builds):
    most = NMS_LIMITS['standard'] + more
    graph = graph_of([node('Identity', 'x', 'output0')], ('output0',), shape=(1, 7, 4000))
    done = compile_graph(without_its_nms(with_nms(graph, topk_all=most)))
    assert bool(done.engine) == builds and (builds or 'K exceeds the maximum value allowed (3840)' in done.said[-1])


# ---- what is refused ----------------------------------------------------------------------------------------------------


def insert(model, op, **attributes):
    """A copy of `model` with a node between the first Conv and what it reads."""
    model = copy(model)
    nodes = list(model.graph.node)
    conv = next(n for n in nodes if n.op_type == 'Conv')
    nodes.insert(nodes.index(conv), node(op, conv.input[0], 'inserted', **attributes))
    conv.input[0] = 'inserted'
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize(
    'broken, message',
    [
        (with_values(INT8_BLOCK, zero=3), 'Non-zero zero point is not supported'),
        (with_values(INT8_BLOCK, wz=1), 'Non-zero zero point is not supported'),
        (with_values(INT8_BLOCK, scale=0), 'Scale coefficients must all be positive'),
        (with_values(INT8_BLOCK, ws=-1), 'Scale coefficients must all be positive'),
        (with_values(to_half(copy(INT8_BLOCK)), scale_fp16=0), 'Scale coefficients must all be positive'),
        (insert(to_half(copy(INT8_BLOCK)), 'Cast', to=FLOAT), '`input` and `kernel` must be of same type'),
    ],
    ids=['zero point', 'zero point of a weight', 'scale 0', 'negative scale', 'FP16 scale 0', 'two types'],
)
def test_what_breaks_the_rules_is_refused(broken, message):
    done = compile_graph(broken)
    assert not done.engine and message in done.errors[0]


@pytest.mark.parametrize('typing', TYPED)
def test_the_kernels_of_the_compiler_tell_int8_convolutions(typing):
    """A node that computes, between a DQ and its convolution, leaves the convolution in float."""
    graph = TYPED[typing](copy(INT8_BLOCK))
    for model, number in ((graph, 1), (insert(graph, 'Relu'), 0), (insert(graph, 'Identity'), 1)):
        done = compile_graph(model)
        assert done.engine and done.kernels.count(INT8_CONV) == number


def test_the_listing_of_a_compiler_of_generation_11(tmp_path):
    """TensorRT-RTX lists an engine that it builds here as text, with the fields of the engine inspector, whose JSON takes a GPU."""

    def listed(text):
        return [
            {'Name': name, 'Dimensions': json.loads(f'[{shape}]'), 'Datatype': kind, 'Format': form}
            for name, shape, kind, form in re.findall(
                r'\{ Name: (.*?), Dimensions: \[(.*?)\], Strides: .*?, Datatype: (\w+), Format: (.*?) \}', text
            )
        ]

    listing = compile_graph(copy(INT8_BLOCK)).listing
    layers = [
        {
            'Name': name,
            'LayerType': kind,
            'TacticName': tactic,
            'Metadata': nodes,
            'Inputs': listed(given),
            'Constants': listed(constants),
            'Outputs': listed(made),
        }
        for name, kind, given, constants, made, tactic, nodes in re.findall(
            r'Name: (.*), LayerType: (\w+), Inputs: \[(.*)\], Constants: \[(.*)\], Outputs: \[(.*)\], '
            r'TacticName: (.*), StreamId: \d+, Metadata: (.*)',
            listing,
        )
    ]
    bound = [
        {'Name': name, 'IOMode': mode, 'DataType': kind, 'Dimensions': json.loads(shape)}
        for name, mode, kind, shape in re.findall(
            r' Name: (.*), IOMode: (\w+), DataType: (\w+), Dimensions: (\[.*?\])', listing
        )
    ]
    (tmp_path / 'layers.json').write_text(json.dumps({'Layers': layers, 'I/O Tensors': bound}))
    engine = read_engine(tmp_path / 'layers.json')

    assert [layer.kind for layer in engine.layers] == ['kgen', 'correlation', 'kgen', 'correlation', 'kgen']
    q, conv8, _, conv32, last = engine.layers
    assert is_qdq(q) and q.types == ('FP32', 'INT8') and is_reformat(last) and last.types == ('FP32', 'FP32')
    assert (conv8.precision, conv8.weights, conv32.precision, conv32.weights) == ('INT8', 'INT8', 'FP32', 'FP32')
    assert 'node_of_c' in conv8.nodes and conv8.outputs[0].shape == (1, 4, 4, 4)
    assert ends(engine) == [(None, 0), (0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (4, None)]
    assert [(f.kind, f.layer) for f in findings(engine)] == [('float output', conv8), ('unfused Q/DQ', q)]
