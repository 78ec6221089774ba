"""FP32 graph → strongly typed graph for TensorRT 11, which has no precision flags: types of tensors set the precision.

    images FP32 → Q (or Cast) → features: FP16, between Q and DQ INT8 → Cast → decoding: FP32 → outputs FP32

Images are quantized in FP32: a Cast before the first Q would be one more pass over the largest tensor. Decoding
stays FP32, because FP16 has 11 bits of mantissa and box coordinates go up to the size of the image. Scales are FP16 too
(opset 19 to 22).

Sums between DQ and Q are FP32: TensorRT 10.6 computes those of FP16 with kernels that read no channels in groups of 32,
and copies each addend first (docs/tensorrt.md#measured).
"""

from collections.abc import Mapping, Set

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import (
    attribute,
    constants,
    count_qdq,
    moved_inputs,
    opset,
    producers,
    readers,
    replace_nodes,
)
from utils.qat.graph.passes import constants_to_initializers, store_int8_weights

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
SUFFIX: dict[int, str] = {FLOAT: '_fp32', HALF: '_fp16'}  # end of the names of tensors that are made here
FUSED = {('QuantizeLinear', 'DequantizeLinear'), ('DequantizeLinear', 'Conv')}  # pairs that TensorRT fuses
LARGEST, SMALLEST_NORMAL = np.finfo(np.float16).max, np.finfo(np.float16).tiny  # 65504 and 2**-14


def to_half(model: ModelProto) -> ModelProto:
    """Make an FP32 graph strongly typed, in place: FP16 up to the last feature convolutions, FP32 after them.

    Weights with Q/DQ are stored as INT8. Types and names of graph inputs and outputs stay, and so does every DQ and every Q
    of an activation. Constants and scales must fit FP16, and Q/DQ needs opset 19 to 22.
    """
    if any(count_qdq(model)) and not 19 <= opset(model) <= 22:
        raise QatError(
            f'opset {opset(model)}: FP16 scales of Q/DQ exist in opsets 19 to 22; export with --trt 11, which takes opset 19'
        )
    constants_to_initializers(model)
    store_int8_weights(model)
    sums = _separate_sums(model)
    qdq, types = count_qdq(model), _types(model)
    _retype(model, _feature_inputs(model, types, sums), types)
    del model.graph.value_info[:]
    model.CopyFrom(_infer(model))
    onnx.checker.check_model(model, full_check=True)
    _require_qdq(model, qdq)
    return model


def _infer(model: ModelProto) -> ModelProto:
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def _types(model: ModelProto) -> dict[str, int]:
    graph = _infer(model).graph
    by_name = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    return {**by_name, **{i.name: i.data_type for i in graph.initializer}}


def _exact(scale: np.ndarray) -> bool:
    """Tell whether a scale is an FP16 number, so that one end of Q/DQ may have it in FP32 and the other in FP16."""
    with np.errstate(over='ignore'):  # a scale beyond FP16 becomes inf, which differs
        return np.array_equal(scale.astype(np.float16), scale)


def _separate_sums(model: ModelProto) -> set[str]:
    """Find the Adds of DQs that Qs alone read, in place: a DQ that others read too is doubled.

    Returns:
        The outputs of the Adds and of their DQs.
    """
    made_by, read_by, values = producers(model), readers(model), constants(model)
    outputs, sums, copies = {o.name for o in model.graph.output}, set[str](), dict[str, list[NodeProto]]()
    for node in model.graph.node:
        sources = [made_by[name] for name in node.input if name in made_by]
        quantizers = [reader for reader, _ in read_by.get(node.output[0], ())]
        if (
            node.op_type != 'Add'
            or outputs.intersection(node.output)
            or [s.op_type for s in sources] != ['DequantizeLinear'] * 2
            or {q.op_type for q in quantizers} != {'QuantizeLinear'}
            or not all(_exact(values[end.input[1]]) for end in (*sources, *quantizers))
        ):
            continue
        for i, source in enumerate(sources):
            if len(read_by[node.input[i]]) > 1:
                copy = NodeProto()
                copy.CopyFrom(source)
                copy.name = copy.output[0] = node.input[i] = f'{node.output[0]}/addend_{i}'
                copies.setdefault(source.output[0], []).append(copy)
            sums.add(node.input[i])
        sums.add(node.output[0])
    replace_nodes(model, [n for node in model.graph.node for n in (node, *copies.get(node.output[0], ()))])
    return sums


def _float_inputs(node: NodeProto, version: int, types: Mapping[str, int]) -> set[int]:
    """Return the positions of the FP32 inputs of a node that may be FP16 and have its computation type.

    This is the type of its first input or of an output. Resize's roi and scales have types of their own.
    """
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    halves = {c.type_param_str for c in schema.type_constraints if 'tensor(float16)' in c.allowed_type_strs}
    computes_in = halves & {schema.inputs[0].type_str, *(o.type_str for o in schema.outputs)} if schema.inputs else ()
    # The last input of an operator may repeat.
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)].type_str for i in range(len(node.input))]
    return {i for i, name in enumerate(node.input) if types.get(name) == FLOAT and formal[i] in computes_in}


