"""An engine's hold on one file: a Session, which an evaluation asks for outputs and the benchmark measures.

An evaluation calls `run`. The benchmark calls `prepare` once, and then `upload`, `compute` and `download`, in this order, as often as
it likes. On a GPU these three order work on `session.stream`, which must be the current one, and the benchmark waits for it (ONNX
Runtime waits by itself). On a CPU nothing is transferred: the inputs are where the engine reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from utils.qat.config.engine import BenchmarkConfig

Inputs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name → type and shape
OpenInputs = dict[str, tuple[torch.dtype, tuple[int | None, ...]]]  # likewise, with None for an axis that is open
# A function that loads a checkpoint: the model, and whether it is quantized
Load = Callable[[Path, torch.device], tuple[torch.nn.Module, bool]]


def example(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Make data to compute on, the same every time: floats in 0..1; ones of any other type, which are valid as token, mask and flag."""
    if dtype.is_floating_point:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)


class MeasuredFile(Protocol):
    """The attributes of a benchmark.model_files.Network that a session reads."""

    file: Path
    types: str

    @property
    def precision(self) -> str:
        """Return fp32, fp16, int8, or '' if nothing tells."""


class MeasuredCase(Protocol):
    """The attributes of a benchmark.cases.Case that a session reads."""

    backend: str
    precision: str

    @property
    def network(self) -> MeasuredFile:
        """Return the file that the case measures."""


@dataclass
class Signature:
    """Inputs, outputs and metadata of an exported file.

    Attributes:
        inputs: name → shape; an axis that is no number is open, and has what the engine gives for it: a name or None.
        outputs: name → shape, likewise.
        metadata: text that the export wrote, by key; anybody may have edited it.
        batch: smallest and largest; None = what the shape of the input says.
    """

    inputs: Mapping[str, Sequence[Any]]
    outputs: Mapping[str, Sequence[Any]]
    metadata: dict[str, str]
    batch: tuple[int, int] | None = None


class Session(ABC):
    """A file that an engine has loaded for a device.

    Attributes:
        types: what it computes in, in words, such as 'INT8 and FP16'.
        size: bytes of the file.
        inputs: name → tensor that the engine reads, known after `prepare`.
        outputs: tensors on the device, known after `compute`.
        stream: CUDA stream of the work; None on a CPU.
        parameters: number of them; None if the engine does not tell.
        layers: number of them, likewise.
        streams: how many queries it computes at once, known after `serve` of a StreamingSession.
    """

    inputs: dict[str, torch.Tensor]
    outputs: Sequence[torch.Tensor] = ()
    stream: torch.cuda.Stream | None = None
    parameters: int | None = None
    layers: int | None = None
    streams: int | None = None

    def __init__(self, file: Path, device: torch.device, types: str = '') -> None:
        self.file, self.device, self.types, self.size = file, device, types, file.stat().st_size

    @classmethod
    def to_evaluate(cls, file: Path, device: torch.device, backend: str) -> Session:
        """Load an exported file for an evaluation: it computes what the file says, whatever the time.

        Raises:
            QatError: the file cannot be loaded here.
        """
        return cls(file, device)

    @classmethod
    def to_measure(
        cls, case: MeasuredCase, file: Path, device: torch.device, config: BenchmarkConfig, load: Load
    ) -> Session:
        """Load the file of a benchmark's case, with all that makes the engine fast.

        Args:
            case: gives types, precision and backend.
            file: the file to run, which for an engine is built of the case's file.
            device: where it runs.
            config: settings of the benchmark.
            load: for checkpoints.

        Raises:
            QatError: the file cannot be loaded here.
        """
        return cls(file, device, case.network.types)

    @staticmethod
    def takes(file: Path) -> bool:
        """Tell whether `file` is for this engine, where two engines have files of one suffix."""
        return True

    @staticmethod
    def missing(backend: str, device: torch.device) -> str:
        """Say why `backend` cannot run on `device`; '' if it can."""
        return ''

    @staticmethod
    def precisions(network: MeasuredFile, device: torch.device) -> tuple[str, ...]:
        """Return the precisions, of MEASURED, in which a file can run; '' where nothing tells."""
        return (network.precision,)

    @property
    def accepts(self) -> OpenInputs | None:
        """Return the inputs of an engine, which knows them better than the file it was built of; None of any other."""
        return None

    @property
    def notes(self) -> Sequence[str]:
        """Return lines about what the engine made of the file, known after the first run."""
        return ()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what is on the device."""

    def signature(self) -> Signature:
        """Describe an exported file to an evaluation.

        Raises:
            QatError: the names or the metadata in the file cannot be read.
        """
        raise NotImplementedError(f'{type(self).__name__} runs no exported files')

    @abstractmethod
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the outputs for inputs on any device.

        Returns:
            Tensors on the session's device, by name, valid until the next call.
        """

    def prepare(self, inputs: Inputs) -> None:
        """Make data for the inputs and run once, after which the sizes of all outputs are known."""
        self.host = {name: example(dtype, shape) for name, (dtype, shape) in inputs.items()}
        if self.stream:
            self.host = {
                name: tensor.pin_memory() for name, tensor in self.host.items()
            }  # or no copy runs beside the host
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
        """Order the copies of the inputs to the GPU."""
        if self.stream:
            for name, tensor in self.host.items():
                self.inputs[name].copy_(tensor, non_blocking=True)

    def compute(self) -> None:
        """Order one run on `inputs`; afterwards `outputs` are known."""
        self.outputs = list(self.run(self.inputs).values())

    def download(self) -> None:
        """Order the copies of the outputs from the GPU."""
        if self.stream:
            for result, output in zip(self.results, self.outputs):
                result.copy_(output, non_blocking=True)


class StreamingSession(Session):
    """A session of an engine that can answer several queries at once, in streams."""

    @abstractmethod
    def serve(self, seconds: float, least: int) -> tuple[int, float, float]:
        """Answer queries on `inputs` for so many seconds, at least so many of them, several at once.

        Returns:
            Number of queries, seconds they took, and seconds in the model, summed over the streams.
        """
