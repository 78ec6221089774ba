"""The decoding of boxes and classes in an ONNX graph."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from utils.qat.graph.channels import Tensors
from utils.qat.graph.onnx_graph import attribute, constants, producers, replace_nodes
from utils.qat.graph.passes import drop_unneeded
from utils.qat.graph.tensor_types import infer

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


def decode_apart(model: ModelProto) -> ModelProto:
    """Let boxes and classes stay apart, in place, where upstream joins them for each stride and splits them again; no value changes.

    Such a head has Concat [B, C, H, W] → Reshape [B, C, H * W], for each stride → Concat → Split. OpenVINO copies each of them: with AMX
    yolov9-t takes 0.92 of the time without. Constants must be initializers or nodes of their own.
    """
    made, nodes = producers(model), list[NodeProto]()
    for node in model.graph.node:
        levels = _levels(node, made)
        apart = _apart(model, node, levels) if levels else []
        nodes += apart or [node]
    return drop_unneeded(replace_nodes(model, nodes)) if len(nodes) > len(model.graph.node) else model


def _levels(split: NodeProto, made: dict[str, NodeProto]) -> list[tuple[NodeProto, NodeProto]]:
    """Return (Concat, Reshape) of each stride whose join a node splits again; none if it is another node."""
    joined = made.get(split.input[0], OTHER) if split.op_type == 'Split' else OTHER
    flat = [made.get(name, OTHER) for name in joined.input] if joined.op_type == 'Concat' else []
    parts = [made.get(node.input[0], OTHER) if node.op_type == 'Reshape' else OTHER for node in flat]
    fits = all(node.op_type == 'Concat' and len(node.input) == len(split.output) for node in parts)
    return list(zip(parts, flat)) if fits else []


def _apart(model: ModelProto, split: NodeProto, levels: Sequence[tuple[NodeProto, NodeProto]]) -> list[NodeProto]:
    """Return the nodes that compute each output of a Split by itself; none if shapes or axes are others than those of `decode_apart`."""
    tensors = Tensors(model)
    made, sizes = tensors.graph.producer, [tensors.number.get(name) for name in split.output]
    joined, types = made[split.input[0]], tensors.types
    for parts, flat in levels:
        image, row = (types.get(name, (0, ()))[1] for name in (flat.input[0], flat.output[0]))
        as_upstream = (
            (attribute(parts, 'axis'), attribute(joined, 'axis')) == (1, 2)
            and tensors.along(split)
            and len(image) == 4
            and row == (*image[:2], image[2] * image[3])
            and [tensors.number.get(name) for name in parts.input] == sizes
        )
        if not as_upstream:
            return []
    nodes = []
    for j, (result, size) in enumerate(zip(split.output, sizes)):
        shape, rows = f'{result}/shape', [f'{result}/level{k}' for k in range(len(levels))]
        model.graph.initializer.append(numpy_helper.from_array(np.array([0, size, -1], np.int64), shape))
        nodes += [
            helper.make_node('Reshape', [parts.input[j], shape], [row], row) for row, (parts, _) in zip(rows, levels)
        ]
        nodes.append(helper.make_node('Concat', rows, [result], f'{result}/joined', axis=2))
    return nodes


def boxes_by_rows(model: ModelProto) -> ModelProto:
    """Compute the distances to the sides from a row for each anchor, in place; values change by rounding.

    Behind `boxes_by_matrix` and `decode_apart` a head has [B, 4R, H, W] → Reshape, for each stride → Concat → Reshape [B, 4, R, N] → Softmax
    → Reshape → MatMul. An INT8 convolution of OpenVINO leaves the channels of a pixel side by side, as a row has them: INT8 of yolov9-t
    takes 0.96 of the time with AMX, and 0.97 with AVX512-VNNI.
    """
    values, made, types = constants(model), producers(model), infer(model)[0]
    nodes = list[NodeProto]()
    for node in model.graph.node:
        matrix = values.get(node.input[0]) if node.op_type == 'MatMul' else None
        softmax = _up(made, node, (1, 'Reshape'), (0, 'Softmax'))
        flat = [made.get(name, OTHER) for name in _up(made, softmax, (0, 'Reshape'), (0, 'Concat')).input]
        maps = [level.input[0] for level in flat if level.op_type == 'Reshape']
        logits = [name for name in maps if len(types.get(name, (0, ()))[1]) == 4]
        channels = [types[name][1][1] for name in logits]
        if (
            flat
            and matrix is not None
            and channels == [matrix.shape[1]] * len(flat)
            and attribute(softmax, 'axis') == 2
        ):
            nodes += _by_rows(model, node, logits, matrix)
        else:
            nodes.append(node)
    return drop_unneeded(replace_nodes(model, nodes)) if len(nodes) > len(model.graph.node) else model


def _by_rows(model: ModelProto, product: NodeProto, logits: Sequence[str], matrix: np.ndarray) -> list[NodeProto]:
    """Return the nodes that compute a product [B, 4, N] of the logits of each stride; see `boxes_by_rows`."""
    result, channels = product.output[0], matrix.shape[1]
    stored = {
        'row': np.array([0, -1, channels]),
        'sides': np.array([0, -1, 4, channels // 4]),
        'weights': matrix.T.copy(),
    }
    row, sides, weights = (f'{result}/{name}' for name in stored)
    model.graph.initializer.extend(numpy_helper.from_array(value, f'{result}/{name}') for name, value in stored.items())
    made = list[NodeProto]()

    def add(op: str, *given: str, **attributes: Any) -> str:
        name = f'{result}/{op}_{len(made)}'
        made.append(helper.make_node(op, given, [name], name, **attributes))
        return name

    rows = [add('Reshape', add('Transpose', level, perm=[0, 2, 3, 1]), row) for level in logits]
    shares = add('Softmax', add('Reshape', add('Concat', *rows, axis=1), sides), axis=3)
    turned = add('MatMul', add('Reshape', shares, row), weights)
    made.append(helper.make_node('Transpose', [turned], [result], product.name, perm=[0, 2, 1]))
    return made


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


def _up(made: dict[str, NodeProto], node: NodeProto, *path: tuple[int, str]) -> NodeProto:
    """Follow inputs of a node: (position, operator that has to produce it), ...; OTHER if it is another."""
    for i, op in path:
        before = made.get(node.input[i], OTHER) if i < len(node.input) else OTHER
        node = before if before.op_type == op else OTHER
    return node


def _decoding(
    scaled: NodeProto, values: dict[str, np.ndarray], made: dict[str, NodeProto]
) -> tuple[str, np.ndarray, str] | None:
    """Return the logits [B, 4, R, N], the R distances and the anchors [1, 2, N] of the boxes that a node multiplies by the stride."""
    up = partial(_up, made)
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
