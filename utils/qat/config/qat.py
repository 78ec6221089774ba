"""Settings of `qat.py` and `val_trt.py`."""

from collections.abc import Iterable
from dataclasses import KW_ONLY, MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from utils.qat.config.common import OR_ALL, SEED, SHARE, FolderConfig, LoaderConfig, image_sides, names_from, scores
from utils.qat.config.settings import Range, Settings, Sides, image_size, option, run
from utils.qat.config.tables import CHECKPOINTS, DEFAULT_TARGET, EXPORTED, PREDICTING, TARGETS
from utils.qat.config.tasks import load_task
from utils.qat.core.errors import QatError
from utils.qat.core.files import in_tree, require_data, require_file, require_source, require_yaml
from utils.qat.vendors.vendor import Target

CANDIDATES = ('l2.4', 'fisher')  # --calib-method auto takes the better of them
AUTO, ACTIVATIONS = 'auto', ('keep', 'polynomial', 'relu', 'relu6')
LEARNT = ('relu', 'relu6')  # activation functions that a model has to learn
PRICES = {  # --activation → what was measured, docs/activations.md
    'polynomial': 'AP stayed within the confidence interval',
    **dict.fromkeys(
        LEARNT,
        'the model learns it from your images, and from labels in --epochs, at next to no cost with up to 31 classes, and for 6 points of AP '
        'with the 80 of COCO',
    ),
}
CALIB_METHODS = ('auto', *CANDIDATES, 'mse', 'percentile', 'max')
SCALE_POLICIES = ('tied', 'free')
AMP = ('off', 'bf16', 'fp16')
GRANULARITIES = ('layer', 'block', 'conv')
METRICS = ('distortion', 'ap', 'both')
COCO = Path('data/coco.yaml')
POINTS = Range(0, 100, words='lie in [0, 100] points of AP, such as 0.5')
DECIDERS = {  # setting that need not be typed → who decides it
    'imgsz': 'the model',
    'activation': 'the target',
    'amp': 'the device',
    'compile': 'the device',
    'lr': 'the activation functions',
    'task_loss': 'the activation functions',
}
calibration = partial(option, group='calibration')
fine_tuning = partial(option, group='fine-tuning')
layers = partial(option, group='which layers become INT8')
units = partial(option, group='what is measured')
activations = partial(option, group='activation functions')


@dataclass(frozen=True)
class ModelConfig(FolderConfig, LoaderConfig):
    """A model, its data, and how the images of the data are read."""

    SUFFIXES: ClassVar[tuple[str, ...]] = CHECKPOINTS  # of `weights`
    weights: Path = option(
        MISSING,
        'checkpoint (.pt), or pretrained weights of torchvision: a name, such as resnet50, or a file (.pth)',
    )
    data: Path = option(COCO, 'data YAML; of a classifier a folder with train/ and val/')
    _: KW_ONLY
    names_from: str | None = names_from()
    only_task: str | None = None  # refuse models of other tasks; a key of tasks.TASKS
    decided: tuple[str, ...] = ()  # settings that nobody typed: the model or the device decided them

    def __post_init__(self) -> None:
        object.__setattr__(self, 'data', in_tree(self.data))  # the default too is found from other folders
        super().__post_init__()

    def decide(self, **values: Any) -> Any:
        """Give settings that are None or AUTO their values, and note their names in `decided`; see DECIDERS."""
        missing = {name: value for name, value in values.items() if getattr(self, name) in (None, AUTO)}
        return replace(self, **missing, decided=(*self.decided, *missing))

    def given(self, names: Iterable[str]) -> str:
        """List the flags of what was typed; see Settings.given."""
        return super().given(name for name in names if name not in self.decided)

    def require_files(self) -> None:
        """Raise QatError unless the named files exist. A command calls this before it loads anything."""
        require_file(self.weights, '--weights', self.SUFFIXES)
        require_data(self.data)

    def for_model(self, model: Any, *others: Any) -> Any:
        """Decide the image size for a model, see file_model.py, and `others` that see the same images.

        Raises QatError unless the model fits the settings.
        """
        given = '' if model.task.masks else self.given(('mask_ratio', 'overlap'))
        wanted = self.only_task and load_task(self.only_task)
        if wanted and wanted is not model.task:
            raise QatError(
                f'--weights {self.weights}: {model.task.title} ({model.kind}), and this command is for {wanted.title}; use: python qat.py'
            )
        if given:
            raise QatError(
                f'{given}: only for a segmentation model, and {self.weights} is none ({model.kind}); leave it out'
            )
        return self.decide(imgsz=image_size(self.imgsz, model, *others))


