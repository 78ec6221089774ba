"""Laws of reading engines: both formats of TensorRT's JSON read alike, findings are right, and no layer is lost.

The engines here are written by hand after the documented fields: TensorRT's developer guide, "Engine Inspector" (8.6 and 10:
"Bindings", "Format/Datatype"), "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x" ("I/O Tensors") and what the compiler of
TensorRT-RTX lists (11: "Datatype", "Format", "Constants"), which test_tensorrt_rtx.py reads for real. No engine was built for them on a GPU.
"""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from helpers.commands import program, python

from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.vendors.tensorrt.engine import layer_graph, layer_tables
from utils.qat.vendors.tensorrt.engine.layer_rules import findings, tensor_cores
from utils.qat.vendors.tensorrt.engine.layers import Layer, Tensor, dtype, read_engine

OLD, NEW = 'TensorRT 8.6 and 10', 'TensorRT 11'
WORDS = {  # type → (Format/Datatype of 8.6 and 10; Datatype and Format of 11)
    'INT8': ('Thirty-two wide channel vectorized row major Int8 format', 'Int8', '(NHWC) Channel major format'),
    'FP16': ('Channel major FP16 format where channel % 8 == 0', 'Half', '(NHWC) Channel major format'),
    'FP32': ('Row major linear FP32', 'Float', '(Linear) Row major linear format'),
    'INT32': ('Row major linear INT32', 'Int32', '(Linear) Row major linear format'),
}
ON = 'sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_tilesize96x64x64_g1_tensor16x8x32_t1r3s3'
OFF = 'ampere_int8x4_icudnn_int8x4_128x32_relu_interior_c32_nn_v1'
SHAPES = {
    'images': (1, 3, 64, 64),
    'q': (1, 3, 64, 64),
    'output0': (1, 84, 84),
}  # of all other tensors: (1, 32, 16, 16)


def tensor(name, kind, generation, shape=None):
    shape = list(shape or SHAPES.get(name, (1, 32, 16, 16)))
    if generation == OLD:
        return {'Name': name, 'Location': 'Device', 'Dimensions': shape, 'Format/Datatype': WORDS[kind][0]}
    return {
        'Name': name,
        'Dimensions': shape,
        'Strides': [1] * len(shape),
        'StrideOrder': list(range(len(shape))),
        'Datatype': WORDS[kind][1],
        'Format': WORDS[kind][2],
    }


def step(name, kind, given, made, tactic='', shape=None, **fields):
    """A layer with inputs and outputs written as 'name TYPE'; `shape` is the shape of its outputs."""

    def described(generation):
        def tensors(texts, shape=None):
            return [tensor(*t.split(), generation, shape) for t in ([texts] if isinstance(texts, str) else texts)]

        convolution = 'onv' in kind
        if generation == NEW:
            more = {'Constants': [tensor('weights', 'INT8', NEW)] * convolution}
        elif convolution:
            more = {'ParameterType': 'Convolution', 'Groups': 1, 'Weights': {'Type': 'Int8', 'Count': 9216}}
        else:
            more = {}
        return {
            'Name': name,
            'LayerType': kind,
            'Inputs': tensors(given),
            'Outputs': tensors(made, shape),
            **more,
            **fields,
            'TacticName': tactic,
            'StreamId': 0,
            'Metadata': '\x1e'.join(f'[ONNX Layer: {n}]' for n in re.findall(r'/[\w./]+', name)),
        }

    return described


def conv(name, given, made, tactic=ON, **fields):
    fused = f'/{name}/conv/Conv + PWN(PWN(/{name}/act/Sigmoid), /{name}/act/Mul)'
    return step(fused, 'CaskConvolution', given, made, tactic, **fields)


