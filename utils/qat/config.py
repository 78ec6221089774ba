"""Settings of each command: dataclasses that check themselves and report every problem at once, quoting the flag."""
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from utils.qat.errors import QatError

CALIB_METHODS = ('auto', 'mse', 'l1.5', 'l2.4', 'l3', 'fisher', 'entropy', 'percentile', 'max')  # auto: the best of the next five
WEIGHT_METHODS = ('max', 'mse')
SCALE_POLICIES = ('tied', 'free')
ADD_POLICIES = ('both', 'residual')
AMP = ('off', 'bf16', 'fp16')
GRANULARITIES = ('layer', 'block', 'conv')
METRICS = ('distortion', 'ap', 'both')
PLUGIN = 'EfficientNMS_TRT'  # TensorRT's own NMS, which nothing else has
END2END = 'num_dets', 'det_boxes', 'det_scores', 'det_classes'  # outputs of a file with NMS inside, as that plugin has them
MASKS = 'det_masks'  # one more, of a segmentation model
# --include → what the name of the file ends in, behind the stem of the weights
INCLUDE = {'onnx': '.onnx', 'onnx_end2end': '-end2end.onnx'}
# --nms → most detections. The plugin looks at the 4096 highest scores of an image; TensorRT's TopK returns up to 3840.
NMS_LIMITS = {'plugin': 4096, 'standard': 3840}
MASK_OPSET = 16  # the first whose RoiAlign takes coordinates as they are, with pixels whose centres are at a half


def check(problems):
    bad = [text for is_bad, text in problems if is_bad]
    if bad:
        raise QatError('; '.join(bad))


@dataclass(kw_only=True)
class MaskConfig:
    """What the verbs of `qat.py` ask of masks. The defaults are those of upstream's segment/val.py."""
    overlap: bool = False  # true masks are one map, in which the smaller of two objects is on top
    mask_ratio: int = 1  # true masks are so many times smaller than the image
    needs_masks: bool = False  # a model that gives none is refused

    def check_model(self, segments, why):
        """Raise QatError unless a model fits. segments: whether it gives masks. why: what says so."""
        given = ['--overlap'] * self.overlap + [f'--mask-ratio {self.mask_ratio}'] * (self.mask_ratio != 1)
        check([
            (self.mask_ratio < 1, f'--mask-ratio {self.mask_ratio}: must be 1 or more'),
            (given and not segments, f"{', '.join(given)}: only for a segmentation model, and {self.weights} is none ({why}); leave it out"),
            (self.needs_masks and not segments, f"--weights {self.weights}: a detection model ({why}), and segment/qat_seg.py is for "
                                                'segmentation models; use: python qat.py'),
        ])


