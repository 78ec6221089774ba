"""Laws of graph/decoding.py: the boxes stay, and another decoding stays as it is."""

import numpy as np
import pytest
from helpers.graphs import graph_of, run_onnx

from utils.qat.graph.decoding import boxes_by_matrix

BATCH, BINS, ANCHORS = 2, 4, 7  # as many bins as sides, so that another order of the axes is a graph too
# As upstream's DDetect is traced: `x` has the logits of the distances to four sides
HEAD = """
t = Transpose<perm = [0, 2, 1, 3]>(x) s = Softmax<axis = 1>(t) c = Conv(s, bins) d = Reshape(c, sides)
before, behind = Split<axis = 1>(d, halves) first = Sub(anchors, before) last = Add(anchors, behind)
sum = Add(first, last) center = Div(sum, two) size = Sub(last, first) box = Concat<axis = 1>(center, size) y = Mul(box, strides)
"""
RNG = np.random.default_rng(1)
VALUES = {
    'bins': np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1),
    'sides': np.array([0, 4, ANCHORS]),
    'halves': np.array([2, 2]),
    'anchors': RNG.uniform(0, 20, (1, 2, ANCHORS)).astype(np.float32),
    'two': np.float32(2),
    'three': np.float32(3),
    'strides': RNG.uniform(8, 32, (1, ANCHORS)).astype(np.float32),
}
OTHERS = {
    'perm = [0, 2, 1, 3]': 'perm = [0, 1, 2, 3]',
    'Softmax<axis = 1>': 'Softmax<axis = 2>',
    'Sub(anchors, before)': 'Sub(before, anchors)',
    'Sub(anchors, before) last = Add(anchors, behind)': 'Sub(anchors, behind) last = Add(anchors, before)',
    'Div(sum, two)': 'Div(sum, three)',
    'Sub(last, first)': 'Sub(first, last)',
    'Concat<axis = 1>(center, size)': 'Concat<axis = 1>(first, last)',
}


def head(text=HEAD):
    return graph_of(text, initializers=VALUES, shape=(BATCH, 4, BINS, ANCHORS), returns=(BATCH, 4, ANCHORS))


def test_the_boxes_stay():
    x = RNG.normal(0, 4, (BATCH, 4, BINS, ANCHORS)).astype(np.float32)
    (before,), (after,) = (run_onnx(model, {'x': x}) for model in (head(), boxes_by_matrix(head())))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-3)  # pixels, of sums of products in FP32
    kinds = [node.op_type for node in boxes_by_matrix(head()).graph.node]
    assert sorted(kinds) == sorted(['Softmax', 'Reshape', 'MatMul', 'Mul', 'Concat', 'Add', 'Mul'])


@pytest.mark.parametrize('part', OTHERS)
def test_another_decoding_stays(part):
    assert HEAD.count(part) == 1
    text = HEAD.replace(part, OTHERS[part])
    assert boxes_by_matrix(head(text)) == head(text)
