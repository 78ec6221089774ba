"""Write config.pbtxt, for NVIDIA Triton Inference Server to serve an exported graph: plain, DeepStream, or with NMS inside.

It belongs in MODELS/<name>/, beside 1/model.plan, the graph's engine. Format:
docs/user_guide/model_configuration.md of https://github.com/triton-inference-server/server.
"""

import json

from onnx import ModelProto, TensorProto, ValueInfoProto

from utils.qat.core.errors import QatError
from utils.qat.graph.onnx_graph import required_inputs

TYPES: dict[int, str] = {
    TensorProto.FLOAT: 'TYPE_FP32',
    TensorProto.FLOAT16: 'TYPE_FP16',
    TensorProto.INT32: 'TYPE_INT32',
    TensorProto.INT64: 'TYPE_INT64',
    TensorProto.INT8: 'TYPE_INT8',
    TensorProto.UINT8: 'TYPE_UINT8',
    TensorProto.BOOL: 'TYPE_BOOL',
}


def triton_config(model: ModelProto, name: str, max_batch: int = 1) -> str:
    """Write the configuration of a model's engine, by its name in Triton.

    With an open batch axis, requests of several clients run together, up to max_batch, which the engine must accept. A graph
    with a fixed batch takes only this batch.
    """
    inputs = required_inputs(model)
    shapes = {v.name: _shape(v) for v in (*inputs, *model.graph.output)}
    open_batch = next(iter(shapes.values()))[0] == -1
    if any((shape[0] == -1) != open_batch for shape in shapes.values()):
        raise QatError(
            'Triton: the first axis of every input and output must be the batch; found '
            + ', '.join(f'{n} {shape}' for n, shape in shapes.items())
        )
    lines = [
        f'name: {json.dumps(name, ensure_ascii=False)}',
        'platform: "tensorrt_plan"',
        f'max_batch_size: {max_batch if open_batch else 0}',
    ]
    for kind, values in (('input', inputs), ('output', model.graph.output)):
        rows = ',\n'.join(
            f'  {{ name: {json.dumps(v.name, ensure_ascii=False)}, data_type: {_type(v)}, dims: {shapes[v.name][open_batch:]} }}'
            for v in values
        )
        lines.append(f'{kind} [\n{rows}\n]')
    if open_batch and max_batch > 1:
        lines.append('dynamic_batching { }')
    return '\n'.join(lines) + '\n'


def _shape(value: ValueInfoProto) -> list[int]:
    """Return the shape of a graph's input or output; -1 where an axis is open."""
    dims = [d.dim_value if d.HasField('dim_value') else -1 for d in value.type.tensor_type.shape.dim]
    if not dims:
        raise QatError(f'Triton: {value.name} has no axes, or a shape that the file does not tell')
    return dims


def _type(value: ValueInfoProto) -> str:
    """Return Triton's name of the type of a graph's input or output."""
    code = value.type.tensor_type.elem_type
    if code not in TYPES:
        raise QatError(
            f'Triton: {value.name} is of type {TensorProto.DataType.Name(code)}, which this tool does not serve'
        )
    return TYPES[code]
