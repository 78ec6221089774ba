"""The table of formats: the kinds of file that export_qat.py writes. export_yoloV9.py writes DeepStream's."""

from dataclasses import dataclass

NMS = (
    *('topk_all', 'iou_thres', 'conf_thres', 'class_agnostic', 'nms'),
    *('mask_resolution', 'pooler_scale', 'sampling_ratio'),
)
TORCH_TENSORRT = 'formats', 'dtype', 'workspace'


@dataclass(frozen=True)
class FileKind:
    """A kind of file."""

    suffix: str  # of the file's name, after the stem of the weights
    file: str  # in models/deploy/formats/, loaded when the format is asked for
    options: tuple[str, ...] = ()  # settings of ExportConfig that only some kinds have


FORMATS = {  # --include → FileKind
    'onnx': FileKind('.onnx', 'onnx'),
    'onnx_end2end': FileKind('-end2end.onnx', 'onnx_end2end', NMS),
    'openvino': FileKind('.xml', 'openvino'),
    'openvino_end2end': FileKind('-end2end.xml', 'openvino_end2end', NMS),
    'pt2': FileKind('.pt2', 'pt2'),
    'aoti': FileKind('-aoti.pt2', 'aoti'),
    'torch_tensorrt': FileKind('.ep', 'torch_tensorrt', TORCH_TENSORRT),
}


def formats_with(options: tuple[str, ...]) -> str:
    """Name the formats that have such options, as they are typed."""
    return ' or '.join(name for name, kind in FORMATS.items() if kind.options == options)
