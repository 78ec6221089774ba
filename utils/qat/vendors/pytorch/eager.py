"""PyTorch, operator by operator."""

from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.backends.pytorch import TorchModel, stride_of
from utils.qat.config.settings import require_multiples
from utils.qat.core.upstream import Network
from utils.qat.vendors.measured import Conditions, Inputs, Measured, Measurement, ModelFile
from utils.qat.vendors.vendor import SIMULATED


class HalfModel(TorchModel):
    """A model of PyTorch in FP16, for images and predictions in FP32."""

    def __init__(self, model: Network) -> None:
        super().__init__(model.half())

    @override
    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        output = super().__call__(images.half())
        if isinstance(output, torch.Tensor):
            return output.float()
        predictions, prototypes = output
        return predictions.float(), prototypes.float()


class MeasuredPyTorch(Measured):
    """A YOLOv9 checkpoint in eager mode. A quantized one simulates INT8 in FP32, so its time is not INT8's."""

    session: TorchModel

    @override
    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> TorchModel:
        opened = conditions.open_checkpoint(file, self.device)
        self.model, self.dtype = opened.model, torch.float32
        self.types = SIMULATED if opened.recipe is not None else 'FP32'
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.layers = sum(any(True for _ in m.parameters(recurse=False)) for m in self.model.modules())
        if measurement.precision != 'fp16':
            return opened
        self.dtype, self.types = torch.float16, 'FP16'
        return HalfModel(self.model)

    @override
    def __exit__(self, *_: object) -> None:
        """Leave the model to the garbage collector."""

    @staticmethod
    @override
    def precisions(model: ModelFile, device: torch.device) -> tuple[str, ...]:
        if model.precision == 'int8':
            return (model.precision,)
        return ('fp32', 'fp16') if device.type == 'cuda' else ('fp32',)

    @override
    def prepare(self, inputs: Inputs) -> None:
        for _, (*_, height, width) in inputs.values():
            require_multiples((height, width), stride_of(self.model))
        super().prepare({name: (self.dtype, shape) for name, (_, shape) in inputs.items()})

    @override
    @torch.inference_mode()
    def compute(self) -> None:
        output = self.model(*self.inputs.values())
        # A detector returns its decoded predictions first; the rest is for training
        self.outputs = [output if isinstance(output, torch.Tensor) else output[0]]

    @override
    def predicting(self) -> TorchModel:
        return self.session


MEASURED = MeasuredPyTorch
