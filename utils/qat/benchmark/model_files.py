"""Describe a model file before it runs: inputs, types, size.

in:  any .onnx, an .xml of OpenVINO, a .tflite, an .engine, a .pt2, a YOLOv9 checkpoint
out: a ModelFile, and the shapes of its inputs for a batch
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from onnx import helper

from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.settings import Sides
from utils.qat.config.tables import CHECKPOINTS, MEASURABLE
from utils.qat.core.errors import QatError, naming
from utils.qat.core.files import require_file
from utils.qat.core.log import LOGGER
from utils.qat.graph.onnx_file import load
from utils.qat.graph.onnx_graph import QDQ, Graph, count_qdq, is_half, metadata_value, required_inputs
from utils.qat.vendors.load import backends_of, measured_by
from utils.qat.vendors.measured import Inputs, ModelFile, OpenInputs, fixed_batch, input_type
from utils.qat.vendors.tensorrt.engine.plan import closed


def read_model_files(files: Sequence[Path], kind_of: Callable[[Path], str]) -> list[ModelFile]:
    """Read the files to measure: .onnx, .xml, .tflite, .engine, .pt2 or checkpoints; a repeated one counts once.

    PyTorch runs the checkpoint of an .onnx file: the .pt or .pth of the same name beside it (export_qat.py's source), unless `files`
    has it already.

    Raises:
        QatError: a file cannot be read.
    """
    models = []
    for file in dict.fromkeys(files):
        require_file(file, 'MODEL', MEASURABLE)
        suffix = file.suffix.lower()
        models.append(_checkpoint(file, kind_of(file)) if suffix in CHECKPOINTS else _exported(file))
    for model in models:
        if model.file.suffix.lower() == '.onnx':
            beside = [model.file.with_suffix(suffix) for suffix in CHECKPOINTS]
            _pair(model, next((file for file in beside if file.is_file()), beside[0]), files, kind_of)
    return models


def _exported(file: Path) -> ModelFile:
    """Describe an exported file."""
    return _onnx(file) if file.suffix.lower() == '.onnx' else measured_by(backends_of(file)[0]).describe(file)


def with_float_beside(files: Sequence[Path]) -> list[Path]:
    """Add the float file in the folder of a single INT8 file, of its kind and with its inputs, if there is exactly one."""
    own, beside = files[0], []
    require_file(own, 'MODEL', MEASURABLE)
    if len(files) > 1 or own.suffix.lower() in CHECKPOINTS or (model := _exported(own)).precision != 'int8':
        return list(files)
    for file in sorted(own.parent.glob(f'*{own.suffix}')):
        try:
            other = _exported(file)
        except QatError as e:
            LOGGER.debug(f'not compared with {file}: {e}')
            continue
        if other.precision not in ('int8', '') and other.inputs == model.inputs:
            beside.append(file)
    if len(beside) == 1:
        LOGGER.info(f'compared with the float file beside it: {beside[0]}')
    elif beside:
        LOGGER.info(f'float files beside {own}: {", ".join(f.name for f in beside)}; give one of them too, to compare')
    return [*beside, own] if len(beside) == 1 else [own]


def sides(shape: Sequence[int | None]) -> Sides | None:
    """Return height and width of a shape [B, C, H, W]; None if one of them is open."""
    height, width = shape[2:]
    return (height, width) if height and width else None


def give_sizes(models: Sequence[ModelFile], open_checkpoint: Callable[[Path, torch.device], TorchModel]) -> None:
    """Set the image size of each checkpoint to the size for which it was quantized; other files keep theirs.

    A float checkpoint takes the size of the other files of its task, for comparison, if they share one size; otherwise the
    usual size.
    """
    known: dict[str, set[Sides]] = {}
    checkpoints = []
    for model in models:
        size = next((sides(shape) for _, shape in model.inputs.values() if len(shape) == 4), None)
        if model.checkpoint == model.file:
            opened = open_checkpoint(model.file, torch.device('cpu'))
            model.task = opened.task.name
            checkpoints.append((model, opened))
            size = opened.quantized_for
        if model.task and size:
            known.setdefault(model.task, set()).add(size)
    for model, opened in checkpoints:
        of_task = known.get(model.task, set())
        shared = next(iter(of_task)) if len(of_task) == 1 else None
        model.sizes = (opened.quantized_for or shared or opened.task.imgsz,)


def _pair(model: ModelFile, checkpoint: Path, files: Sequence[Path], kind_of: Callable[[Path], str]) -> None:
    """Set the checkpoint from which an .onnx file was exported, or the reason why it has none."""
    kind = 'quantized' if model.precision == 'int8' else 'float'
    if not checkpoint.is_file():
        model.unpaired = f'there is no {checkpoint.name} beside it'
    elif checkpoint in files:
        model.unpaired = f'{checkpoint} is measured by itself'
    elif kind_of(checkpoint) != kind:
        model.unpaired = f'{checkpoint.name} beside it is no {kind} one'
    else:
        model.checkpoint = checkpoint


def _checkpoint(file: Path, kind: str) -> ModelFile:
    """Describe a checkpoint. kind: see checkpoint.CheckpointFile."""
    types = 'INT8 and FP32' if kind == 'quantized' else 'FP32'
    return ModelFile(file, {'images': (torch.float32, (None, 3, None, None))}, types, checkpoint=file)


def _onnx(file: Path) -> ModelFile:
    """Describe an .onnx file."""
    model = load(file)
    inputs: OpenInputs = {}
    with naming(file):
        graph = Graph(model)
    for value in required_inputs(model):
        dtype = input_type(file, value.name, value.type.tensor_type.elem_type, helper.tensor_dtype_to_np_dtype)
        inputs[value.name] = dtype, tuple(d.dim_value or None for d in value.type.tensor_type.shape.dim)
    types = 'INT8 and ' * any(count_qdq(model)) + ('FP16' if is_half(model) else 'FP32')
    layers = sum(n.op_type not in QDQ and not all(name in graph.fixed for name in n.output) for n in graph.nodes)
    task = metadata_value(model, 'task')
    return ModelFile(file, inputs, types, parameters=parameters_of(graph), layers=layers, task=task)


def parameters_of(graph: Graph) -> int:
    """Count the values in the constants of a graph.

    INT8 weights count, and so do constants of the exporter, such as a head's anchors. Scales, zero points, scalars, and
    integers such as shapes do not.
    """

    def counts(name: str, value: np.ndarray) -> bool:
        readers = [(node.op_type, i) for node, i in graph.readers.get(name, ())]
        stored = ('DequantizeLinear', 0) in readers
        settings = all(op in QDQ | {'Resize'} and i for op, i in readers)
        return value.ndim > 0 and (stored or (value.dtype.kind not in 'iubOSU' and not settings))

    return sum(value.size for name, value in graph.values.items() if counts(name, value))


def shapes_of(inputs: OpenInputs, batch: int, imgsz: Sides | None, file: Path) -> Inputs:
    """Fill in the open axes of inputs, see `closed`. Raises QatError if the file does not take such a batch or size."""
    own = fixed_batch(inputs)
    if own and batch not in {shape[0] for _, shape in inputs.values() if shape}:
        raise QatError(
            f'--batch {batch}: {file} has a fixed batch of {own}; leave the flag out, or export with --dynamic'
        )
    return {name: (dtype, closed(file, name, shape, batch, imgsz)) for name, (dtype, shape) in inputs.items()}
