"""TensorRT takes signed INT8 with zero point 0, and fuses the activation function into the convolution.

It fuses them only if the widths are multiples of 32 (NVIDIA/TensorRT#1310): 112 of 173 of YOLOv9-t, and all 173 with padded widths. Its
files have no INT8 convolutions with groups, because TensorRT 10.6 computes these wrongly: docs/tensorrt.md#measured.
"""

from utils.qat.vendors.vendor import Backend, FileKind, Target, Vendor

MODULE, PREDICTS, MEASURES = f'{__name__}.measured', ('.engine',), ('.onnx', '.engine')

VENDOR = Vendor(
    Target(
        'tensorrt',
        'TensorRT',
        engine='.engine',
        clients={
            'C++, docs/cpp.md': 'build/yolov9_tensorrt --model {file} --input IMAGES',
            'The file for DeepStream; for Triton and NMS inside: docs/deploy.md': 'python export_yoloV9.py -w {checkpoint} -s {height} {width} --dynamic',
        },
        int8_outputs=frozenset({'box', 'class'}),
        groups=False,
        split_sums=64,
        multiple=32,
        simulated_in=('onnxruntime',),
        in_openvino_classes='values behind a ReLU are signed and a residual Add has one scale, which costs OpenVINO up to 12 % more time',
    ),
    {
        'tensorrt': Backend('TensorRT', MODULE, PREDICTS, MEASURES, ('tensorrt',)),
        # its wheels have only the second module
        'rtx': Backend('TensorRT-RTX', MODULE, PREDICTS, MEASURES, ('tensorrt_rtx', 'tensorrt_rtx_bindings')),
    },
    {
        'torch_tensorrt': FileKind(
            '.ep', f'{__name__}.write', ('formats', 'dtype', 'workspace', 'require_full_compilation')
        )
    },
)
