"""The tables of targets, formats and backends: a line for each. A line names the file with its code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils.qat.core.errors import QatError


class TargetText(NamedTuple):
    """Texts about the engine of a target."""

    title: str
    placement: str = ''  # difference from the Q/DQ placement of the default target, for `-h`
    include: str = 'onnx'  # its kind of file


TARGETS = {  # --target → TargetText. utils/qat/targets/ has a file for each
    'tensorrt': TargetText('TensorRT'),
    'openvino': TargetText('OpenVINO', 'outputs of the head in INT8, unsigned behind a ReLU', 'openvino'),
    'onnxruntime': TargetText('ONNX Runtime', 'also around activation functions, with zero points'),
    'litert': TargetText('LiteRT', 'as onnxruntime, a scale for each addend of an Add', 'litert'),
}
DEFAULT_TARGET = 'tensorrt'  # also of checkpoints and files that name no target
NMS = tuple('topk_all iou_thres conf_thres class_agnostic nms mask_resolution pooler_scale sampling_ratio'.split())
TORCH_TENSORRT = 'formats', 'dtype', 'workspace', 'require_full_compilation'


@dataclass(frozen=True)
class FileKind:
    """A kind of file."""

    suffix: str  # of the file's name, after the stem of the weights
    file: str  # in models/deploy/formats/, loaded when the format is asked for
    options: tuple[str, ...] = ()  # settings of ExportConfig that only some kinds have


FORMATS = {  # --include → FileKind
    'onnx': FileKind('.onnx', 'onnx'),
    'onnx_end2end': FileKind('-end2end.onnx', 'onnx_end2end', NMS),
    'openvino': FileKind('.xml', 'openvino'),
    'openvino_end2end': FileKind('-end2end.xml', 'openvino_end2end', NMS),
    'litert': FileKind('.tflite', 'litert'),
    'pt2': FileKind('.pt2', 'pt2'),
    'aoti': FileKind('-aoti.pt2', 'aoti'),
    'torch_tensorrt': FileKind('.ep', 'torch_tensorrt', TORCH_TENSORRT),
}


def formats_with(options: tuple[str, ...]) -> str:
    """Name the formats that have such options, as they are typed."""
    return ' or '.join(name for name, kind in FORMATS.items() if kind.options == options)


@dataclass(frozen=True)
class Backend:
    """A library that runs files."""

    title: str  # in reports and messages
    file: str  # in utils/qat/backends/, loaded when the backend is chosen
    predicts: tuple[str, ...]  # suffixes of the exported files that it runs in an evaluation
    measures: tuple[str, ...]  # suffixes of the files that it runs in the benchmark
    builders: tuple[str, ...] = ()  # Python modules that build its engines; the first that is installed is taken
    native: bool = False  # its files are programs, and loading one runs it: --backend must name it


BACKENDS = {  # --backend → Backend
    'tensorrt': Backend('TensorRT', 'tensorrt', ('.engine',), ('.onnx', '.engine'), ('tensorrt',)),
    # its wheels have only the second module
    'rtx': Backend(
        'TensorRT-RTX', 'tensorrt', ('.engine',), ('.onnx', '.engine'), ('tensorrt_rtx', 'tensorrt_rtx_bindings')
    ),
    'onnxruntime': Backend('ONNX Runtime', 'onnxruntime', ('.onnx',), ('.onnx',)),
    'openvino': Backend('OpenVINO', 'openvino', ('.onnx', '.xml'), ('.onnx', '.xml')),
    'litert': Backend('LiteRT', 'litert', ('.tflite',), ('.tflite',)),
    'pt2': Backend('torch.export', 'pt2', ('.pt2',), ('.pt2',)),
    'aoti': Backend('AOTInductor', 'aoti', ('.pt2',), ('.pt2',), native=True),
    # for an .onnx file the checkpoint from which it was exported
    'pytorch': Backend('PyTorch', 'pytorch', (), ('.pt', '.pth', '.onnx')),
}
CHECKPOINTS = ('.pt', '.pth', '.ckpt')
EXPORTED = tuple(dict.fromkeys(suffix for backend in BACKENDS.values() for suffix in backend.predicts))
PREDICTING = tuple(name for name, backend in BACKENDS.items() if backend.predicts)
ENGINES = tuple(name for name, backend in BACKENDS.items() if backend.builders)


def backends_for(files: Sequence[Path], given: Sequence[str] | None) -> list[str | None]:
    """Assign the backends of --backend to files; None = the first that takes the file.

    One backend applies to each file that it takes; several are one per file.
    """
    if given is None:
        return [None] * len(files)
    if len(given) == len(files):
        return list(given)
    if len(given) > 1:
        raise QatError(f'--backend {",".join(given)}: give one, or one for each of the {len(files)} models')
    (name,) = given
    takes = BACKENDS[name].predicts
    if not any(file.suffix.lower() in takes for file in files):
        raise QatError(
            f'--backend {name}: {BACKENDS[name].title} runs {" and ".join(takes)} files, and neither {" nor ".join(map(str, files))} is one'
        )
    return [name if file.suffix.lower() in takes else None for file in files]
