"""Settings of the commands that build and run engines, and of the benchmark."""

from dataclasses import dataclass
from pathlib import Path

from utils.qat.config.backends import BACKENDS, ENGINES
from utils.qat.core.errors import QatError, check

PRECISIONS = ('auto', 'fp32', 'fp16', 'int8')


def batches(text):
    """'MIN,OPT,MAX' or 'N' → three numbers. Raises QatError for anything else."""
    numbers = [int(n) for n in text.split(',') if n.strip().isdigit()]
    numbers = numbers * 3 if len(numbers) == 1 else numbers
    if len(numbers) != 3 or text.count(',') not in (0, 2) or not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise QatError(
            f'--batch {text}: must be one number or MIN,OPT,MAX, such as 1,8,16, with 1 <= MIN <= OPT <= MAX'
        )
    return tuple(numbers)


@dataclass
class BuildConfig:
    """`scripts/build_engine.py`."""

    onnx: Path
    engine: Path = None  # where to write; None = beside the ONNX file
    imgsz: list = None  # height, width in pixels; None = those of the file
    batch: tuple = None  # smallest, best served, largest; None = the file's, or 1 where the axis is open
    precision: str = (
        'auto'  # auto = INT8 with FP16 where the file has Q/DQ, else FP16; a strongly typed file has its own
    )
    workspace: int = (
        4096  # MiB that kernels may use to work in. A fixed number, so that a build does not depend on what is free
    )
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
        check(
            [
                (
                    self.imgsz and (len(self.imgsz) != 2 or min(self.imgsz) < 1),
                    f'--imgsz {self.imgsz}: one number, or height and width',
                ),
                (
                    self.precision not in PRECISIONS,
                    f'--precision {self.precision}: must be one of {", ".join(PRECISIONS)}',
                ),
                (self.workspace < 1, f'--workspace {self.workspace}: must be 1 (MiB) or more'),
                (self.level is not None and not 0 <= self.level <= 5, f'--level {self.level}: must lie in 0 to 5'),
                (self.backend not in ENGINES, f'--backend {self.backend}: must be one of {", ".join(ENGINES)}'),
                (self.engine.suffix != '.engine', f'--engine {self.engine}: expected a name ending in .engine'),
            ]
        )


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
            check(
                [
                    (
                        not numbers or not all(n.isdigit() and int(n) for n in numbers),
                        f'--batch {self.batch}: must be numbers of images, 1 or more, such as 1,4,8,12',
                    )
                ]
            )
            self.batch = tuple(dict.fromkeys(map(int, numbers)))
        self.precision, self.backend = (
            tuple(dict.fromkeys(listed(x))) if isinstance(x, str) else x for x in (self.precision, self.backend)
        )
        if isinstance(self.warmup, str):
            self.warmup = milliseconds(self.warmup)
        if self.imgsz and len(self.imgsz) == 1:
            self.imgsz = self.imgsz * 2
        precisions = PRECISIONS[1:]
        check(
            [
                (
                    self.precision is not None and (not self.precision or not set(self.precision) <= set(precisions)),
                    f'--precision {",".join(self.precision or ())}: must be of {", ".join(precisions)}',
                ),
                (
                    self.backend is not None and (not self.backend or not set(self.backend) <= set(BACKENDS)),
                    f'--backend {",".join(self.backend or ())}: must be of {", ".join(BACKENDS)}',
                ),
                (
                    self.imgsz and (len(self.imgsz) != 2 or min(self.imgsz) < 1),
                    f'--imgsz {self.imgsz}: one number, or height and width, of 1 or more',
                ),
                (not 0 < self.duration < float('inf'), f'--duration {self.duration}: must be more than 0 seconds'),
                (not 0 <= self.warmup < float('inf'), f'--warmup {self.warmup}: must be 0 or more'),
                (self.workspace < 1, f'--workspace {self.workspace}: must be 1 (MiB) or more'),
            ]
        )