@dataclass(frozen=True)
class EvalConfig(ModelConfig):
    """Settings of `qat.py eval`."""

    SUFFIXES = CHECKPOINTS + EXPORTED
    weights: Path = option(MISSING, 'checkpoint (.pt), .onnx, .xml or .tflite; of several each is scored', each=True)
    _: KW_ONLY
    project: Path = Path('runs/qat_eval')
    # None until the file has been read
    imgsz: Sides = image_sides('that of the file or the quantization, else 640')
    conf_thres: float = scores(0.001, 'lowest score that counts, but for files with NMS inside', allowed=SHARE)
    iou_thres: float = scores(0.7, 'IoU above which NMS drops a box, likewise', allowed=SHARE)
    square: bool = scores(False, 'letterbox to squares, as with exported files; default: padded rectangles, as val.py')
    save_json: bool = True  # write the detections, in COCO's result format
    baseline: Path | None = option(None, 'another model, such as the float one; the report has the differences')
    backend: str | None = option(
        None, 'what runs an exported file; default: the first that takes it', allowed=PREDICTING
    )

    def require_files(self) -> None:
        """Check the baseline too; see ModelConfig.require_files."""
        super().require_files()
        if self.baseline:
            require_file(self.baseline, '--baseline', CHECKPOINTS + EXPORTED)


@dataclass(frozen=True)
class FileEvalConfig(EvalConfig):
    """Settings of `val_trt.py`: an exported file, which sees square images."""

    SUFFIXES = EXPORTED
    weights: Path = option(
        MISSING,
        'MODEL.engine, MODEL.onnx, MODEL.xml or MODEL.tflite; of several each is scored',
        '--engine-file',
        metavar='FILE',
        each=True,
    )
    _: KW_ONLY
    project: Path = Path('runs/val_trt')
    square: bool = option(False, '')  # always
    save_json: bool = option(False, "write the detections to predictions.json, in COCO's result format")