def write(folder, steps, generation=OLD, outputs=('output0',), times=None):
    """layers.json, and profile.json if there are `times`: {name of a layer: ms}, or pairs of them."""
    bound = {'Bindings': ['images', *outputs]}
    if generation == NEW:
        sides = [('images', 'Input'), *((name, 'Output') for name in outputs)]
        bound = {
            'I/O Tensors': [
                {'Name': name, 'IOMode': mode, 'DataType': 'Float', 'Dimensions': list(SHAPES[name])}
                for name, mode in sides
            ],
            'Engine Metadata': {'Multi-Device': 'Disabled'},
        }
    layers, profile = folder / 'layers.json', folder / 'profile.json'
    layers.write_text(json.dumps({'Layers': [s(generation) for s in steps], **bound}))
    if times is None:
        return layers, None
    pairs = times.items() if isinstance(times, dict) else times
    rows = [{'name': name, 'timeMs': ms * 100, 'averageMs': ms, 'medianMs': ms} for name, ms in pairs]
    profile.write_text(json.dumps([{'count': 100}, *rows]))
    return layers, profile


def read(*arguments, **options):
    """The engine of files as `write` makes them."""
    return read_engine(*write(*arguments, **options))


def ends(engine):
    """[(writer, reader)] of each edge."""
    return [edge[:2] for edge in engine.edges()]


FIRST_Q = step('/model.0/QuantizeLinear', 'Reformat', 'images FP32', 'q INT8', Origin='QDQ')
LAST = step('/model.22/Concat_3', 'Myelin', 'head FP16', 'output0 FP32')
GOOD = [  # a finding for the first Q, the first convolution, and the last, whose output is float
    FIRST_Q,
    conv('model.0', 'q INT8', 'a INT8', OFF),
    conv('model.1', 'a INT8', 'b INT8'),
    conv('model.2', 'b INT8', 'head FP16', 'sm80_xmma_fprop_implicit_gemm_i8f16_i8i32_f32_tensor16x8x32'),
    LAST,
]
TIMES = {'/model.0/QuantizeLinear': 0.05}


# ---- reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('generation', [OLD, NEW])
def test_what_a_layer_says(tmp_path, generation):
    engine = read(tmp_path, GOOD, generation, times=TIMES)
    layer = engine.layers[2]
    assert (layer.types, layer.precision, layer.weights) == (('INT8', 'INT8'), 'INT8', 'INT8')
    assert (layer.kind, layer.tactic, layer.outputs[0].shape) == ('CaskConvolution', ON, (1, 32, 16, 16))
    assert layer.nodes == ['/model.1/conv/Conv', '/model.1/act/Sigmoid', '/model.1/act/Mul']
    assert ends(engine) == [(None, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, None)]
    assert [t.name for t in (*engine.inputs, *engine.outputs)] == ['images', 'output0'] and engine.layers[0].ms == 0.05


TYPES = """
Row major linear FP32 → FP32
Row major linear FP16 format → FP16
Row major Int8 format → INT8
Half → FP16
Float → FP32
BFloat16 → BF16
BF16 → BF16
Int64 → INT64
UInt8 → UINT8
Bool → BOOL
FP8E4M3 → FP8
Two wide channel vectorized row major FP16 format → FP16
(NHWC) Channel major format →
N/A →
"""


@pytest.mark.parametrize('line', TYPES.strip().splitlines())
def test_types_in_the_words_of_tensorrt(line):
    text, expected = line.split(' →')
    assert dtype(text) == expected.strip()


KGEN = {'LayerType': 'kgen', 'Inputs': [{'Name': 'x', 'Datatype': 'Half'}], 'Outputs': ['y']}
UNKNOWN = [
    {**KGEN, 'Metadata': None, 'TacticName': 7},
    {'Name': 'signal', 'Inputs': None},
    'only a name',
    {'Name': 'next', 'LayerType': 'kgen', 'Inputs': [{'Name': 'y', 'Dimensions': '?'}]},
]


def test_what_is_missing_in_a_layer_stays_unknown(tmp_path):
    (tmp_path / 'layers.json').write_text(json.dumps({'Layers': UNKNOWN}))
    engine = read_engine(tmp_path / 'layers.json')
    first, signal, text, last = engine.layers
    assert (first.name, first.types, first.tactic, first.nodes) == ('layer 0', ('FP16', ''), '', [])
    assert (signal.kind, signal.precision, text.name) == ('unknown', 'unknown', 'only a name')
    assert first.outputs == last.inputs == [Tensor('y')]
    assert [t.name for t in engine.inputs] == ['x'] and ends(engine) == [(None, 0), (0, 3)]
    assert findings(engine) == [] and engine.ms is None and engine.share(engine.layers) is None
    assert 'None' not in layer_tables.engine_report(engine, []) and 'None' not in layer_graph.dot(engine, [], 'x')


