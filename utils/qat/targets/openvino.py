"""OpenVINO has the placement of TensorRT but for three things.

The last convolutions of the head for boxes and classes are INT8. In float they would take data in float, four times the bytes:
docs/cpu.md has the time, and the AP.

Values that are never negative, such as behind a ReLU, are unsigned. Otherwise OpenVINO takes them as unsigned integers with a zero
point in the middle, which costs its convolutions time, and half of the steps serve no value.

Where TensorRT has Q/DQ only on the shortcut of a residual Add, both addends have them: then a convolution takes the Add along, else
it is a kernel of its own (docs/classification.md).

The Q/DQ that repeat a scale are dropped when a file is read or written for it (graph/openvino_model.py).
"""

from utils.qat.targets.target import Target

TARGET = Target(
    'openvino',
    zero_points='unsigned',
    add_policies={'residual': 'each'},
    int8_outputs=frozenset({'box', 'class'}),
    only_here='TensorRT reads no unsigned INT8, which stands behind ReLU',
)
