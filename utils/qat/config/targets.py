"""The table of targets: the engines that a placement of Q/DQ can be made for."""

from typing import NamedTuple


class Engine(NamedTuple):
    """An engine, as texts have it. placement: what differs from the placement of the default target, for `-h`."""

    title: str
    placement: str = ''


TARGETS = {  # --target → Engine. utils/qat/targets/ has a file for each
    'tensorrt': Engine('TensorRT'),
    'openvino': Engine(
        'OpenVINO',
        'the outputs of the head are INT8 too, values behind a ReLU are unsigned, and each addend of a residual Add of '
        'torchvision has a scale',
    ),
    'onnxruntime': Engine(
        'ONNX Runtime', 'also around activation functions, which it does not fuse, and with zero points'
    ),
}
DEFAULT_TARGET = 'tensorrt'  # of checkpoints and files that name no target, too