def test_a_list_of_layers_alone_is_an_engine_too(tmp_path):
    layers, _ = write(tmp_path, GOOD)
    whole = read_engine(layers)
    layers.write_text(json.dumps(json.loads(layers.read_text())['Layers']))
    assert read_engine(layers) == whole


HALF = (1, 16, 16, 16)
EDGES = {  # name → layers, (writer, reader) of each edge
    'a Concat that TensorRT removed: two layers write halves of one tensor; `again` is written, read, and written once more': (
        [
            conv('left', 'images FP32', 'joined INT8', shape=HALF),
            conv('right', 'images FP32', 'joined INT8', shape=HALF),
            conv('both', 'joined INT8', 'again INT8'),
            conv('one', 'again INT8', 'again INT8'),
            conv('two', 'again INT8', 'output0 FP32'),
        ],
        [(None, 0), (None, 1), (0, 2), (1, 2), (2, 3), (3, 4), (4, None)],
    ),
    'a view of another shape is the same tensor: the last, and once, though it is read twice': (
        [
            conv('c', 'images FP32', 'a FP16'),
            conv('d', 'a FP16', 'a FP16'),
            lambda generation: {'Name': 'flat', 'Inputs': [tensor('a', 'FP16', generation, (1, 32, 256))] * 2},
        ],
        [(None, 0), (0, 1), (1, 2)],
    ),
}


@pytest.mark.parametrize('generation', [OLD, NEW])
@pytest.mark.parametrize('name', EDGES, ids=['parts of a Concat', 'a view'])
def test_an_edge_goes_from_the_last_writer(tmp_path, name, generation):
    layers, wanted = EDGES[name]
    assert ends(read(tmp_path, layers, generation)) == wanted


# ---- times --------------------------------------------------------------------------------------------------------------


def test_times_are_matched_by_name_and_what_is_left_is_reported(tmp_path):
    twice = step('copy', 'Reformat', 'a FP16', 'b FP16')
    times = [('copy', 0.3), ('copy', 0.1), ('gone', 0.6), ('copy', 1.0)]
    engine = read(tmp_path, [twice, step('alone', 'NoOp', 'b FP16', 'c FP16'), twice], outputs=(), times=times)
    assert [layer.ms for layer in engine.layers] == [0.3, None, 0.1] and engine.ms == pytest.approx(2.0)
    assert engine.untimed == ['alone'] and engine.unknown == ['gone', 'copy']
    assert engine.share(engine.layers[:2]) == pytest.approx(0.15)
    said = layer_tables.engine_report(engine, [])
    assert '1 layers without a time: alone' in said and '2 times without a layer: gone; copy' in said


def test_without_a_profile_there_are_no_times(tmp_path):
    engine = read(tmp_path, GOOD)
    said = layer_tables.engine_report(engine, findings(engine))
    assert engine.untimed == [] and not [text for text in (' ms,', 'slowest', '%', '0.0000') if text in said]


def test_sums_are_those_of_the_layers(tmp_path):
    names = [layer.name for layer in read(tmp_path, GOOD).layers]
    engine = read(tmp_path, GOOD, times=zip(names, (1, 4, 2, 2, 1)))
    lines = layer_tables.engine_report(engine, findings(engine)).splitlines()
    rows = dict.fromkeys(' '.join(line.replace('|', ' ').split()) for line in lines)
    for row in (
        'INT8 3 8.0000 80.0%',
        'FP32 1 1.0000 10.0%',
        'FP16 1 1.0000 10.0%',
        'CaskConvolution 3 8.0000 80.0%',
        'Reformat (Q/DQ) 1 1.0000 10.0%',
        'convolutions that do not run on tensor cores 1 4.0000 40.0%',
    ):
        assert row in rows, row


# ---- findings -----------------------------------------------------------------------------------------------------------