@dataclass(frozen=True, kw_only=True)
class PtqConfig(Settings):
    """Settings of post-training quantization, for a model from anywhere."""

    target: str = option(
        DEFAULT_TARGET,
        'engine that the placement of Q/DQ is made for; docs/placement.md says where each wants them',
        allowed=tuple(TARGETS),
    )
    seed: int = run(57, 'seed of all random numbers', allowed=SEED)
    calib_method: str = calibration(
        'auto',
        'range of an activation. mse, l2.4: least error, to the power 2 or 2.4. fisher: least change of the detections. '
        'auto: the better of l2.4 and fisher',
        allowed=CALIB_METHODS,
    )
    percentile: float = calibration(
        99.99,
        'percentage of magnitudes in the range of --calib-method percentile',
        allowed=Range(0.0, 100.0, without=0),
    )
    bias_correction: bool = calibration(True, 'let the biases correct the shift of rounding')
    scale_policy: str = calibration(
        'tied',
        'what shares a scale. tied: tensors joined by Concat, MaxPool, split, nearest resize or Add share one scale; free: none do',
        allowed=SCALE_POLICIES,
    )
    reduce_range: bool = calibration(
        False,
        'weights take half of the INT8 range, for OpenVINO on x86 CPUs without VNNI: so sums of two products fit in 16 bits',
    )
    activation: str = activations(  # AUTO until the model is known
        AUTO,
        'exchange SiLU for a function that is faster in INT8: a polynomial near to it, or a ReLU or ReLU6, which the model learns. '
        'auto: `quantize` takes the polynomial in YOLOv9 for OpenVINO, else keep',
        allowed=(AUTO, *ACTIVATIONS),
    )

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the percentile; see Settings.problems."""
        yield from super().problems()
        yield (
            self.given(['percentile']) and self.calib_method != 'percentile',
            f'--percentile {self.percentile:g}: only with --calib-method percentile',
        )

    @property
    def made_for(self) -> Target:
        """The target by its name."""
        return TARGETS[self.target]


@dataclass(frozen=True, kw_only=True)
class FloatConfig(ModelConfig):
    """A float checkpoint that is calibrated."""

    imgsz: Sides = image_sides('640, of a classifier 224')  # None until the model is known
    calib_images: int = calibration(512, 'training images to calibrate on, at most', allowed=Range(1))

    def require_files(self) -> None:
        """Check also that files can be named after the weights; see ModelConfig.require_files."""
        require_source(self.weights, '--weights', self.SUFFIXES)
        require_data(self.data)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(PtqConfig, FloatConfig):
    """Settings that `quantize` and `sensitive` share: a float checkpoint and its calibration."""

    HIDDEN: ClassVar[tuple[str, ...]] = ('hyp', 'overlap', 'mask_ratio')
    project: Path = Path('runs/qat')
    hyp: Path | None = option(
        None, 'fine-tune on images augmented as this file says; default: as they are', parse=in_tree
    )

    @property
    def exchanges(self) -> bool:
        """Whether activation functions are exchanged."""
        return self.activation not in (AUTO, 'keep')

    def require_files(self) -> None:
        """Check also --hyp; see FloatConfig.require_files."""
        super().require_files()
        if self.hyp:
            require_yaml(self.hyp, '--hyp')


@dataclass(frozen=True, kw_only=True)
class SensitiveConfig(CalibrationConfig):
    """Settings of `qat.py sensitive`."""

    project: Path = Path('runs/qat_sensitive')
    num_image: int = units(100, 'images of val, at most, evenly spread; 0 = all', allowed=OR_ALL)
    granularity: str = units(
        'block', 'units whose cost is measured; a block is a part of a layer', allowed=GRANULARITIES
    )
    metric: str = units(
        'both',
        'cost of a unit. distortion: change of the outputs. ap: AP. both: distortion of all, AP of the ten worst',
        allowed=METRICS,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(CalibrationConfig):
    """Settings of `qat.py quantize`."""

    HIDDEN = *CalibrationConfig.HIDDEN, 'supervision_stride', 'eval_origin', 'eval_ptq'
    epochs: int = fine_tuning(
        10,
        'epochs; 0 = calibration only, which is often enough',
        allowed=Range(0, words='be 0 (calibration only) or more'),
    )
    iters: int = fine_tuning(  # an epoch ends with the training set
        200,
        'steps per epoch, at most',
        allowed=Range(1, words='be 1 or more (for calibration only use --epochs 0)'),
    )
    lr: float | None = fine_tuning(
        None, 'highest learning rate; default: 1e-5, with ReLUs 3e-4', allowed=Range(0.0, 1.0, without=0)
    )
    task_loss: float | None = fine_tuning(
        None,
        "add W times upstream's loss on the labels, such as 0.1; default: 0, with ReLUs 1",
        metavar='W',
        allowed=Range(0, words='be 0 (labels do not count) or more'),
    )
    val_split: float = fine_tuning(
        0.0,
        'hold out this share of the training images, such as 0.1, to choose the best epoch; default: val chooses',
        allowed=Range(0, 1, without=1, words='lie in [0, 1), such as 0.1; 0 = none held out'),
    )
    amp: str | None = fine_tuning(None, 'autocast; default: fp16 on a GPU, which it needs, else off', allowed=AMP)
    compile: bool | None = fine_tuning(
        None,
        'replay a CUDA graph, which takes more memory; default: on a GPU',
        negatable=True,
    )
    supervision_stride: int = option(1, 'compare every n-th layer with the float model', allowed=Range(1))
    activation_only: tuple[str, ...] = activations(
        (), 'layers whose functions are exchanged, by path; default: all', metavar='REGEX'
    )
    activation_epochs: int = activations(20, 'epochs in which the model learns its ReLUs, at most', allowed=Range(1))
    exclude: tuple[str, ...] = layers(
        (),
        r"layers that stay in float, by path: 'model.2' is layer 2 and all in it, '.*\.cv4' every cv4",
        metavar='REGEX',
    )
    only: tuple[str, ...] = layers((), 'the layers that become INT8, by path; default: all', metavar='REGEX')
    sensitive: Path | None = layers(
        None,
        'JSON of `qat.py sensitive`, for --keep-float and --max-drop',
        metavar='SUMMARY',
    )
    keep_float: int = layers(0, 'leave the N most sensitive units of SUMMARY in float', allowed=Range(0))
    max_drop: float | None = layers(
        None,
        'leave units of SUMMARY in float, or their SiLU, until at most so many points of AP are lost; without SUMMARY ReLUs are learnt until then',
        metavar='POINTS',
        allowed=POINTS,
    )
    dry_run: bool = layers(False, 'print what would be quantized; needs only --weights')
    eval_origin: bool = option(True, 'evaluate the float model')
    eval_ptq: bool = option(True, 'evaluate the calibrated model')
    resume: Path | None = run(  # no setting of the run
        None,
        'continue the interrupted run in FOLDER; takes only --device and --workers',
        metavar='FOLDER',
    )

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the options that need or exclude each other; see Settings.problems."""
        yield from super().problems()
        yield (
            self.activation_only and not self.exchanges,
            '--activation-only: needs --activation polynomial, relu or relu6; leave it out',
        )
        choosing = self.given(('keep_float', 'max_drop'))
        yield (
            self.val_split and not self.epochs,
            f'--val-split {self.val_split}: with --epochs 0 there is no epoch to choose; leave one of the two out',
        )
        yield (
            self.hyp and self.imgsz and len(set(self.imgsz)) > 1,
            f'--hyp {self.hyp}: augmented images are squares; give one number for --imgsz, or leave --hyp out',
        )
        yield ',' in choosing, f'{choosing}: give one of the two'
        left = self.given(('keep_float', 'exclude', 'only', *(('max_drop',) if self.sensitive else ())))
        yield (
            left and self.target in TARGETS and self.made_for.integers,
            f'{left}: leaves layers in float, and --target {self.target} computes integers alone; leave it out',
        )
        yield (
            choosing and not self.sensitive and (self.keep_float or self.activation not in LEARNT),
            f'{choosing}: needs --sensitive SUMMARY, the summary-sensitive-analysis.json '
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
