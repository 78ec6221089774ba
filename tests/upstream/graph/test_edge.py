"""Laws of files for edge chips: all in integers, the numbers of the checkpoint, and what their readers find in them.

Without the packages of requirements-litert.txt only the tests above `needs_litert` run.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from helpers import graphs
from helpers.faults import answer
from helpers.zoo import SMALL, assert_verdicts, build, command, deployed, fuse, program
from models.common import CBFuse
from utils.general import non_max_suppression

from models.deploy.agreement import Reference, made_images
from models.deploy.formats.onnx import export_onnx
from models.quantize.activations import exchangeable, exchanged, finish_exchange
from models.quantize.blocks import QuantFusedReLU6, QuantRoundedCBFuse
from models.quantize.convert import quantize_model
from models.quantize.quantizers import LogitQuantizer, quantizers_off, rounded_unit
from test_litert import Read, needs_litert
from test_targets import prepared
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError
from utils.qat.graph.audit import audit
from utils.qat.graph.onnx_graph import constants, metadata_value
from utils.qat.graph.passes import absorb_relus
from utils.qat.vendors.edge.graph import RULES
from utils.qat.vendors.edge.session import JOINED, LAYOUTS, decode
from utils.qat.vendors.edge.write import EdgeProgram, for_layout, raw_model, write_heads
from utils.qat.vendors.litert.session import read_metadata, values_of
from utils.qat.vendors.load import open_file

EDGE, CPU, SIDE = load_target('edge'), torch.device('cpu'), 64
# Operators of the model that Frigate publishes, all of which run on the Edge TPU (blakeblackshear/frigate#21124), and two others, which
# Coral lists too (coral.ai/docs/edgetpu/models-intro)
MAPPED = set('CONV_2D CONCATENATION RESIZE_NEAREST_NEIGHBOR SPLIT STRIDED_SLICE RESHAPE MINIMUM MAXIMUM PAD'.split())
MAPPED |= {'MAX_POOL_2D', 'AVERAGE_POOL_2D', 'ADD', 'QUANTIZE', 'SLICE', 'DEPTHWISE_CONV_2D'}


def model_of(**changes):
    """A small calibrated network for the target, with ReLU6."""
    return prepared('demo', EDGE, **{**SMALL, 'activation': 'nn.ReLU6()', **changes})[1]


# ---- placement ----------------------------------------------------------------------------------------------------------


def test_pixels_are_the_integers_of_images_and_strides_share_the_scales_of_outputs():
    """And the layout heads has a scale of its own for each, none of them coarser."""
    model = model_of()
    images, head = model.model[0].conv.input_quantizer, model.model[-1]
    assert images.scale.item() == pytest.approx(1 / 255, rel=2**-22) and images._zero_point == -128
    boxes, classes = ({branch[-1] for branch in branches} for branches in (head.cv2, head.cv3))
    for strides in (boxes, classes):
        assert len({(q.scale.item(), q._zero_point.item()) for q in strides}) == 1 and len(strides) == 3
    apart = for_layout(model, 'heads').model[-1]
    for branches, joined in ((apart.cv2, boxes), (apart.cv3, classes)):
        own = [branch[-1].scale.item() for branch in branches]
        assert len({*own}) > 1 and max(own) <= joined.pop().scale.item() * 1.001


def test_logits_that_no_integer_shows_are_no_difference_from_float():
    """Classes that are nowhere have logits far below: between calibrations they would be all that counts."""
    model = model_of()
    for branch in model.model[-1].cv3:
        branch[-2].bias.data -= 30
    with quantizers_off(model), torch.no_grad():
        _, maps = model(made_images(2, (SIDE, SIDE)))
    classes = torch.cat([raw[:, -model.nc :].flatten() for raw in maps])
    assert classes.min() == classes.max() == LogitQuantizer.least


@pytest.mark.parametrize('lowest, highest', [(-20.0, 3.0), (-20.0, 30.0), (-1.0, 5.0), (-0.5, 0.1), (-3.0, -1.0)])
def test_logits_have_no_negative_zero_point(lowest, highest):
    """And the ends of their range are among the integers, up to the logits of 0.0003 and 0.9997; so is a score of 0.98, if none was seen."""
    quantizer = LogitQuantizer()
    quantizer.shifts = True
    ends = torch.tensor(max(lowest, -8.0)), torch.tensor(highest)
    quantizer.set_amax(torch.stack(ends).abs().max(), *ends)
    zero = quantizer._zero_point.item()
    low, high = (quantizer.scale.item() * (end - zero) for end in (-128, 127))
    assert (
        0 <= zero <= 127 and low <= ends[0] + quantizer.scale and high >= min(max(highest, 4.0), 8.0) - quantizer.scale
    )


def test_a_relu6_is_the_end_of_its_convolution(tmp_path):
    """No quantizer stands in front of it."""
    model = model_of()
    assert sum(isinstance(m, QuantFusedReLU6) for m in model.modules()) > 30
    export_onnx(model, tmp_path / 'model.onnx', (SIDE, SIDE), target=EDGE)
    graph = onnx.load(tmp_path / 'model.onnx')
    assert audit(graph, RULES).findings == []
    made = {name: node.op_type for node in graph.graph.node for name in node.output}
    assert {made[n.input[0]] for n in graph.graph.node if n.op_type == 'Clip'} <= {'Conv'}


@pytest.mark.parametrize('largest, left', [(5.0, 0), (6.0, 0), (6.005, 0), (6.1, 1)])
def test_a_clip_at_the_end_of_a_range_is_dropped(largest, left):
    """Where it changes no integer: 6.005 is nearer to step 255 than half a step."""
    numbers = {'zero': np.float32(0), 'six': np.float32(6), 'scale': np.float32(largest / 255), 'lowest': np.int8(-128)}
    nodes, returned = 'c = Clip(x, zero, six) y = QuantizeLinear(c, scale, lowest)', (onnx.TensorProto.INT8, [4])
    found = absorb_relus(graphs.model_of(nodes, {'x': [4]}, {'y': returned}, numbers))
    assert [n.op_type for n in found.graph.node].count('Clip') == left


@pytest.mark.parametrize('activation', ['nn.SiLU()', 'nn.ReLU()'])
def test_relu6_replaces_silu_and_relu(activation):
    model = fuse(build('demo', **SMALL, activation=activation))
    paths = exchangeable(model, 'relu6')
    new = finish_exchange(exchanged(model, 'relu6', paths))
    assert len(paths) > 30 and {type(new.get_submodule(path)).__name__ for path in paths} == {'ReLU6'}


# ---- what is refused ----------------------------------------------------------------------------------------------------


def test_a_segmentation_model_is_refused():
    with pytest.raises(QatError, match='edge: takes detectors'):
        quantize_model(fuse(build('demo-seg')), target=EDGE)


def test_checkpoints_and_options_that_do_not_fit_are_refused(small, capfd, tmp_path):
    for words, end in (
        (('--weights', small.single), 'python qat.py quantize --target edge'),
        (('--weights', small.quantized), 'quantize with --target edge'),
        (('--weights', small.quantized, '--dynamic'), 'leave it out'),
        (('--weights', small.single, '--sigmoid'), 'programs for coral compute it themselves'),
        (('--weights', small.single, '--layout', 'heads', '--opset', 18), 'leave it out'),
    ):
        code, line = answer('export_qat.py', (*words, '--include', 'edge'), capfd, tmp_path)
        assert code == 2 and line.endswith(end), line


# ---- decoding -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_decoding_gives_what_the_head_computes():
    """Both layouts give the predictions of PyTorch's head, up to the order of its sums."""
    model, images = model_of(), made_images(1, (SIDE, SIDE))
    for layout, names in LAYOUTS.items():
        changed = for_layout(model, layout)
        outputs = EdgeProgram(raw_model(changed), layout == 'coral')(images.permute(0, 2, 3, 1))
        assert torch.allclose(decode(dict(zip(names, outputs)), (SIDE, SIDE), False), changed(images), atol=1e-3)