TO_FP16 = conv('model.2', 'b INT8', 'c FP16')
START = GOOD[:3]
CONV = 'model.2 Conv+Sigmoid+Mul'
REFORMAT, CAST, QUANTIZE = 'Reformatting CopyNode', '__myl_CastTran_myl0_3', '__myl_MulMinMaxRounCast_myl0_3'


def reformat(given, made):
    return step(REFORMAT, 'Reformat', given, made, Origin='REFORMAT')


ENGINES = {  # name → layers after START, findings beside those of START: (kind, short name, words of the advice)
    'INT8 to the end': ([conv('model.2', 'b INT8', 'head INT8')], []),
    'float behind INT8': (
        [TO_FP16, step('/model.3/Softmax', 'Softmax', 'c FP16', 'head FP16')],
        [('float output', CONV, 'operator that runs in float')],
    ),
    'float convolution behind INT8': (
        [TO_FP16, conv('model.3', 'c FP16', 'head FP16', 'ampere_h16816cudnn_128x64_ldg8_relu_nhwc_tn_v1')],
        [('float output', CONV, 'last of the head')],
    ),
    'float output of the engine': (
        [conv('model.2', 'b INT8', 'output0 FP16')],
        [('float output', CONV, 'nothing to do')],
    ),
    'Q of its own behind INT8': (
        [
            TO_FP16,
            step('/model.3/QuantizeLinear', 'Reformat', 'c FP16', 'd INT8', Origin='QDQ'),
            conv('model.3', 'd INT8', 'head INT8'),
        ],
        [('float output', CONV, 'right behind'), ('unfused Q/DQ', 'model.3 QuantizeLinear', 'one scale')],
    ),
    'Scale that quantizes': ([step('scale', 'Scale', 'b INT8', 'head FP16')], [('unfused Q/DQ', 'scale', 'one scale')]),
    'Scale that does not': ([step('scale', 'Scale', 'b INT8', 'head INT8')], []),
    'layers called Quantize': (
        [step('dq', 'Dequantize', 'b INT8', 'c FP16'), step('q', 'Quantize', 'c FP16', 'head INT8')],
        [('unfused Q/DQ', 'dq', 'one scale'), ('unfused Q/DQ', 'q', 'one scale')],
    ),
    'Myelin that quantizes': (
        [step(QUANTIZE, 'kgen', 'b FP16', 'head INT8')],
        [('unfused Q/DQ', QUANTIZE, 'one scale')],
    ),
    'Myelin that does more': ([step('__myl_MulMinMaxRounCastSilu_myl0_3', 'kgen', 'b FP16', 'head INT8')], []),
    'Myelin that joins': ([step(QUANTIZE, 'kgen', ['b FP16', 'a FP16'], 'head INT8')], []),
    'Myelin that casts': ([step(CAST, 'kgen', 'b FP16', 'head FP32')], [('type change', CAST, 'two types')]),
    'reformat to INT8': ([reformat('b FP16', 'head INT8')], [('type change', REFORMAT, 'alternate')]),
    'reformat between floats': ([reformat('b FP32', 'head FP16')], [('type change', REFORMAT, 'two types')]),
    'reformat of the layout': ([reformat('b INT8', 'head INT8')], []),
    'reformat of indices': ([reformat('b INT32', 'head FP32')], []),
    'reformat of the output': ([reformat('b FP16', 'output0 FP32')], [('type change', REFORMAT, '--outputIOFormats')]),
    'reformat of the input': ([reformat('images FP32', 'head FP16')], [('type change', REFORMAT, '--inputIOFormats')]),
    'no tensor cores': ([conv('model.2', 'b INT8', 'head INT8', OFF)], [('no tensor cores', CONV, 'multiples of 16')]),
    'no tensor cores in FP32': ([conv('model.2', 'b FP32', 'head FP32', 'ampere_scudnn_128x64_relu_small_nn_v1')], []),
    'no name of a kernel': ([conv('model.2', 'b INT8', 'head INT8', '')], []),
    'no tensor cores, no convolution': (
        [step('pool', 'CaskPooling', 'b INT8', 'head INT8', 'sm50_xmma_pooling_simt')],
        [],
    ),
}


