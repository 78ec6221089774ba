"""Settings of the commands that build and run engines, as qat.py has those of the others."""
from dataclasses import dataclass
from pathlib import Path

from utils.qat.config.export import OPSETS
from utils.qat.config.qat import check
from utils.qat.core.errors import QatError
from utils.qat.engine.api import BACKENDS

PRECISIONS = ('auto', 'fp32', 'fp16', 'int8')


def batches(text):
    """'MIN,OPT,MAX' or 'N' → three numbers. Raises QatError for anything else."""
    numbers = [int(n) for n in text.split(',') if n.strip().isdigit()]
    numbers = numbers * 3 if len(numbers) == 1 else numbers
    if len(numbers) != 3 or text.count(',') not in (0, 2) or not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise QatError(f'--batch {text}: must be one number or MIN,OPT,MAX, such as 1,8,16, with 1 <= MIN <= OPT <= MAX')
    return tuple(numbers)


@dataclass
class CompareConfig:
    """`compare_outputs.py`."""
    reference: Path
    other: Path
    data: Path = None  # data YAML of a detector; of a classifier a folder with one folder of images for each class
    random: int = None  # so many images of noise instead
    images: int = 100  # of the data, at most, evenly spread; 0 = all
    imgsz: int = None  # pixels; None = that of the files, or 640
    batch_size: int = 10
    rtol: float = 1e-3  # |other - reference| <= atol + rtol |reference| is equal
    atol: float = 1e-3
    top: int = 10  # ranks to compare
    mean: list = (0.0, 0.0, 0.0)  # what a classifier's images, in 0..1, are normalised with
    std: list = (1.0, 1.0, 1.0)
    device: str = ''
    backend: str = 'tensorrt'  # what runs engines
    workers: int = 8
    seed: int = 57  # of --random
    project: Path = Path('runs/compare')
    name: str = 'exp'
    exist_ok: bool = False

    def __post_init__(self):
        check([
            ((self.data is None) == (self.random is None), '--data, --random: give one of the two'),
            (self.random is not None and self.random < 1, f'--random {self.random}: must be 1 or more'),
            (self.images < 0, f'--images {self.images}: must be 1 or more, or 0 for all'),
            (self.imgsz is not None and self.imgsz < 32, f'--imgsz {self.imgsz}: must be 32 or more'),
            (self.batch_size < 1, f'--batch-size {self.batch_size}: must be 1 or more'),
            (not 0 <= self.rtol < float('inf'), f'--rtol {self.rtol}: must be 0 or more'),
            (not 0 <= self.atol < float('inf'), f'--atol {self.atol}: must be 0 or more'),
            (self.top < 1, f'--top {self.top}: must be 1 or more'),
            (len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0, '--mean, --std: three numbers each, for red, green and blue; '
                                                                              '--std above 0'),
        ])


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
        check([(self.trt not in OPSETS, f"--trt {self.trt}: must be one of {', '.join(map(str, OPSETS))}")])
        lowest, highest, default = OPSETS[self.trt]
        self.opset = default if self.opset is None else self.opset
        check([
            (len(self.size) != 2, f"--size {' '.join(map(str, self.size))}: one number, or height and width"),
            (self.batch < 1, f'--batch {self.batch}: must be 1 or more'),
            (self.dynamic and self.batch > 1, f'--dynamic, --batch {self.batch}: give one of the two; with --dynamic the file takes any batch'),
            (not lowest <= self.opset <= highest, f'--opset {self.opset}: must lie in {lowest} to {highest} for --trt {self.trt}'),
        ])

    def require_stride(self, stride):
        """Raise QatError unless the size suits a model of that stride."""
        right = [max(1, -(-n // stride)) * stride for n in self.size]
        check([(right != self.size, f"--size {' '.join(map(str, self.size))}: must be multiples of the model's stride, {stride}; "
                                    f"the next are --size {' '.join(map(str, right))}")])


@dataclass
class BuildConfig:
    """`scripts/build_engine.py`."""
    onnx: Path
    engine: Path = None  # where to write; None = beside the ONNX file
    imgsz: list = None  # height, width in pixels; None = those of the file
    batch: tuple = None  # smallest, best served, largest; None = the file's, or 1 where the axis is open
    precision: str = 'auto'  # auto = INT8 with FP16 where the file has Q/DQ, else FP16; a strongly typed file has its own
    workspace: int = 4096  # MiB that kernels may use to work in. A fixed number, so that a build does not depend on what is free
    timing_cache: Path = None  # None = beside the engine; speeds up the next build
    level: int = None  # the builder's optimization level, 0 to 5; None = TensorRT's own choice
    backend: str = 'tensorrt'
    trtexec: bool = True  # use it where it is found

    def __post_init__(self):
        if isinstance(self.batch, str):
            self.batch = batches(self.batch)
        if self.imgsz and len(self.imgsz) == 1:
            self.imgsz = self.imgsz * 2
        self.engine = self.engine or self.onnx.with_suffix('.engine')
        self.timing_cache = self.timing_cache or self.engine.with_suffix('.timing.cache')
        check([
            (self.imgsz and (len(self.imgsz) != 2 or min(self.imgsz) < 1), f'--imgsz {self.imgsz}: one number, or height and width'),
            (self.precision not in PRECISIONS, f"--precision {self.precision}: must be one of {', '.join(PRECISIONS)}"),
            (self.workspace < 1, f'--workspace {self.workspace}: must be 1 (MiB) or more'),
            (self.level is not None and not 0 <= self.level <= 5, f'--level {self.level}: must lie in 0 to 5'),
            (self.backend not in BACKENDS, f"--backend {self.backend}: must be one of {', '.join(BACKENDS)}"),
            (self.engine.suffix != '.engine', f'--engine {self.engine}: expected a name ending in .engine'),
        ])


BENCHMARKED = ('tensorrt', 'rtx', 'onnxruntime', 'pytorch')  # --backend of benchmark_trt.py


def listed(text):
    """'a, b' → ('a', 'b')."""
    return tuple(part.strip() for part in text.split(',') if part.strip())


def milliseconds(text):
    """'500ms', '0.5s' or '500' → 500.0. Raises QatError for anything else."""
    number, unit = (text[:-2], 1) if text.endswith('ms') else (text[:-1], 1000) if text.endswith('s') else (text, 1)
    try:
        return float(number) * unit
    except ValueError as e:
        raise QatError(f'--warmup {text}: must be a time such as 500ms or 0.5s') from e


@dataclass
class BenchmarkConfig:
    """`benchmark_trt.py`."""
    models: list  # .onnx, .engine and .pt files
    batch: tuple = None  # images per query, each a measurement; None = those of the file, see model_files.Network
    precision: tuple = None  # None = all that a file and a backend have
    imgsz: list = None  # height, width in pixels, where a file leaves them open
    duration: float = 10.0  # seconds of each measurement
    warmup: float = 500.0  # milliseconds before it
    backend: tuple = None  # None = all that can run here
    device: str = ''
    cuda_graph: bool = True  # replay engines, as trtexec 11 does unless told otherwise
    workspace: int = BuildConfig.workspace
    project: Path = Path('runs/benchmark')
    name: str = 'exp'
    exist_ok: bool = False

    def __post_init__(self):
        if isinstance(self.batch, str):
            numbers = listed(self.batch)
            check([(not numbers or not all(n.isdigit() and int(n) for n in numbers),
                    f'--batch {self.batch}: must be numbers of images, 1 or more, such as 1,4,8,12')])
            self.batch = tuple(dict.fromkeys(map(int, numbers)))
        self.precision, self.backend = (tuple(dict.fromkeys(listed(x))) if isinstance(x, str) else x for x in (self.precision, self.backend))
        if isinstance(self.warmup, str):
            self.warmup = milliseconds(self.warmup)
        if self.imgsz and len(self.imgsz) == 1:
            self.imgsz = self.imgsz * 2
        precisions = PRECISIONS[1:]
        check([
            (self.precision is not None and (not self.precision or not set(self.precision) <= set(precisions)),
             f"--precision {','.join(self.precision or ())}: must be of {', '.join(precisions)}"),
            (self.backend is not None and (not self.backend or not set(self.backend) <= set(BENCHMARKED)),
             f"--backend {','.join(self.backend or ())}: must be of {', '.join(BENCHMARKED)}"),
            (self.imgsz and (len(self.imgsz) != 2 or min(self.imgsz) < 1), f'--imgsz {self.imgsz}: one number, or height and width, of 1 or more'),
            (not 0 < self.duration < float('inf'), f'--duration {self.duration}: must be more than 0 seconds'),
            (not 0 <= self.warmup < float('inf'), f'--warmup {self.warmup}: must be 0 or more'),
            (self.workspace < 1, f'--workspace {self.workspace}: must be 1 (MiB) or more'),
        ])
