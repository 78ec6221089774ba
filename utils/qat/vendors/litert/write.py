"""Model → LiteRT's file (.tflite): converted by litert-torch, compared with PyTorch in LiteRT, and renamed into place.

A quantized model has PyTorch's quantize and dequantize operators (decomposed.py), which the converter turns into INT8 tensors with the
same scales. Images are [B, H, W, 3], and boxes relative to the image, as Ultralytics' package expects them.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.deploy.agreement import Reference, metadata_of, traceable_copy
from models.deploy.decomposed import GriddedWeight, RoundedActivation, on_integers
from models.deploy.formats.format import Export, Format, Written
from models.quantize.quantizers import named_quantizers
from utils.qat.backends.pytorch import task_of
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import atomic
from utils.qat.core.upstream import Network
from utils.qat.vendors.litert.session import INSTALL, METADATA, load_litert, without_native_messages
from utils.qat.vendors.load import open_file

CPU = torch.device('cpu')


class PoolsAsConvolutions(TorchFunctionMode):
    """Context that computes an average pooling as a depthwise convolution with Q and DQ.

    XNNPACK has no INT8 kernel for the pooling: LiteRT's own takes twelve times as long as this convolution, and it wants one scale
    before and behind.
    """

    def __init__(self, weight: int = 1) -> None:
        """Set the integer that each weight is."""
        super().__init__()
        self.weight = weight

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is not F.avg_pool2d:
            return func(*args, **(kwargs or {}))
        x, kernel, stride, padding, *_ = args  # as upstream's blocks call it
        value = kernel**-2.0
        weight = RoundedActivation(value / self.weight, 0, False)(torch.full((x.shape[1], 1, kernel, kernel), value))
        return F.conv2d(x, weight, None, stride, padding, groups=x.shape[1])


class OnChannelsLast(nn.Module):
    """A model whose images, and prototypes of masks, are [B, H, W, C], and whose boxes are relative to the image, 0..1."""

    def __init__(self, model: Network, imgsz: Sequence[int], quantized: bool) -> None:
        super().__init__()
        height, width = imgsz
        self.model, self.quantized = model, quantized
        black, white = (task_of(model).normalized(torch.full((1, 3, 1, 1), value)) for value in (0.0, 1.0))
        self.limits = black.min().item(), white.max().item()
        self.register_buffer('relative', 1 / torch.tensor([width, height, width, height]).float().view(1, 4, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Predict for images FP32 [B, H, W, 3], in 0..1 or normalized as the task wants them: a classifier's logits, predictions, or predictions and prototypes."""
        # The clamp changes no image: without it the converter leaves out the Q of the images, and the file takes INT8
        with PoolsAsConvolutions() if self.quantized else nullcontext():
            result = self.model(images.clamp(*self.limits).permute(0, 3, 1, 2))
        predictions, *prototypes = result if isinstance(result, (tuple, list)) else (result,)
        if predictions.dim() == 2:
            return predictions
        predictions = torch.cat((predictions[:, :4] * self.relative, predictions[:, 4:]), 1)
        return (predictions, *(part.permute(0, 2, 3, 1) for part in prototypes)) if prototypes else predictions


def load_converter(who: str) -> ModuleType:
    """Import litert-torch; raise QatError if it cannot be loaded. who: the flag that needs it."""
    problem = f'{who}: no package litert-torch that can be loaded here'
    # its parts for another PyTorch raise whatever they met
    with reporting(problem, Exception, remedy=INSTALL, most=100), without_native_messages():
        import litert_torch
        import litert_torch.quantize.pt2e_quantizer
        import litert_torch.quantize.quant_config
    return litert_torch


def convert(model: Network, imgsz: Sequence[int], batch: int, file: Path) -> None:
    """Convert a model to a .tflite file without metadata.

    model: float, or quantized and calibrated, in the form of `traceable_copy`; it is changed.
    """
    quantized = bool(named_quantizers(model))
    if quantized:
        model = on_integers(model, stored=GriddedWeight)
    write_module(OnChannelsLast(model, imgsz, quantized), (batch, *imgsz, 3), file, quantized, '--include litert')


def write_module(module: nn.Module, shape: Sequence[int], file: Path, quantized: bool, who: str) -> None:
    """Convert a module whose input, FP32, has this shape to a .tflite file. who: the flag that needs it."""
    library, settings = load_converter(who), None
    if quantized:
        pt2e = library.quantize.pt2e_quantizer  # which only tells the converter that Q and DQ are in the graph
        quantizer = pt2e.PT2EQuantizer().set_global(pt2e.get_symmetric_quantization_config())
        settings = library.quantize.quant_config.QuantConfig(pt2e_quantizer=quantizer)
    with without_native_messages(), torch.no_grad():
        library.convert(module.eval(), (torch.zeros(*shape),), quant_config=settings).export(str(file))


def append_metadata(file: Path, metadata: Mapping[str, object]) -> None:
    """Append metadata to a .tflite file, as texts, where Ultralytics' package looks for them."""
    with zipfile.ZipFile(file, 'a') as archive:
        archive.writestr(METADATA, json.dumps({key: str(value) for key, value in metadata.items()}))


class LiteRTFormat(Format):
    """MODEL.tflite, which returns predictions."""

    name = runs_in = 'litert'

    @override
    def require(self, export: Export) -> None:
        for flag in ('dynamic', 'half'):
            if getattr(export.config, flag):
                raise QatError(f'--{flag}: not with --include {self.name}; leave it out')
        if export.int8 and not export.target.places_as(load_target(self.name)):
            raise QatError(
                f'{export.config.weights}: was quantized for {export.target.title}, so that much of it would be in float; quantize with '
                f'--target {self.name}'
            )
        load_litert(f'--include {self.name}')
        load_converter(f'--include {self.name}')

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        config, model = export.config, export.predict.model.cpu()
        reference = Reference(model, config.batch_size, config.imgsz)
        metadata = metadata_of(model, export.kept_float, export.target.name)
        metadata |= {'imgsz': list(config.imgsz), 'batch': config.batch_size}
        with atomic(path) as tmp:
            convert(traceable_copy(model), config.imgsz, config.batch_size, tmp)
            append_metadata(tmp, metadata)
            opened = open_file(tmp, CPU, 'litert')
            agreement = reference.require_agreement(opened(reference.images), 'LiteRT', 'FP32')
        return self.report(export, path, 'LiteRT file', agreement, *opened.notes)


FORMAT = LiteRTFormat()
