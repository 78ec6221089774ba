"""OpenVINO has the placement of TensorRT with two exceptions.

Values that are never negative, such as those of a ReLU, are unsigned. Otherwise OpenVINO converts them to unsigned integers with a
zero point in the middle, which slows its convolutions down and wastes half of the steps.

Where TensorRT has Q/DQ only on the shortcut of a residual Add, both addends have them. Then OpenVINO fuses the Add into a
convolution; otherwise it is a kernel of its own (docs/classification.md).

Q/DQ that repeat a scale are dropped when a file is read or written for OpenVINO (model.py).
"""

from utils.qat.vendors.vendor import GRAPH, NMS, Backend, FileKind, Target, Vendor

FILES = '.onnx', '.xml'

VENDOR = Vendor(
    Target(
        'openvino',
        'OpenVINO',
        "unsigned behind a ReLU, a scale for each addend of a classifier's Add",
        'openvino',
        graph=f'{__name__}.graph',
        zero_points='unsigned',
        add_policies={'residual': 'each'},
        int8_outputs=frozenset({'box', 'class'}),
        activation='polynomial',
        gains_by=('polynomial', 'relu'),
        simulated_in=('onnxruntime',),
        clients={'C++, docs/cpp.md': 'build/yolov9_openvino --model {file} --input IMAGES'},
        frigate='openvino',
        only_here='TensorRT reads no unsigned INT8, which stands behind ReLU',
    ),
    {'openvino': Backend('OpenVINO', f'{__name__}.session', FILES, FILES)},
    {
        'openvino': FileKind('.xml', f'{__name__}.write', GRAPH),
        'openvino_end2end': FileKind('-end2end.xml', f'{__name__}.write:END2END', GRAPH + NMS),
    },
)
