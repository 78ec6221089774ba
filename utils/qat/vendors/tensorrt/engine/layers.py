"""TensorRT's description of an engine: layer information and, if there is one, a profile (JSON) → an `Engine`.

`trtexec --exportLayerInfo` writes the layer information. EngineInspector.get_engine_information(JSON) returns the same for an
engine built with detailed profiling verbosity. `trtexec --exportProfile` writes a profile. Both are read without TensorRT,
torch or a GPU. The fields differ between versions, so a missing field of a layer stays unknown:

  8.6, 10  "Bindings": [name, ...]; a tensor has "Format/Datatype", such as "Thirty-two wide channel vectorized row major Int8
           format", or just "Half" where Myelin compiled the layer. 10 adds "StreamId" and "Metadata" (nodes of the ONNX file).
  11       "I/O Tensors": [{"Name", "IOMode", ...}, ...]; a tensor has "Datatype" and "Format", and a layer "Constants".

Sources: TensorRT's developer guide (Engine Inspector), "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x",
sampleReporting.cpp of trtexec, and the list of the compiler of TensorRT-RTX 1.7 (tests/upstream/engine/test_tensorrt_rtx.py reads it).
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from utils.qat.core.errors import QatError
from utils.qat.core.files import require_file
from utils.qat.core.text import visible
from utils.qat.untrusted.json_schema import read_json

DETAILED = 'build the engine again with --profilingVerbosity=detailed (trtexec) or config.profiling_verbosity = DETAILED (Python)'
EXPORT = 'trtexec --exportLayerInfo=layers.json --exportProfile=profile.json writes both'
TYPES = {
    'float': 'FP32',
    'fp32': 'FP32',
    'half': 'FP16',
    'fp16': 'FP16',
    'bfloat16': 'BF16',
    'bf16': 'BF16',
    'fp8': 'FP8',
    'fp4': 'FP4',
    'uint8': 'UINT8',
    'int8': 'INT8',
    'int4': 'INT4',
    'int32': 'INT32',
    'int64': 'INT64',
    'bool': 'BOOL',
}
TYPE = re.compile(rf'\b({"|".join(TYPES)})', re.IGNORECASE)
FLOATS = ('FP32', 'FP16', 'BF16')


@dataclass(frozen=True)
class Tensor:
    """An input or output of a layer or of the engine."""

    name: str
    shape: tuple[int, ...] | None = None  # None if unknown; an open dimension is -1
    dtype: str = ''  # INT8, FP16, FP32, ...; '' if unknown
    format: str = ''  # memory layout, in TensorRT's words


@dataclass
class Layer:
    """A layer of an engine."""

    name: str
    kind: str  # LayerType
    inputs: list[Tensor]  # without the weights
    outputs: list[Tensor]
    operation: str = ''  # ParameterType, such as Convolution
    weights: str = ''  # their data type
    tactic: str = ''  # name of the kernel; '' if TensorRT names none
    origin: str = ''  # of a Reformat: QDQ or REFORMAT
    nodes: list[str] = field(default_factory=list)  # names in the ONNX file; empty if TensorRT gives none
    ms: float | None = None  # per inference; None if the layer is not in the profile

    @property
    def types(self) -> tuple[str, ...]:
        """Return the data types of the first input and the first output; '' for an unknown type or no tensor."""
        return tuple(tensors[0].dtype if tensors else '' for tensors in (self.inputs, self.outputs))

    @property
    def precision(self) -> str:
        """Return the data type in which the layer computes: the type of its first input, the data of a convolution."""
        return self.types[0] or self.types[1] or 'unknown'


@dataclass
class Engine:
    """The layers of an engine, its inputs and outputs, and its times."""

    layers: list[Layer]  # in the order in which they run
    inputs: list[Tensor]
    outputs: list[Tensor]
    ms: float | None = None  # sum over the profile, longer than one inference; None without a profile
    untimed: list[str] = field(default_factory=list)  # names of layers that are not in the profile
    unknown: list[str] = field(default_factory=list)  # names in the profile that are no layers

    def share(self, layers: Iterable[Layer]) -> float | None:
        """Compute the share of the time, 0 to 1, that `layers` take; None without a profile."""
        return sum(layer.ms or 0 for layer in layers) / self.ms if self.ms else None

    def edges(self) -> list[tuple[int | None, int | None, Tensor]]:
        """Find the tensors that go from layer to layer: (writer, reader, tensor as the reader reads it) of each.

        Writer and reader are indices of layers. The writer is None for an input of the engine, the reader for an
        output.

        A name can have several writers: a Concat that the builder removed leaves one for each of its parts, and Myelin reuses
        memory. So a reader gets the last tensor of its own size that was written before it, or without one all the parts.
        """
        writers: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        edges: list[tuple[int | None, int | None, Tensor]] = []
        given = {t.name for t in self.inputs}
        readers = [(i, t) for i, layer in enumerate(self.layers) for t in layer.inputs]
        for i, layer in enumerate(self.layers):
            for t in layer.outputs:
                writers[t.name].append((i, t))
        for reader, t in [*readers, *((None, t) for t in self.outputs)]:
            before = [(i, w) for i, w in writers[t.name] if reader is None or i < reader]
            whole: list[int | None] = [i for i, w in before if size(w) == size(t)]
            sources = whole[-1:] or [i for i, _ in before] or [None] * (t.name in given and reader is not None)
            edges += [(i, reader, t) for i in sources]
        return list(dict.fromkeys(edges))  # a layer may read a tensor twice


def size(tensor: Tensor) -> int | None:
    """Count the elements of `tensor`; None if its shape is unknown."""
    return None if tensor.shape is None else math.prod(tensor.shape)


def dtype(text: str) -> str:
    """Find the data type (INT8, FP16, ...) in TensorRT's text about a type or a format; '' if it has no known type."""
    match = TYPE.search(text)
    return TYPES[match[1].lower()] if match else ''


