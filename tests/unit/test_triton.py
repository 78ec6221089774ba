"""config.pbtxt of Triton, for graphs made by hand: every input and output with its type and its shape as Triton counts it."""

import re

import pytest
from helpers.graphs import model_of
from onnx import TensorProto

from utils.qat.core.errors import QatError
from utils.qat.graph.triton_config import triton_config

FLOAT, INT32, INT64, HALF = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT16


def graph(inputs, outputs):
    """A model without nodes; inputs and outputs: {name: (type, shape)}."""
    return model_of([], inputs, outputs)


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


BOXES = [('num_dets', 'INT32', [1]), ('det_boxes', 'FP32', [100, 4]), ('det_scores', 'FP32', [100])]
BOXES += [('det_classes', 'INT32', [100])]
SERVED = {  # graph, options → tensors, and lines that are there or not
    'an open batch': (
        end2end('batch'),
        {'max_batch': 8},
        [('input', 'images', 'FP32', [3, 640, 320]), *(('output', *box) for box in BOXES)],
        {'max_batch_size: 8': True, 'platform: "tensorrt_plan"': True, 'dynamic_batching { }': True},
    ),
    'a fixed batch, which is an axis': (
        end2end(2),
        {'max_batch': 8},
        [
            ('input', 'images', 'FP32', [2, 3, 640, 320]),
            *(('output', name, kind, [2, *axes]) for name, kind, axes in BOXES),
        ],
        {'max_batch_size: 0': True, 'dynamic_batching { }': False},
    ),
    'one image at a time': (
        graph({'images': (FLOAT, ['batch', 3, 8, 8])}, {'det_masks': (FLOAT, ['batch', 100, 25600])}),
        {},
        [('input', 'images', 'FP32', [3, 8, 8]), ('output', 'det_masks', 'FP32', [100, 25600])],
        {'max_batch_size: 1': True, 'dynamic_batching { }': False},
    ),
    'open sizes and other types': (
        graph({'images': (HALF, ['batch', 3, 'height', None])}, {'output0': (INT64, ['batch', 84, 'anchors'])}),
        {},
        [('input', 'images', 'FP16', [3, -1, -1]), ('output', 'output0', 'INT64', [84, -1])],
        {},
    ),
}


@pytest.mark.parametrize('model, options, wanted, lines', SERVED.values(), ids=SERVED)
def test_every_tensor_as_triton_counts_it(model, options, wanted, lines):
    text = triton_config(model, 'yolov9', **options)
    assert tensors(text) == wanted and text.startswith('name: "yolov9"\n')
    assert {line: line in text.splitlines() for line in lines} == lines


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
