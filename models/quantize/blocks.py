"""Quantized twins of upstream blocks: the same block, with fake-quantizers where TensorRT needs its Q/DQ pairs.

A twin is a subclass of the upstream block. It shares parameters and submodules with the block that it was made from.
Convolutions are replaced at the leaf (`nn.Conv2d`), so those of every upstream block, known or not, are quantized. A
block needs its own twin only for its other operations (residual Add, average pooling, the fusing sum).

Class paths in this file are a file format, because checkpoints pickle them. Do not rename or move the classes.
"""

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from models.common import AConv, ADown, Bottleneck, CBFuse, RepNBottleneck
from typing_extensions import Self

from models.quantize.network import replace_module
from models.quantize.quantizers import Quantizer, SiLUQuantizer, rounded_unit
from utils.qat.core.upstream import Network

T = TypeVar('T')


def _without_copy(cls: type[T], module: object) -> T:
    """Make an instance of `cls` with the state of `module`: new containers, the same parameters and submodules.

    Leave out the `forward` that upstream's `fuse()` sets on an instance: it would hide the forward of the class.
    """
    new = cls.__new__(cls)
    new.__dict__ = {
        k: (type(v)(v) if k in ('_parameters', '_buffers', '_modules') else v)
        for k, v in module.__dict__.items()
        if k != 'forward'
    }
    return new


class Twin:
    """Mixin of every quantized block: the twin of `float_class`, with quantizers in the attributes `quantizer_names`."""

    # A comment, because torch.jit reads the annotations of modules
    quantizer_names = ('input_quantizer',)  # type: tuple[str, ...]
    if TYPE_CHECKING:  # a twin has those that it names
        float_class: type[nn.Module]
        input_quantizer: Quantizer
        weight_quantizer: Quantizer
        add_quantizer: Quantizer
        branch_quantizer: Quantizer
        sum_quantizer: Quantizer
        output_quantizer: Quantizer

    @classmethod
    def suits(cls, block: nn.Module) -> bool:
        """Tell whether `block` has the operation that this twin quantizes."""
        return type(block) is cls.float_class

    @classmethod
    def from_float(cls, block: nn.Module) -> Self:
        """Make the quantized twin of `block`, without a calibration."""
        twin = _without_copy(cls, block)
        for name in twin.quantizer_names:
            setattr(twin, name, Quantizer())
        return twin

    def to_float(self) -> nn.Module:
        """Make the float block, with the same parameters and submodules."""
        block = _without_copy(self.float_class, self)
        for name in self.quantizer_names:
            delattr(block, name)
        return block


class WeightedTwin(Twin):
    """Mixin of a layer with a weight: its input is quantized per tensor, its weight per output channel (axis 0)."""

    quantizer_names = ('input_quantizer', 'weight_quantizer')
    if TYPE_CHECKING:
        weight: torch.Tensor

        def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            """Compute the layer with another weight."""

    @classmethod
    def from_float(cls, block: nn.Module) -> Self:
        """Make the quantized twin of `block`, without a calibration."""
        twin = super().from_float(block)
        twin.weight_quantizer = Quantizer(axis=0)
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer with rounded input and weight."""
        return self.weighted(self.input_quantizer(x), self.weight_quantizer(self.weight))


class QuantConv2d(WeightedTwin, nn.Conv2d):
    """Convolution with a quantized input and weight."""

    float_class = nn.Conv2d

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Convolve with another weight: [B, C, H, W] → [B, K, H', W']."""
        return self._conv_forward(x, weight, self.bias)


