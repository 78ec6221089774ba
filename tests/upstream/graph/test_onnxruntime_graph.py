"""Laws of the graph for ONNX Runtime: an INT8 average is an INT8 convolution, and its integers are the same."""

import numpy as np
import onnxruntime
import pytest
from helpers.graphs import copy, model_of, run_onnx
from helpers.tables import named_rows

from utils.qat.core.machine import onnx_options
from utils.qat.graph.passes import averages_by_convolutions

VALUES = {'s': np.float32(0.125), 'z': np.uint8(100), 'ys': np.float32(0.11), 'yz': np.uint8(90)}
# name, nodes behind `a`, and whether the average becomes a convolution; y is the result
ROWS = """
two by two | p = AveragePool<kernel_shape = [2, 2]>(a) y = QDQ(p, s, z) | yes
with strides | p = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(a) y = QDQ(p, s, z) | yes
two readers | p = AveragePool<kernel_shape = [2, 2]>(a) q = QDQ(p, s, z) r = QDQ(p, ys, yz) y = Add(q, r) | yes
zeros around count | p = AveragePool<kernel_shape = [4, 4], pads = [1, 1, 1, 1], count_include_pad = 1>(a) y = QDQ(p, s, z) | yes
they do not | p = AveragePool<kernel_shape = [4, 4], pads = [1, 1, 1, 1]>(a) y = QDQ(p, s, z) | no
windows over the edge | p = AveragePool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(a) y = QDQ(p, s, z) | no
a float reader | p = AveragePool<kernel_shape = [2, 2]>(a) q = QDQ(p, s, z) r = Relu(p) y = Add(q, r) | no
the output | y = AveragePool<kernel_shape = [2, 2]>(a) | no
of floats | p = AveragePool<kernel_shape = [2, 2]>(x) y = QDQ(p, s, z) | no
"""


@pytest.mark.parametrize('text, becomes', named_rows(ROWS))
def test_an_average_of_integers_is_a_convolution_with_the_same_result(text, becomes):
    """The scale is a power of two, so no product is rounded, and averages that lie between two integers are compared too."""
    before = model_of(f'a = QDQ(x, s, z) {text}', {'x': [1, 3, 9, 9]}, {'y': [*'nchw']}, VALUES)
    after = averages_by_convolutions(copy(before))
    assert [n.op_type for n in after.graph.node if n.op_type in ('AveragePool', 'Conv')] == [
        'Conv' if becomes == 'yes' else 'AveragePool'
    ]
    feeds = {'x': np.random.default_rng(0).integers(-100, 156, (1, 3, 9, 9)).astype(np.float32) / 8}
    wanted = run_onnx(before, feeds)[0]
    session = onnxruntime.InferenceSession(after.SerializeToString(), onnx_options(), ['CPUExecutionProvider'])
    np.testing.assert_array_equal(run_onnx(after, feeds)[0], wanted)  # node by node
    np.testing.assert_array_equal(session.run(None, feeds)[0], wanted)  # by the kernels for integers
