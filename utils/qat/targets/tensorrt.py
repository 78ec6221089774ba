"""TensorRT takes signed INT8 with zero point 0, and fuses the activation function into the convolution.

It fuses them only if the widths are multiples of 32 (NVIDIA/TensorRT#1310): 112 of 173 of YOLOv9-t, and all 173 with padded widths.
"""

from utils.qat.targets.target import Target

TARGET = Target(
    'tensorrt',
    multiple=32,
    simulated_in=('onnxruntime',),
    in_openvino='the outputs of the head are in float, which costs OpenVINO up to 2 % more time',
    in_openvino_classes='values behind a ReLU are signed and a residual Add has one scale, which costs OpenVINO up to 12 % more time',
)