def without_groups(model: Network) -> Network:
    """Write quantized convolutions with groups as dense ones, whose weights for other groups are 0, in place, and return the model.

    For engines that take no groups. Those with a group for each channel stay. Outputs change by rounding alone.
    """
    for conv in model.modules():
        if isinstance(conv, QuantConv2d) and 1 < conv.groups < conv.in_channels:
            outputs, inputs = (n // conv.groups for n in (conv.out_channels, conv.in_channels))
            weight = conv.weight.new_zeros(conv.out_channels, conv.in_channels, *conv.kernel_size)
            for i in range(conv.groups):
                rows = slice(i * outputs, (i + 1) * outputs)
                weight[rows, i * inputs : (i + 1) * inputs] = conv.weight[rows]
            conv.weight, conv.groups = nn.Parameter(weight, requires_grad=False), 1
    return model


def float_groups(model: Network) -> list[str]:
    """Put float convolutions in the place of quantized ones with groups, in a model. Returns their paths."""
    convs = [(path, m) for path, m in model.named_modules() if isinstance(m, QuantConv2d) and m.groups > 1]
    for path, conv in convs:
        replace_module(model, path, conv.to_float())
    return [path for path, _ in convs]


class QuantResidual(Twin):
    """Bottleneck with its residual Add in INT8.

    `add_policy`, set by `set_add_policy`, names the addends that are quantized. 'both': with one scale, so the Add is
    an INT8 kernel by itself. 'residual': only the shortcut, so that a compiler can fuse the Add into the last
    convolution and round the sum (NVIDIA's advice for Conv+Add; here an activation is between the two). 'each': both,
    each with its own scale.
    """

    add_policy = 'both'
    if TYPE_CHECKING:  # of the upstream block
        cv1: nn.Module
        cv2: nn.Module

    @property
    def quantizer_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Attributes of the quantizers; the branch has its own only with the policy 'each'."""
        return ('add_quantizer', 'branch_quantizer') if self.add_policy == 'each' else ('add_quantizer',)

    def set_add_policy(self, policy: str) -> None:
        """Change the addends that are quantized, before the calibration."""
        self.add_policy = policy
        if policy == 'each':
            self.branch_quantizer = Quantizer()

    @classmethod
    def suits(cls, block: nn.Module) -> bool:
        """Tell whether `block` has a residual Add."""
        return super().suits(block) and bool(block.add)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the shortcut to the branch: [B, C, H, W] → the same shape."""
        return self.added(x, self.cv2(self.cv1(x)))

    def added(self, shortcut: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Add, with the addends quantized by `add_policy`."""
        shortcut = self.add_quantizer(shortcut)
        if self.add_policy != 'residual':
            branch = (self.add_quantizer if self.add_policy == 'both' else self.branch_quantizer)(branch)
        return shortcut + branch


class QuantBottleneck(QuantResidual, Bottleneck):
    """Bottleneck with an INT8 Add."""

    float_class = Bottleneck


class QuantRepNBottleneck(QuantResidual, RepNBottleneck):
    """RepNBottleneck with an INT8 Add."""

    float_class = RepNBottleneck


class _QuantPoolInput(Twin):
    """Down-sampling block that starts with an average pooling, whose input is quantized.

    The pooling is INT8 because the input quantizers of the next convolutions quantize its output.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.input_quantizer(x))  # type: ignore[misc]  # of the upstream block


class QuantAConv(_QuantPoolInput, AConv):
    """AConv with an INT8 average pooling."""

    float_class = AConv


class QuantADown(_QuantPoolInput, ADown):
    """ADown with an INT8 average pooling."""

    float_class = ADown


class QuantCBFuse(Twin, CBFuse):
    """Sum of one map of each CBLinear, resized (nearest) to the last input. All addends share one quantizer."""

    float_class = CBFuse

    def forward(self, xs: Sequence) -> torch.Tensor:
        """Add the maps: a tuple of maps [B, C, h, w] per CBLinear, and at last one map [B, C, H, W]."""
        # One Add after the other, in upstream's order: an engine has INT8 kernels for Add, none for a sum over a stack
        size = xs[-1].shape[2:]
        maps = [F.interpolate(self.input_quantizer(x[j]), size=size, mode='nearest') for x, j in zip(xs[:-1], self.idx)]
        return self.summed([*maps, self.input_quantizer(xs[-1])])

    def summed(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add maps [B, C, H, W]."""
        return reduce(torch.add, maps)


class QuantRoundedCBFuse(QuantCBFuse):
    """CBFuse whose sums of some of the maps are rounded too, for an engine that computes only integers."""

    @property
    def quantizer_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Attributes of the quantizers; two maps have only one sum."""
        return ('input_quantizer', 'sum_quantizer') if len(self.idx) > 1 else ('input_quantizer',)

    def summed(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add maps [B, C, H, W]."""
        first, *others, last = maps
        return reduce(lambda total, each: self.sum_quantizer(total + each), others, first) + last


class QuantSiLU(Twin, nn.SiLU):
    """SiLU in INT8 for an engine that does not fuse it into the convolution: x and sigmoid(x) are rounded.

    The sigmoid lies in 0..1, so its scale is fixed. The next quantizer rounds the product.
    """

    float_class = nn.SiLU

    @classmethod
    def from_float(cls, block: nn.Module) -> Self:
        """Make the quantized twin of `block`, without a calibration."""
        twin = super().from_float(block)
        twin.input_quantizer = SiLUQuantizer()
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute SiLU: any shape → the same shape."""
        x = self.input_quantizer(x)
        return x * rounded_unit(torch.sigmoid(x)) if self.input_quantizer.rounds else F.silu(x)


class QuantReLU(Twin, nn.ReLU):
    """ReLU whose result is rounded: a convolution that writes unsigned integers ends at 0 by itself."""

    float_class = nn.ReLU
    quantizer_names = ('output_quantizer',)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ReLU: any shape → the same shape."""
        return self.output_quantizer(F.relu(x))


class QuantFusedReLU6(Twin, nn.ReLU6):
    """ReLU6 whose result is rounded, for an engine whose convolutions end with it."""

    float_class = nn.ReLU6
    quantizer_names = ('output_quantizer',)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ReLU6: any shape → the same shape."""
        return self.output_quantizer(F.relu6(x))


class _QuantActivation(Twin):
    """Any other activation function: its input is rounded, so the convolution in front is an integer kernel.

    The next quantizer rounds the result. If the engine has no integer kernel of the function, it computes it in float.
    """

    @classmethod
    def from_float(cls, block: nn.Module) -> Self:
        twin = super().from_float(block)
        if hasattr(twin, 'inplace'):
            twin.inplace = False  # calibrators and the backward pass read the input after the call
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.input_quantizer(x))  # type: ignore[misc]  # of PyTorch's module


def _quant_activation(cls: type) -> type[Twin]:
    """Make the twin of a class of activation functions."""
    return type(f'Quant{cls.__name__}', (_QuantActivation, cls), {'__module__': __name__, 'float_class': cls})


QuantReLU6, QuantLeakyReLU, QuantPReLU = map(_quant_activation, (nn.ReLU6, nn.LeakyReLU, nn.PReLU))
QuantELU, QuantCELU, QuantSELU, QuantGELU = map(_quant_activation, (nn.ELU, nn.CELU, nn.SELU, nn.GELU))
QuantMish, QuantHardswish, QuantSoftplus = map(_quant_activation, (nn.Mish, nn.Hardswish, nn.Softplus))
QuantHardsigmoid, QuantSigmoid, QuantTanh = map(_quant_activation, (nn.Hardsigmoid, nn.Sigmoid, nn.Tanh))

ACTIVATIONS: dict[type, type[Twin]] = {  # as TWINS, for targets whose engine fuses no activation function
    twin.float_class: twin
    for twin in (
        *(QuantSiLU, QuantReLU, QuantReLU6, QuantPReLU, QuantELU, QuantLeakyReLU, QuantCELU, QuantSELU, QuantGELU),
        *(QuantMish, QuantHardswish, QuantSoftplus, QuantHardsigmoid, QuantSigmoid, QuantTanh),
    )
}
TWINS: dict[type, type[Twin]] = {  # upstream class → its twin
    twin.float_class: twin
    for twin in (QuantConv2d, QuantBottleneck, QuantRepNBottleneck, QuantAConv, QuantADown, QuantCBFuse)
}


def is_quantized(model: nn.Module) -> bool:
    """Tell whether any block of `model` is a quantized twin."""
    return any(isinstance(m, Twin) for m in model.modules())
