"""config.pbtxt of Triton, for graphs made by hand: every input and output with its type and its shape as Triton counts it."""

import re

import pytest
from onnx import TensorProto, helper

from utils.qat.core.errors import QatError
from utils.qat.graph.triton_config import triton_config

FLOAT, INT32, INT64, HALF = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT16


def graph(inputs, outputs):
    """A model without nodes; inputs and outputs: {name: (type, shape)}."""
    values = [[helper.make_tensor_value_info(name, *of) for name, of in group.items()] for group in (inputs, outputs)]
    return helper.make_model(helper.make_graph([], 'by hand', *values))


def end2end(batch):
    return graph(
        {'images': (FLOAT, [batch, 3, 640, 320])},
        {
            'num_dets': (INT32, [batch, 1]),
            'det_boxes': (FLOAT, [batch, 100, 4]),
            'det_scores': (FLOAT, [batch, 100]),
            'det_classes': (INT32, [batch, 100]),
        },
    )


def tensors(text):
    """[(kind, name, type, dims)] of a config.pbtxt."""
    found = []
    for kind, block in re.findall(r'^(input|output) \[\n(.*?)\n\]', text, re.DOTALL | re.MULTILINE):
        found += [
            (kind, name, type_, [int(n) for n in dims.split(',')])
            for name, type_, dims in re.findall(r'\{ name: "(\w+)", data_type: TYPE_(\w+), dims: \[(.*?)\] \}', block)
        ]
    return found


def test_end2end_with_an_open_batch():
    text = triton_config(end2end('batch'), 'yolov9', max_batch=8)
    assert tensors(text) == [
        ('input', 'images', 'FP32', [3, 640, 320]),
        ('output', 'num_dets', 'INT32', [1]),
        ('output', 'det_boxes', 'FP32', [100, 4]),
        ('output', 'det_scores', 'FP32', [100]),
        ('output', 'det_classes', 'INT32', [100]),
    ]
    assert text.splitlines()[:3] == ['name: "yolov9"', 'platform: "tensorrt_plan"', 'max_batch_size: 8']
    assert 'dynamic_batching { }' in text


def test_end2end_with_a_fixed_batch():
    """With a fixed batch, Triton counts the batch as an axis."""
    text = triton_config(end2end(2), 'yolov9', max_batch=8, platform='onnxruntime_onnx')
    assert tensors(text)[0] == ('input', 'images', 'FP32', [2, 3, 640, 320]) and tensors(text)[1] == (
        'output',
        'num_dets',
        'INT32',
        [2, 1],
    )
    assert 'max_batch_size: 0' in text and 'platform: "onnxruntime_onnx"' in text and 'dynamic_batching' not in text


def test_masks():
    model = end2end('batch')
    model.graph.output.append(helper.make_tensor_value_info('det_masks', FLOAT, ['batch', 100, 25600]))
    assert tensors(triton_config(model, 'yolov9-seg', max_batch=4))[-1] == ('output', 'det_masks', 'FP32', [100, 25600])


def test_one_image_at_a_time_is_not_gathered():
    text = triton_config(end2end('batch'), 'yolov9')
    assert 'max_batch_size: 1' in text and 'dynamic_batching' not in text


def test_open_sizes_and_other_types():
    model = graph({'images': (HALF, ['batch', 3, 'height', None])}, {'output0': (INT64, ['batch', 84, 'anchors'])})
    assert tensors(triton_config(model, 'm')) == [
        ('input', 'images', 'FP16', [3, -1, -1]),
        ('output', 'output0', 'INT64', [84, -1]),
    ]


@pytest.mark.parametrize(
    'outputs, says',
    [
        (
            {'boxes': (FLOAT, ['batch', 4]), 'picked': (INT64, [7, 3])},
            'first axis of every input and output must be the batch; found images',
        ),
        ({'output0': (FLOAT, None)}, 'output0 has no axes'),
        ({'output0': (FLOAT, [])}, 'output0 has no axes'),
        ({'output0': (TensorProto.COMPLEX64, ['batch', 4])}, 'output0 is of type COMPLEX64'),
    ],
)
def test_what_triton_cannot_serve(outputs, says):
    with pytest.raises(QatError, match=says):
        triton_config(graph({'images': (FLOAT, ['batch', 3, 64, 64])}, outputs), 'm')
