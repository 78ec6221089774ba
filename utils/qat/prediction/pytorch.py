"""PyTorch: checkpoints, float or quantized."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.settings import Sides, require_multiples
from utils.qat.data.images import channels_last
from utils.qat.prediction.session import Inputs, Load, MeasuredCase, MeasuredFile, Session

LARGEST = 8192  # pixels that are believed of a file


def classifies(model: nn.Module) -> bool:
    """Tell whether a model is a classifier: a network of torchvision, or upstream's, which ends with Classify."""
    layers = getattr(model, 'model', None)
    return layers is None or type(layers[-1]).__name__ == 'Classify'


def sides_in(recipe: dict[str, Any] | None) -> Sides | None:
    """Read the image size in the recipe of a checkpoint, which anybody may have edited; None if there is none.

    It has two numbers, or one in the files of earlier versions.
    """
    found = (recipe or {}).get('imgsz')
    sides = found if isinstance(found, (list, tuple)) else (found, found)
    return (
        (sides[0], sides[1]) if len(sides) == 2 and all(type(n) is int and 32 <= n <= LARGEST for n in sides) else None
    )


class TorchModel:
    """A model of PyTorch, float or with fake quantization, in eval mode.

    Attributes:
        names: class index → name.
        stride: the largest of the head, in pixels.
        nc: number of classes.
        classifies: whether it gives one score for each class.
        segments: whether it gives masks.
        task: 'classify' for a classifier, as file_model.FileModel.
        kind: what says so, in words.
        recipe: settings of the quantization; None for a float model.
        quantized_for: height and width of the images that it was quantized for, in pixels; None for a float model.
    """

    def __init__(
        self,
        model: nn.Module,
        quant: dict[str, Any] | None = None,
        context: AbstractContextManager[None] | None = None,
    ) -> None:
        """Take a model.

        Args:
            model: the model.
            quant: of a quantized checkpoint, see checkpoint.load_any.
            context: entered for each pass, such as quantizers.RoundedOnce.
        """
        self.model, self.recipe = model.eval(), quant and quant['recipe']
        self.context = context or nullcontext()
        self.names, self.stride, self.nc = model.names, int(max(model.stride)), len(model.names)
        self.classifies, head = classifies(model), model
        if hasattr(model, 'model'):
            head = model.model[-1]
            self.nc = self.nc if self.classifies else head.nc
        self.task = 'classify' if self.classifies else None
        self.segments, self.kind = hasattr(head, 'nm'), f'its head is {type(head).__name__}'
        self.device = next(model.parameters()).device
        self.quantized_for = sides_in(self.recipe)

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict for images FP32 [B, 3, H, W] in 0..1: see file_model.py."""
        return self.predictions(self.outputs(images))

    def outputs(self, images: torch.Tensor) -> tuple:
        """Run the model: its predictions, and what its training needs."""
        with self.context:
            return self.model(channels_last(images))

    def predictions(self, output: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Take the predictions out of what the model returns in eval mode; the rest is for its training."""
        if self.classifies:
            return output
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
        output = self.model(*tensors.values())
        # A detector returns its decoded predictions first; the rest is for training
        return {'output0': output if isinstance(output, torch.Tensor) else output[0]}


SESSION = PyTorch  # see registry.py; an evaluation makes a TorchModel of a model, not of a file
