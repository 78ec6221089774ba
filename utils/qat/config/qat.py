"""Settings of `qat.py` and `val_trt.py`."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path
from typing import Any

from utils.qat.config.backends import PREDICTING
from utils.qat.config.common import OR_ALL, SEED, SHARE, SIZE, FolderConfig, LoaderConfig
from utils.qat.config.settings import Range, Sides, option
from utils.qat.config.targets import DEFAULT_TARGET, TARGETS
from utils.qat.core.errors import check

CANDIDATES = ('l2.4', 'fisher')  # --calib-method auto takes the better of them
CALIB_METHODS = ('auto', *CANDIDATES, 'mse', 'l1.5', 'l3', 'entropy', 'percentile', 'max')
WEIGHT_METHODS = ('max', 'mse')
SCALE_POLICIES = ('tied', 'free')
ADD_POLICIES = ('both', 'residual', 'each')
AMP = ('off', 'bf16', 'fp16')
GRANULARITIES = ('layer', 'block', 'conv')
METRICS = ('distortion', 'ap', 'both')
TREE = Path(__file__).parents[3]  # the patched YOLOv9 folder, with --link too
COCO = Path('data/coco.yaml')


@dataclass(frozen=True)
class ModelConfig(FolderConfig, LoaderConfig):
    """A model, its data, and how the images of the data are read."""

    weights: Path = option(
        MISSING, 'checkpoint (.pt), or a network of torchvision with its pretrained weights, such as resnet50'
    )
    data: Path = option(
        COCO, 'data YAML: train, val, names; of a classifier a folder with train/ and val/, in each a folder per class'
    )
    _: KW_ONLY
    needs_classes: bool = False  # a model that is no classifier is refused
    needs_masks: bool = False  # a model that gives none is refused

    @property
    def data_file(self) -> Path:
        """The data YAML; COCO's is looked for here and, because a command can be called from elsewhere, in its tree."""
        elsewhere = self.data == COCO and not COCO.exists() and (TREE / COCO).exists()
        return TREE / COCO if elsewhere else self.data

    def check_model(self, segments: bool, why: str, classifies: bool = False) -> None:
        """Raise QatError unless a model fits the settings.

        Args:
            segments: whether the model gives masks.
            why: what in the model says so.
            classifies: whether it is a classifier.
        """
        given = ['--overlap'] * self.overlap + [f'--mask-ratio {self.mask_ratio}'] * (self.mask_ratio != 1)
        check(
            [
                (
                    given and not segments,
                    f'{", ".join(given)}: only for a segmentation model, and {self.weights} is none ({why}); leave it out',
                ),
                (
                    self.needs_classes and not classifies,
                    f'--weights {self.weights}: no classifier ({why}), and classify/qat_cls.py is for classifiers; use: python qat.py',
                ),
                (
                    self.needs_masks and not segments,
                    f'--weights {self.weights}: a {"classifier" if classifies else "detection model"} ({why}), and segment/qat_seg.py is for '
                    'segmentation models; use: python qat.py',
                ),
            ]
        )


@dataclass(frozen=True)
class EvalConfig(ModelConfig):
    """Settings of `qat.py eval`."""

    weights: Path = option(
        MISSING, 'checkpoint (.pt, quantized or float), .onnx or .xml; of several each is scored', each=True
    )
    _: KW_ONLY
    project: Path = Path('runs/qat_eval')
    imgsz: Sides = option(  # None until the file has been read
        None,
        'image size in pixels: one number, or height and width. Default: the size of the file, or that a checkpoint was quantized '
        'for, else 640',
        *SIZE,
        allowed=Range(32),
    )
    conf_thres: float = option(0.001, 'lowest score that counts', allowed=SHARE)
    iou_thres: float = option(0.7, 'IoU above which NMS drops a box', allowed=SHARE)
    square: bool = option(
        False,
        'letterbox to IMGSZ x IMGSZ, as a deployed model sees images (always so for .onnx and .xml, and where height and width '
        'differ); default: padded rectangles, as val.py, whose padding, and with it AP, depends a little on --batch-size',
    )
    save_json: bool = True  # write the detections, in COCO's result format
    baseline: Path | None = option(
        None,
        'a model of any kind, such as the float one: scored on the same images, and the differences go into the report',
    )
    backend: str | None = option(
        None,
        f'what runs an exported file; default: the first of {", ".join(PREDICTING)} that takes it',
        allowed=PREDICTING,
    )


