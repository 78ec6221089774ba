"""A file under measurement, run with every optimization of its engine.

Call `prepare` once, then repeat `upload`, `compute` and `download`, in this order. On a GPU these three queue work on `stream`, which must
be the current one, and the caller waits for it (ONNX Runtime waits by itself). On a CPU nothing is transferred: the inputs are where the
engine reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import Self

from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.deploy import BenchmarkConfig
from utils.qat.config.settings import Sides
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.core.text import pixels
from utils.qat.vendors.session import Session

WHERE = {  # the only type of a device → why a backend cannot run on another
    'cpu': 'computes on the CPU, and this is --device {}; --device cpu measures it',
    'cuda': 'needs an NVIDIA GPU, and this is --device {}',
}


Inputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name → type and shape
OpenInputs = dict[str, tuple[torch.dtype, tuple[int | None, ...]]]  # likewise, with None for an axis that is open
Kind = TypeVar('Kind')
BATCHES = (1, 4, 8, 12)  # measured where a file takes any


@dataclass
class ModelFile:
    """A file to measure."""

    file: Path
    inputs: OpenInputs  # empty for an engine, which tells them when it is loaded
    types: str  # 'FP32', 'FP16', 'INT8 and FP32', 'INT8 and FP16'; '' if unknown
    # to measure unless told otherwise; by default that of `inputs`, or BATCHES if it is open
    batches: tuple[int, ...] = ()
    sizes: tuple[Sides | None, ...] = (None,)  # likewise; None = as `inputs` have it
    parameters: int | None = None  # their number; None if only a backend knows it
    layers: int | None = None  # likewise
    checkpoint: Path | None = None  # that PyTorch runs
    unpaired: str = ''  # why it has no checkpoint
    backend: str | None = None  # of an engine or a .pt2 file; None = all that take such files
    task: str = ''  # detect, segment or classify; '' if unknown

    def __post_init__(self) -> None:
        own = fixed_batch(self.inputs)
        self.batches = self.batches or ((own,) if own else BATCHES)

    @property
    def precision(self) -> str:
        """Return fp32, fp16, int8, or '' if unknown."""
        return self.types.split(' ')[0].lower()

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the file, hex digits; it is read once for all its measurements."""
        return sha256(self.file)


def fixed_batch(inputs: OpenInputs) -> int | None:
    """Return the fixed batch of inputs; None if the first axis of one is open."""
    batched = [shape for _, shape in inputs.values() if shape]
    return batched[0][0] if batched and all(shape[0] for shape in batched) else None


def input_type(file: Path, name: str, kind: Kind, to_numpy: Callable[[Kind], object]) -> torch.dtype:
    """Return the type of an input. to_numpy: type of the file's library → type of NumPy."""
    try:
        return torch.from_numpy(np.empty(0, to_numpy(kind))).dtype
    except (TypeError, KeyError, RuntimeError) as e:
        raise QatError(f'{file}: input {name} is of a type ({kind}) that the benchmark cannot feed') from e


@dataclass(frozen=True)
class Conditions:
    """Conditions that all measurements of a benchmark share.

    Attributes:
        failed: engines that could not be built → why.
    """

    config: BenchmarkConfig
    device: torch.device
    open_checkpoint: Callable[[Path, torch.device], TorchModel]
    failed: dict[Path, str] = field(default_factory=dict)


@dataclass
class Measurement:
    """A planned measurement."""

    model: ModelFile
    backend: str  # one of BACKENDS
    precision: str  # of MEASURED; '' if the engine does not tell
    imgsz: Sides | None  # height and width in pixels; None = those of the file
    batch: int  # images per query
    inputs: Inputs  # empty for an engine, which tells them when it is loaded

    @property
    def file(self) -> Path:
        """Return the user's file that runs, or from which an engine is built."""
        checkpoint = self.model.checkpoint if self.backend == 'pytorch' else None
        return checkpoint or self.model.file

    def __str__(self) -> str:
        parts = str(self.file), BACKENDS[self.backend].title, self.precision.upper(), pixels(self.imgsz)
        return ', '.join([*filter(None, parts), f'batch {self.batch}'])


