"""The fake-quantizer: one class for activations and weights, and the contexts that switch it.

This is the only file that imports pytorch_quantization (2.1.3). The state machine (enabled, quantizing, collecting) is
its TensorQuantizer. The arithmetic is PyTorch's native `fake_quantize_*` operators, because the ONNX exporter turns
these into QuantizeLinear/DequantizeLinear:

    scale = amax / 127,  q = clamp(round_half_even(x / scale) + zero_point, -128, 127),  y = (q - zero_point) * scale

The zero point is 0, except for targets whose kernels take any: there it fits the values of the activation.

Class paths in this file are a file format, because checkpoints pickle them. Do not rename or move the classes.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from absl import logging as absl_logging
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from utils.qat.compat import imported_when_called
from utils.qat.core.errors import QatError, one_line
from utils.qat.core.log import LOGGER

# At import the library scripts a function, and imports one of SciPy for a calibrator; nothing here uses either
with warnings.catch_warnings(), imported_when_called('scipy.stats', 'entropy'):
    warnings.filterwarnings('ignore', message='.torch.jit.script. is deprecated', category=FutureWarning)
    from pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
    from pytorch_quantization.tensor_quant import QuantDescriptor

QMIN, QMAX = -128, 127  # the full INT8 range, as ONNX and TensorRT compute it
# Scales are FP16 numbers, because a strongly typed engine stores them in FP16. So the simulation is exact for every
# engine. The smallest scale is FP16's smallest normal number (6.1e-5), the largest is its largest number. Rounding
# moves a range by 0.05 %.
MIN_AMAX, MAX_AMAX = QMAX * 2.0**-14, QMAX * 65504.0
UNIT_SCALE, UNIT_MAX = 2.0**-8, 255  # of unsigned INT8 for values in 0..1
LOWER = 1.02  # how far the range of logits goes below minus its end: more than a scale's rounding

absl_logging.set_verbosity(absl_logging.ERROR)  # the library warns at every construction and load
logging.getLogger('absl').propagate = False


def usable_scale(amax: torch.Tensor) -> torch.Tensor:
    """Round amax / 127 (any shape) to FP16 numbers, within MIN_AMAX and MAX_AMAX; the result is FP32."""
    return (amax.float().clamp(MIN_AMAX, MAX_AMAX) / QMAX).half().float()


def shifted_range(amax: torch.Tensor, lowest: torch.Tensor, highest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scale and zero point for the part of -amax..amax that has values, `lowest` to `highest`, FP32 [].

    Returns scales (FP32) and zero points (INT32), in the shape of `amax`. The range contains 0, because convolutions pad
    with 0.
    """
    low, high = torch.maximum(-amax, lowest.clamp(max=0)), torch.minimum(amax, highest.clamp(min=0))
    scale = usable_scale((high - low) * QMAX / (QMAX - QMIN))
    return scale, (QMIN - low / scale).round().clamp(QMIN, QMAX).int()


