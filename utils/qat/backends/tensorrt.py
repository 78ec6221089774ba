"""TensorRT and TensorRT-RTX: .engine files."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.backends.file_model import Session, Signature
from utils.qat.engine.runner import EngineRunner


class TensorRT(Session):
    """An engine of TensorRT or TensorRT-RTX. It keeps GPU memory until it is closed."""

    def __init__(self, file: Path, device: torch.device, backend: str, cuda_graph: bool = False) -> None:
        super().__init__(file, device)
        self.engine = EngineRunner(file, device, cuda_graph, backend)

    @classmethod
    @override
    def open(cls, file: Path, device: torch.device, backend: str) -> TensorRT:
        return cls(file, device, backend)

    @override
    def __exit__(self, *_: object) -> None:
        self.engine.__exit__()

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


SESSION = TensorRT
