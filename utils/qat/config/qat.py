"""Settings of `qat.py`: dataclasses that check themselves and report every problem at once, quoting the flag."""

from dataclasses import asdict, dataclass
from pathlib import Path

from utils.qat.core.errors import check

CALIB_METHODS = (
    'auto',
    'mse',
    'l1.5',
    'l2.4',
    'l3',
    'fisher',
    'entropy',
    'percentile',
    'max',
)  # auto: the best of the next five
WEIGHT_METHODS = ('max', 'mse')
SCALE_POLICIES = ('tied', 'free')
ADD_POLICIES = ('both', 'residual')
AMP = ('off', 'bf16', 'fp16')
GRANULARITIES = ('layer', 'block', 'conv')
METRICS = ('distortion', 'ap', 'both')


@dataclass(kw_only=True)
class MaskConfig:
    """What the verbs of `qat.py` ask of masks. The defaults are those of upstream's segment/val.py."""

    overlap: bool = False  # true masks are one map, in which the smaller of two objects is on top
    mask_ratio: int = 1  # true masks are so many times smaller than the image
    needs_masks: bool = False  # a model that gives none is refused

    def check_model(self, segments, why):
        """Raise QatError unless a model fits. segments: whether it gives masks. why: what says so."""
        given = ['--overlap'] * self.overlap + [f'--mask-ratio {self.mask_ratio}'] * (self.mask_ratio != 1)
        check(
            [
                (self.mask_ratio < 1, f'--mask-ratio {self.mask_ratio}: must be 1 or more'),
                (
                    given and not segments,
                    f'{", ".join(given)}: only for a segmentation model, and {self.weights} is none ({why}); leave it out',
                ),
                (
                    self.needs_masks and not segments,
                    f'--weights {self.weights}: a detection model ({why}), and segment/qat_seg.py is for '
                    'segmentation models; use: python qat.py',
                ),
            ]
        )


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
        check(
            [
                (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
                (self.imgsz < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
                (not 0 <= self.conf_thres <= 1, f'--conf-thres {self.conf_thres}: must lie in [0, 1]'),
                (not 0 <= self.iou_thres <= 1, f'--iou-thres {self.iou_thres}: must lie in [0, 1]'),
                (self.workers < 0, f'--workers {self.workers}: must be 0 or more'),
            ]
        )


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
            (not 0 <= self.seed < 2**32, f'--seed {self.seed}: must lie in 0 to 2**32 - 1'),
            (self.calib_images < 1, f'--calib-images {self.calib_images}: must be 1 or more'),
            (
                self.calib_method not in CALIB_METHODS,
                f'--calib-method {self.calib_method}: must be one of {", ".join(CALIB_METHODS)}',
            ),
            (
                self.weight_calib not in WEIGHT_METHODS,
                f'--weight-calib {self.weight_calib}: must be one of {", ".join(WEIGHT_METHODS)}',
            ),
            (
                self.scale_policy not in SCALE_POLICIES,
                f'--scale-policy {self.scale_policy}: must be one of {", ".join(SCALE_POLICIES)}',
            ),
            (
                self.add_policy not in ADD_POLICIES,
                f'--add-policy {self.add_policy}: must be one of {", ".join(ADD_POLICIES)}',
            ),
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
            (
                self.granularity not in GRANULARITIES,
                f'--granularity {self.granularity}: must be one of {", ".join(GRANULARITIES)}',
            ),
            (self.metric not in METRICS, f'--metric {self.metric}: must be one of {", ".join(METRICS)}'),
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
        choosing = [
            flag
            for flag, given in (('--keep-float', self.keep_float), ('--max-drop', self.max_drop is not None))
            if given
        ]
        return [
            *super().problems(),
            (self.epochs < 0, f'--epochs {self.epochs}: must be 0 (calibration only) or more'),
            (self.iters < 1, f'--iters {self.iters}: must be 1 or more (for calibration only use --epochs 0)'),
            (self.supervision_stride < 1, f'--supervision-stride {self.supervision_stride}: must be 1 or more'),
            (not 0 < self.lr <= 1, f'--lr {self.lr}: must lie in (0, 1]'),
            (self.amp not in (None, *AMP), f'--amp {self.amp}: must be one of {", ".join(AMP)}'),
            (
                not 0 <= self.task_loss < float('inf'),
                f'--task-loss {self.task_loss}: must be 0 (labels do not count) or more',
            ),
            (
                self.task_loss and self.compile,
                f'--task-loss {self.task_loss}: not with --compile, because it waits for the device, which '
                'a CUDA graph cannot do; leave one of the two out',
            ),
            (
                not 0 <= self.val_split < 1,
                f'--val-split {self.val_split}: must lie in [0, 1), such as 0.1; 0 = none held out',
            ),
            (
                self.val_split and not self.epochs,
                f'--val-split {self.val_split}: with --epochs 0 there is no epoch to choose; leave one of the two out',
            ),
            (self.keep_float < 0, f'--keep-float {self.keep_float}: must be 0 or more'),
            (
                self.max_drop is not None and not 0 <= self.max_drop <= 100,
                f'--max-drop {self.max_drop}: must lie in [0, 100] points of AP, such as 0.2',
            ),
            (len(choosing) == 2, '--keep-float, --max-drop: give one of the two'),
            (
                choosing and not self.sensitive,
                f'{" and ".join(choosing)}: needs --sensitive SUMMARY, the summary-sensitive-analysis.json '
                'that `qat.py sensitive` writes',
            ),
            (
                self.sensitive and not choosing,
                f'--sensitive {self.sensitive}: say what to do with it, by --keep-float N or --max-drop POINTS',
            ),
            (
                self.max_drop is not None and self.dry_run,
                '--max-drop: needs evaluations, which --dry-run does not make; leave one of the two out',
            ),
        ]
