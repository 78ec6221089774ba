"""ONNX Runtime fuses no SiLU: the convolution, the sigmoid and the product are rounded each, and each is an integer kernel.

Activations are unsigned, because its kernels for x86 take no signed ones. They take any zero point, so the 256 integers lie
where the values are: SiLU's results begin at -0.28, and a range that is symmetric around 0 wastes nearly half of them.
"""

from functools import partial

from onnx import ModelProto

from utils.qat.graph.audit_rules import CHECKS, adds, not_absorbed, numbers, open_ends
from utils.qat.graph.passes import absorb_relus, drop_repeated_qdq, unsigned_activations
from utils.qat.targets.target import Target


def finish(model: ModelProto) -> ModelProto:
    """Give a graph the form that ONNX Runtime computes in integers, in place; changes no value."""
    return unsigned_activations(absorb_relus(drop_repeated_qdq(model, behind_moves=False)))


TARGET = Target(
    'onnxruntime',
    activations=True,
    zero_points='any',
    add_policies={'residual': 'each'},  # its Add is a kernel by itself, and reads two scales
    finish=finish,
    checks=(
        *(check for check in CHECKS if check not in (adds, not_absorbed, numbers)),
        open_ends,
        partial(adds, one_scale=False),
        partial(numbers, zero_points='any'),
    ),
    only_here='TensorRT reads no unsigned INT8, and in OpenVINO the file is slower',
    in_openvino='the Q/DQ around SiLU cost OpenVINO a quarter more time',
)