def _load(path: Path, flag: str) -> object:
    require_file(path, flag)
    try:
        return _visible(read_json(path))
    except ValueError as e:
        where = f' in line {e.lineno}' if isinstance(e, json.JSONDecodeError) else ''
        raise QatError(f'{flag} {path}: no JSON, or not all of it{where}; {EXPORT}') from e


def _visible(content: object) -> object:
    """Make all text in the content of a JSON file printable: names are printed, drawn and compared with each other."""
    if isinstance(content, dict):
        return {visible(key): _visible(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_visible(value) for value in content]
    return visible(content) if isinstance(content, str) else content


def _texts(raw: dict[str, object], *keys: str) -> list[str]:
    return [text for key in keys if isinstance(text := raw.get(key), str)]


def _tensor(raw: object) -> Tensor:
    if not isinstance(raw, dict):
        return Tensor(str(raw))
    shape, described = raw.get('Dimensions'), _texts(raw, 'Datatype', 'DataType', 'Format/Datatype', 'Format')
    return Tensor(
        str(raw.get('Name', '')),
        tuple(shape) if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else None,
        next(filter(None, map(dtype, described)), ''),
        next(iter(_texts(raw, 'Format', 'Format/Datatype')), ''),
    )


def _layer(raw: dict[str, object], index: int) -> Layer:
    def tensors(key: str) -> list[Tensor]:
        return [_tensor(t) for t in given] if isinstance(given := raw.get(key), list) else []

    def text(key: str) -> str:
        return next(iter(_texts(raw, key)), '')

    weights, constants = raw.get('Weights'), tensors('Constants')
    weights = (
        dtype(str(weights.get('Type', ''))) if isinstance(weights, dict) else constants[0].dtype if constants else ''
    )
    return Layer(
        text('Name') or f'layer {index}',
        text('LayerType') or 'unknown',
        tensors('Inputs'),
        tensors('Outputs'),
        text('ParameterType'),
        weights,
        text('TacticName'),
        text('Origin'),
        re.findall(r'\[ONNX Layer: (.*?)\]', text('Metadata')),
    )


def _bound(raw: dict[str, object], layers: list[Layer]) -> tuple[list[Tensor], list[Tensor]]:
    """Find the inputs and outputs of the engine; "Bindings" are only names: one that no layer writes is an input."""
    read, written = ({t.name: t for layer in layers for t in getattr(layer, side)} for side in ('inputs', 'outputs'))
    listed = raw.get('I/O Tensors')
    if isinstance(listed, list) and all(isinstance(t, dict) for t in listed):
        sides = [('output' if str(t.get('IOMode')).lower() == 'output' else 'input', _tensor(t)) for t in listed]
        return [t for side, t in sides if side == 'input'], [t for side, t in sides if side == 'output']
    names = raw.get('Bindings')
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        # only layers: a tensor without a writer is an input, one without a reader is an output
        names = [*(n for n in read if n not in written), *(n for n in written if n not in read)]
    return [read[n] for n in names if n in read and n not in written], [written[n] for n in names if n in written]


def read_layers(path: Path) -> Engine:
    """Read a file of layer information, without times."""
    raw = _load(path, '--layer')
    if isinstance(raw, list) and any(isinstance(row, dict) and ('averageMs' in row or 'count' in row) for row in raw):
        raise QatError(f'--layer {path}: a profile (times of layers), to be given as --profile; {EXPORT}')
    raw = raw if isinstance(raw, dict) else {'Layers': raw}
    rows = raw.get('Layers')
    if not isinstance(rows, list) or not all(isinstance(row, (dict, str)) for row in rows):
        raise QatError(f'--layer {path}: no layer information of an engine; {EXPORT}')
    if not rows:
        raise QatError(f'--layer {path}: it lists no layer; {DETAILED}')
    layers = [_layer(row if isinstance(row, dict) else {'Name': row}, i) for i, row in enumerate(rows)]
    if not any(t.dtype for layer in layers for t in (*layer.inputs, *layer.outputs)):
        raise QatError(f'--layer {path}: names of layers and no more; {DETAILED}')
    return Engine(layers, *_bound(raw, layers))


def read_profile(path: Path) -> list[tuple[str, float]]:
    """Read a profile: (name of a layer, ms per inference) of each layer, in the order of the file."""
    raw = _load(path, '--profile')
    if isinstance(raw, dict) and 'Layers' in raw:
        raise QatError(f'--profile {path}: layer information, to be given as --layer; {EXPORT}')
    rows = (
        [row for row in raw if not (isinstance(row, dict) and row.keys() == {'count'})] if isinstance(raw, list) else []
    )
    try:
        times = [(str(row['name']), float(row['averageMs'])) for row in rows]
    except (KeyError, TypeError, ValueError) as e:
        raise QatError(f'--profile {path}: no profile of an engine; {EXPORT}') from e
    if not times or not all(0 <= ms < math.inf for _, ms in times):
        raise QatError(
            f'--profile {path}: {"it lists no layer" if not times else "times that are no numbers"}; {EXPORT}'
        )
    return times


def read_engine(layer_path: Path, profile_path: Path | None = None) -> Engine:
    """Read an engine from its layer information, and its times from a profile if there is one.

    Layers and times with equal names are matched in their order. Names without a match are kept in `untimed` and
    `unknown`.
    """
    engine = read_layers(layer_path)
    if profile_path is None:
        return engine
    times = read_profile(profile_path)
    waiting = defaultdict(list)
    for layer in engine.layers:
        waiting[layer.name].append(layer)
    for name, ms in times:
        if waiting[name]:
            waiting[name].pop(0).ms = ms
        else:
            engine.unknown.append(name)
    engine.ms = sum(ms for _, ms in times)
    engine.untimed = [layer.name for layer in engine.layers if layer.ms is None]
    if len(engine.untimed) == len(engine.layers):
        raise QatError(
            f'--profile {profile_path}: none of its {len(times)} layers is in {layer_path}: it is of another engine; {EXPORT}'
        )
    return engine
