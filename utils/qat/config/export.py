"""Settings of `export_qat.py` and `export_yoloV9.py`, and of the NMS and masks inside their files."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path

from utils.qat.config.common import OR_ALL, SHARE, image_sides, names_from
from utils.qat.config.deploy import MEMORY, WORKSPACE
from utils.qat.config.settings import Range, Settings, Sides, option, run
from utils.qat.config.tables import FORMATS, formats_with
from utils.qat.core.errors import refuse
from utils.qat.core.files import in_tree

PLUGIN = 'EfficientNMS_TRT'  # NMS that only TensorRT has
END2END = (
    'num_dets',
    'det_boxes',
    'det_scores',
    'det_classes',
)  # outputs of a file with NMS inside, as the plugin has them
MASKS = 'det_masks'  # the fifth output, of a segmentation model
TORCH_TENSORRT_FILES = {'ep': '.ep', 'ts': '.ts', 'engine': '-torch_tensorrt.engine'}
# --nms → most detections. The plugin looks at the 4096 highest scores of an image; TensorRT's TopK returns up to 3840.
NMS_LIMITS = {'plugin': 4096, 'standard': 3840}
MASK_OPSET = 16  # the first whose RoiAlign puts the centre of a pixel at a half


@dataclass(frozen=True)
class Limits:
    """Allowed differences between a file and its model, in 0..1; see compare_detections.Differences."""

    ap: float  # largest absolute difference of AP
    matched: float  # smallest share of the top detections that have a match in the other model
    score: float  # largest mean difference of the scores of matches
    mask: float  # smallest mean IoU of the masks of matches


# Float: the order of a sum moves scores by 1e-6, and AP not at all. INT8: a value between two steps rounds either way, so two
# runtimes are two samples of one noise. Right files were up to 0.004 of AP apart (40 to 72 images), with 98.7 % matched and
# scores 0.008 apart. The limit of 0.005 leaves room for data of this size, where one box moves AP by 0.001. Scores have their
# own limit: if all of them shrink, AP does not change, but a threshold cuts off more. Masks of right files had an IoU of 1.000,
# in INT8 0.995; the IoU of a mask of a few points is far lower if one point differs.
FLOAT_LIMITS = Limits(ap=0.001, matched=0.99, score=0.001, mask=0.99)
INT8_LIMITS = Limits(ap=0.005, matched=0.95, score=0.02, mask=0.9)


# TensorRT's major version → lowest, highest and default opset. 13 is the first with per-channel Q/DQ; TensorRT 8.6 reads up to
# 17; FP16 scales exist from 19; PyTorch's TorchScript exporter writes up to 20.
OPSETS = {8: (13, 17, 17), 10: (13, 20, 17), 11: (19, 20, 19)}


@dataclass(frozen=True)
class Nms:
    """NMS inside an exported file, see graph/ends.py."""

    kind: str  # key of NMS_LIMITS
    topk_all: int = 100  # detections per image, at most
    iou_thres: float = 0.45  # a box that overlaps a better one of its class by more is dropped
    conf_thres: float = 0.25  # scores up to this do not count
    class_agnostic: bool = False  # boxes of all classes suppress each other, and a box has only its best class


@dataclass(frozen=True)
class Pooling:
    """RoiAlign settings for the masks inside an exported file, see graph/ends.py."""

    mask_resolution: int = 160  # R: a mask is R x R values over the box of its detection
    pooler_scale: float = 0.25  # side of the prototypes / side of the image, the same in every model of upstream
    sampling_ratio: int = 0  # points per value and axis, averaged; 0 = one for each prototype cell under the value


@dataclass(frozen=True, kw_only=True)
class OnnxConfig(Settings):
    """Settings of an ONNX file for TensorRT."""

    dynamic: bool = option(False, 'leave the batch axis open')
    simplify: bool = option(False, 'simplify the graph (onnxslim)')
    trt: int = option(
        10,
        'TensorRT version for the file. 8 (8.6) and 10: FP32 with Q/DQ, and the builder chooses FP16. 11: strongly typed, FP16 '
        'outside Q/DQ',
        allowed=tuple(OPSETS),
    )
    no_pad: bool = option(False, 'do not pad the widths of an INT8 file for TensorRT')
    opset: int = option(
        None, 'ONNX opset; default: ' + ', '.join(f'{default} for --trt {v}' for v, (*_, default) in OPSETS.items())
    )

    overwrite: bool = option(False, 'replace files of these names that this tool did not make')

    def __post_init__(self) -> None:
        if self.opset is None and self.trt in OPSETS:
            object.__setattr__(self, 'opset', OPSETS[self.trt][2])
        super().__post_init__()

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the opset; see Settings.problems."""
        if self.trt in OPSETS:
            lowest, highest, _ = OPSETS[self.trt]
            yield (
                not lowest <= self.opset <= highest,
                f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}',
            )


