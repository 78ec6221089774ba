"""Settings of the commands that build, measure and compare exported files."""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from functools import partial
from pathlib import Path

from utils.qat.config.common import (
    DEVICE,
    ENGINE_BACKEND,
    LARGEST,
    SEED,
    SHARE,
    SIZE,
    SQUARE,
    TOLERANCE,
    FolderConfig,
    LabelledConfig,
    image_sides,
    scores,
)
from utils.qat.config.settings import Range, Settings, Sides, option, run
from utils.qat.config.tables import BACKENDS, ENGINES, PREDICTING
from utils.qat.core.errors import QatError

PRECISIONS = ('auto', 'fp32', 'fp16', 'int8')  # of an engine that is built
MEASURED = ('fp32', 'bf16', 'fp16', 'int8')  # of a benchmark
WORKSPACE = 4096  # MiB. Fixed, so that a build does not depend on the free memory
MEMORY = Range(1, words='be 1 (MiB) or more')
JOBS = (None, 'engines that are built at a time; default: 1, or of level 0 up to 8')
LEVEL = (None, "TensorRT's optimization level, 0 (fast build) to 5 (fast engine)")
measurement = partial(option, group='measurement')
comparison = partial(option, group='comparison')


def min_opt_max(text: str) -> tuple[int, ...]:
    """Read --batch of a build, 'MIN,OPT,MAX' or 'N', as three numbers."""
    numbers = [int(n) for n in text.split(',') if n.strip().isdigit()]
    numbers = numbers * 3 if len(numbers) == 1 else numbers
    if len(numbers) != 3 or text.count(',') not in (0, 2) or not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise QatError(
            f'--batch {text}: must be one number or MIN,OPT,MAX, such as 1,8,16, with 1 <= MIN <= OPT <= MAX'
        )
    return tuple(numbers)


def in_order(text: str) -> tuple[str, ...]:
    """Read a list: 'a, b,a' → ('a', 'b', 'a')."""
    return tuple(part.strip() for part in text.split(',') if part.strip())


def words(text: str) -> tuple[str, ...]:
    """Read a list without repetitions: 'a, b,a' → ('a', 'b')."""
    return tuple(dict.fromkeys(in_order(text)))


def batch_sizes(text: str) -> tuple[int, ...]:
    """Read --batch of the benchmark, such as '1,4,8'."""
    numbers = words(text)
    if not numbers or not all(n.isdigit() and int(n) for n in numbers):
        raise QatError(f'--batch {text}: must be numbers of images, 1 or more, such as 1,4,8,12')
    return tuple(dict.fromkeys(map(int, numbers)))


def image_sizes(given: Sequence[str]) -> tuple[Sides, ...]:
    """Read --imgsz of the benchmark: '640', '480 640' (height and width), or a list such as '320,480x640'."""
    sizes = [given[0]] if len(given) != 2 else ['x'.join(given)]
    sides = [part.split('x') for part in words(sizes[0])]
    if (
        len(given) > 2
        or not sides
        or not all(len(s) < 3 and all(n.isdigit() and 0 < int(n) <= LARGEST for n in s) for s in sides)
    ):
        raise QatError(
            f'--imgsz {" ".join(given)}: must be one number of pixels, height and width, or a list such as 320,480x640; each at most {LARGEST}'
        )
    return tuple(dict.fromkeys((int(s[0]), int(s[-1])) for s in sides))


def milliseconds(text: str) -> float:
    """Read --warmup, such as '500ms', '0.5s' or '500'."""
    number, unit = (text[:-2], 1) if text.endswith('ms') else (text[:-1], 1000) if text.endswith('s') else (text, 1)
    try:
        return float(number) * unit
    except ValueError as e:
        raise QatError(f'--warmup {text}: must be a time such as 500ms or 0.5s') from e


