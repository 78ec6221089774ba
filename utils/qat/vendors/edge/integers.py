"""The ends of a .tflite file: pixels in, integers of the head out, no operator in float."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from utils.qat.core.errors import QatError


class IntegerTensor(TypedDict):
    """An input or output: a value is (integer - zero_point) * scale."""

    shape: list[int]
    type: str
    scale: float
    zero_point: int


def with_integer_ends(file: Path, outputs: Sequence[str]) -> dict[str, IntegerTensor]:
    """Let a converted file take the pixels themselves, UINT8 `images`, in place, and name its outputs.

    Returns its inputs and outputs, for its reader: name → shape, type, scale and zero point. Raises QatError if an operator of it is in
    float.
    """
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(file))
    graph, signature = model.subgraphs[0], model.signatureDefs[0]
    kinds = [code.builtinCode for code in model.operatorCodes]
    floats = {i for i, tensor in enumerate(graph.tensors) if tensor.type == schema.TensorType.FLOAT32}
    (image,) = graph.inputs
    graph.operators = [op for op in graph.operators if not floats.issuperset(op.outputs)]  # the clamp to 0..1
    left = [op for op in graph.operators if floats & {*op.inputs, *op.outputs}]
    if len(left) != 1 or kinds[left[0].opcodeIndex] != schema.BuiltinOperator.QUANTIZE:
        raise QatError(
            f'{len(left)} operators would be in float, such as those of layers that the quantization left in float; quantize all'
        )
    left[0].inputs = np.array([image], np.int32)
    pixels, quantized = graph.tensors[image], graph.tensors[left[0].outputs[0]].quantization
    pixels.type = schema.TensorType.UINT8
    pixels.quantization = schema.QuantizationParametersT()
    pixels.quantization.scale, pixels.quantization.zeroPoint = quantized.scale, np.array([0], np.int64)
    returned = sorted(signature.outputs, key=lambda each: each.name)
    graph.outputs = [each.tensorIndex for each in returned]
    about: dict[str, IntegerTensor] = {}
    for entry, name in zip((*signature.inputs, *returned), ('images', *outputs)):
        tensor = graph.tensors[entry.tensorIndex]
        entry.name = tensor.name = name.encode()
        about[name] = {
            'shape': [*map(int, tensor.shape)],
            'type': 'uint8' if tensor is pixels else 'int8',
            'scale': float(tensor.quantization.scale[0]),
            'zero_point': int(tensor.quantization.zeroPoint[0]),
        }
    flatbuffer_utils.write_model(model, str(file))
    return about
