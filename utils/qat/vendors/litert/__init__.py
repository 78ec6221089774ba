"""LiteRT (TensorFlow Lite): each operator is an integer kernel, which reads and writes INT8 tensors with any zero point.

No kernel fuses SiLU, so it is a LOGISTIC, whose result has the fixed scale 1/256, and a MUL. A ReLU is the lower end of the range of its
convolution. ADD reads two scales; the kernels that only move values, such as CONCATENATION and MAX_POOL_2D, want one
(https://ai.google.dev/edge/litert/conversion/tensorflow/quantization/quantization_spec).
"""

from dataclasses import replace

from utils.qat.vendors import onnxruntime
from utils.qat.vendors.vendor import Backend, FileKind, Vendor

FILES = ('.tflite',)
TARGET = replace(
    onnxruntime.TARGET,
    name='litert',
    title='LiteRT',
    placement='as onnxruntime, a scale for each addend of an Add',
    include='litert',
    add_policies={'both': 'each', 'residual': 'each'},
    clients={'Phones and boards: docs/litert.md': ''},
    frigate='',
    only_here='TensorRT reads no zero points, and in OpenVINO the file is slower',
)
VENDOR = Vendor(
    TARGET,
    {'litert': Backend('LiteRT', f'{__name__}.session', FILES, FILES)},
    {'litert': FileKind('.tflite', f'{__name__}.write')},
)
