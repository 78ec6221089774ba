"""The table of backends, which run files. A line names the file in utils/qat/prediction/ with its code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A library that runs files."""

    title: str  # in reports and messages
    file: str  # in utils/qat/prediction/, loaded when the backend is chosen
    predicts: tuple[str, ...]  # suffixes of the exported files that it runs in an evaluation
    measures: tuple[str, ...]  # suffixes of the files that it runs in the benchmark
    builders: tuple[str, ...] = ()  # Python modules that build its engines; the first that is installed is taken


BACKENDS = {  # --backend → Backend
    'tensorrt': Backend('TensorRT', 'tensorrt', ('.engine',), ('.onnx', '.engine'), ('tensorrt',)),
    'rtx': Backend(
        'TensorRT-RTX', 'tensorrt', ('.engine',), ('.onnx', '.engine'), ('tensorrt_rtx', 'tensorrt_rtx_bindings')
    ),  # its wheels alone bring the second
    'onnxruntime': Backend('ONNX Runtime', 'onnxruntime', ('.onnx',), ('.onnx',)),
    'pytorch': Backend(
        'PyTorch', 'pytorch', (), ('.pt', '.pth', '.onnx')
    ),  # of an .onnx the checkpoint that it was exported from
}
CHECKPOINTS = ('.pt', '.pth')
EXPORTED = tuple(dict.fromkeys(suffix for backend in BACKENDS.values() for suffix in backend.predicts))
ENGINES = tuple(name for name, backend in BACKENDS.items() if backend.builders)
