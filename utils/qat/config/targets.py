"""The table of targets: the engines for which Q/DQ can be placed."""

from typing import NamedTuple


class Engine(NamedTuple):
    """Texts about an engine. placement: difference from the Q/DQ placement of the default target, for `-h`."""

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
DEFAULT_TARGET = 'tensorrt'  # also of checkpoints and files that name no target