@dataclass(frozen=True)
class BuildConfig(Settings):
    """Settings of `scripts/build_engine.py`."""

    onnx: Path = option(MISSING, 'file of export_qat.py, or any other', metavar='MODEL.onnx', positional=True)
    engine: Path = option(None, 'where to write; default: MODEL.engine beside the ONNX file')
    imgsz: Sides | None = option(
        None, 'height and width in pixels, for a file that leaves them open', *SIZE, allowed=Range(1, LARGEST)
    )
    batch: tuple[int, ...] | None = option(  # smallest, fastest, largest
        None,
        'MIN,OPT,MAX (smallest, fastest, largest) or one number, of a file with an open batch; default: 1',
        parse=min_opt_max,
    )
    precision: str = option(
        'auto',
        'types of the layers. auto: INT8 with FP16 if the file has Q/DQ, else FP16; TensorRT 11 computes in the types of the file',
        allowed=PRECISIONS,
    )
    workspace: int = option(WORKSPACE, 'memory for kernels', metavar='MIB', allowed=MEMORY)
    _: KW_ONLY
    timing_cache: Path = option(None, 'file of kernel timings; default: beside the engine')
    level: int | None = option(*LEVEL, metavar='N', allowed=Range(0, 5))
    backend: str = option(ENGINE_BACKEND, 'TensorRT, or TensorRT-RTX, which builds without a GPU', allowed=ENGINES)
    trtexec: bool = option(True, 'use trtexec where it is found')
    tune_build_routes: str | None = option(
        None,
        "keep the fastest engine of these build routes (trtexec 11.1), such as --tune-build-routes='-copy_ppg=[on|off]'",
        metavar='ROUTES',
    )
    accuracy_threshold: float | None = option(
        None,
        "with --tune-build-routes, largest cosine distance from ONNX Runtime's outputs, such as 0.01",
        allowed=Range(0),
    )

    def __post_init__(self) -> None:
        engine = self.engine or self.onnx.with_suffix('.engine')
        object.__setattr__(self, 'engine', engine)
        object.__setattr__(self, 'timing_cache', self.timing_cache or engine.with_suffix('.timing.cache'))
        super().__post_init__()

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the name of the engine; see Settings.problems."""
        yield self.engine.suffix != '.engine', f'--engine {self.engine}: expected a name ending in .engine'
        yield (
            self.accuracy_threshold is not None and self.tune_build_routes is None,
            f'--accuracy-threshold {self.accuracy_threshold}: only with --tune-build-routes',
        )


@dataclass(frozen=True)
class AuditConfig(Settings):
    """Settings of `scripts/audit_onnx.py`."""

    model: Path = option(MISSING, 'exported graph', metavar='MODEL.onnx', positional=True)
    json: Path | None = option(None, 'write the whole audit to FILE', metavar='FILE')
    openvino: bool = option(
        False,
        'compile the file in OpenVINO as well: layers that run in INT8 here, layers that do not and why, and their time',
    )
    strict: bool = option(False, 'exit with 1 if there is any finding')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the file to write; see Settings.problems."""
        yield from super().problems()
        yield (
            self.json and (self.json.suffix != '.json' or self.json.is_dir()),
            f'--json {self.json}: expected the name of a file ending in .json',
        )


@dataclass(frozen=True)
class DrawConfig(Settings):
    """Settings of `scripts/draw_engine.py`."""

    layer: Path = option(
        MISSING,
        'layer information of an engine built with --profilingVerbosity=detailed: trtexec --exportLayerInfo=L.json',
        metavar='L.json',
    )
    profile: Path | None = option(None, 'times of the layers: trtexec --exportProfile=P.json', metavar='P.json')
    output: Path | None = option(
        None, 'write PREFIX.csv, .dot, .svg and .png; default: L; in a folder: FOLDER/L', metavar='PREFIX'
    )