def example(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make deterministic input data: floats in 0..1; ones of any other type, which are valid as token, mask and flag."""
    if dtype.is_floating_point:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)


class Measured:
    """A file under measurement.

    Attributes:
        types: its computation types, in words, such as 'INT8 and FP16'.
        size: bytes of the file.
        inputs: name → tensor that the engine reads, known after `prepare`.
        outputs: tensors on the device, known after `compute`.
        stream: CUDA stream of the work; None on a CPU.
        parameters: their number; None if the engine does not tell.
        layers: their number, likewise.
        opens: the class of its session.
        runs_on: types of the devices that it can run on.
        several: whether it can answer several queries at once, see `serve`.
        streams: number of queries at once, known after `serve`.
    """

    inputs: dict[str, torch.Tensor]
    outputs: Sequence[torch.Tensor] = ()
    stream: torch.cuda.Stream | None = None
    parameters: int | None = None
    layers: int | None = None
    opens: type[Session]
    runs_on: tuple[str, ...] = ('cpu', 'cuda')
    several = False
    streams: int | None = None

    def __init__(self, measurement: Measurement, file: Path, conditions: Conditions) -> None:
        """Load `file`: the measurement's file, or the engine that was built from it.

        Raises:
            QatError: the file cannot be loaded here.
        """
        self.device, self.types, self.size = conditions.device, measurement.model.types, file.stat().st_size
        if self.device.type == 'cuda':
            self.stream = torch.cuda.Stream(self.device)
        self.session = self.open(measurement, file, conditions)

    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> Any:
        """Open the session, by default as an evaluation does, and set `types` if the session knows more."""
        return self.opens.open(file, self.device, measurement.backend)

    @classmethod
    def missing(cls, backend: str, device: torch.device) -> str:
        """Return why `backend` cannot run on `device`; '' if it can."""
        title = BACKENDS[backend].title
        if device.type not in cls.runs_on:
            return f'{title}: {WHERE[cls.runs_on[0]].format(device)}'
        try:
            cls.require(backend, title)
        except QatError as e:
            return str(e)
        return ''

    @classmethod
    def overflows(cls) -> bool:
        """Tell whether INT8 is right on this machine only with --reduce-range."""
        return False

    @staticmethod
    def require(backend: str, title: str) -> None:
        """Raise QatError if the library of `backend` is missing. title: begins the message."""

    @staticmethod
    def precisions(model: ModelFile, device: torch.device) -> tuple[str, ...]:
        """Return the precisions of MEASURED in which a file can run; '' if unknown."""
        return (model.precision,)

    @staticmethod
    def describe(file: Path) -> ModelFile:
        """Describe a file before it runs; by default it tells its inputs when it is loaded. Raises QatError if it cannot be read."""
        return ModelFile(file, {}, '')

    @staticmethod
    def file_to_run(measurement: Measurement, conditions: Conditions) -> Path:
        """Return the file that runs: the measurement's own, or what is built from it. Raises QatError if it could not be built."""
        return measurement.file

    @staticmethod
    def build_missing(measurements: Sequence[Measurement], conditions: Conditions) -> None:
        """Build what the measurements need and do not have; a failure is in conditions.failed."""

    @property
    def accepts(self) -> OpenInputs | None:
        """Return the inputs of an engine, which may differ from those of its source file; None for any other file."""
        return None

    @property
    def notes(self) -> Sequence[str]:
        """Return notes on how the engine runs the file, known after the first run."""
        return self.session.notes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        """Free the memory on the device."""
        self.session.__exit__(*ended)

    def prepare(self, inputs: Inputs) -> None:
        """Make data for the inputs, and run once to learn the sizes of all outputs."""
        self.host = {name: example(dtype, shape) for name, (dtype, shape) in inputs.items()}
        if self.stream:
            # otherwise copies block the host
            self.host = {name: tensor.pin_memory() for name, tensor in self.host.items()}
        with torch.cuda.stream(self.stream):  # None leaves everything as it is
            self.inputs = self.bind(self.host)
            self.upload()
            self.compute()
        if self.stream:
            self.stream.synchronize()
            self.results = [torch.empty(o.shape, dtype=o.dtype).pin_memory() for o in self.outputs]

    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors on the device in the shapes of `host`, which `compute` reads."""
        return {name: tensor.to(self.device) for name, tensor in host.items()}

    def upload(self) -> None:
        """Queue the copies of the inputs to the GPU."""
        if self.stream:
            for name, tensor in self.host.items():
                self.inputs[name].copy_(tensor, non_blocking=True)

    def compute(self) -> None:
        """Queue one run on `inputs`, and set `outputs`."""
        self.outputs = list(self.session.run(self.inputs).values())

    def predicting(self) -> FileModel | TorchModel:
        """Return the model for an evaluation."""
        return FileModel(self.session)

    def download(self) -> None:
        """Queue the copies of the outputs from the GPU."""
        if self.stream:
            for result, output in zip(self.results, self.outputs):
                result.copy_(output, non_blocking=True)

    def serve(self, seconds: float, least: int) -> tuple[int, float, float]:
        """Answer queries on `inputs`, several at once, for `seconds`, and at least `least` of them.

        Returns:
            Number of queries, seconds they took, and seconds in the model, summed over the streams.
        """
        raise NotImplementedError(f'{type(self).__name__} answers one query after the other')
