"""The two ends of a classifier inside its ONNX file: ImageNet's normalization before the network, the softmax behind it."""

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, TensorProto, helper

from utils.qat.graph.nms import GraphWriter
from utils.qat.graph.onnx_graph import axes_of, replace_nodes, required_inputs

PROBABILITIES = 'probabilities'  # the output of such a file


def add_class_ends(model: ModelProto, mean: Sequence[float], std: Sequence[float]) -> ModelProto:
    """Make a classifier take images in 0..1 and return probabilities FP32 [B, nc], in place.

    Before, it took images that are less `mean` and divided by `std`, of RGB, and returned logits, see export_onnx. Its own nodes
    do not change.
    """
    [images], [logits] = required_inputs(model), model.graph.output
    network, graph = list(model.graph.node), GraphWriter(model)
    by_channel = [graph.constant(np.reshape(value, (3, 1, 1)), np.float32) for value in (mean, std)]
    centred = graph.node('Sub', [images.name, by_channel[0]])
    normalized = graph.node('Div', [centred, by_channel[1]])
    before = list(model.graph.node)[len(network) :]
    for node in network:
        node.input[:] = [normalized if name == images.name else name for name in node.input]
    replace_nodes(model, [*before, *network])
    graph.node('Softmax', [logits.name], (PROBABILITIES,), axis=1)
    output = helper.make_tensor_value_info(PROBABILITIES, TensorProto.FLOAT, axes_of(logits))
    del model.graph.output[:]
    model.graph.output.append(output)
    return model
