"""Settings of `export_qat.py` and `export_yoloV9.py`, and of what can be inside their files."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from utils.qat.config.common import OR_ALL, SHARE, SIZE, TOLERANCE
from utils.qat.config.engine import MEMORY, WORKSPACE
from utils.qat.config.settings import Range, Settings, Sides, flag_of, option
from utils.qat.core.errors import check

PLUGIN = 'EfficientNMS_TRT'  # TensorRT's own NMS, which nothing else has
END2END = (
    'num_dets',
    'det_boxes',
    'det_scores',
    'det_classes',
)  # outputs of a file with NMS inside, as the plugin has them
MASKS = 'det_masks'  # the fifth output, of a segmentation model
# --include → end of the file's name, behind the stem of the weights
INCLUDE = {
    'onnx': '.onnx',
    'onnx_end2end': '-end2end.onnx',
    'openvino': '.xml',
    'openvino_end2end': '-end2end.xml',
    'pt2': '.pt2',
    'aoti': '-aoti.pt2',
    'torch_tensorrt': '.ep',
}
PT2 = 'pt2', 'aoti'
FROM_MODEL = *PT2, 'torch_tensorrt'  # made of the model itself; the others are made of its ONNX graph
TORCH_TENSORRT_FILES = {'ep': '.ep', 'ts': '.ts', 'engine': '-torch_tensorrt.engine'}
# --nms → most detections. The plugin looks at the 4096 highest scores of an image; TensorRT's TopK returns up to 3840.
NMS_LIMITS = {'plugin': 4096, 'standard': 3840}
MASK_OPSET = 16  # the first with a RoiAlign that takes coordinates as they are: the centre of a pixel is at a half


@dataclass(frozen=True)
class Limits:
    """How far a file may be from its model, see compare.Comparison. All limits are in 0..1."""

    ap: float  # largest absolute difference of AP
    matched: float  # smallest share of the top detections that have a match in the other model
    score: float  # largest mean difference of the scores of the two
    mask: float  # smallest mean IoU of their masks


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
    """NMS inside an exported file, see nms.py."""

    kind: str  # key of NMS_LIMITS
    topk_all: int = 100  # detections per image, at most
    iou_thres: float = 0.45  # a box that overlaps a better one of its class by more is dropped
    conf_thres: float = 0.25  # scores up to this do not count
    class_agnostic: bool = False  # boxes of different classes drop each other too, and a box has its best class only


@dataclass(frozen=True)
class Pooling:
    """How an exported file cuts out the masks of its detections, see nms.py."""

    mask_resolution: int = 160  # R: a mask is R x R values over the box of its detection
    pooler_scale: float = 0.25  # side of the prototypes / side of the image
    sampling_ratio: int = 0  # points per value and axis, averaged; 0 = one for each prototype cell under the value


@dataclass(frozen=True)
class TorchTensorRT:
    """How Torch-TensorRT compiles a model, see torch_tensorrt_export.py."""

    formats: tuple[str, ...] = ('ep', 'engine')  # of TORCH_TENSORRT_FILES
    dtype: str = 'fp16'  # outside of Q/DQ
    optimization_level: int | None = None  # 0 to 5; None = TensorRT's own
    workspace: int = WORKSPACE  # MiB

    def files(self, path: Path) -> dict[str, Path]:
        """Name the files. path: MODEL.ep."""
        return {name: path.with_name(path.stem + TORCH_TENSORRT_FILES[name]) for name in self.formats}


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Settings):
    """Settings of a file for TensorRT."""

    dynamic: bool = option(False, 'leave the batch axis open')
    simplify: bool = option(False, 'simplify the graph (onnxslim)')
    trt: int = option(
        10,
        'TensorRT version for the file. 8 (8.6) and 10: FP32 with Q/DQ, and the builder chooses FP16. 11: strongly typed, FP16 '
        'outside Q/DQ',
        allowed=tuple(OPSETS),
    )
    opset: int | None = option(
        None, 'ONNX opset; default: ' + ', '.join(f'{default} for --trt {v}' for v, (*_, default) in OPSETS.items())
    )

    @property
    def onnx_opset(self) -> int:
        """The opset that is exported: --opset, or the default of --trt."""
        return OPSETS[self.trt][2] if self.opset is None else self.opset

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the opset; see Settings.problems."""
        if self.opset is not None and self.trt in OPSETS:
            lowest, highest, _ = OPSETS[self.trt]
            yield (
                not lowest <= self.opset <= highest,
                f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}',
            )


INSIDE = 'NMS inside the file (--include onnx_end2end or openvino_end2end)'
BY_TORCH_TENSORRT = 'Torch-TensorRT (--include torch_tensorrt)'
MASKS_INSIDE = 'masks inside the file (--include onnx_end2end or openvino_end2end, segmentation models)'


