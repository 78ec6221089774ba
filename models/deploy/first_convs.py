"""Compute the first convolution in parts: TensorRT has a kernel for 3 channels to 32, which reads the image as it is.

For more outputs it copies the image to 32 channels first. In parts yolov9-c takes 0.92 of the time (docs/tensorrt.md#measured).
"""

from collections.abc import Iterable
from copy import deepcopy

import torch
import torch.nn as nn
from models.common import Conv

from models.quantize.blocks import QuantConv2d
from models.quantize.network import replace_module
from models.quantize.quantizers import QMAX
from utils.qat.core.upstream import Network

IMAGE = 3  # channels


class Parts(nn.Module):
    """Blocks with one input, whose outputs are joined along the channels: [B, C, H, W] → [B, K, H', W']."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Join the outputs."""
        return torch.cat([part(x) for part in self.parts], 1)


def split_first(model: Network, most: int) -> Network:
    """Put parts of at most `most` outputs in the place of each quantized convolution of images, in place, and return the model.

    model: fused, and copied for tracing. No value changes.
    """
    for path, block in list(model.named_modules()):
        conv = block.conv if isinstance(block, Conv) else None
        if isinstance(conv, QuantConv2d) and conv.in_channels == IMAGE and conv.out_channels > most:
            outputs = range(conv.out_channels)
            parts = Parts(_part(block, outputs[start : start + most]) for start in outputs[::most])
            vars(parts).update(i=block.i, f=block.f)  # by which upstream's forward pass finds a layer and its input
            replace_module(model, path, parts)
    return model


def _part(block: Conv, outputs: range) -> Conv:
    """Copy a block with some outputs of its convolution."""
    block, kept = deepcopy(block), list(outputs)
    conv = block.conv
    conv.weight, conv.bias = (nn.Parameter(each[kept], requires_grad=False) for each in (conv.weight, conv.bias))
    conv.weight_quantizer.set_amax(conv.weight_quantizer.scale[kept] * QMAX)
    conv.out_channels = len(kept)
    return block
