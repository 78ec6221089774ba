"""Settings of `export_qat.py`, and of what can be inside its files."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from utils.qat.core.errors import check

PLUGIN = 'EfficientNMS_TRT'  # TensorRT's own NMS, which nothing else has
END2END = (
    'num_dets',
    'det_boxes',
    'det_scores',
    'det_classes',
)  # outputs of a file with NMS inside, as that plugin has them
MASKS = 'det_masks'  # one more, of a segmentation model
# --include → what the name of the file ends in, behind the stem of the weights
INCLUDE = {'onnx': '.onnx', 'onnx_end2end': '-end2end.onnx'}
# --nms → most detections. The plugin looks at the 4096 highest scores of an image; TensorRT's TopK returns up to 3840.
NMS_LIMITS = {'plugin': 4096, 'standard': 3840}
MASK_OPSET = 16  # the first whose RoiAlign takes coordinates as they are, with pixels whose centres are at a half


@dataclass
class Limits:
    """How far a file may be from the model it was made of, see compare.Comparison. All in 0..1."""

    ap: float  # largest absolute difference of AP
    matched: float  # smallest share of the top detections that have a match in the other model
    score: float  # largest mean difference of the scores of the two
    mask: float  # smallest mean IoU of their masks


# Float: the order of summation alone moves scores by 1e-6, and AP by nothing. INT8: a value between two steps rounds either
# way, so that two runtimes are two samples of one noise. Right files were seen at up to 0.004 of AP (40 to 72 images),
# 98.7 % matched and 0.008 of score; 0.005 of AP leaves room for data of that size, where one box moves AP by 0.001. The
# score has a limit of its own because AP does not see scores that all shrink, and a threshold does. Masks of right files had an
# IoU of 1.000, in INT8 0.995; one of a few points is far off if one of them differs.
FLOAT_LIMITS = Limits(ap=0.001, matched=0.99, score=0.001, mask=0.99)
INT8_LIMITS = Limits(ap=0.005, matched=0.95, score=0.02, mask=0.9)


# TensorRT's major version → lowest, highest and default opset. 13 is the first with per-channel Q/DQ; TensorRT 8.6 reads up to
# 17; FP16 scales exist from 19; PyTorch's TorchScript exporter writes up to 20.
OPSETS = {8: (13, 17, 17), 10: (13, 20, 17), 11: (19, 20, 19)}


@dataclass(frozen=True)
class Nms:
    """NMS inside an exported file, see nms.py."""

    kind: str  # of NMS_LIMITS
    topk_all: int = 100  # detections per image, at most
    iou_thres: float = 0.45  # a box that overlaps a better one of its class by more is dropped
    conf_thres: float = 0.25  # scores up to this do not count
    class_agnostic: bool = False  # classes do not matter for what is dropped, and a box is of its best class alone


@dataclass(frozen=True)
class Pooling:
    """How an exported file cuts out the masks of its detections, see nms.py."""

    mask_resolution: int = 160  # R: a mask is R x R values over the box of its detection
    pooler_scale: float = 0.25  # side of the prototypes / side of the image
    sampling_ratio: int = (
        0  # points per value and axis, of which it is the mean; 0 = as many as there are prototype cells to it
    )


@dataclass
class ExportConfig:
    """`export_qat.py`."""

    weights: Path
    include: list = field(default_factory=lambda: ['onnx'])  # of INCLUDE
    imgsz: list = field(default_factory=lambda: [640, 640])  # height, width in pixels
    batch_size: int = 1
    dynamic: bool = False  # the batch axis
    simplify: bool = False
    inplace: bool = False
    trt: int = 10  # major version of TensorRT the file is for
    half: bool = False  # a float model in FP16, for TensorRT 11
    fp32_scales: bool = (
        False  # of a quantized model for TensorRT 11; the file is then of opset 23, whatever `opset` it is made of
    )
    opset: int = None  # None = that of OPSETS
    device: str = 'cpu'
    verify: Path = None  # data YAML
    verify_images: int = 100  # of its val images, at most, evenly spread; 0 = all
    rtol: float = 1e-3  # of what counts as within tolerance: |ONNX Runtime - PyTorch| <= atol + rtol |PyTorch|
    atol: float = 1e-3
    max_ap_diff: float = None  # 0..1; None = that of FLOAT_LIMITS or INT8_LIMITS
    nms: str = None  # the kind; None = what --trt and the model allow, see end2end. This and the next four: see Nms
    topk_all: int = Nms.topk_all
    iou_thres: float = Nms.iou_thres
    conf_thres: float = Nms.conf_thres
    class_agnostic: bool = Nms.class_agnostic
    mask_resolution: int = Pooling.mask_resolution  # this and the next two: see Pooling
    pooler_scale: float = Pooling.pooler_scale
    sampling_ratio: int = Pooling.sampling_ratio

    def __post_init__(self):
        if len(self.imgsz) == 1:
            self.imgsz = self.imgsz * 2
        end2end = 'onnx_end2end' in self.include
        idle = self._given([*(f.name for f in fields(Nms)[1:]), 'nms', *(f.name for f in fields(Pooling))])
        check(
            [(name not in INCLUDE, f'--include {name}: must be of {", ".join(INCLUDE)}') for name in self.include]
            + [(idle and not end2end, f'{idle}: only with --include onnx_end2end')]
        )
        check([(self.trt not in OPSETS, f'--trt {self.trt}: must be one of {", ".join(map(str, OPSETS))}')])
        lowest, highest, default = OPSETS[self.trt]
        opset_given = self.opset is not None
        self.opset = default if self.opset is None else self.opset
        check(
            [
                (len(self.imgsz) != 2, f'--imgsz {self.imgsz}: one number, or height and width'),
                (min(self.imgsz) < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
                (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
                (
                    not self.fp32_scales and not lowest <= self.opset <= highest,
                    f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}',
                ),
                (
                    self.half and self.trt != 11,
                    f'--half: only with --trt 11; TensorRT {self.trt} takes the FP32 file and chooses FP16 '
                    'when it builds (trtexec --fp16)',
                ),
                (
                    self.fp32_scales and self.trt != 11,
                    f'--fp32-scales: only with --trt 11; for TensorRT {self.trt} scales are FP32 anyway',
                ),
                (
                    self.fp32_scales and opset_given,
                    f'--opset {self.opset}: leave it out with --fp32-scales, which always takes opset 23',
                ),
                (
                    self.fp32_scales and self.verify,
                    '--verify: ONNX Runtime cannot run a file with --fp32-scales; verify an export without '
                    'that flag first, whose scales have the same values',
                ),
                (
                    self.verify and len(set(self.imgsz)) != 1,
                    f'--verify needs a square --imgsz (one number): images are letterboxed to squares, not to {self.imgsz}',
                ),
                (self.verify_images < 0, f'--verify-images {self.verify_images}: must be 1 or more, or 0 for all'),
                (not 0 <= self.rtol < float('inf'), f'--rtol {self.rtol}: must be 0 or more'),
                (not 0 <= self.atol < float('inf'), f'--atol {self.atol}: must be 0 or more'),
                (not 0 <= (self.max_ap_diff or 0) <= 1, f'--max-ap-diff {self.max_ap_diff}: must lie in [0, 1]'),
                (self.nms not in (None, *NMS_LIMITS), f'--nms {self.nms}: must be one of {", ".join(NMS_LIMITS)}'),
                (not 0 <= self.iou_thres <= 1, f'--iou-thres {self.iou_thres}: must lie in [0, 1]'),
                (not 0 <= self.conf_thres <= 1, f'--conf-thres {self.conf_thres}: must lie in [0, 1]'),
                (
                    not 1 <= self.mask_resolution <= 1024,
                    f'--mask-resolution {self.mask_resolution}: must lie in 1 to 1024',
                ),
                (not 0 < self.pooler_scale <= 1, f'--pooler-scale {self.pooler_scale}: must lie in (0, 1]'),
                (
                    self.sampling_ratio < 0,
                    f'--sampling-ratio {self.sampling_ratio}: must be 1 or more, or 0 for as many as it takes',
                ),
            ]
        )

    def _given(self, names):
        """Flags of those settings among `names` that are not at their defaults."""
        return ', '.join(
            '--' + name.replace('_', '-') for name in names if getattr(self, name) != getattr(ExportConfig, name)
        )

    def end2end(self, segments):
        """(Nms, Pooling) of the end2end file of a model that segments, or of a detector. Raises QatError if the flags are not for such a
        model."""
        kind = self.nms or ('standard' if segments or self.trt == 11 else 'plugin')
        masks = self._given(f.name for f in fields(Pooling))
        check(
            [
                (
                    segments and kind == 'plugin',
                    f'--nms plugin: {PLUGIN} does not tell which candidates it keeps, and so not whose masks; leave '
                    'it out, a segmentation model takes --nms standard',
                ),
                (
                    segments and self.opset < MASK_OPSET,
                    f'--opset {self.opset}: masks take RoiAlign of opset {MASK_OPSET}; give that or more',
                ),
                (masks and not segments, f'{masks}: only for a segmentation model, which {self.weights} is not'),
                (
                    not 1 <= self.topk_all <= NMS_LIMITS[kind],
                    f'--topk-all {self.topk_all}: must lie in 1 to {NMS_LIMITS[kind]} for --nms {kind}',
                ),
                (
                    kind == 'plugin' and self.iou_thres == 0,
                    f'--iou-thres 0: {PLUGIN} takes more than 0 only; give 0.01, or --nms standard',
                ),
                (
                    self.verify and kind == 'plugin' and 'onnx' not in self.include,
                    f'--verify: ONNX Runtime has no {PLUGIN}; verify the file without NMS (--include onnx onnx_end2end), or give --nms standard',
                ),
            ]
        )
        return (
            Nms(kind, self.topk_all, self.iou_thres, self.conf_thres, self.class_agnostic),
            Pooling(self.mask_resolution, self.pooler_scale, self.sampling_ratio),
        )

    def limits(self, quantized):
        """Limits of --verify for a quantized or a float model."""
        limits = INT8_LIMITS if quantized else FLOAT_LIMITS
        return limits if self.max_ap_diff is None else replace(limits, ap=self.max_ap_diff)


@dataclass
class DeepStreamConfig:
    """`export_yoloV9.py`."""

    weights: Path
    size: list  # height, width in pixels
    opset: int = None  # None = that of OPSETS
    simplify: bool = False
    dynamic: bool = False  # the batch axis
    batch: int = 1  # of a graph whose batch is fixed
    trt: int = 10  # major version of TensorRT the file is for

    def __post_init__(self):
        if len(self.size) == 1:
            self.size = self.size * 2
        check([(self.trt not in OPSETS, f'--trt {self.trt}: must be one of {", ".join(map(str, OPSETS))}')])
        lowest, highest, default = OPSETS[self.trt]
        self.opset = default if self.opset is None else self.opset
        check(
            [
                (len(self.size) != 2, f'--size {" ".join(map(str, self.size))}: one number, or height and width'),
                (self.batch < 1, f'--batch {self.batch}: must be 1 or more'),
                (
                    self.dynamic and self.batch > 1,
                    f'--dynamic, --batch {self.batch}: give one of the two; with --dynamic the file takes any batch',
                ),
                (
                    not lowest <= self.opset <= highest,
                    f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}',
                ),
            ]
        )

    def require_stride(self, stride):
        """Raise QatError unless the size suits a model of that stride."""
        right = [max(1, -(-n // stride)) * stride for n in self.size]
        check(
            [
                (
                    right != self.size,
                    f"--size {' '.join(map(str, self.size))}: must be multiples of the model's stride, {stride}; "
                    f'the next are --size {" ".join(map(str, right))}',
                )
            ]
        )
