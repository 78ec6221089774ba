"""Laws of graph/decoding.py: boxes and classes stay, and another decoding stays as it is."""

import numpy as np
import pytest
from helpers.graphs import graph_of, run_onnx

from utils.qat.graph.decoding import boxes_by_matrix, boxes_by_rows, decode_apart

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


# ---- boxes and classes apart --------------------------------------------------------------------------------------------

# As upstream joins and splits them, of images of two strides; the second has other boxes and classes
JOINED = """
left = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) a, b, e = Split<axis = 1>(x, three) c, d, f = Split<axis = 1>(left, three)
large = Concat<axis = 1>(a, b) small = Concat<axis = 1>(d, c) rows = Reshape(large, flat) more = Reshape(small, flat)
all = Concat<axis = 2>(rows, more) box, cls = Split<axis = 1>(all, two) s = Sigmoid(cls) y = Concat<axis = 1>(box, s)
"""
PARTS = {'three': np.array([2, 2, 1]), 'two': np.array([2, 2]), 'flat': np.array([0, 4, -1]), 'other': np.array([1, 3])}
NOT_JOINED = {
    'more = Reshape(small, flat)': 'more = Relu(rows)',
    'large = Concat<axis = 1>(a, b)': 'large = Concat<axis = 1>(a, e, e)',
    'Split<axis = 1>(all, two)': 'Split<axis = 1>(all, other)',
}


def joined(text=JOINED):
    return graph_of(text, initializers=PARTS, shape=(1, 5, 4, 4), returns=(None, None, None))


def test_boxes_and_classes_are_not_joined():
    x = {'x': RNG.normal(size=(1, 5, 4, 4)).astype(np.float32)}
    before, after = joined(), decode_apart(joined())
    np.testing.assert_array_equal(run_onnx(after, x)[0], run_onnx(before, x)[0])
    assert [[n.op_type for n in model.graph.node].count('Split') for model in (before, after)] == [3, 2]
    assert not {'large', 'small', 'all'} & {name for n in after.graph.node for name in n.output}


# ---- boxes from rows ----------------------------------------------------------------------------------------------------

# As both leave them, of two strides: the product of the shares of 4 x 3 bins
TURNED = """
left = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) rows = Reshape(x, flat) more = Reshape(left, flat)
all = Concat<axis = 2>(rows, more) four = Reshape(all, sides) s = Softmax<axis = 2>(four) shares = Reshape(s, flat) y = MatMul(matrix, shares)
"""
NOT_TURNED = {
    'Softmax<axis = 2>': 'Softmax<axis = 1>',
    'more = Reshape(left, flat)': 'more = Relu(rows)',
    'y = MatMul(matrix, shares)': 'double = Add(matrix, matrix) y = MatMul(double, shares)',
}
OF_ROWS = {
    'flat': np.array([0, 12, -1]),
    'sides': np.array([0, 4, 3, -1]),
    'matrix': RNG.normal(size=(4, 12)).astype(np.float32),
}


def turned(text=TURNED):
    return graph_of(text, initializers=OF_ROWS, shape=(2, 12, 4, 6), returns=(None, None, None))


def test_boxes_are_computed_from_rows():
    x = {'x': RNG.normal(size=(2, 12, 4, 6)).astype(np.float32)}
    after = boxes_by_rows(turned())
    np.testing.assert_allclose(run_onnx(after, x)[0], run_onnx(turned(), x)[0], rtol=1e-5, atol=1e-5)
    (softmax,) = [n for n in after.graph.node if n.op_type == 'Softmax']
    assert softmax.attribute[0].i == 3, 'the last axis: the bins lie side by side'
    assert not {'rows', 'more', 'all'} & {name for n in after.graph.node for name in n.output}


# ---- anything else ------------------------------------------------------------------------------------------------------

FORMS = (
    (boxes_by_matrix, head, HEAD, OTHERS),
    (decode_apart, joined, JOINED, NOT_JOINED),
    (boxes_by_rows, turned, TURNED, NOT_TURNED),
)
OTHER = [(change, make, text, *parts) for change, make, text, others in FORMS for parts in others.items()]


@pytest.mark.parametrize('change, make, text, part, other', OTHER)
def test_another_decoding_stays(change, make, text, part, other):
    assert text.count(part) == 1
    model = make(text.replace(part, other))
    assert change(model) == make(text.replace(part, other))