def as_frigate(boxes, scores, box_numbers, score_numbers, least):
    """Candidates as its detector edgetpu decodes them before its NMS (0.17): class, score, box in pixels [n, 6]; in INT8 as there."""
    (box_scale, box_zero), (scale, zero) = box_numbers, score_numbers
    best = scores.max(1)
    kept = best >= int(np.log(least / (1 - least)) / scale + zero)
    logits = (best[kept] - np.int8(zero)) * np.float32(scale)
    parts = np.exp(((boxes[kept].astype(np.float32) - box_zero) * box_scale).reshape(-1, 4, 16))
    sides = (parts / parts.sum(2, keepdims=True)) @ np.arange(16)
    grids = [np.meshgrid(np.arange(SIDE // s) + 0.5, np.arange(SIDE // s) + 0.5) for s in (8, 16, 32)]
    cells = np.concatenate([np.stack((x.ravel(), y.ravel()), 1) for x, y in grids])[kept]
    strides = np.repeat([8, 16, 32], [x.size for x, _ in grids])[kept, None]
    corners = np.concatenate((cells - sides[:, :2], cells + sides[:, 2:]), 1) * strides
    return np.column_stack((scores[kept].argmax(1), 1 / (1 + np.exp(-logits)), corners))


@pytest.mark.parametrize('least', [0.4, 0.25])
def test_frigate_and_the_reference_decoder_find_our_boxes(least):
    """In the same random integers. The reference decoder has the NMS of our evaluator too, which is upstream's."""
    rng, decoder = np.random.default_rng(0), program('examples/edge/decode.py')
    boxes = rng.integers(-128, 128, (84, 64), np.int8)
    scores = rng.integers(-128, -40, (84, 3), np.int8)
    scores[np.arange(84), rng.integers(0, 3, 84)] = rng.permutation(84) - 30  # no two are equal, so NMS has one order
    numbers = (0.05, -7), (0.04, 30)
    floats = (values_of(x, {'dtype': np.int8, 'quantization': n})[None] for x, n in zip((boxes, scores), numbers))
    predictions = decode(dict(zip(JOINED, floats)), (SIDE, SIDE), False)
    found = predictions[0].T.numpy()
    kept = found[:, 4:].max(1) >= least
    middle, size = found[kept, :2], found[kept, 2:4]
    ours = np.column_stack((found[kept, 4:].argmax(1), found[kept, 4:].max(1), middle - size / 2, middle + size / 2))
    theirs = as_frigate(boxes, scores, *numbers, least)
    theirs = theirs[theirs[:, 1] >= least]  # it rounds the threshold down to an integer
    assert 5 < len(ours) < 84 and np.allclose(theirs, ours, atol=0.001)
    xyxy, best, kinds = decoder.decode(boxes, scores, *numbers, (SIDE, SIDE), least, 0.45)
    after_nms = non_max_suppression(predictions, least, 0.45)[0].numpy()
    assert len(best) < len(ours) and np.allclose(np.column_stack((xyxy, best, kinds)), after_nms, atol=0.001)


@torch.no_grad()
def test_scores_instead_of_logits(tmp_path):
    """The classes end with a sigmoid in steps of 1/256; and --per-tensor leaves one scale to each weight."""
    model = for_layout(model_of(nc=3), 'heads', per_tensor=True)
    reference, file = Reference(model, 1, (SIDE, SIDE)), tmp_path / 'model.onnx'
    reference.outputs[:, 4:] = rounded_unit(reference.outputs[:, 4:])
    write_heads(raw_model(model, sigmoid=True), file, reference, EDGE, 13, {'sigmoid': True})
    session = onnxruntime.InferenceSession(file, providers=['CPUExecutionProvider'])
    outputs = session.run(None, {'images': reference.images.numpy()})
    assert all(np.array_equal((x * 256).round(), x * 256) and 0 <= x.min() and x.max() < 1 for x in outputs[1::2])
    graph = onnx.load(file)
    values = constants(graph)
    assert all(values[node.input[1]].ndim == 0 for node in graph.graph.node if node.op_type == 'DequantizeLinear')


def test_sums_of_maps_are_rounded_one_by_one():
    """In float the block computes what it did."""
    maps, twin = torch.rand(3, 1, 4, 8, 8), QuantRoundedCBFuse.from_float(CBFuse([0, 0]))
    xs = (maps[0],), (maps[1],), maps[2]
    with quantizers_off(twin):
        assert torch.equal(twin(xs), maps[0] + maps[1] + maps[2])
    twin.input_quantizer.set_amax(torch.tensor(1.0))
    twin.sum_quantizer.set_amax(torch.tensor(2.0))
    steps = (twin(xs) - twin.input_quantizer(maps[2])) / twin.sum_quantizer.scale
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert not hasattr(QuantRoundedCBFuse.from_float(CBFuse([0])), 'sum_quantizer')


# ---- files --------------------------------------------------------------------------------------------------------------


def values_in(file, images):
    """The outputs of a file for images FP32 [1, 3, H, W]: name → values, their step, and the ends of their range."""
    session = open_file(file, CPU, 'edge').session
    session.run({'images': images})
    found = {}
    for name, integers in session.integers().items():
        step, zero = session.details[name]['quantization']
        ends = step * (-128 - zero), step * (127 - zero)
        found[name] = values_of(integers.numpy(), session.details[name]), step, ends
    return found


@pytest.fixture(scope='module')
def coral(tmp_path_factory):
    """(model, file) in the layout coral, of three classes."""
    model, file = model_of(nc=3), tmp_path_factory.mktemp('edge') / 'model-coral.tflite'
    return model, deployed('edge', model, file, imgsz=(SIDE, SIDE), target='edge').path


@pytest.fixture(scope='module')
def heads(coral, tmp_path_factory):
    """The .tflite and .onnx of the same model in the layout heads."""
    file = tmp_path_factory.mktemp('edge') / 'model-coral.tflite'
    made = deployed('edge', coral[0], file, imgsz=(SIDE, SIDE), target='edge', layout='heads')
    return made.path, made.files['edge onnx']


@needs_litert
def test_nothing_is_float(coral):
    model, file = coral
    read = Read(file)
    used = [t for _, ins, outs in read.operators for t in (*ins, *outs)]
    assert {t['dtype'].__name__ for t in used} <= {'uint8', 'int8', 'int32'}
    assert {name for name, *_ in read.operators} <= MAPPED
    assert [ins[0]['name'] for name, ins, _ in read.operators if name == 'QUANTIZE'] == ['images']
    assert all(ins[1]['shape'][3] == ins[0]['shape'][3] for _, ins, _ in read.named('CONV_2D')), 'no groups'
    pools = [read.session.model.get_tensor(ins[1]['index']) for _, ins, _ in read.named('DEPTHWISE_CONV_2D')]
    assert pools and all((weights == 127).all() for weights in pools), 'no sum of few units, which may be rounded twice'


@needs_litert
def test_its_description_is_that_of_its_tensors(coral):
    _, file = coral
    about, read = json.loads(file.with_suffix('.json').read_text()), Read(file).session
    for each in (*read.inputs, *read.outputs):
        told = about['tensors'][each['name']]
        assert (told['scale'], told['zero_point']) == each['quantization'] and told['shape'] == each['shape'].tolist()
    assert about['tensors']['images']['type'] == 'uint8' and about['tensors']['images']['zero_point'] == 0
    assert [about['tensors'][name]['shape'] for name in JOINED] == [[1, 84, 64], [1, 84, 3]]
    assert json.loads(read_metadata(file)['tensors']) == about['tensors'] and len(about['names']) == 3


@needs_litert
def test_both_layouts_have_the_same_values(coral, heads):
    """Up to a step, because heads has scales of its own. The .onnx, whose predictions were compared as it was written, is sound."""
    images = (made_images(1, (SIDE, SIDE)) * 255).round() / 255
    joined, apart = values_in(coral[1], images), values_in(heads[0], images)
    for i, name in enumerate(JOINED):
        parts = [apart[each] for each in LAYOUTS['heads'][i::2]]
        values, step, _ = joined[name]
        for (own, finer, ends), part in zip(parts, values.split([own.flatten(1, 2).shape[1] for own, *_ in parts], 1)):
            assert finer <= step * 1.001 and (own.flatten(1, 2) - part.clamp(*ends)).abs().max() < step
    graph = onnx.load(heads[1])
    onnx.checker.check_model(graph, full_check=True)
    assert [output.name for output in graph.graph.output] == list(LAYOUTS['heads'])
    assert audit(graph, RULES).findings == [] and metadata_value(graph, 'layout') == 'heads'


@needs_litert
@pytest.mark.parametrize('classes', [1, 64, 80])
def test_frigate_tells_boxes_and_scores_apart(classes, tmp_path):
    """By their last dimension, 64 or another above 1."""
    model = model_of(nc=classes)
    made = deployed('edge', model, tmp_path / 'model-coral.tflite', imgsz=(SIDE, SIDE), target='edge')
    shapes = [output['shape'].tolist() for output in Read(made.path).session.outputs]
    added = classes in (1, 64)
    assert sorted(shapes) == sorted([[1, 84, 64], [1, 84, classes + added]])
    assert any('never scores' in line for line in made.lines) == added
    opened = open_file(made.path, CPU)
    assert opened.nc == classes and opened(made_images(1, (SIDE, SIDE))).shape == (1, 4 + classes, 84)
    if added:
        assert (opened.session.integers()['scores'][..., -1] == -128).all()


@needs_litert
def test_from_checkpoint_to_file(small, tmp_path):
    """quantize, export, --verify, eval and benchmark."""
    data = '--data', small.data, '--device', 'cpu', '--workers', 0
    command(
        *('qat.py', 'quantize', '--weights', small.single, *data, '--imgsz', SIDE, '--target', 'edge', '--epochs', 0),
        *('--activation', 'relu6', '--activation-epochs', 1, '--iters', 2, '--batch-size', 6, '--calib-images', 4),
        *('--calib-method', 'mse', '--no-bias-correction', '--project', tmp_path, '--name', 'run'),
    )
    best = tmp_path / 'run/weights/best.pt'
    said = command('export_qat.py', '--weights', best, '--include', 'edge', '--verify', small.data, code=(0, 1))
    file = best.with_name('best-coral.tflite')
    assert_verdicts(said, json.loads(file.with_name(f'{file.name}.verify.json').read_text()))
    assert re.search(r'[\d.]+% of the integers within one step', said)
    command('export_qat.py', '--weights', best, '--include', 'edge', '--layout', 'heads', '--sigmoid', '--per-tensor')
    assert {f'best-heads.{suffix}' for suffix in ('tflite', 'onnx', 'json')} <= {f.name for f in best.parent.iterdir()}
    said = command('val_trt.py', '--weights', file, *data, '--project', tmp_path, '--name', 'val')
    assert 'INT8: ' in said
    short = '--device', 'cpu', '--duration', 0.1, '--warmup', 1, '--project', tmp_path, '--name', 'speed'
    said = command('benchmark_trt.py', file, *short)
    assert 'LiteRT' in said and 'INT8' in said


@needs_litert
@pytest.mark.skipif(not find_spec('ethosu'), reason='no ethos-u-vela')
@pytest.mark.parametrize('chip', ['ethos-u55-128', 'ethos-u65-256', 'ethos-u85-256'])
def test_vela_leaves_no_operator_to_the_cpu(chip, coral, heads, tmp_path):
    for file in (coral[1], heads[0]):
        code = 'import sys; from ethosu.vela.vela import main; main(sys.argv[1:])'
        line = [sys.executable, '-c', code, file, '--accelerator-config', chip, '--output-dir', tmp_path]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        assert 'CPU operators = 0 ' in said and re.search(r'NPU operators = [1-9]', said)


RKNN = """
import sys
import numpy
from rknn.api import RKNN
model, images, found = sys.argv[1:]
rknn = RKNN()
for stage, run in {
    'config': lambda: rknn.config(
        target_platform='rk3588', mean_values=[[0] * 3], std_values=[[255] * 3], optimization_level=2
    ),
    'load_onnx': lambda: rknn.load_onnx(model=model),
    'build': lambda: rknn.build(do_quantization=False),
    'export_rknn': lambda: rknn.export_rknn(found + '.rknn'),
    'init_runtime': rknn.init_runtime,
    'inference': lambda: numpy.savez(found, *rknn.inference(inputs=[numpy.load(images)], data_format=['nhwc'])),
}.items():
    print('stage', stage, run() or 0, flush=True)
"""


@needs_litert
@pytest.mark.skipif('RKNN_PYTHON' not in os.environ, reason='no RKNN_PYTHON, a Python with rknn-toolkit2')
def test_rknn_builds_and_simulates_heads(coral, heads, tmp_path):
    """Each stage of rknn-toolkit2 ends well, and the predictions are PyTorch's."""
    pixels = (made_images(1, (SIDE, SIDE)) * 255).round()
    np.save(tmp_path / 'images.npy', pixels.permute(0, 2, 3, 1).byte().numpy())
    line = [os.environ['RKNN_PYTHON'], '-c', RKNN, heads[1], tmp_path / 'images.npy', tmp_path / 'found']
    said = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    stages = re.findall(r'^stage (\w+) (-?\d+)$', said.stdout, re.MULTILINE)
    assert said.returncode == 0 and len(stages) == 6 and {code for _, code in stages} == {'0'}, (
        said.stdout + said.stderr
    )
    found = zip(LAYOUTS['heads'], np.load(tmp_path / 'found.npz').values(), strict=True)
    maps = {name: torch.from_numpy(x).permute(0, 2, 3, 1) for name, x in found}
    reference = Reference(for_layout(coral[0], 'heads'), 1, (SIDE, SIDE))
    reference.images, reference.outputs = pixels / 255, reference.traced(pixels / 255)
    reference.require_agreement(decode(maps, (SIDE, SIDE), False), 'RKNN', 'FP32')