@dataclass
class EvalConfig(MaskConfig):
    """`qat.py eval`."""
    weights: Path
    data: Path
    batch_size: int = 10
    imgsz: int = 640  # pixels, the longer side; rounded up to the stride
    device: str = ''  # '' = first GPU, else the CPU
    conf_thres: float = 0.001
    iou_thres: float = 0.7  # of the NMS
    square: bool = False  # letterbox to imgsz x imgsz, as a deployed model sees it
    workers: int = 8
    save_json: bool = True  # write the detections, in COCO's result format
    project: Path = Path('runs/qat_eval')
    name: str = 'exp'
    exist_ok: bool = False

    def __post_init__(self):
        check([
            (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
            (self.imgsz < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
            (not 0 <= self.conf_thres <= 1, f'--conf-thres {self.conf_thres}: must lie in [0, 1]'),
            (not 0 <= self.iou_thres <= 1, f'--iou-thres {self.iou_thres}: must lie in [0, 1]'),
            (self.workers < 0, f'--workers {self.workers}: must be 0 or more'),
        ])


@dataclass
class CalibrationConfig(MaskConfig):
    """What `quantize` and `sensitive` have in common: a float checkpoint, and how it is calibrated."""
    weights: Path
    data: Path
    hyp: Path = None  # augmentation of the images for fine-tuning; None = they are taken as they are
    device: str = ''
    batch_size: int = 10
    imgsz: int = 640
    project: Path = Path('runs/qat')
    name: str = 'exp'
    exist_ok: bool = False
    seed: int = 57
    calib_images: int = 512
    calib_method: str = 'auto'
    percentile: float = 99.99  # of |x|, for --calib-method percentile
    weight_calib: str = 'max'  # of each output channel
    bias_correction: bool = True
    scale_policy: str = 'tied'  # tensors joined by operations that Q/DQ commutes with share one scale
    add_policy: str = 'both'  # which addends of a residual Add are quantized
    workers: int = 8

    def problems(self):
        """(is it bad, what to say) of each setting."""
        return [
            (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
            (self.imgsz < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
            (not 0 <= self.seed < 2 ** 32, f'--seed {self.seed}: must lie in 0 to 2**32 - 1'),
            (self.calib_images < 1, f'--calib-images {self.calib_images}: must be 1 or more'),
            (self.calib_method not in CALIB_METHODS,
             f"--calib-method {self.calib_method}: must be one of {', '.join(CALIB_METHODS)}"),
            (self.weight_calib not in WEIGHT_METHODS, f"--weight-calib {self.weight_calib}: must be one of {', '.join(WEIGHT_METHODS)}"),
            (self.scale_policy not in SCALE_POLICIES,
             f"--scale-policy {self.scale_policy}: must be one of {', '.join(SCALE_POLICIES)}"),
            (self.add_policy not in ADD_POLICIES, f"--add-policy {self.add_policy}: must be one of {', '.join(ADD_POLICIES)}"),
            (not 0 < self.percentile <= 100, f'--percentile {self.percentile}: must lie in (0, 100]'),
            (self.workers < 0, f'--workers {self.workers}: must be 0 or more'),
        ]

    def __post_init__(self):
        check(self.problems())


@dataclass
class SensitiveConfig(CalibrationConfig):
    """`qat.py sensitive`."""
    project: Path = Path('runs/qat_sensitive')
    num_image: int = 100  # of val, at most, evenly spread; 0 = all
    granularity: str = 'block'
    metric: str = 'both'

    def problems(self):
        return [
            *super().problems(),
            (self.num_image < 0, f'--num-image {self.num_image}: must be 1 or more, or 0 for all'),
            (self.granularity not in GRANULARITIES, f"--granularity {self.granularity}: must be one of {', '.join(GRANULARITIES)}"),
            (self.metric not in METRICS, f"--metric {self.metric}: must be one of {', '.join(METRICS)}"),
        ]


@dataclass
class QuantizeConfig(CalibrationConfig):
    """`qat.py quantize`."""
    epochs: int = 10  # 0 = calibration only (PTQ)
    iters: int = 200  # fine-tuning steps per epoch, at most; an epoch ends with the training set
    supervision_stride: int = 1  # compare every n-th layer with the float teacher
    lr: float = 1e-5  # highest learning rate
    amp: str = None  # precision of the fine-tuning: FP32, or autocast to BF16 or FP16; None = fp16 on a GPU, else off
    compile: bool = False  # fine-tune by replaying a CUDA graph
    task_loss: float = 0.0  # weight of the detection loss on the labels
    learn_scales: bool = False  # of activations
    exclude: list = ()  # regular expressions: layers that stay in float
    only: list = ()  # regular expressions: the layers that are quantized; empty = all
    sensitive: Path = None  # summary of `qat.py sensitive`
    keep_float: int = 0  # its most sensitive units, so many, stay in float
    max_drop: float = None  # or as many as PTQ needs to lose no more points (0.01) of AP
    dry_run: bool = False  # print the plan, write nothing
    eval_origin: bool = True
    eval_ptq: bool = True
    val_split: float = 0.0  # share of the training images that is held out to choose the best epoch; 0 = chosen on val
    resume: Path = None  # folder of the interrupted run that this one goes on with; no setting of the run

    def plain(self):
        """The settings of the run as plain values."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items() if k != 'resume'}

    def problems(self):
        choosing = [flag for flag, given in (('--keep-float', self.keep_float), ('--max-drop', self.max_drop is not None)) if given]
        return [
            *super().problems(),
            (self.epochs < 0, f'--epochs {self.epochs}: must be 0 (calibration only) or more'),
            (self.iters < 1, f'--iters {self.iters}: must be 1 or more (for calibration only use --epochs 0)'),
            (self.supervision_stride < 1, f'--supervision-stride {self.supervision_stride}: must be 1 or more'),
            (not 0 < self.lr <= 1, f'--lr {self.lr}: must lie in (0, 1]'),
            (self.amp not in (None, *AMP), f"--amp {self.amp}: must be one of {', '.join(AMP)}"),
            (not 0 <= self.task_loss < float('inf'), f'--task-loss {self.task_loss}: must be 0 (labels do not count) or more'),
            (self.task_loss and self.compile, f'--task-loss {self.task_loss}: not with --compile, because it waits for the device, which '
                                              'a CUDA graph cannot do; leave one of the two out'),
            (not 0 <= self.val_split < 1, f'--val-split {self.val_split}: must lie in [0, 1), such as 0.1; 0 = none held out'),
            (self.val_split and not self.epochs, f'--val-split {self.val_split}: with --epochs 0 there is no epoch to choose; '
                                                 'leave one of the two out'),
            (self.keep_float < 0, f'--keep-float {self.keep_float}: must be 0 or more'),
            (self.max_drop is not None and not 0 <= self.max_drop <= 100, f'--max-drop {self.max_drop}: must lie in [0, 100] points of AP, '
                                                                          'such as 0.2'),
            (len(choosing) == 2, '--keep-float, --max-drop: give one of the two'),
            (choosing and not self.sensitive, f"{' and '.join(choosing)}: needs --sensitive SUMMARY, the summary-sensitive-analysis.json "
                                              'that `qat.py sensitive` writes'),
            (self.sensitive and not choosing, f'--sensitive {self.sensitive}: say what to do with it, by --keep-float N or --max-drop POINTS'),
            (self.max_drop is not None and self.dry_run, '--max-drop: needs evaluations, which --dry-run does not make; leave one of the two out'),
        ]


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
    """NMS inside an exported file, see onnx_nms.py."""
    kind: str  # of NMS_LIMITS
    topk_all: int = 100  # detections per image, at most
    iou_thres: float = 0.45  # a box that overlaps a better one of its class by more is dropped
    conf_thres: float = 0.25  # scores up to this do not count
    class_agnostic: bool = False  # classes do not matter for what is dropped, and a box is of its best class alone


@dataclass(frozen=True)
class Pooling:
    """How an exported file cuts out the masks of its detections, see onnx_nms.py."""
    mask_resolution: int = 160  # R: a mask is R x R values over the box of its detection
    pooler_scale: float = 0.25  # side of the prototypes / side of the image
    sampling_ratio: int = 0  # points per value and axis, of which it is the mean; 0 = as many as there are prototype cells to it


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
    fp32_scales: bool = False  # of a quantized model for TensorRT 11; the file is then of opset 23, whatever `opset` it is made of
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
        check([(name not in INCLUDE, f"--include {name}: must be of {', '.join(INCLUDE)}") for name in self.include]
              + [(idle and not end2end, f'{idle}: only with --include onnx_end2end')])
        check([(self.trt not in OPSETS, f"--trt {self.trt}: must be one of {', '.join(map(str, OPSETS))}")])
        lowest, highest, default = OPSETS[self.trt]
        opset_given = self.opset is not None
        self.opset = default if self.opset is None else self.opset
        check([
            (len(self.imgsz) != 2, f'--imgsz {self.imgsz}: one number, or height and width'),
            (min(self.imgsz) < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
            (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
            (not self.fp32_scales and not lowest <= self.opset <= highest,
             f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}'),
            (self.half and self.trt != 11, f'--half: only with --trt 11; TensorRT {self.trt} takes the FP32 file and chooses FP16 '
                                           'when it builds (trtexec --fp16)'),
            (self.fp32_scales and self.trt != 11, f'--fp32-scales: only with --trt 11; for TensorRT {self.trt} scales are FP32 anyway'),
            (self.fp32_scales and opset_given, f'--opset {self.opset}: leave it out with --fp32-scales, which always takes opset 23'),
            (self.fp32_scales and self.verify, '--verify: ONNX Runtime cannot run a file with --fp32-scales; verify an export without '
                                               'that flag first, whose scales have the same values'),
            (self.verify and len(set(self.imgsz)) != 1,
             f"--verify needs a square --imgsz (one number): images are letterboxed to squares, not to {self.imgsz}"),
            (self.verify_images < 0, f'--verify-images {self.verify_images}: must be 1 or more, or 0 for all'),
            (not 0 <= self.rtol < float('inf'), f'--rtol {self.rtol}: must be 0 or more'),
            (not 0 <= self.atol < float('inf'), f'--atol {self.atol}: must be 0 or more'),
            (not 0 <= (self.max_ap_diff or 0) <= 1, f'--max-ap-diff {self.max_ap_diff}: must lie in [0, 1]'),
            (self.nms not in (None, *NMS_LIMITS), f"--nms {self.nms}: must be one of {', '.join(NMS_LIMITS)}"),
            (not 0 <= self.iou_thres <= 1, f'--iou-thres {self.iou_thres}: must lie in [0, 1]'),
            (not 0 <= self.conf_thres <= 1, f'--conf-thres {self.conf_thres}: must lie in [0, 1]'),
            (not 1 <= self.mask_resolution <= 1024, f'--mask-resolution {self.mask_resolution}: must lie in 1 to 1024'),
            (not 0 < self.pooler_scale <= 1, f'--pooler-scale {self.pooler_scale}: must lie in (0, 1]'),
            (self.sampling_ratio < 0, f'--sampling-ratio {self.sampling_ratio}: must be 1 or more, or 0 for as many as it takes'),
        ])

    def _given(self, names):
        """Flags of those settings among `names` that are not at their defaults."""
        return ', '.join('--' + name.replace('_', '-') for name in names if getattr(self, name) != getattr(ExportConfig, name))

    def end2end(self, segments):
        """(Nms, Pooling) of the end2end file of a model that segments, or of a detector. Raises QatError if the flags are not for such a
        model."""
        kind = self.nms or ('standard' if segments or self.trt == 11 else 'plugin')
        masks = self._given(f.name for f in fields(Pooling))
        check([
            (segments and kind == 'plugin', f'--nms plugin: {PLUGIN} does not tell which candidates it keeps, and so not whose masks; leave '
                                            'it out, a segmentation model takes --nms standard'),
            (segments and self.opset < MASK_OPSET, f'--opset {self.opset}: masks take RoiAlign of opset {MASK_OPSET}; give that or more'),
            (masks and not segments, f'{masks}: only for a segmentation model, which {self.weights} is not'),
            (not 1 <= self.topk_all <= NMS_LIMITS[kind], f'--topk-all {self.topk_all}: must lie in 1 to {NMS_LIMITS[kind]} for --nms {kind}'),
            (kind == 'plugin' and self.iou_thres == 0, f'--iou-thres 0: {PLUGIN} takes more than 0 only; give 0.01, or --nms standard'),
            (self.verify and kind == 'plugin' and 'onnx' not in self.include,
             f'--verify: ONNX Runtime has no {PLUGIN}; verify the file without NMS (--include onnx onnx_end2end), or give --nms standard'),
        ])
        return (Nms(kind, self.topk_all, self.iou_thres, self.conf_thres, self.class_agnostic),
                Pooling(self.mask_resolution, self.pooler_scale, self.sampling_ratio))

    def limits(self, quantized):
        """Limits of --verify for a quantized or a float model."""
        limits = INT8_LIMITS if quantized else FLOAT_LIMITS
        return limits if self.max_ap_diff is None else replace(limits, ap=self.max_ap_diff)