@dataclass(frozen=True)
class FileEvalConfig(EvalConfig):
    """Settings of `val_trt.py`: an exported file, which sees square images."""

    weights: Path = option(
        MISSING,
        'MODEL.engine, MODEL.onnx or MODEL.xml; of several each is scored',
        '--engine-file',
        metavar='FILE',
        each=True,
    )
    _: KW_ONLY
    device: str = option('', "GPU number, or 'cpu' for .onnx and .xml; default: the first GPU, else the CPU")
    batch_size: int = option(10, 'images read at once; the file gets them in parts of its own batch', allowed=Range(1))
    imgsz: Sides = option(
        None,
        'image size in pixels: one number, or height and width; default: the size of the file, which it must be',
        *SIZE,
        allowed=Range(32),
    )
    project: Path = Path('runs/val_trt')
    conf_thres: float = option(0.001, 'lowest score that counts; no effect with NMS inside the file', allowed=SHARE)
    iou_thres: float = option(0.7, 'IoU above which NMS drops a box; no effect with NMS inside the file', allowed=SHARE)
    square: bool = option(False, '')  # always
    save_json: bool = option(False, "write the detections to predictions.json, in COCO's result format")


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(ModelConfig):
    """Settings that `quantize` and `sensitive` have in common: a float checkpoint, and how it is calibrated."""

    imgsz: Sides = option(  # None until the model is known
        None,
        'image size in pixels: one number, or height and width; default: 640, of a classifier 224',
        *SIZE,
        allowed=Range(32),
    )
    project: Path = Path('runs/qat')
    reparameterize: bool = option(
        True, 'refuse a dual-branch checkpoint; by default its main branch is taken, as reparameterization.py does'
    )
    hyp: Path | None = option(None, 'fine-tune on images augmented as this file says; default: as they are')
    seed: int = option(
        57, 'seed of all random numbers; the same seed gives the same result on the same machine', allowed=SEED
    )
    calib_images: int = option(512, 'training images to calibrate on, at most', allowed=Range(1))
    calib_method: str = option(
        'auto',
        'how the range of an activation is chosen. mse, l1.5, l2.4, l3: least rounding error, to the power 2, 1.5, 2.4 or 3. '
        'fisher: least change of the detections. auto: l2.4 or fisher, the one that changes the detections less',
        allowed=CALIB_METHODS,
    )
    percentile: float = option(
        99.99,
        'for --calib-method percentile: percentage of the magnitudes that lie in the range',
        allowed=Range(0.0, 100.0, without=0),
    )
    weight_calib: str = option(
        'max',
        "range of a weight's output channel. max: its largest magnitude. mse: the range of least squared error",
        allowed=WEIGHT_METHODS,
    )
    bias_correction: bool = option(
        True,
        'do not correct the biases. Rounding to INT8 shifts the mean output of a convolution; by default its bias takes the '
        'shift back, if that brings the detections closer to the float model',
    )
    target: str = option(
        DEFAULT_TARGET,
        'engine that the placement of Q/DQ is made for. tensorrt and openvino: the same placement. onnxruntime: also around '
        'activation functions, which it does not fuse, and with zero points',
        allowed=tuple(TARGETS),
    )
    scale_policy: str = option(
        'tied',
        'tied: tensors joined by Concat, MaxPool, split, nearest resize or Add share one scale; free: none do',
        allowed=SCALE_POLICIES,
    )
    add_policy: str | None = option(
        None,
        'residual Add: quantize both addends with one scale, only the shortcut (residual), or both with a scale for each. Default: both; in '
        'the blocks of torchvision, where a convolution stands directly before the Add, residual, and each for OpenVINO and ONNX Runtime',
        allowed=ADD_POLICIES,
    )