@dataclass(frozen=True)
class ExportConfig(TargetConfig):
    """Settings of `export_qat.py`."""

    weights: Path = option(MISSING, 'quantized or float checkpoint (.pt); of several each is exported', each=True)
    include: tuple[str, ...] = option(('onnx',), 'files to write', allowed=tuple(INCLUDE))
    imgsz: Sides = option(  # None until the model is known
        None,
        'image size in pixels: one number, or height and width; default: that of the quantization, of a float checkpoint 640, of a classifier 224',
        *SIZE,
        allowed=Range(32),
    )
    _: KW_ONLY
    batch_size: int = option(1, 'images per run of a graph with a fixed batch', allowed=Range(1))
    inplace: bool = option(False, "set the head's inplace flag, as upstream's export does")
    half: bool = option(
        False,
        'FP16 for a float checkpoint: of an ONNX file with --trt 11 (INT8 always has it there), of pt2 and aoti for GPUs',
    )
    fp32_scales: bool = option(
        False,
        'with --trt 11 and an INT8 checkpoint: scales in FP32. Sets opset 23 (leave out --opset). ONNX Runtime cannot run the '
        'file (leave out --verify)',
    )
    device: str = option('cpu', "device for tracing, and of an aoti package: 'cpu' or a GPU number")
    verify: Path | None = option(
        None,
        'compare the file with PyTorch, on the val: images of this data; exit code 1 if a difference is above '
        'its limit',
        metavar='DATA.yaml',
    )
    verify_images: int = option(
        100, 'number of images for --verify, at most, evenly spread over val:; 0 = all', allowed=OR_ALL
    )
    backend: str = option(
        'onnxruntime',
        'what runs .onnx files for --verify; OpenVINO runs its own anyway',
        allowed=('onnxruntime', 'openvino'),
    )
    rtol: float = option(1e-3, 'relative tolerance of --verify, as in numpy.isclose', allowed=TOLERANCE)
    atol: float = option(1e-3, 'absolute tolerance; for boxes in pixels', allowed=TOLERANCE)
    max_ap_diff: float | None = option(
        None,
        f'largest difference of AP, in 0..1; default: {FLOAT_LIMITS.ap} for a float checkpoint, {INT8_LIMITS.ap} for INT8',
        allowed=SHARE,
    )
    nms: str | None = option(
        None,
        f'plugin: {PLUGIN}, only for TensorRT. standard: operators of ONNX, for ONNX Runtime too. '
        'Default: plugin; with --trt 11, with openvino_end2end and for a segmentation model: standard',
        allowed=tuple(NMS_LIMITS),
        group=INSIDE,
    )
    topk_all: int = option(Nms.topk_all, 'detections per image, at most', group=INSIDE)
    iou_thres: float = option(Nms.iou_thres, 'IoU above which a box is dropped', allowed=SHARE, group=INSIDE)
    conf_thres: float = option(Nms.conf_thres, 'boxes with this score or less are dropped', allowed=SHARE, group=INSIDE)
    class_agnostic: bool = option(Nms.class_agnostic, 'boxes of different classes drop each other too', group=INSIDE)
    mask_resolution: int = option(
        Pooling.mask_resolution,
        'R: a mask has R x R values, which cover the box of its detection',
        allowed=Range(1, 1024),
        group=MASKS_INSIDE,
    )
    pooler_scale: float = option(
        Pooling.pooler_scale,
        'side of the prototypes / side of the image',
        allowed=Range(0.0, 1.0, without=0),
        group=MASKS_INSIDE,
    )
    sampling_ratio: int = option(
        Pooling.sampling_ratio,
        'RoiAlign: points per value and axis; a value is their mean. 0: one point for each prototype cell under a value',
        allowed=Range(0, words='be 1 or more, or 0 for as many as it takes'),
        group=MASKS_INSIDE,
    )

    formats: tuple[str, ...] = option(
        TorchTensorRT.formats,
        'ep: exported program with the engine inside. ts: TorchScript, for C++ with libtorch. engine: the engine alone, for '
        'val_trt.py and trtexec',
        allowed=tuple(TORCH_TENSORRT_FILES),
        group=BY_TORCH_TENSORRT,
    )
    dtype: str = option(TorchTensorRT.dtype, 'types outside of Q/DQ', allowed=('fp16', 'fp32'), group=BY_TORCH_TENSORRT)
    optimization_level: int | None = option(
        TorchTensorRT.optimization_level,
        "TensorRT's optimization level, 0 (fast build) to 5 (fast engine); default: its own",
        allowed=Range(0, 5),
        group=BY_TORCH_TENSORRT,
    )
    workspace: int = option(
        TorchTensorRT.workspace, 'memory for kernels', metavar='MIB', allowed=MEMORY, group=BY_TORCH_TENSORRT
    )

    @property
    def torch_tensorrt(self) -> TorchTensorRT:
        """The options of Torch-TensorRT."""
        return TorchTensorRT(*(getattr(self, f.name) for f in fields(TorchTensorRT)))

    @property
    def openvino(self) -> list[str]:
        """The files of --include that are for OpenVINO."""
        return [name for name in self.include if name.startswith('openvino')]

    @property
    def pt2(self) -> list[str]:
        """The files of --include that PyTorch writes."""
        return [name for name in self.include if name in PT2]

    @property
    def from_model(self) -> list[str]:
        """The files of --include that are made of the model itself."""
        return [name for name in self.include if name in FROM_MODEL]

    @property
    def onnx(self) -> bool:
        """Whether a file of --include is made of the ONNX graph."""
        return len(self.from_model) < len(self.include)

    @property
    def with_nms(self) -> list[str]:
        """The files of --include with NMS inside."""
        return [name for name in self.include if name.endswith('end2end')]

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the options that need or exclude each other; see Settings.problems."""
        idle = self._given([*(f.name for f in fields(Nms)[1:]), 'nms', *(f.name for f in fields(Pooling))])
        yield idle and not self.with_nms, f'{idle}: only with --include onnx_end2end or openvino_end2end'
        idle = self._given(f.name for f in fields(TorchTensorRT))
        yield (
            'torch_tensorrt' in self.include and self.dynamic and self.batch_size == 1,
            '--dynamic: with --include torch_tensorrt the batch is 1 to --batch-size; give that, such as --batch-size 8',
        )
        yield (
            self.verify and list(self.include) == ['torch_tensorrt'],
            '--verify: not with --include torch_tensorrt alone, whose files are compared with PyTorch as they are compiled; '
            'val_trt.py evaluates the engine',
        )
        yield (
            self.half and list(self.include) == ['torch_tensorrt'],
            '--half: --include torch_tensorrt takes --dtype instead, which is fp16 by default; leave it out',
        )
        yield (
            idle and 'torch_tensorrt' not in self.include,
            f'{idle}: only with --include torch_tensorrt',
        )
        yield (
            'openvino_end2end' in self.include and self.nms == 'plugin',
            f'--nms plugin: {PLUGIN}, which TensorRT alone has; OpenVINO takes --nms standard',
        )
        yield (
            self.openvino and self.fp32_scales,
            f'--fp32-scales: not with --include {" ".join(self.openvino)}; it is for TensorRT 11, leave it out',
        )
        yield (
            self.pt2 and self.fp32_scales,
            f'--fp32-scales: not with --include {" ".join(self.pt2)}; it is for TensorRT 11, leave it out',
        )
        yield (
            self.half and self.onnx and self.trt != 11,
            f'--half: only with --trt 11; TensorRT {self.trt} takes the FP32 file and chooses FP16 '
            'when it builds (trtexec --fp16)',
        )
        if self.fp32_scales:
            yield (
                self.trt != 11,
                f'--fp32-scales: only with --trt 11; for TensorRT {self.trt} scales are FP32 anyway',
            )
            yield (
                self.opset is not None,
                f'--opset {self.opset}: leave it out with --fp32-scales, which always takes opset 23',
            )
            yield (
                self.verify,
                '--verify: ONNX Runtime cannot run a file with --fp32-scales; verify an export without '
                'that flag first, whose scales have the same values',
            )
        else:
            yield from super().problems()
        yield (
            self.backend != ExportConfig.backend and not self.verify,
            f'--backend {self.backend}: only with --verify',
        )

    def _given(self, names: Iterable[str]) -> str:
        """List the flags of the settings that are not at their defaults."""
        return ', '.join(flag_of(name) for name in names if getattr(self, name) != getattr(ExportConfig, name))

    def end2end(self, segments: bool) -> tuple[Nms, Pooling]:
        """Choose what is inside the end2end file of a model. Raise QatError if the options are not for such a model.

        segments: whether the model gives masks.
        """
        openvino = 'openvino_end2end' in self.include
        kind = self.nms or ('standard' if segments or self.trt == 11 or openvino else 'plugin')
        masks = self._given(f.name for f in fields(Pooling))
        check(
            [
                (
                    segments and kind == 'plugin',
                    f'--nms plugin: {PLUGIN} does not tell which candidates it keeps, and so not whose masks; leave '
                    'it out, a segmentation model takes --nms standard',
                ),
                (
                    segments and self.onnx_opset < MASK_OPSET,
                    f'--opset {self.onnx_opset}: masks take RoiAlign of opset {MASK_OPSET}; give that or more',
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
                    self.verify and kind == 'plugin' and not {'onnx', 'openvino', *PT2} & set(self.include),
                    f'--verify: ONNX Runtime has no {PLUGIN}; verify the file without NMS (--include onnx onnx_end2end), or give --nms standard',
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
class DeepStreamConfig(TargetConfig):
    """Settings of `export_yoloV9.py`."""

    weights: Path = option(MISSING, 'quantized or float checkpoint (.pt); auxiliary branches are left out', '-w')
    size: Sides = option((640, 640), 'size of the images in pixels: one number, or height and width', '-s')
    _: KW_ONLY
    batch: int = option(1, 'images per run of a graph with a fixed batch', allowed=Range(1))

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the opset and the batch; see Settings.problems."""
        yield from super().problems()
        yield (
            self.dynamic and self.batch > 1,
            f'--dynamic, --batch {self.batch}: give one of the two; with --dynamic the file takes any batch',
        )
