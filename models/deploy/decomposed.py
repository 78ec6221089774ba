"""Quantized model → the same model on integers: PyTorch's quantize and dequantize operators, and weights stored as INT8.

Compilers behind torch.export recognize these operators (`torch.ops.quantized_decomposed`). The results equal those of the
fake-quantizers bit for bit: rounding and limits are the same, and an INT8 weight times its scale is the rounded weight.
"""

from copy import deepcopy

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn as nn

from models.quantize.blocks import QuantSiLU
from models.quantize.quantizers import QMAX, QMIN, UNIT_SCALE, Quantizer
from utils.qat.core.upstream import Network

SIGNED, UNSIGNED = (0, QMIN, QMAX, torch.int8), (-QMIN, 0, QMAX - QMIN, torch.uint8)  # shift, limits and type


class RoundedActivation(nn.Module):
    """Q and DQ of an activation, with one scale and zero point."""

    rounds = True

    def __init__(self, scale: float, zero_point: int, unsigned: bool) -> None:
        super().__init__()
        shift, *limits = UNSIGNED if unsigned else SIGNED
        self.numbers = (scale, zero_point + shift, *limits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize `x`, of any shape."""
        ops = torch.ops.quantized_decomposed
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *self.numbers), *self.numbers)


class StoredWeight(nn.Module):
    """An INT8 weight with a scale for each output channel, and its DQ."""

    int8: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, quantizer: Quantizer, weight: torch.Tensor) -> None:
        super().__init__()
        scale = quantizer.scale.detach().clone()
        steps = weight.detach() * scale.reciprocal().view(-1, *[1] * (weight.dim() - 1))
        self.register_buffer('int8', steps.round().clamp(QMIN, QMAX).to(torch.int8))
        self.register_buffer('scale', scale)
        self.register_buffer('zero_point', torch.zeros_like(scale, dtype=torch.int64))

    def forward(self, _: None) -> torch.Tensor:
        """Dequantize the stored weight: FP32."""
        return torch.ops.quantized_decomposed.dequantize_per_channel(
            self.int8, self.scale, self.zero_point, 0, QMIN, QMAX, torch.int8
        )


class GriddedWeight(nn.Module):
    """The same weight as FP32 values, and its Q and DQ, for a converter that wants to store the integers itself.

    No integer is -128: kernels for ARM add two products of INT8 in 16 bits.
    """

    def __init__(self, quantizer: Quantizer, weight: torch.Tensor) -> None:
        super().__init__()
        stored = StoredWeight(quantizer, weight)
        stored.int8.clamp_(min=-QMAX)
        self.register_buffer('weight', stored(None))
        self.register_buffer('scale', stored.scale)
        self.register_buffer('zero_point', stored.zero_point)

    def forward(self, _: None) -> torch.Tensor:
        """Return the weight: FP32."""
        ops, grid = torch.ops.quantized_decomposed, (self.scale, self.zero_point, 0, -QMAX, QMAX, torch.int8)
        return ops.dequantize_per_channel(ops.quantize_per_channel(self.weight, *grid), *grid)


class SiLUOnIntegers(nn.Module):
    """The twin of SiLU, with Q and DQ behind the sigmoid too."""

    def __init__(self, rounded_input: nn.Module, unsigned: bool) -> None:
        super().__init__()
        self.rounded_input, self.rounded_unit = rounded_input, RoundedActivation(UNIT_SCALE, QMIN, unsigned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute SiLU: any shape → the same shape."""
        x = self.rounded_input(x)
        return x * self.rounded_unit(torch.sigmoid(x))


class Passed(nn.Identity):
    """In place of a quantizer that is off."""

    rounds = False


def on_integers(model: Network, unsigned: bool = False, stored: type[nn.Module] = StoredWeight) -> Network:
    """Copy a model with each quantizer replaced; a float model is copied as it is.

    Args:
        model: in eval mode, calibrated.
        unsigned: store activations as UINT8, with zero points 128 higher, as the INT8 kernels for x86 require; the values are the same.
        stored: StoredWeight or GriddedWeight, the form of a weight.
    """
    model = deepcopy(model)
    made: dict[Quantizer, nn.Module] = {}
    for block in list(model.modules()):
        for name, quantizer in list(block._modules.items()):
            if not isinstance(quantizer, Quantizer):
                continue
            if not quantizer.rounds:
                made[quantizer] = Passed()
            elif quantizer._axis is not None:
                made[quantizer] = stored(quantizer, block.weight)
                block.register_parameter('weight', None)  # or it would be stored beside the INT8 one
            elif quantizer not in made:
                made[quantizer] = RoundedActivation(quantizer.scale.item(), int(quantizer._zero_point), unsigned)
            setattr(block, name, made[quantizer])
    for block in list(model.modules()):
        for name, part in block.named_children():
            if isinstance(part, QuantSiLU) and part.input_quantizer.rounds:
                setattr(block, name, SiLUOnIntegers(part.input_quantizer, unsigned))
    return model