@pytest.mark.parametrize('generation', [OLD, NEW])
@pytest.mark.parametrize('name', ENGINES)
def test_findings(tmp_path, name, generation):
    steps, wanted = ENGINES[name]
    last = [] if steps[-1](OLD)['Outputs'][0]['Name'] == 'output0' else [LAST]
    found = findings(read(tmp_path, [*START, *steps, *last], generation))
    given = [f for f in found if f.layer.inputs[0].name in ('images', 'q') and 'nothing to do' in f.advice]
    assert len(given) == 2, 'the first Q, and the convolution of 3 channels that reads it'
    others = [f for f in found if f not in given]
    assert [(f.kind, layer_tables.short_name(f.layer)) for f in others] == [entry[:2] for entry in wanted]
    assert all(words in f.advice and f.detail for f, (*_, words) in zip(others, wanted))


def test_findings_are_sorted_by_time(tmp_path):
    steps = [step(f'scale {i}', 'Scale', f't{i} FP16', f't{i + 1} INT8') for i in range(3)]
    found = findings(read(tmp_path, steps, times={'scale 0': 1, 'scale 1': 3, 'scale 2': 2}))
    assert [f.layer.name for f in found] == ['scale 1', 'scale 2', 'scale 0']


KERNELS = {  # names of kernels → whether they run on tensor cores
    'yes': [
        ON,
        'ampere_h16816cudnn_128x64_sliced1x2_ldg8_relu_exp_stages_64x3_small_nhwc_tn_v1',
        'turing_fp16_i8816cudnn_int8_128x128',
        'trt_turing_cutlass_image_network_first_layer_hmma_fprop_f16f16f32_nhwc',
        'cutlass_tensorop_s4_i8832fprop_optimized',
        'sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f16_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1',
    ],
    'no': [
        OFF,
        'volta_int8x4_icudnn_int8x4_128x32_relu_xregs_medium_c32_nn_v1',
        'ampere_scudnn_winograd_128x128_ldg1_ldg4_relu',
        'sm70_xmma_fprop_conv1x1_i8f32_f32_f32_nchw_vect_c_4kcrs_vect_c_4_nchw_simt_small_batch_bias_relu',
        'sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_tilesize128x64x8_stage3_warpsize2x2x1_g1_ffma_t1r3s3',
    ],
    'unknown': ['', '__myelin_CASK_STUB', 'sm80_xmma_fprop_of_some_new_sort'],
}


@pytest.mark.parametrize('kernel, expected', [(kernel, told) for told, names in KERNELS.items() for kernel in names])
def test_what_the_name_of_a_kernel_tells(kernel, expected):
    assert tensor_cores(Layer('x', 'CaskConvolution', [], [], tactic=kernel)) == expected


# ---- rows and pictures ----------------------------------------------------------------------------------------------------


CV1 = '/model.2/cv2/cv2.0/cv1'
LONG = 'begin' + 'x' * 100 + 'end'


@pytest.mark.parametrize(
    'name, nodes, expected',
    [
        (f'{CV1}/conv/Conv + PWN(PWN({CV1}/act/Sigmoid), {CV1}/act/Mul)', [], 'model.2.cv2.0.cv1 Conv+Sigmoid+Mul'),
        ('/model.3/cv1/conv/weight_quantizer/QuantizeLinear + /model.3/cv1/conv/Conv', [], 'model.3.cv1.conv Conv'),
        ('/model.3/cv1/QuantizeLinear', [], 'model.3.cv1 QuantizeLinear'),
        ('__myl_Fc_myl0_3', ['/model.1/Conv', '/model.1/Add_2'], 'model.1 Conv+Add'),
        ('__myl_Fc_myl0_3', [], '__myl_Fc_myl0_3'),
        ('/Concat_3', [], 'Concat'),
        ('resnet50/conv1/Conv2D', [], 'resnet50/conv1/Conv2D'),
        (LONG, [], f'{LONG[:22]}…{LONG[-21:]}'),
    ],
)
def test_short_names(name, nodes, expected):
    assert layer_tables.short_name(Layer(name, 'x', [], [], nodes=nodes)) == expected


