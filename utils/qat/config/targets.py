"""The table of targets: the engines that a placement of Q/DQ can be made for."""

# --target → the engine's name. utils/qat/targets/ has a file for each
TARGETS = {'tensorrt': 'TensorRT', 'openvino': 'OpenVINO', 'onnxruntime': 'ONNX Runtime'}
DEFAULT_TARGET = 'tensorrt'  # of checkpoints and files that name no target, too
