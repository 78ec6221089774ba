"""The command that follows a good score leads to what the target of the file runs."""

from pathlib import Path

import pytest

from utils.qat.config.tables import TARGETS
from utils.qat.vendors.next_step import after_scoring

FOLLOWING = {  # file, target, backend that scored it → the end of the command
    ('m.onnx', 'tensorrt', None): ('build_engine.py m.onnx', 'audit_onnx.py m.onnx'),
    ('m.onnx', 'tensorrt', 'openvino'): ('benchmark_trt.py m.onnx --backend openvino',),
    ('m.onnx', 'onnxruntime', None): ('benchmark_trt.py m.onnx --backend onnxruntime',),
    ('m.onnx', 'openvino', 'onnxruntime'): ('benchmark_trt.py m.onnx --backend openvino',),
    ('m-end2end.onnx', 'litert', None): ('export_qat.py --weights m.pt --include litert --imgsz 64',),
    ('m.pt', 'openvino', None): ('export_qat.py --weights m.pt --include openvino --imgsz 64',),
    ('m.xml', 'openvino', None): ('benchmark_trt.py m.xml',),
}


@pytest.mark.parametrize(('file', 'target', 'backend'), FOLLOWING)
def test_the_next_step_is_of_the_target(file, target, backend):
    said = after_scoring(Path(file), (64, 64), TARGETS[target], backend)
    assert said.endswith(FOLLOWING[file, target, backend]), said