def _feature_inputs(model: ModelProto, types: Mapping[str, int], sums: Set[str]) -> dict[str, set[int]]:
    """Find the inputs of nodes that become FP16: first output of a node → positions of its inputs.

    The nodes are every feature convolution, every node that computes an input of one, and nodes that only move their
    outputs: the Cast comes where decoding starts to compute. A feature convolution does not follow a Softmax: that
    convolution is the DFL, a part of the decoding. The search backwards follows values (FP32 or INT8), not shapes.
    `sums` stay FP32, and so do the Qs that read one of them or the images.
    """
    made_by, values, in_fp32 = producers(model), constants(model), {*sums, *(i.name for i in model.graph.input)}
    decoded: set[str] = set()

    for node in model.graph.node:
        if node.op_type == 'Softmax' or decoded.intersection(node.input):
            decoded.update(node.output)
    todo = [n for n in model.graph.node if n.op_type in ('Conv', 'ConvTranspose') and not decoded.intersection(n.input)]
    features: dict[str, set[int]] = {}
    while todo:
        node = todo.pop()
        if node.output[0] not in features:
            positions = _float_inputs(node, opset(model), types)
            stays = node.op_type == 'QuantizeLinear' and node.input[0] in in_fp32 and _exact(values[node.input[1]])
            features[node.output[0]] = set() if stays or node.output[0] in sums else positions
            todo += [
                made_by[name]
                for i, name in enumerate(node.input)
                if name in made_by and (i in positions or types.get(name) in (TensorProto.INT8, TensorProto.UINT8))
            ]
    for node in model.graph.node:
        if (
            node.output[0] not in features
            and moved_inputs(node)
            and {node.input[i] for i in moved_inputs(node)} <= features.keys()
        ):
            features[node.output[0]] = _float_inputs(node, opset(model), types)
            features.update(dict.fromkeys(node.output[1:], features[node.output[0]]))
    return features


def _to_fp16(tensor: TensorProto, name: str) -> TensorProto:
    """Copy an FP32 initializer as FP16, under another name; QatError if a value is beyond FP16."""
    values = numpy_helper.to_array(tensor)
    largest = np.abs(values[np.isfinite(values)]).max(initial=0)
    if largest > LARGEST:
        raise QatError(
            f'{tensor.name}: {largest:.6g} is beyond FP16 (at most {LARGEST:.0f}); export for TensorRT 10 (--trt 10)'
        )
    return numpy_helper.from_array(values.astype(np.float16), name)


def _require_scale(node: NodeProto, scale: np.ndarray) -> None:
    """Raise QatError unless `scale` stays positive and precise in FP16. TensorRT refuses 0."""
    bad = scale[~((scale >= SMALLEST_NORMAL) & (scale <= LARGEST))]
    if bad.size:
        raise QatError(
            f'{node.name or node.output[0]}: scale {bad.flat[0]:.3g} is no normal FP16 number ({SMALLEST_NORMAL:.3g} '
            f'to {LARGEST:.0f}); quantize this model anew (qat.py quantize), or export for TensorRT 10 (--trt 10)'
        )


def _retype(model: ModelProto, features: Mapping[str, set[int]], types: Mapping[str, int]) -> None:
    """Convert the inputs `features` to FP16, in place, with a Cast on each tensor from the FP32 part, and back.

    A constant that both parts read is stored twice.
    """
    graph = model.graph
    stored, values = {i.name: i for i in graph.initializer}, constants(model)
    outputs = {o.name for o in graph.output}
    halves: set[str] = set()  # tensors that are FP16 now
    nodes: list[NodeProto] = []
    made: dict[tuple[str, int], str] = {}  # (tensor, type) → name of the tensor in that type

    def convert(name: str, to: int) -> str:
        if (name, to) not in made:
            made[name, to] = name + SUFFIX[to]
            if name in stored:
                graph.initializer.append(_to_fp16(stored[name], made[name, to]))
            else:
                nodes.append(helper.make_node('Cast', [name], [made[name, to]], name + SUFFIX[to], to=to))
        return made[name, to]

    for node in graph.node:
        positions = features.get(node.output[0], ())
        if positions and node.op_type in ('QuantizeLinear', 'DequantizeLinear'):
            _require_scale(node, values[node.input[1]])
        for i, name in enumerate(node.input):
            if i in positions and name not in halves:
                node.input[i] = convert(name, HALF)
            # Shape and Size read no values
            elif i not in positions and name in halves and node.op_type not in ('Shape', 'Size'):
                node.input[i] = convert(name, FLOAT)
        nodes.append(node)
        to_float = node.op_type == 'Cast' and node.output[0] in features and attribute(node, 'to') == FLOAT
        if to_float:
            node.attribute[0].i = HALF
        for i, name in enumerate(node.output):
            if not (positions or to_float) or types.get(name) != FLOAT:
                continue
            if name in outputs:  # stays FP32 under its name
                made[name, HALF] = node.output[i] = name + SUFFIX[HALF]
                nodes.append(helper.make_node('Cast', [node.output[i]], [name], name + SUFFIX[FLOAT], to=FLOAT))
            else:
                halves.add(name)

    replace_nodes(model, nodes)
    read = {*readers(model), *outputs}
    for name, _ in made:
        if name in stored and name not in read:
            graph.initializer.remove(stored[name])


def _require_qdq(model: ModelProto, qdq: tuple[int, int]) -> None:
    """Raise QatError unless the numbers of Q and DQ are `qdq`, and no Cast separates a pair that TensorRT fuses."""
    made_by, read_by = producers(model), readers(model)
    parted = [
        cast.name
        for cast in model.graph.node
        if cast.op_type == 'Cast' and cast.input[0] in made_by
        for reader, _ in read_by.get(cast.output[0], ())
        if (made_by[cast.input[0]].op_type, reader.op_type) in FUSED
    ]
    if count_qdq(model) != qdq or parted:
        raise QatError(
            f'FP16: {count_qdq(model)} Q/DQ nodes instead of {qdq}, misplaced Casts: {", ".join(parted) or "none"}; '
            'please report this model, and export for TensorRT 10 (--trt 10)'
        )