@dataclass(frozen=True)
class BenchmarkConfig(LabelledConfig, FolderConfig):
    """Settings of `benchmark_trt.py`."""

    models: tuple[Path, ...] = option(
        MISSING,
        '.onnx or .xml (any network), .tflite, .engine, .pt2 of export_qat.py, or .pt (YOLOv9)',
        metavar='MODEL',
        positional=True,
    )
    batch: tuple[int, ...] | None = measurement(  # see model_files.ModelFile
        None,
        'images per query, such as 1,8; each is measured; default: those of the file, or 1,4,8,12 if it takes any',
        parse=batch_sizes,
    )
    precision: tuple[str, ...] | None = measurement(
        None,
        f'one or more of {",".join(MEASURED)}; default: all that the file and the backend have',
        parse=words,
        allowed=MEASURED,
    )
    imgsz: tuple[str, ...] | None = measurement(  # see `sizes`
        None,
        'sizes in pixels of a .pt or a file with open height and width, such as 320,640,480x640',
        *SIZE,
    )
    duration: float = measurement(
        10.0, 'seconds of each measurement', allowed=Range(0, without=0, words='be more than 0 seconds')
    )
    warmup: float = measurement(  # milliseconds
        500.0,
        'time before each measurement, such as 500ms or 0.5s; default: 500ms',
        parse=milliseconds,
        allowed=Range(0),
    )
    backend: tuple[str, ...] | None = measurement(
        None,
        f'one or more of {",".join(BACKENDS)}; default: all that can run here',
        parse=words,
        allowed=tuple(BACKENDS),
    )
    _: KW_ONLY
    device: str = run('', DEVICE)
    cuda_graph: bool = measurement(True, 'replay the kernels of an engine as a CUDA graph')  # as trtexec 11 does
    workspace: int = measurement(WORKSPACE, 'MiB for the kernels of an engine that is built', allowed=MEMORY)
    level: int | None = measurement(*LEVEL, metavar='N', allowed=Range(0, 5))
    jobs: int | None = measurement(*JOBS, metavar='N', allowed=Range(1))
    baseline: str | None = measurement(
        None,
        'what each row is compared with; default: the float file in the same backend',
        metavar='FILE|BACKEND',
    )
    data: Path | None = scores(
        None,
        'score each model too; data YAML, or folder of classes',
    )
    batch_size: int = option(10, '')  # of the scoring; --batch is measured
    project: Path = option(Path('runs/benchmark'), 'results go to PROJECT/NAME, engines to PROJECT/engines')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the baseline against the backends; see Settings.problems. Raises QatError for a wrong --imgsz."""
        yield from super().problems()
        if self.imgsz:
            image_sizes(self.imgsz)
        yield (
            self.baseline in BACKENDS and self.backend and self.baseline not in self.backend,
            f'--baseline {self.baseline}: not among --backend {",".join(self.backend or ())}; name it there too',
        )
        builders = [name for name in BACKENDS if BACKENDS[name].builders]
        idle = self.given(('workspace', 'level', 'jobs'))
        yield (
            idle and self.backend and not {*builders} & {*self.backend},
            f'{idle}: only for engines, by --backend {" or ".join(builders)}; leave it out',
        )

    @property
    def sizes(self) -> tuple[Sides, ...] | None:
        """Return the image sizes of --imgsz; None = those of the files."""
        return image_sizes(self.imgsz) if self.imgsz else None

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files to measure: the models, and the baseline if it is another file."""
        known = {self.baseline} & {*BACKENDS, *(name for model in self.models for name in (str(model), model.name))}
        return self.models if self.baseline is None or known else (Path(self.baseline), *self.models)


