"""The decoding of boxes in an ONNX graph."""

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.qat.graph.onnx_graph import attribute, constants, producers, replace_nodes
from utils.qat.graph.passes import drop_unneeded

# rows: x, y, width and height of a box; columns: distances from its anchor to the left, upper, right and lower side
BOX_OF_SIDES = np.array([[-0.5, 0, 0.5, 0], [0, -0.5, 0, 0.5], [1, 0, 1, 0], [0, 1, 0, 1]], np.float32)
OTHER = NodeProto()  # in place of a node that is not what upstream's head has


def boxes_by_matrix(model: ModelProto) -> ModelProto:
    """Compute the boxes of a head of YOLOv9 by one matrix, in place; values change by rounding. Another head stays as it is.

    Such a head has Transpose → Softmax → 1x1 convolution (DFL) → distances to the sides → corners → center and size → times stride. All
    between Softmax and stride is linear, and the Transpose serves the convolution alone. docs/tensorrt.md has the time that it took.
    """
    values, made = constants(model), producers(model)
    nodes: list[NodeProto] = []
    for scaled in model.graph.node:
        if decoded := _decoding(scaled, values, made):
            nodes += _product(model, scaled, *decoded)
        nodes.append(scaled)
    return drop_unneeded(replace_nodes(model, nodes)) if len(nodes) > len(model.graph.node) else model


def _product(model: ModelProto, scaled: NodeProto, logits: str, bins: np.ndarray, anchors: str) -> list[NodeProto]:
    """Let a node read the product, and return the nodes that compute it; see `_decoding`."""
    base = scaled.output[0]
    stored = {
        f'{base}/matrix': np.kron(BOX_OF_SIDES, bins.reshape(1, -1)),
        f'{base}/shape': np.array([0, 4 * bins.size, -1], np.int64),
        f'{base}/zero': np.zeros((), np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    matrix, shape, zero = stored
    steps: Sequence[tuple[str, list[str], int | None]] = (
        ('Softmax', [logits], 2),
        ('Reshape', [f'{base}/Softmax', shape], None),
        ('MatMul', [matrix, f'{base}/Reshape'], None),
        ('Mul', [anchors, zero], None),
        ('Concat', [anchors, f'{base}/Mul'], 1),  # what the anchors add to x, y, width and height
        ('Add', [f'{base}/MatMul', f'{base}/Concat'], None),
    )
    scaled.input[0] = f'{base}/Add'
    return [helper.make_node(op, given, [f'{base}/{op}'], f'{base}/{op}', axis=axis) for op, given, axis in steps]


def _decoding(
    scaled: NodeProto, values: dict[str, np.ndarray], made: dict[str, NodeProto]
) -> tuple[str, np.ndarray, str] | None:
    """Return the logits [B, 4, R, N], the R distances and the anchors [1, 2, N] of the boxes that a node multiplies by the stride."""

    def up(node: NodeProto, *path: tuple[int, str]) -> NodeProto:
        """Follow inputs: (position, operator that has to produce it), ...; an empty node if it is another."""
        for i, op in path:
            before = made.get(node.input[i], OTHER) if i < len(node.input) else OTHER
            node = before if before.op_type == op else OTHER
        return node

    joined = up(scaled, (0, 'Concat')) if scaled.op_type == 'Mul' else OTHER
    halved, size = up(joined, (0, 'Div')), up(joined, (1, 'Sub'))
    first, last = up(halved, (0, 'Add'), (0, 'Sub')), up(halved, (0, 'Add'), (1, 'Add'))
    sides = up(first, (1, 'Split'))
    mean = up(sides, (0, 'Reshape'), (0, 'Conv'))
    softmax, turned = up(mean, (0, 'Softmax')), up(mean, (0, 'Softmax'), (0, 'Transpose'))
    bins = values.get(mean.input[1]) if all(node.op_type for node in (size, last, turned)) else None
    if bins is None:
        return None
    anchors = first.input[0]
    as_upstream = (
        bins.shape == (1, bins.size, 1, 1)
        and values.get(halved.input[1]) == 2
        and [*first.input, *last.input] == [anchors, sides.output[0], anchors, sides.output[1]]
        and [*size.input] == [last.output[0], first.output[0]]
        and (attribute(softmax, 'axis'), attribute(turned, 'perm')) == (1, [0, 2, 1, 3])
    )
    return (turned.input[0], bins, anchors) if as_upstream else None
