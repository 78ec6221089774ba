"""ONNX Runtime fuses no SiLU: the convolution, the sigmoid and the product are rounded each, and each is an integer kernel.

Activations are unsigned, because its kernels for x86 take no signed ones. They take any zero point, so the 256 integers lie
where the values are: SiLU's results begin at -0.28, and a range that is symmetric around 0 wastes nearly half of them.
"""

from utils.qat.targets.target import Target

TARGET = Target(
    'onnxruntime',
    activations=True,
    zero_points='any',
    add_policies={'residual': 'each'},  # its Add is a kernel by itself, and reads two scales
    only_here='TensorRT reads no unsigned INT8, and in OpenVINO the file is slower',
    in_openvino='the Q/DQ around SiLU cost OpenVINO a quarter more time',
    in_openvino_classes='OpenVINO needs no Q/DQ around activation functions, and no zero points but those behind a ReLU',
)