@dataclass(frozen=True)
class CompareConfig(LabelledConfig, FolderConfig):
    """Settings of `compare_outputs.py`."""

    reference: Path = option(MISSING, 'checkpoint (.pt), .onnx, .xml, .tflite or .engine', metavar='A', positional=True)
    others: tuple[Path, ...] = option(
        MISSING, 'one or more like it; each is compared with A', metavar='B', positional=True
    )
    random: int | None = option(None, 'use N images of noise instead of --data', metavar='N', allowed=Range(1))
    _: KW_ONLY
    images: int = 100
    imgsz: Sides | None = image_sides('that of the files, or 640')
    device: str = run('', DEVICE)
    rtol: float = comparison(1e-3, 'relative tolerance, as in numpy.isclose', allowed=TOLERANCE)
    atol: float = comparison(1e-3, 'absolute tolerance; for boxes in pixels', allowed=TOLERANCE)
    top: int = comparison(10, 'ranks to compare', allowed=Range(1))
    show: int = comparison(
        3,
        'images that the report shows side by side, those that differ most; 0 = none',
        allowed=Range(0),
    )
    backend: tuple[str, ...] | None = option(
        None,
        f'what runs exported files, of {",".join(PREDICTING)}: one, or one for each model; default: the first that takes the file',
        parse=in_order,
        allowed=PREDICTING,
    )
    seed: int = run(57, 'seed of --random', allowed=SEED)
    project: Path = Path('runs/compare')

    @property
    def models(self) -> tuple[Path, ...]:
        """Return A and all B."""
        return self.reference, *self.others

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the source of the images; see Settings.problems."""
        yield (self.data is None) == (self.random is None), '--data, --random: give one of the two'
        yield self.given(['seed']) and not self.random, f'--seed {self.seed}: only with --random, whose noise it is of'
        yield from super().problems()


@dataclass(frozen=True)
class VerifyConfig(FolderConfig):
    """Settings of `scripts/verify_tensorrt.py`."""

    weights: Path = option(MISSING, 'INT8 checkpoint of qat.py quantize')
    float_weights: Path = option(MISSING, 'the float checkpoint that it was made of, with one branch', '--float')
    data: Path = option(MISSING, 'data YAML')
    imgsz: Sides = image_sides(default=SQUARE)
    _: KW_ONLY
    segment: Path | None = option(None, 'INT8 checkpoint of a segmentation model; without it those rows are skipped')
    segment_data: Path | None = option(None, 'its data YAML')
    classify: Path | None = option(None, 'INT8 checkpoint of a classifier; without it those rows are skipped')
    classify_data: Path | None = option(None, 'the folder of its images')
    backend: str = option(ENGINE_BACKEND, 'TensorRT, or TensorRT-RTX, which builds without a GPU', allowed=ENGINES)
    images: int = option(100, 'number of val images that the files are compared on, at most', allowed=Range(1))
    minutes: float = option(
        20.0, 'time for all rows; rows that have not begun by then are skipped', allowed=Range(0, without=0)
    )
    jobs: int | None = option(*JOBS, metavar='N', allowed=Range(1))
    level: int = option(
        0,
        "TensorRT's optimization level, 0 (fast build) to 5, of all engines but those whose speed is measured; theirs is 2",
        allowed=Range(0, 5),
    )
    duration: float = option(3.0, 'seconds of each measurement of speed', allowed=Range(0, without=0))
    only: tuple[str, ...] = option((), 'check these rows and no others, such as "build plain" "timing cache"')
    project: Path = Path('runs/verify')

    def problems(self) -> Iterable[tuple[object, str]]:
        """Check the options that need each other; see Settings.problems."""
        yield from super().problems()
        for task in ('segment', 'classify'):
            given = getattr(self, task), getattr(self, f'{task}_data')
            yield given.count(None) == 1, f'--{task}, --{task}-data: give both or none'


@dataclass(frozen=True)
class InferConfig(FolderConfig):
    """Settings of `scripts/infer_onnx.py`."""

    models: tuple[Path, ...] = option(
        MISSING, 'one or more checkpoints (.pt) or exported files', metavar='MODEL', positional=True
    )
    images: Path = option(
        MISSING, 'an image, or a folder: all images in it and in its folders', metavar='IMAGE|FOLDER', positional=True
    )
    _: KW_ONLY
    save: bool = option(
        False, 'draw the detections into copies of the images, in PROJECT/NAME; of several models in a folder each'
    )
    imgsz: Sides | None = image_sides('that of the file or of the quantization, else 640')
    conf_thres: float = scores(0.25, 'lowest score; a file with NMS inside has one of its own besides', allowed=SHARE)
    iou_thres: float = scores(0.45, 'IoU above which NMS drops a box; not of a file with NMS inside', allowed=SHARE)
    backend: str | None = option(
        None, 'what runs an exported file; default: the first that takes it', allowed=PREDICTING
    )
    device: str = run('', DEVICE)
    name: str = 'infer'
