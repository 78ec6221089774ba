"""What can run a file, one line each. The code that a line needs is in the file of utils/qat/prediction/ that it names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    title: str  # in reports and messages
    file: str  # in utils/qat/prediction/, loaded when the backend is chosen
    predicts: tuple  # suffixes of the exported files that it computes for an evaluation
    measures: tuple  # suffixes of the files that the benchmark takes for it
    builders: tuple = ()  # what builds its engines of .onnx files: Python modules, of which the first that is there is taken


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
ENGINES = tuple(name for name, backend in BACKENDS.items() if backend.builders)
