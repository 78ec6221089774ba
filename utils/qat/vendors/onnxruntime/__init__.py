"""ONNX Runtime fuses no SiLU: convolution, sigmoid and product are separate integer kernels, and each result is rounded.

Activations are unsigned, because its kernels for x86 take no signed ones. They take any zero point, so the range covers only
actual values: SiLU's results start at -0.28, and a range symmetric around 0 would waste nearly half of the 256 integers.
"""

from utils.qat.vendors.vendor import Backend, Target, Vendor

FILES = ('.onnx',)
TARGET = Target(
    'onnxruntime',
    'ONNX Runtime',
    'also around activation functions, with zero points, and the outputs of the head in float',
    graph=f'{__name__}.graph',
    activations=True,
    zero_points='any',
    add_policies={'residual': 'each'},  # its Add is a kernel by itself, and reads two scales
    frigate='onnx',
    only_here='TensorRT reads no unsigned INT8, and in OpenVINO the file is slower',
    in_openvino='the Q/DQ around SiLU cost OpenVINO a quarter more time',
    in_openvino_classes='OpenVINO needs no Q/DQ around activation functions, and no zero points but those behind a ReLU',
)
VENDOR = Vendor(TARGET, {'onnxruntime': Backend('ONNX Runtime', f'{__name__}.session', FILES, FILES)})