INT8 = dict.fromkeys(('type in', 'type out', 'weights'), 'INT8')
ROWS = [  # columns of the first layers of GOOD
    {'ms': '0.05', 'share': '1.000000', 'tensor cores': '', 'findings': 'unfused Q/DQ', 'type in': 'FP32'},
    {'ms': '', 'share': '', 'tensor cores': 'no', 'findings': 'no tensor cores', 'kernel': OFF, **INT8}
    | {'shapes in': '1×3×64×64', 'shapes out': '1×32×16×16'},
    {'tensor cores': 'yes', 'findings': ''},
]


def test_rows(tmp_path):
    engine = read(tmp_path, GOOD, times=TIMES)
    layer_tables.write_csv(tmp_path / 'x.csv', engine, findings(engine))
    rows = list(csv.DictReader((tmp_path / 'x.csv').open(newline='', encoding='utf-8')))
    assert [row['name'] for row in rows] == [layer.name for layer in engine.layers]
    assert [{key: row[key] for key in wanted} for row, wanted in zip(rows, ROWS)] == ROWS


def test_a_list_says_what_it_leaves_out(tmp_path):
    steps = [step(f'scale{i}', 'Scale', f't{i} FP16', f't{i + 1} INT8') for i in range(7)]
    engine = read(tmp_path, steps)
    short, whole = (layer_tables.engine_report(engine, findings(engine), limit) for limit in (3, None))
    assert '... and 4 more' in short and 'scale6' not in short and 'scale6' in whole and '... and' not in whole


def statements(source):
    """(nodes, edges) of a DOT text: {name: attributes} and [(from, to, attributes)], legend and defaults aside."""
    nodes, edges = {}, []
    for line in source.splitlines():
        if edge := re.match(r'("(?:[^"\\]|\\.)*"|\d+) -> ("(?:[^"\\]|\\.)*"|\d+) \[(.*)\];$', line):
            edges.append(edge.groups())
        elif node := re.match(r'("(?:[^"\\]|\\.)*"|\d+) \[(.*)\];$', line):
            nodes[node[1]] = node[2]
    return nodes, edges


@pytest.mark.parametrize('generation', [OLD, NEW])
def test_every_layer_and_edge_is_drawn(tmp_path, generation):
    engine = read(tmp_path, GOOD, generation, times=TIMES)
    nodes, edges = statements(layer_graph.dot(engine, findings(engine), 'title'))
    order = ['"in images"', *map(str, range(len(GOOD))), '"out output0"']
    assert nodes.keys() == set(order) and [(a, b) for a, b, _ in edges] == list(pairwise(order))
    q, first, second = (nodes[str(i)] for i in range(3))
    fp32, int8 = layer_graph.FILL['FP32'], layer_graph.FILL['INT8']
    for node, there, absent in (
        (q, ['peripheries="2"', f'{fp32}:{int8}', '0.0500 ms   100.0%', '! unfused Q/DQ', layer_graph.FOUND], []),
        (q, ['FP32 1×3×64×64 → INT8 1×3×64×64'], []),
        (first, ['! no tensor cores'], []),
        (second, ['peripheries="1"', int8, ON], [layer_graph.FOUND, '!']),  # the kernel is in the tooltip
        (edges[0][2], [layer_graph.LINE['FP32']], []),
        (edges[1][2], [layer_graph.LINE['INT8']], []),
    ):
        assert [part for part in there if part not in node] == [part for part in absent if part in node] == []


def test_a_layer_that_reads_and_writes_nothing_is_not_drawn(tmp_path):
    engine = read(tmp_path, GOOD, NEW, times=TIMES)
    before = layer_graph.dot(engine, [], 'title')
    engine.layers.append(Layer('dummy', 'shape_call', [], [], ms=0.001))
    assert layer_graph.dot(engine, [], 'title') == before


def test_an_edge_is_labelled_where_the_box_shows_another_shape(tmp_path):
    add = step('add', 'ElementWise', ['a FP16', 'images FP32'], 'b FP16')
    engine = read(tmp_path, [conv('c', 'images FP32', 'a FP16'), add])
    _, edges = statements(layer_graph.dot(engine, [], 'x'))
    assert [re.match(r'label="(.*?)"', more)[1] for *_, more in edges] == ['', 'FP16 1×32×16×16', 'FP32 1×3×64×64']


