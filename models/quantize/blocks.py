"""Quantized twins of upstream blocks: the same block, with fake-quantizers where TensorRT wants its Q/DQ pairs.

A twin is a subclass of the upstream block, made by `from_float` and undone by `to_float`; both share the parameters
and submodules with the block they come from. Convolutions are replaced at the leaf (`nn.Conv2d`), so every upstream
block, known or not, gets its convolutions quantized; a block needs a twin of its own only for the other operations
(residual Add, average pooling, the fusing sum), whose inputs must be INT8 for a kernel to run in INT8.

Class paths in this file are a file format: checkpoints pickle them. Do not rename or move.
"""

from functools import reduce

import torch
import torch.nn as nn
import torch.nn.functional as F
from models.common import AConv, ADown, Bottleneck, CBFuse, RepNBottleneck

from models.quantize.quantizers import Quantizer


def _without_copy(cls, module):
    """An instance of `cls` with the state of `module`: own containers, the very same parameters and submodules.

    Everything upstream hangs on its layers (.i .f .type .np) comes along. Not the instance `forward` that upstream's
    `fuse()` sets: it would shadow the class's.
    """
    new = cls.__new__(cls)
    new.__dict__ = {
        k: (type(v)(v) if k in ('_parameters', '_buffers', '_modules') else v)
        for k, v in module.__dict__.items()
        if k != 'forward'
    }
    return new


class Twin:
    """Mixin of every quantized block. `float_class` is the upstream class, `quantizer_names` the quantizers it adds."""

    float_class = None
    quantizer_names = ('input_quantizer',)

    @classmethod
    def suits(cls, block):
        """Whether `block` has the operation this twin is for."""
        return type(block) is cls.float_class

    @classmethod
    def from_float(cls, block):
        """The quantized twin of `block`, not calibrated yet."""
        twin = _without_copy(cls, block)
        for name in cls.quantizer_names:
            setattr(twin, name, Quantizer())
        return twin

    def to_float(self):
        """The upstream block again."""
        block = _without_copy(self.float_class, self)
        for name in self.quantizer_names:
            del block._modules[name]
        return block


class QuantConv2d(Twin, nn.Conv2d):
    """Convolution with its input quantized per tensor and its weight per output channel (axis 0)."""

    float_class = nn.Conv2d
    quantizer_names = ('input_quantizer', 'weight_quantizer')

    @classmethod
    def from_float(cls, block):
        twin = super().from_float(block)
        twin.weight_quantizer = Quantizer(axis=0)
        return twin

    def forward(self, x):  # [B, C, H, W] -> [B, K, H', W']
        return self._conv_forward(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)


class QuantResidual(Twin):
    """Bottleneck with its residual Add in INT8. `add_policy` says which addends pass its one quantizer:

    'both': the Add is an INT8 kernel by itself. 'residual': only the shortcut, so that a compiler may let the last
    convolution add it before it rounds (NVIDIA's advice for Conv+Add; here an activation stands between).
    """

    quantizer_names = ('add_quantizer',)
    add_policy = 'both'

    @classmethod
    def suits(cls, block):
        return super().suits(block) and block.add

    def to_float(self):
        block = super().to_float()
        block.__dict__.pop('add_policy', None)
        return block

    def forward(self, x):  # [B, C, H, W], same shape out
        branch = self.cv2(self.cv1(x))
        return self.add_quantizer(x) + (self.add_quantizer(branch) if self.add_policy == 'both' else branch)


class QuantBottleneck(QuantResidual, Bottleneck):
    float_class = Bottleneck


class QuantRepNBottleneck(QuantResidual, RepNBottleneck):
    float_class = RepNBottleneck


class _QuantPoolInput(Twin):
    """Down-sampling block that starts with an average pooling: INT8 only if its input and its output are quantized.

    The output side is the input quantizer of the convolutions that follow.
    """

    def forward(self, x):
        return super().forward(self.input_quantizer(x))


class QuantAConv(_QuantPoolInput, AConv):
    float_class = AConv


class QuantADown(_QuantPoolInput, ADown):
    float_class = ADown


class QuantCBFuse(Twin, CBFuse):
    """Sum of one map of each CBLinear, resized (nearest) to the last input; all addends share one quantizer."""

    float_class = CBFuse

    def forward(self, xs):  # xs[:-1]: tuples of [B, C, h, w]; xs[-1]: [B, C, H, W]
        # Added one by one, in upstream's order: an engine has INT8 kernels for Add, but none for a sum over a stack.
        size = xs[-1].shape[2:]
        maps = [F.interpolate(self.input_quantizer(x[j]), size=size, mode='nearest') for x, j in zip(xs[:-1], self.idx)]
        return reduce(torch.add, [*maps, self.input_quantizer(xs[-1])])


TWINS = {
    twin.float_class: twin
    for twin in (QuantConv2d, QuantBottleneck, QuantRepNBottleneck, QuantAConv, QuantADown, QuantCBFuse)
}
