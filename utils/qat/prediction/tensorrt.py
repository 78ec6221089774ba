"""TensorRT and TensorRT-RTX: .engine files."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.config.backends import BACKENDS
from utils.qat.config.engine import BenchmarkConfig
from utils.qat.core.errors import QatError
from utils.qat.engine.api import load_tensorrt
from utils.qat.engine.runner import EngineRunner
from utils.qat.prediction.session import Load, MeasuredCase, MeasuredFile, OpenInputs, Session, Signature


class TensorRT(Session):
    """An engine of TensorRT or TensorRT-RTX. It keeps GPU memory until it is closed."""

    def __init__(
        self, file: Path, device: torch.device, backend: str, types: str = '', cuda_graph: bool = False
    ) -> None:
        super().__init__(file, device)
        self.engine = EngineRunner(file, device, cuda_graph, backend)
        self.stream, self.layers = self.engine.stream, self.engine.engine.num_layers
        self.types = (self.engine.sidecar or {}).get('precision') or types or 'as built'

    @classmethod
    @override
    def to_evaluate(cls, file: Path, device: torch.device, backend: str) -> TensorRT:
        return cls(file, device, backend)

    @classmethod
    @override
    def to_measure(
        cls, case: MeasuredCase, file: Path, device: torch.device, config: BenchmarkConfig, load: Load
    ) -> TensorRT:
        return cls(file, device, case.backend, case.network.types, config.cuda_graph)

    @staticmethod
    @override
    def missing(backend: str, device: torch.device) -> str:
        title = BACKENDS[backend].title
        if device.type != 'cuda':
            return f'{title}: needs an NVIDIA GPU, and this is --device {device}'
        try:
            load_tensorrt(backend, title)
        except QatError as e:
            return str(e)
        return ''

    @staticmethod
    @override
    def precisions(network: MeasuredFile, device: torch.device) -> tuple[str, ...]:
        if network.file.suffix.lower() == '.onnx' and network.types == 'FP32':
            return 'fp32', 'fp16'  # chosen when the engine is built
        return (network.precision,)

    @override
    def __exit__(self, *_: object) -> None:
        self.engine.__exit__()

    @property
    @override
    def accepts(self) -> OpenInputs:
        """Return the inputs of the engine; an axis is open where the profile has a range."""
        return {
            name: (self.engine.dtype(name), tuple(a if a == b else None for a, b in zip(smallest, largest)))
            for name, (smallest, _, largest) in self.engine.inputs.items()
        }

    @override
    def signature(self) -> Signature:
        profiles, batch = self.engine.inputs, None
        if len(profiles) == 1:
            ((smallest, _, largest),) = profiles.values()
            batch = smallest[0], largest[0]
        metadata = self.engine.sidecar['metadata'] if self.engine.sidecar else {}
        return Signature(
            {name: largest for name, (*_, largest) in profiles.items()}, self.engine.outputs, metadata, batch
        )

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.engine(tensors)

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.outputs = list(self.engine.prepare({name: tensor.shape for name, tensor in host.items()}).values())
        return {name: self.engine.buffers[name][: tensor.numel()].view(tensor.shape) for name, tensor in host.items()}

    @override
    def compute(self) -> None:
        self.engine.enqueue()


SESSION = TensorRT  # see registry.py