# ---- the command --------------------------------------------------------------------------------------------------------

HARD = 'a "quoted" <name> \\ {with} | everything\n& more ünïcode'


def test_files_of_the_command(tmp_path, graphviz):
    """SVG and PNG show layers of any name; no temporary file stays."""
    layers, profile = write(tmp_path, [*GOOD, step(HARD, 'NoOp', 'output0 FP32', 'end FP32')], times=TIMES)
    prefix = tmp_path / 'new folder' / 'v1.2'
    out = python('scripts/draw_engine.py', '--layer', layers, '--profile', profile, '--output', prefix)
    files = {suffix: prefix.with_name(f'v1.2.{suffix}') for suffix in ('csv', 'dot', 'png', 'svg')}
    assert set(prefix.parent.iterdir()) == set(files.values())
    svg = files['svg'].read_text(encoding='utf-8').replace('&#160;', ' ').replace('&#45;', '-')
    assert svg.count('class="node"') == len(GOOD) + 1 + 2 + 1, 'layers, input and output, legend'
    labels = 'model.1 Conv+Sigmoid+Mul', '0.0500 ms', 'INT8 1×32×16×16', '! no tensor cores', 'computes in INT8'
    for part in (*labels, '&quot;quoted&quot; &lt;name&gt;'):
        assert part in svg, part
    png = files['png'].read_bytes()
    width, height = (int.from_bytes(png[at : at + 4], 'big') for at in (16, 20))
    assert png.startswith(b'\x89PNG\r\n\x1a\n') and width > 300 and height > 500
    assert 'Fontconfig warning' not in out and '3 findings' in out and 'v1.2.svg' in out


def test_default_names_and_folders(tmp_path, graphviz):
    layers, _ = write(tmp_path, GOOD)
    main = program('scripts/draw_engine.py').main
    (tmp_path / 'folder').mkdir()
    for options, folder in (([], tmp_path), (['--output', str(tmp_path / 'folder')], tmp_path / 'folder')):
        assert not main(['--layer', str(layers), *options])
        assert {f'layers.{suffix}' for suffix in ('csv', 'dot', 'svg', 'png')} <= {p.name for p in folder.iterdir()}


@pytest.mark.parametrize('suffix', ['csv', 'dot', 'svg', 'png'])
def test_only_files_of_an_earlier_drawing_are_replaced(tmp_path, graphviz, capsys, suffix):
    layers, _ = write(tmp_path, GOOD)
    main = program('scripts/draw_engine.py').main
    mine = tmp_path / f'layers.{suffix}'
    mine.write_text('mine')
    assert run_command(main, ['--layer', str(layers)]) == 2
    assert f'{mine}: is there already' in capsys.readouterr().err and mine.read_text() == 'mine'
    mine.unlink()
    assert run_command(main, ['--layer', str(layers)]) == run_command(main, ['--layer', str(layers)]) == 0


def test_a_machine_without_fonts_draws_the_same_picture(tmp_path, monkeypatch, graphviz):
    (tmp_path / 'x.dot').write_text('digraph { "words to be seen" }', encoding='utf-8')
    layer_graph.draw(tmp_path / 'x.dot', [tmp_path / 'here.png'])
    (tmp_path / 'none.conf').write_text('<?xml version="1.0"?><fontconfig></fontconfig>')
    monkeypatch.setenv('FONTCONFIG_FILE', str(tmp_path / 'none.conf'))
    layer_graph.draw(tmp_path / 'x.dot', [tmp_path / 'there.png'])
    assert (tmp_path / 'here.png').read_bytes() == (tmp_path / 'there.png').read_bytes()