class Quantizer(TensorQuantizer):
    """Fake quantization to INT8: per tensor (`axis` None, activations) or per slice of an axis (weights).

    It has two buffers. `_amax` is 127 times the scale (with zero point 0 the largest magnitude): FP32 at any precision of
    the model, shape [] or [C]. `_zero_point` is INT32 of the same shape. Before `set_amax` the quantizer
    can only collect statistics.
    """

    least = -float('inf')  # smaller values do not widen the range
    tied = True  # shares its scale with the tensors that only moves are between, see scales.py
    shifts = False  # the zero point follows from the values, see `shifted_range`

    def __init__(self, axis: int | None = None) -> None:
        super().__init__(QuantDescriptor(num_bits=8, axis=axis, fake_quant=True))
        self._calibrator: object = None  # attached during calibration only, so that checkpoints stay small

    @property
    def rounds(self) -> bool:
        """Whether inputs are rounded: neither while statistics are collected nor when the quantizer is off."""
        return self._if_quant and not self._disabled

    def steps(self, amax: torch.Tensor, *ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute scales (FP32) and zero points (INT32) for values up to `amax`, in its shape.

        `ends` are the smallest and the largest value, FP32 []; they are used only if the zero point depends on them.
        """
        if self.shifts and ends:
            return shifted_range(amax, *ends)
        return usable_scale(amax), torch.zeros_like(amax, dtype=torch.int32)

    def set_amax(self, amax: torch.Tensor, *ends: torch.Tensor) -> None:
        """Set the range, [] or [C], to at least MIN_AMAX, so that the scale is an FP16 number; `ends`: see `steps`."""
        scale, zero_point = self.steps(amax.detach(), *ends)
        self.register_buffer('_amax', scale * QMAX)  # 11 bits times 7: exact in FP32
        self.register_buffer('_zero_point', zero_point)

    @property
    def scale(self) -> torch.Tensor:
        """The size of one INT8 step, FP32 with a value of FP16, [] or [C]."""
        return self._amax / QMAX

    def _quant_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fixed = self.__dict__.get('_fixed')
        return fixed(self, inputs) if fixed else self._fake_quantize(inputs, self.scale, self._zero_point)

    def _fake_quantize(self, inputs: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
        """Quantize and dequantize. Scale and zero point are tensors, or per tensor also numbers."""
        if _without_gradient(inputs):
            if self._axis is None:
                return rounded(inputs, torch.as_tensor(scale), int(zero_point))
            return rounded(inputs, _along(self._axis, scale, inputs))
        if self._axis is None:
            return torch.fake_quantize_per_tensor_affine(inputs, scale, zero_point, QMIN, QMAX)
        return torch.fake_quantize_per_channel_affine(inputs, scale, zero_point, self._axis, QMIN, QMAX)

    def _apply(self, fn: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> 'Quantizer':
        """Move with the model but stay FP32, so that `model.half()` does not change the scale."""
        amax = self._buffers.get('_amax')
        super()._apply(fn, *args, **kwargs)
        if amax is not None and self._amax.dtype != torch.float32:
            self._amax: torch.Tensor = amax.to(self._amax.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, torch.Tensor], prefix: str, *args: object, **kwargs: object
    ) -> None:
        """Create the buffers of a calibrated state dict; the library would create them on the GPU."""
        if prefix + '_amax' in state_dict and not hasattr(self, '_amax'):
            self.set_amax(state_dict[prefix + '_amax'])
        torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


class SiLUQuantizer(Quantizer):
    """Quantizer of the input of SiLU: values below `least` need no range, because SiLU is nearly 0 there."""

    least = -8.0  # SiLU: -0.003


class OutputQuantizer(Quantizer):
    """Quantizer of an output of the head at a stride.

    All strides have the range that suffices for all of them, see `join_strides`, because a file may join them; `separate` gives
    this one its own. Older checkpoints have a single quantizer for all strides.

    Attributes:
        own: amax, the negative of the smallest value, and the largest value of this stride, FP32 [3].
    """

    tied = False
    own = None  # type: torch.Tensor | None

    @override
    def set_amax(self, amax: torch.Tensor, *ends: torch.Tensor) -> None:
        """Set the range of this stride."""
        self.own = torch.stack((amax, -ends[0], ends[1]))
        self.take(self.own)

    def take(self, range_: torch.Tensor) -> None:
        """Take a range, as in `own`."""
        amax, low, high = range_
        super().set_amax(amax, -low, high)

    def separate(self) -> None:
        """Take the range of this stride alone."""
        if self.own is not None:
            self.take(self.own.to(self._amax.device))


class LogitQuantizer(OutputQuantizer):
    """Quantizer of the classes' logits: none beyond ±8, which are scores of 0.0003 and 0.9997, and no negative zero point.

    Frigate subtracts the zero point from INT8 in INT8: a negative one would overflow. Logits up to 4, a score of 0.98, always fit:
    fine-tuning raises them above those of the calibration.
    """

    least, sure = -8.0, 4.0

    @override
    def steps(self, amax: torch.Tensor, *ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute scale and zero point, see `Quantizer.steps`."""
        lowest, highest = ends
        highest = highest.clamp(self.sure, -self.least)
        amax = amax.clamp(self.sure * LOWER, -self.least * LOWER)
        return super().steps(amax, torch.minimum(lowest, -highest * LOWER), highest)

    @override
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Clip while it is switched off too: what no integer can show must not count when calibrations are compared with float."""
        return super().forward(inputs.clamp(self.least, -self.least) if self._disabled else inputs)


def join_strides(quantizers: Collection[Quantizer]) -> None:
    """Give all strides of an output of the head the range that suffices for each of them."""
    for kind in (OutputQuantizer, LogitQuantizer):
        strides = [q for q in quantizers if type(q) is kind]
        for each in strides:
            each.take(torch.stack([q.own for q in strides if q.own is not None]).amax(0))


class UnitQuantizer(Quantizer):
    """Quantizer of values in 0..1, as `rounded_unit` in signed integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('_amax', torch.tensor(UNIT_SCALE * QMAX))
        self.register_buffer('_zero_point', torch.tensor(QMIN, dtype=torch.int32))


class ImageQuantizer(Quantizer):
    """Quantizer of the images: its 256 integers are the values of a pixel, 0..255, whatever the calibration saw."""

    @override
    def set_amax(self, amax: torch.Tensor, *ends: torch.Tensor) -> None:
        """Set the scale 1/255 and the zero point -128."""
        self.register_buffer('_amax', torch.full_like(amax, QMAX / UNIT_MAX))
        self.register_buffer('_zero_point', torch.full_like(amax, QMIN, dtype=torch.int32))


def rounded_unit(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize values in 0..1, such as a sigmoid, as unsigned integers with the scale UNIT_SCALE."""
    if _without_gradient(x):
        return (x / UNIT_SCALE).round_().clamp_(max=UNIT_MAX).mul_(UNIT_SCALE)
    return torch.fake_quantize_per_tensor_affine(x, UNIT_SCALE, 0, 0, UNIT_MAX)


def _without_gradient(inputs: torch.Tensor) -> bool:
    """Tell whether PyTorch's operators can be replaced: FP32 on a CPU, without a backward pass and without an exporter.

    On a CPU their rounding takes ten times as long. On a GPU they are one kernel, and the number of kernels counts.
    """
    return not (torch.is_grad_enabled() or torch.jit.is_tracing()) and _rounds_slowly(inputs)


def _rounds_slowly(inputs: torch.Tensor) -> bool:
    """Tell whether PyTorch's operators round value by value: FP32 on a CPU."""
    return inputs.device.type == 'cpu' and inputs.dtype == torch.float32


def rounded(inputs: torch.Tensor, scale: torch.Tensor, zero_point: int = 0) -> torch.Tensor:
    """Quantize and dequantize FP32 as PyTorch's operators do, step by step, without a gradient; `scale` broadcasts."""
    return (inputs * scale.reciprocal()).round_().clamp_(QMIN - zero_point, QMAX - zero_point).mul_(scale)


class _Rounded(torch.autograd.Function):
    """Fake quantization as `rounded`, with a gradient that passes where the input is inside the range.

    On a CPU the forward pass takes a third of the time of PyTorch's operator.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
        steps = (inputs * torch.tensor(scale).reciprocal()).round_()
        kept = steps.clamp(QMIN - zero_point, QMAX - zero_point)
        ctx.save_for_backward(kept == steps)
        return kept.mul_(scale)

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None


def _along(axis: int, scale: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Reshape `scale` [C] so that it broadcasts along `axis` of `inputs`."""
    return scale.view([-1 if i == axis else 1 for i in range(inputs.dim())])


def named_quantizers(model: nn.Module) -> list[tuple[str, Quantizer]]:
    """List every distinct quantizer with its path; a quantizer of several modules has its first path."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Quantizer)]


def has_ranges(model: nn.Module) -> bool:
    """Tell whether a model is calibrated: all of its quantizers have ranges."""
    return all(hasattr(q, '_amax') for _, q in named_quantizers(model))


def require_ranges(model: nn.Module) -> None:
    """Raise QatError for a model that was prepared and not calibrated."""
    if not has_ranges(model):
        raise QatError('the model has no ranges yet; calibrate it first')


def has_zero_points(model: nn.Module) -> bool:
    """Tell whether a calibrated model has a zero point other than 0."""
    return any(q._zero_point.any() for _, q in named_quantizers(model))


@contextlib.contextmanager
def _switched(model: nn.Module, **flags: bool) -> Iterator[nn.Module]:
    """Set flags of all quantizers inside this context."""
    quantizers = [q for _, q in named_quantizers(model)]
    before = [{k: getattr(q, k) for k in flags} for q in quantizers]
    try:
        for q in quantizers:
            q.__dict__.update(flags)
        yield model
    finally:
        for q, state in zip(quantizers, before):
            q.__dict__.update(state)


def quantizers_off(model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
    """Let `model` compute in float inside this context, as if it had no quantizers."""
    return _switched(model, _disabled=True)


def collecting(model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
    """Let quantizers show their inputs to their calibrators inside this context; the inputs pass unchanged."""
    return _switched(model, _disabled=False, _if_calib=True, _if_quant=False)


@lru_cache
def gpu_kernels(device: torch.device) -> ModuleType | None:
    """Return the module gpu/rounding.py; None if `device` is no GPU, or if the kernels do not work there, which is logged."""
    if device.type != 'cuda':
        return None
    try:
        from models.quantize.gpu import rounding

        if rounding.works_on(device):
            return rounding
        why = 'they round otherwise than PyTorch'
    except Exception as e:  # Triton and the C compiler that it calls raise errors of many kinds
        why = f'{type(e).__name__}: {one_line(e)}'
    LOGGER.info(f"rounding by PyTorch's kernels, which is slower: those of Triton do not work here ({why})")
    return None


class FixedScales:
    """Context in which a calibrated model caches its scales instead of computing them at every call.

    The results are the same, with fewer kernels, and the host never waits for the device. Per tensor the operator also
    takes a plain number as scale. Per channel it checks integer zero points on the host, so here they are floats.

    With `share` a tensor that reaches one quantizer on several paths (residual Add and convolution) is rounded once per
    context, and kept once for the backward pass. The gradients of these paths are then added in another order.
    """

    def __init__(self, model: nn.Module, share: bool = False) -> None:
        require_ranges(model)
        quantizers = [q for _, q in named_quantizers(model)]
        per_tensor = [q for q in quantizers if q._axis is None]
        pairs = [torch.stack((q.scale, q._zero_point)) for q in per_tensor]
        numbers = torch.stack(pairs).tolist() if pairs else []  # the one wait
        # Quantizer → scale and zero point, as the operators take them
        self.scales: dict[Quantizer, tuple[torch.Tensor | float, torch.Tensor | int]] = {
            q: (q.scale, torch.zeros_like(q._amax)) for q in quantizers if q._axis is not None
        }
        self.scales.update({q: (scale, int(zero_point)) for q, (scale, zero_point) in zip(per_tensor, numbers)})
        self.rounded = WeakTensorKeyDictionary() if share else None  # tensor → {quantizer: rounded}
        self.kernels = gpu_kernels(quantizers[0]._amax.device) if quantizers else None

    def _quantize(self, quantizer: Quantizer, inputs: torch.Tensor) -> torch.Tensor:
        scale, zero_point = self.scales[quantizer]
        result = None
        if quantizer._axis is None:
            if self.kernels:
                result = self.kernels.rounded(inputs, scale, zero_point)
            elif inputs.requires_grad and _rounds_slowly(inputs):
                result = _Rounded.apply(inputs, scale, zero_point)
        return quantizer._fake_quantize(inputs, scale, zero_point) if result is None else result

    def _forward(self, quantizer: Quantizer, inputs: torch.Tensor) -> torch.Tensor:
        if self.rounded is None or quantizer._axis is not None:
            return self._quantize(quantizer, inputs)
        known = self.rounded.setdefault(inputs, {})
        if quantizer not in known:
            known[quantizer] = self._quantize(quantizer, inputs)
        return known[quantizer]

    def __enter__(self) -> None:
        for q in self.scales:
            q.__dict__['_fixed'] = self._forward

    def __exit__(self, *_: object) -> None:
        for q in self.scales:
            del q.__dict__['_fixed']
        if self.rounded is not None:
            self.rounded.clear()


class RoundedOnce(FixedScales):
    """Context for passes without gradients: each weight is rounded once, each tensor once per pass. The results are the same.

    The model's weights and scales must not change after construction.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, share=True)
        self.weights: dict[Quantizer, torch.Tensor] = {}

    def _forward(self, quantizer: Quantizer, inputs: torch.Tensor) -> torch.Tensor:
        if quantizer._axis is None:
            return super()._forward(quantizer, inputs)
        if quantizer not in self.weights:
            self.weights[quantizer] = self._quantize(quantizer, inputs)
        return self.weights[quantizer]
