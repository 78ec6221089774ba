"""Laws of the FP16 graph of real models: types, INT8 weights, and outputs near the model's."""

import warnings

import onnx
import pytest
import torch
from helpers.faults import sampled
from helpers.graphs import between_quantized, copy
from helpers.zoo import build, fuse, image
from onnx import TensorProto, numpy_helper

from models.deploy.agreement import LIMITS, output_differences, traceable_copy
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from test_half import FLOAT, HALF, INT64, casts, types_of
from utils.qat.graph import onnx_graph
from utils.qat.graph.passes import store_int8_weights
from utils.qat.vendors.load import open_file
from utils.qat.vendors.tensorrt.half import to_half

# Measured on 8 images of 96 and 320 px (2 CPU cores, ONNX Runtime 1.31): the FP16 graph is at most 0.02 % (boxes) and 0.05 %
# (scores, as logits) from the float model, and at most 2.2 % and 4.2 % from the quantized one; the FP32 graph of that is 0.8 %
# and 2.5 % from it. FP16 has 3 bits more than the INT8 grid, so that more values come to lie on the other side of a half step.


def int8_weights(model):
    """{name: bytes} of the INT8 initializers that are no zero points."""
    values = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer if i.data_type == TensorProto.INT8}
    return {name: v.tobytes() for name, v in values.items() if v.ndim == 4}


@pytest.mark.parametrize('kind', ['float', 'quantized'])
@pytest.mark.parametrize(
    'options', sampled([{'opset': 19}, {'opset': 20, 'dynamic': True, 'simplify': True}], 2), ids=['static', 'dynamic']
)
def test_every_law_on_the_demo(small, tmp_path, kind, options):
    model = small.float_model() if kind == 'float' else small.quantized_model()
    file = tmp_path / 'model.onnx'
    export_onnx(model, file, (64, 64), int8_weights=False, **options)
    fp32 = onnx.load(file)
    typed = to_half(copy(fp32))
    onnx.save(typed, file)

    onnx.checker.check_model(typed, full_check=True)
    assert list(typed.graph.input) == list(fp32.graph.input) and list(typed.graph.output) == list(fp32.graph.output)
    assert list(typed.metadata_props) == list(fp32.metadata_props)
    types, convs = types_of(typed), [n for n in typed.graph.node if n.op_type == 'Conv']
    assert [types[n.output[0]] for n in convs] == [HALF] * (len(convs) - 1) + [FLOAT], 'the last is the DFL'
    to_fp16, to_fp32 = ([name for name, t in casts(typed) if t == one] for one in (HALF, FLOAT))
    assert to_fp16 == (['images'] if kind == 'float' else []), 'INT8: images are quantized as they come'
    assert len(to_fp32) == 2, 'boxes and classes, all strides together'
    assert {types[n.output[0]] for n in typed.graph.node if n.op_type in ('Softmax', 'Div', 'Sub')} <= {FLOAT, INT64}
    assert {types[n.output[0]] for n in typed.graph.node if n.op_type == 'Resize'} == {HALF}, 'CBFuse and Upsample'

    number = sum(isinstance(m, QuantConv2d) for m in model.modules())
    (q32, dq32), (q16, dq16) = onnx_graph.count_qdq(fp32), onnx_graph.count_qdq(typed)
    assert (q16, dq16) == (q32 - number, dq32)
    if kind == 'quantized':
        between = between_quantized(typed.graph.node)
        assert {'Conv', 'Mul', 'Sigmoid', 'Add', 'Concat', 'DequantizeLinear'} <= {n.op_type for n in between}
        assert {types[o] for n in between for o in n.output} <= {HALF, TensorProto.INT8, INT64}
        assert (
            int8_weights(typed) == int8_weights(store_int8_weights(copy(fp32))) and len(int8_weights(typed)) == number
        )

    for n in (1, 3) if options.get('dynamic') else (1,):
        images = image(64, n, seed=n)
        with torch.no_grad():
            figures = output_differences(open_file(file)(images), traceable_copy(model)(images))
        assert max(figures['boxes'], figures['scores']) <= LIMITS['float' if kind == 'float' else 'INT8', 'FP16'], (
            figures
        )


@pytest.mark.full_tree
def test_a_segmentation_head(tmp_path):
    """Only types are checked, because a deep network with random weights magnifies any rounding."""
    model = fuse(build('gelan-c-seg', width_multiple=0.25))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.onnx.export(model, (image(),), str(tmp_path / 'model.onnx'), opset_version=20, dynamo=False)
    typed = to_half(onnx.load(tmp_path / 'model.onnx'))
    types, convs = types_of(typed), [n for n in typed.graph.node if n.op_type == 'Conv']
    assert [types[n.output[0]] for n in convs].count(FLOAT) == 1, 'the DFL alone'
    assert {t for _, t in casts(typed)[1:]} == {FLOAT}
    assert len(casts(typed)) == 1 + 3 + 1 + 3, (
        'the image; boxes, classes and coefficients; prototypes; raw maps, which it returns'
    )