verifying = partial(option, group='comparison with PyTorch')
inside = partial(option, group=f'NMS inside the file (--include {formats_with("nms")})')
masks_inside = partial(option, group='masks inside the file (likewise, segmentation models)')
by_torch_tensorrt = partial(option, group=f'Torch-TensorRT (--include {formats_with("formats")})')
for_edge = partial(option, group=f'edge chips (--include {formats_with("layout")})')


@dataclass(frozen=True)
class ExportConfig(OnnxConfig):
    """Settings of `export_qat.py`."""

    HIDDEN = 'inplace', 'pooler_scale', 'sampling_ratio', 'workspace'

    weights: Path = option(
        MISSING,
        'checkpoint (.pt), or a network of torchvision, such as resnet18; of several each is exported',
        each=True,
    )
    include: tuple[str, ...] = option(('onnx',), 'files to write', allowed=tuple(FORMATS))
    project: Path | None = option(None, 'folder of the files; default: that of the weights')
    # None until the model is known
    imgsz: Sides = image_sides('that of the quantization, of a float checkpoint 640, of a classifier 224')
    _: KW_ONLY
    batch_size: int = option(1, 'images per run of a graph with a fixed batch', allowed=Range(1))
    inplace: bool = option(False, "set the head's inplace flag, as upstream's export does")
    half: bool = option(
        False,
        'FP16 for a float checkpoint: ONNX with --trt 11 (where INT8 always has it), pt2 and aoti for GPUs',
    )
    device: str = run('cpu', "'cpu' or a GPU number, for tracing and of an aoti package")
    verify: Path | None = verifying(
        None,
        'compare the file with PyTorch on the images of val; exit code 1 above a limit',
        metavar='DATA.yaml',
        parse=in_tree,
    )
    names_from: str | None = names_from(group='comparison with PyTorch')
    verify_images: int = verifying(100, 'images for --verify, at most; 0 = all', allowed=OR_ALL)
    backend: str = verifying(
        'onnxruntime',
        'what runs .onnx files for --verify',
        allowed=('onnxruntime', 'openvino'),
    )
    max_ap_diff: float | None = verifying(
        None,
        f'largest difference of AP, in 0..1; default: {FLOAT_LIMITS.ap} for a float checkpoint, {INT8_LIMITS.ap} for INT8',
        allowed=SHARE,
    )
    nms: str = inside(
        'standard',
        f'operators of the NMS. standard: those of ONNX, which run everywhere. plugin: {PLUGIN}, for TensorRT alone',
        allowed=tuple(NMS_LIMITS),
    )
    topk_all: int = inside(Nms.topk_all, 'detections per image, at most')
    iou_thres: float = inside(Nms.iou_thres, 'IoU above which a box is dropped', allowed=SHARE)
    conf_thres: float = inside(Nms.conf_thres, 'boxes with this score or less are dropped', allowed=SHARE)
    class_agnostic: bool = inside(Nms.class_agnostic, 'boxes of different classes drop each other too')
    mask_resolution: int = masks_inside(
        Pooling.mask_resolution,
        'values of a mask along each side of its box',
        allowed=Range(1, 1024),
    )
    pooler_scale: float = masks_inside(
        Pooling.pooler_scale, 'side of the prototypes / side of the image', allowed=(Pooling.pooler_scale,)
    )
    sampling_ratio: int = masks_inside(
        Pooling.sampling_ratio,
        'RoiAlign: points per value and axis; a value is their mean. 0: one point for each prototype cell under a value',
        allowed=Range(0, words='be 1 or more, or 0 for as many as it takes'),
    )

    formats: tuple[str, ...] = by_torch_tensorrt(
        ('ep', 'engine'),
        'files to write. ep: exported program. ts: TorchScript, for C++. engine: the engine alone',
        allowed=tuple(TORCH_TENSORRT_FILES),
    )
    dtype: str = by_torch_tensorrt('fp16', 'types outside of Q/DQ', allowed=('fp16', 'fp32'))
    workspace: int = by_torch_tensorrt(WORKSPACE, 'memory for kernels', metavar='MIB', allowed=MEMORY)
    require_full_compilation: bool = by_torch_tensorrt(True, 'require that TensorRT runs every part (ep, ts)')

    layout: str = for_edge(
        'coral',
        'outputs of the file. coral: boxes and scores. heads: both of each stride, as .tflite and .onnx',
        allowed=('coral', 'heads'),
    )
    sigmoid: bool = for_edge(False, 'scores instead of logits (--layout heads)')
    per_tensor: bool = for_edge(False, 'one scale for all weights of a layer')

    @property
    def files(self) -> dict[str, Path]:
        """Return the files to write: key of FORMATS → path."""
        folder = self.project or self.weights.parent
        return {name: folder / f'{self.weights.stem}{FORMATS[name].suffix}' for name in self.include}

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the options that need or exclude each other; see Settings.problems. Each format checks its own options."""
        read = {name for kind in self.include if kind in FORMATS for name in FORMATS[kind].options}
        unread: dict[str, list[str]] = {}  # formats that read them → names
        for name in dict.fromkeys(name for kind in FORMATS.values() for name in kind.options if name not in read):
            unread.setdefault(formats_with(name), []).append(name)
        for formats, names in unread.items():
            idle = self.given(names)
            yield idle, f'{idle}: only with --include {formats}'
        yield from super().problems()
        idle = self.given(('backend', 'verify_images', 'max_ap_diff'))
        yield idle and not self.verify, f'{idle}: only with --verify'

    def given(self, names: Iterable[str]) -> str:
        """List them without an opset that is the default of --trt; see Settings.given."""
        decided = ('opset',) if self.trt in OPSETS and self.opset == OPSETS[self.trt][2] else ()
        return super().given(name for name in names if name not in decided)

    def nms_inside(self, masks: bool) -> tuple[Nms, Pooling]:
        """Choose the NMS and mask settings of a model's files. masks: whether the model returns masks.

        Raises:
            QatError: an option does not apply to such a model.
        """
        kind, given = self.nms, self.given(f.name for f in fields(Pooling))
        refuse(
            [
                (
                    masks and kind == 'plugin',
                    f'--nms plugin: {PLUGIN} does not tell which candidates it keeps, and so not whose masks; leave '
                    'it out, a segmentation model takes --nms standard',
                ),
                (
                    masks and self.opset < MASK_OPSET,
                    f'--opset {self.opset}: masks take RoiAlign of opset {MASK_OPSET}; give that or more',
                ),
                (given and not masks, f'{given}: only for a segmentation model, which {self.weights} is not'),
                (
                    not 1 <= self.topk_all <= NMS_LIMITS[kind],
                    f'--topk-all {self.topk_all}: must lie in 1 to {NMS_LIMITS[kind]} for --nms {kind}',
                ),
                (
                    kind == 'plugin' and self.iou_thres == 0,
                    f'--iou-thres 0: {PLUGIN} takes more than 0 only; give 0.01, or --nms standard',
                ),
            ]
        )
        return (
            Nms(kind, self.topk_all, self.iou_thres, self.conf_thres, self.class_agnostic),
            Pooling(self.mask_resolution, self.pooler_scale, self.sampling_ratio),
        )

    def limits(self, quantized: bool) -> Limits:
        """Choose the limits of --verify for a quantized or a float model."""
        limits = INT8_LIMITS if quantized else FLOAT_LIMITS
        return limits if self.max_ap_diff is None else replace(limits, ap=self.max_ap_diff)


@dataclass(frozen=True)
class DeepStreamConfig(OnnxConfig):
    """Settings of `export_yoloV9.py`."""

    weights: Path = option(MISSING, 'checkpoint (.pt); auxiliary branches are left out', '-w')
    size: Sides = image_sides('that of the quantization, else 640', flags=['-s'])  # None until the model is known
    _: KW_ONLY
    batch: int = option(1, 'images per run of a graph with a fixed batch', allowed=Range(1))
    project: Path | None = option(None, 'folder of the files; default: that of the weights')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the opset and the batch; see Settings.problems."""
        yield from super().problems()
        yield (
            self.dynamic and self.batch > 1,
            f'--dynamic, --batch {self.batch}: give one of the two; with --dynamic the file takes any batch',
        )

    def export(self) -> ExportConfig:
        """Convert to the settings of `export_qat.py`."""
        shared = {f.name: getattr(self, f.name) for f in fields(OnnxConfig)}
        return ExportConfig(self.weights, imgsz=self.size, batch_size=self.batch, project=self.project, **shared)
