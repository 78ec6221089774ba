"""PyTorch: checkpoints, float or quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.settings import require_multiples
from utils.qat.prediction.session import Inputs, Load, MeasuredCase, MeasuredFile, Session


class TorchModel:
    """A YOLOv9 model of PyTorch, float or with fake quantization, in eval mode.

    Attributes:
        names: class index → name.
        stride: the largest of the head, in pixels.
        nc: number of classes.
        segments: whether it gives masks.
        kind: what says so, in words.
        recipe: settings of the quantization; None for a float model.
    """

    def __init__(self, model: nn.Module, quant: dict[str, Any] | None = None) -> None:
        """Take a model. quant: of a quantized checkpoint, see checkpoint.load_any."""
        self.model, self.recipe = model.eval(), quant and quant['recipe']
        self.names, self.stride, self.nc = model.names, int(max(model.stride)), model.model[-1].nc
        self.segments, self.kind = hasattr(model.model[-1], 'nm'), f'its head is {type(model.model[-1]).__name__}'
        self.device = next(model.parameters()).device

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict for images FP32 [B, 3, H, W] in 0..1: see file_model.py."""
        return self.predictions(self.model(images))

    def predictions(self, output: tuple) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Take the predictions out of what the model returns in eval mode; the rest is for its training."""
        predictions, rest = output
        return (predictions, rest[-1]) if self.segments else predictions


class PyTorch(Session):
    """A YOLOv9 checkpoint, eager. A quantized one computes in FP32 and rounds to what INT8 can hold: its time is not INT8's."""

    def __init__(self, file: Path, device: torch.device, half: bool, load: Load) -> None:
        self.model, quantized = load(file, device)
        if half:
            self.model.half()
        super().__init__(file, device, 'INT8 simulated' if quantized else 'FP16' if half else 'FP32')
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
        self.dtype = torch.float16 if half else torch.float32
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.layers = sum(any(True for _ in m.parameters(recurse=False)) for m in self.model.modules())

    @classmethod
    @override
    def to_measure(
        cls, case: MeasuredCase, file: Path, device: torch.device, config: BenchmarkConfig, load: Load
    ) -> PyTorch:
        return cls(file, device, case.precision == 'fp16', load)

    @staticmethod
    @override
    def precisions(network: MeasuredFile, device: torch.device) -> tuple[str, ...]:
        if network.precision == 'int8':
            return (network.precision,)
        return ('fp32', 'fp16') if device.type == 'cuda' else ('fp32',)

    @override
    def prepare(self, inputs: Inputs) -> None:
        for _, (*_, height, width) in inputs.values():
            require_multiples((height, width), int(max(self.model.stride)))
        super().prepare({name: (self.dtype, shape) for name, (_, shape) in inputs.items()})

    @override
    @torch.inference_mode()
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {'output0': self.model(*tensors.values())[0]}  # the decoded predictions; the rest is for training


SESSION = PyTorch  # see registry.py; an evaluation makes a TorchModel of a model, not of a file