@dataclass(frozen=True, kw_only=True)
class SensitiveConfig(CalibrationConfig):
    """Settings of `qat.py sensitive`."""

    project: Path = Path('runs/qat_sensitive')
    hyp: Path | None = option(None, 'not needed: images are taken as they are')
    num_image: int = option(100, 'images of val, at most, evenly spread; 0 = all', allowed=OR_ALL)
    granularity: str = option(
        'block',
        'size of the units whose cost is measured: whole layers of the model, the blocks that layers are built of, or single '
        'convolutions',
        allowed=GRANULARITIES,
    )
    metric: str = option(
        'both',
        'cost of a unit. distortion: change of the outputs. ap: AP, of all units. both: distortion of all, AP of the ten worst',
        allowed=METRICS,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(CalibrationConfig):
    """Settings of `qat.py quantize`."""

    epochs: int = option(
        10, 'fine-tuning epochs; 0 = calibration only', allowed=Range(0, words='be 0 (calibration only) or more')
    )
    iters: int = option(  # an epoch ends with the training set
        200,
        'fine-tuning steps per epoch, at most',
        allowed=Range(1, words='be 1 or more (for calibration only use --epochs 0)'),
    )
    lr: float = option(1e-5, 'highest learning rate of the fine-tuning', allowed=Range(0.0, 1.0, without=0))
    amp: str | None = option(
        None,
        'precision of the fine-tuning: FP32 (off), or autocast; default: fp16 on a GPU, which it needs, else off',
        allowed=AMP,
    )
    compile: bool | None = option(
        None, 'fine-tune by replaying a CUDA graph; default: on a GPU, but not with --task-loss', negatable=True
    )
    task_loss: float = option(
        0.0,
        'add W times the detection loss on the labels to the loss of the fine-tuning; not with --compile',
        metavar='W',
        allowed=Range(0, words='be 0 (labels do not count) or more'),
    )
    learn_scales: bool = option(False, 'scales of activations learn with the weights')
    supervision_stride: int = option(1, 'compare every n-th layer with the float model', allowed=Range(1))
    exclude: tuple[str, ...] = option(
        (), "layers that stay in float, by path: 'model.2' is layer 2 and all in it", metavar='REGEX'
    )
    only: tuple[str, ...] = option((), 'the layers that are quantized, by path; default: all', metavar='REGEX')
    sensitive: Path | None = option(
        None,
        'summary-sensitive-analysis.json of `qat.py sensitive`, which --keep-float and --max-drop choose by',
        metavar='SUMMARY',
    )
    keep_float: int = option(0, 'leave the N most sensitive units of SUMMARY in float', metavar='N', allowed=Range(0))
    max_drop: float | None = option(
        None,
        'leave as many units of SUMMARY in float as calibration needs to lose at most so many points of AP, such as 0.2',
        metavar='POINTS',
        allowed=Range(0, 100, words='lie in [0, 100] points of AP, such as 0.2'),
    )
    dry_run: bool = option(
        False, 'print what would be quantized, what shares a scale and what stays float, and stop; needs only --weights'
    )
    eval_origin: bool = option(True, 'do not evaluate the float model')
    eval_ptq: bool = option(True, 'do not evaluate the calibrated model')
    val_split: float = option(
        0.0,
        'share of the training images to hold out of training and choose the best epoch on, such as 0.1; default: on val',
        allowed=Range(0, 1, without=1, words='lie in [0, 1), such as 0.1; 0 = none held out'),
    )
    resume: Path | None = option(  # no setting of the run
        None, 'go on with the interrupted run in FOLDER, with its settings', metavar='FOLDER'
    )

    def precision(self, device: str) -> str:
        """Choose the precision of the fine-tuning on a type of device, such as 'cuda': --amp or its default."""
        return self.amp or ('fp16' if device == 'cuda' else 'off')

    def plain(self) -> dict[str, Any]:
        """Return the settings of the run as JSON has them."""
        return {name: value for name, value in super().plain().items() if name != 'resume'}

    def problems(self) -> Iterable[tuple[Any, str]]:
        """Check the options that need or exclude each other; see Settings.problems."""
        choosing = ['--keep-float'] * bool(self.keep_float) + ['--max-drop'] * (self.max_drop is not None)
        yield (
            self.task_loss and self.compile,
            f'--task-loss {self.task_loss}: not with --compile, because it waits for the device, which '
            'a CUDA graph cannot do; leave one of the two out',
        )
        yield (
            self.val_split and not self.epochs,
            f'--val-split {self.val_split}: with --epochs 0 there is no epoch to choose; leave one of the two out',
        )
        yield (
            self.hyp and self.imgsz and len(set(self.imgsz)) > 1,
            f'--hyp {self.hyp}: augmented images are squares; give one number for --imgsz, or leave --hyp out',
        )
        yield len(choosing) == 2, '--keep-float, --max-drop: give one of the two'
        yield (
            choosing and not self.sensitive,
            f'{" and ".join(choosing)}: needs --sensitive SUMMARY, the summary-sensitive-analysis.json '
            'that `qat.py sensitive` writes',
        )
        yield (
            self.sensitive and not choosing,
            f'--sensitive {self.sensitive}: say what to do with it, by --keep-float N or --max-drop POINTS',
        )
        yield (
            self.max_drop is not None and self.dry_run,
            '--max-drop: needs evaluations, which --dry-run does not make; leave one of the two out',
        )
