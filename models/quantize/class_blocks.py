"""Quantized twins of the layers and blocks that only classifiers have: torchvision's residual blocks, pooling, Linear.

They are twins as in blocks.py. Batch norms are folded before quantization and are Identity here.

Class paths in this file are a file format, because checkpoints pickle them. Do not rename or move the classes.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.models.efficientnet import FusedMBConv, MBConv
from torchvision.models.mobilenetv2 import InvertedResidual as InvertedResidualV2
from torchvision.models.mobilenetv3 import InvertedResidual as InvertedResidualV3
from torchvision.models.regnet import ResBottleneckBlock
from torchvision.models.resnet import BasicBlock, Bottleneck

from models.quantize.blocks import QuantResidual, Twin, WeightedTwin


class QuantLinear(WeightedTwin, nn.Linear):
    """Linear layer with a quantized input and weight."""

    float_class = nn.Linear

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute the layer with another weight: [..., C] → [..., K]."""
        return F.linear(x, weight, self.bias)


class QuantAdaptiveAvgPool2d(Twin, nn.AdaptiveAvgPool2d):
    """Average pooling over the whole map with its input quantized; the next layer quantizes its output."""

    float_class = nn.AdaptiveAvgPool2d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool the rounded map: [B, C, H, W] → [B, C, 1, 1]."""
        return super().forward(self.input_quantizer(x))


class _QuantBlock(QuantResidual):
    """Residual block of torchvision, whose branch ends with a convolution, without an activation function.

    So only the shortcut is quantized by default: the Add is fused into the convolution, and the sum is rounded once.
    """

    add_policy = 'residual'

    @classmethod
    def suits(cls, block: nn.Module) -> bool:
        return type(block) is cls.float_class and getattr(block, 'use_res_connect', True)


class _QuantResNetBlock(_QuantBlock):
    """ResNet's block with an INT8 Add.

    torchvision calls one ReLU module several times. Here the calls before the Add are functions: otherwise, where a ReLU
    has a quantizer, results inside the block would share its scale with the block's result.
    """

    @classmethod
    def suits(cls, block: nn.Module) -> bool:
        return super().suits(block) and isinstance(block.relu, nn.ReLU)


class QuantBasicBlock(_QuantResNetBlock, BasicBlock):
    """ResNet's block of two convolutions with an INT8 Add."""

    float_class = BasicBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the shortcut to the branch: [B, C, H, W] → [B, K, H / stride, W / stride]."""
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.relu(self.added(self.downsample(x) if self.downsample else x, branch))


class QuantBottleneck(_QuantResNetBlock, Bottleneck):
    """ResNet's block of three convolutions with an INT8 Add."""

    float_class = Bottleneck

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the shortcut to the branch: [B, C, H, W] → [B, K, H / stride, W / stride]."""
        branch = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.relu(self.added(self.downsample(x) if self.downsample else x, self.bn3(self.conv3(branch))))


class QuantInvertedResidualV2(_QuantBlock, InvertedResidualV2):
    """MobileNetV2's block with an INT8 Add."""

    float_class = InvertedResidualV2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the input to the branch: [B, C, H, W] → the same shape."""
        return self.added(x, self.conv(x))


class QuantInvertedResidualV3(_QuantBlock, InvertedResidualV3):
    """MobileNetV3's block with an INT8 Add."""

    float_class = InvertedResidualV3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the input to the branch: [B, C, H, W] → the same shape."""
        return self.added(x, self.block(x))


class _QuantMBConv(_QuantBlock):
    if TYPE_CHECKING:  # torchvision's blocks have them
        block: nn.Module
        stochastic_depth: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.added(x, self.stochastic_depth(self.block(x)))


class QuantMBConv(_QuantMBConv, MBConv):
    """EfficientNet's block with an INT8 Add."""

    float_class = MBConv


class QuantFusedMBConv(_QuantMBConv, FusedMBConv):
    """EfficientNetV2's block with an INT8 Add."""

    float_class = FusedMBConv


class QuantResBottleneckBlock(_QuantBlock, ResBottleneckBlock):
    """RegNet's block with an INT8 Add."""

    float_class = ResBottleneckBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the shortcut to the branch: [B, C, H, W] → [B, K, H / stride, W / stride]."""
        return self.activation(self.added(self.proj(x) if self.proj else x, self.f(x)))


TWINS: dict[type, type[Twin]] = {  # class of torchvision or PyTorch → its twin
    twin.float_class: twin
    for twin in (
        QuantLinear,
        QuantAdaptiveAvgPool2d,
        QuantBasicBlock,
        QuantBottleneck,
        QuantInvertedResidualV2,
        QuantInvertedResidualV3,
        QuantMBConv,
        QuantFusedMBConv,
        QuantResBottleneckBlock,
    )
}