def test_without_graphviz_only_the_pictures_are_missing(tmp_path, monkeypatch, capsys):
    layers, _ = write(tmp_path, GOOD)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert run_command(program_main(monkeypatch), ['--layer', str(layers)]) == 0
    out = capsys.readouterr().out
    (warning,) = [line for line in out.splitlines() if line.startswith('warning:')]
    assert 'pip install "pygraphviz' in warning and f'dot -Tsvg -O {tmp_path / "layers.dot"}' in warning
    assert 'layers.svg' not in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ['layers.csv', 'layers.dot', 'layers.json']


def test_a_library_of_the_system_is_missing(tmp_path, monkeypatch):
    """As in a slim container, where pygraphviz is installed and does not import."""
    (tmp_path / 'pygraphviz.py').write_text(
        "raise ImportError('libgobject-2.0.so.0: cannot open shared object file: No such file or directory')"
    )
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    says = r'libgobject-2\.0\.so\.0.*apt-get install libglib2\.0-0 .*, or with a Graphviz of your own: dot '
    with pytest.raises(QatError, match=says):
        layer_graph.draw(tmp_path / 'x.dot', [tmp_path / 'x.svg'])
    assert not list(tmp_path.glob('*.svg*'))


def program_main(monkeypatch):
    """`main` of the command, loaded while importlib.util is whole."""
    with monkeypatch.context() as whole:
        whole.undo()
        return program('scripts/draw_engine.py').main


def test_a_graphviz_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
    monkeypatch.setattr(
        subprocess, 'run', lambda *a, **k: subprocess.CompletedProcess(a, 1, '', 'line\nImportError: libX.so')
    )
    with pytest.raises(QatError, match='ImportError: libX.so.*dot -Tsvg'):
        layer_graph.draw(tmp_path / 'x.dot', [tmp_path / 'x.svg'])
    assert list(tmp_path.iterdir()) == []


NAMES_ONLY = {'Layers': ['/model.0/conv/Conv', '/model.1/conv/Conv'], 'Bindings': ['images', 'output0']}
PROFILE = [{'count': 10}, {'name': 'x', 'timeMs': 1.0, 'averageMs': 0.1, 'medianMs': 0.1, 'percentage': 100.0}]
LATENCIES = [{'startEnqMs': 0.1, 'endEnqMs': 0.2, 'latencyMs': 1.0}]  # trtexec --exportTimes
LAYERS = {'Layers': [step('x', 'NoOp', 'a FP16', 'b FP16')(OLD)]}


MISTAKES = [  # layers, profile, what the line says
    ('{"Layers": [{"Name": "x"', None, 'no JSON, or not all of it in line 1'),
    (b'ftrt\x00\x00\xff\xfe\x80', None, 'no JSON'),
    ([3, 4], None, 'no layer information'),
    ({'Layers': []}, None, 'lists no layer'),
    (NAMES_ONLY, None, 'profilingVerbosity=detailed'),
    ({'Layers': [{'Name': 'x', 'Inputs': [{'Name': 'a'}]}]}, None, 'profilingVerbosity=detailed'),
    (PROFILE, None, 'a profile .*--profile'),
    (LATENCIES, None, 'profilingVerbosity=detailed'),
    (LAYERS, LAYERS, 'layer information.*--layer'),
    (LAYERS, LATENCIES, 'no profile'),
    (LAYERS, PROFILE[:1], 'lists no layer'),
    (LAYERS, [{'name': 'x', 'averageMs': float('nan')}], 'no numbers'),
    (LAYERS, [{'name': 'other', 'averageMs': 1}], 'another engine'),
]


@pytest.mark.parametrize('layer, profile, words', MISTAKES, ids=[says for *_, says in MISTAKES])
def test_mistakes_are_one_line(tmp_path, capsys, layer, profile, words):
    """Other damages are those of faults.KINDS."""
    options = []
    for flag, content in (('layer', layer), ('profile', profile)):
        if content is not None:
            file = tmp_path / f'{flag}.json'
            file.write_bytes(
                content
                if isinstance(content, bytes)
                else (content if isinstance(content, str) else json.dumps(content)).encode()
            )
            options += [f'--{flag}', str(file)]
    before = sorted(tmp_path.iterdir())
    assert run_command(program('scripts/draw_engine.py').main, options) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(words, error) and str(tmp_path) in error, error
    assert sorted(tmp_path.iterdir()) == before
