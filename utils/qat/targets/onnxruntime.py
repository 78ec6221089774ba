"""ONNX Runtime fuses no SiLU: the convolution, the sigmoid and the product are rounded each, and each is an integer kernel.

Activations are unsigned with zero point 128, because its kernels for x86 take no signed ones.
"""

from functools import partial

from utils.qat.graph.audit_rules import CHECKS, not_absorbed, numbers, open_ends
from utils.qat.graph.passes import unsigned_activations
from utils.qat.targets.target import Target

TARGET = Target(
    'onnxruntime',
    activations=frozenset({'SiLU'}),
    finish=unsigned_activations,
    checks=(
        *(check for check in CHECKS if check not in (not_absorbed, numbers)),
        open_ends,
        partial(numbers, unsigned=True),
    ),
    only_here='TensorRT reads no unsigned INT8, and in OpenVINO the file is slower',
)
