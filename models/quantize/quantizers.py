"""The fake-quantizer: one class for activations and weights, and the contexts that switch it.

The only file that imports pytorch_quantization (2.1.3). Its TensorQuantizer brings the state machine (enabled,
quantizing, collecting) under the names users of such checkpoints know; the arithmetic here is PyTorch's native
`fake_quantize_*` operators, because those are what the ONNX exporter turns into QuantizeLinear/DequantizeLinear:

    scale = amax / 127,  q = clamp(round_half_even(x / scale), -128, 127),  y = q * scale

Class paths in this file are a file format: checkpoints pickle them. Do not rename or move.
"""

import contextlib
import logging
import warnings

import torch
from absl import logging as absl_logging
from torch.utils.weak import WeakTensorKeyDictionary

with warnings.catch_warnings():  # the library scripts a function when it is imported; nothing here calls it
    warnings.filterwarnings('ignore', message='.torch.jit.script. is deprecated', category=FutureWarning)
    from pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
    from pytorch_quantization.tensor_quant import QuantDescriptor

QMIN, QMAX = -128, 127  # the full INT8 range, as ONNX and TensorRT compute it
# Scales are FP16 numbers, because a strongly typed engine stores them so: what is simulated here is then exact in every
# engine. The smallest is FP16's smallest normal number (6.1e-5), the largest its largest; rounding moves a range by 0.05 %.
MIN_AMAX, MAX_AMAX = QMAX * 2.0**-14, QMAX * 65504.0

absl_logging.set_verbosity(absl_logging.ERROR)  # the library warns at every construction and load
logging.getLogger('absl').propagate = False


def usable_scale(amax):
    """amax, values >= 0 of any shape → the scales that it gets: FP32, the nearest FP16 numbers, see MIN_AMAX."""
    return (amax.float().clamp(MIN_AMAX, MAX_AMAX) / QMAX).half().float()


class Quantizer(TensorQuantizer):
    """Fake-quantize a tensor to INT8: per tensor (`axis=None`, activations) or per slice of `axis` (weights).

    Buffers: `_amax`, the largest magnitude that INT8 represents, FP32 whatever the model's precision, shape [] or [C];
    `_zero_point`, INT32 zeros of the same shape. Until `set_amax` the quantizer can only collect statistics.
    """

    def __init__(self, axis=None):
        super().__init__(QuantDescriptor(num_bits=8, axis=axis, fake_quant=True))
        self._calibrator = None  # attached while calibrating only, so that checkpoints stay small

    def set_amax(self, amax):
        """Take `amax` (tensor, shape [] or [C], values >= 0), rounded to the nearest whose scale is an FP16 number;
        values under MIN_AMAX are raised to it."""
        amax = usable_scale(amax.detach()) * QMAX  # 11 bits times 7: exact in FP32
        self.register_buffer('_amax', amax)
        self.register_buffer('_zero_point', torch.zeros_like(amax, dtype=torch.int32))

    @property
    def scale(self):
        """Real value of one INT8 step, FP32 (an FP16 number), shape [] or [C]."""
        return self._amax / QMAX

    def _quant_forward(self, inputs):
        """Quantize and dequantize `inputs` (any float dtype; shape unchanged)."""
        fixed = self.__dict__.get('_fixed')
        return fixed(self, inputs) if fixed else self._fake_quantize(inputs, self.scale, self._zero_point)

    def _fake_quantize(self, inputs, scale, zero_point):
        if _without_gradient(inputs):
            return rounded(inputs, scale if self._axis is None else _along(self._axis, scale, inputs))
        if self._axis is None:
            return torch.fake_quantize_per_tensor_affine(inputs, scale, zero_point, QMIN, QMAX)
        return torch.fake_quantize_per_channel_affine(inputs, scale, zero_point, self._axis, QMIN, QMAX)

    def _apply(self, fn, *args, **kwargs):
        """Move with the model but stay FP32: a scale rounded by `model.half()` is another scale."""
        amax = self._buffers.get('_amax')
        super()._apply(fn, *args, **kwargs)
        if amax is not None and self._amax.dtype != torch.float32:
            self._amax = amax.to(self._amax.device)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Create the buffers a calibrated state dict brings (the library would put them on the GPU)."""
        if prefix + '_amax' in state_dict and not hasattr(self, '_amax'):
            self.set_amax(state_dict[prefix + '_amax'])
        torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)

    def extra_repr(self):
        where = 'per-tensor' if self._axis is None else f'axis={self._axis}'
        return (
            f'int8 {where} amax={self._short_amax() if hasattr(self, "_amax") else None}'
            f'{" disabled" if self._disabled else ""}'
        )


def _without_gradient(inputs):
    """Whether the operators' mask for the backward pass is made for nobody, on a CPU: their rounding takes ten times as long.
    On a GPU they are one kernel, which is what counts there; an exporter looks for them."""
    return (
        not (torch.is_grad_enabled() or torch.jit.is_tracing())
        and inputs.device.type == 'cpu'
        and inputs.dtype == torch.float32
    )


def rounded(inputs, scale):
    """What the operators compute, in the order in which they do, without gradient; scale: FP32, of a shape that broadcasts."""
    return (inputs * scale.reciprocal()).round_().clamp_(QMIN, QMAX).mul_(scale)


def _along(axis, scale, inputs):
    """`scale` [C], to be multiplied with `inputs` along `axis`."""
    return scale.view([-1 if i == axis else 1 for i in range(inputs.dim())])


def named_quantizers(model):
    """(path, Quantizer) of every distinct quantizer; one shared by several modules appears under its first path."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, Quantizer)]


@contextlib.contextmanager
def _switched(model, **flags):
    quantizers = [q for _, q in named_quantizers(model)]
    before = [{k: getattr(q, k) for k in flags} for q in quantizers]
    try:
        for q in quantizers:
            q.__dict__.update(flags)
        yield model
    finally:
        for q, state in zip(quantizers, before):
            q.__dict__.update(state)


def quantizers_off(model):
    """Context: `model` computes in float, as if no quantizer were there."""
    return _switched(model, _disabled=True)


def collecting(model):
    """Context: quantizers with a calibrator show it every tensor they see and pass the tensor on unchanged."""
    return _switched(model, _disabled=False, _if_calib=True, _if_quant=False)


class FixedScales:
    """Context: `model` uses the scales that it had when this was made, which are not computed again at every call.

    The results are the same; there are fewer kernels, and the host never waits for the device: per tensor the operator takes
    a plain number as well, and per channel it reads back only zero points that are integers, to check them.
    share: a tensor that passes one quantizer on several ways (residual Add and convolution, two branches) is rounded, and
    kept for the backward pass, once per context. Gradients of these ways are then added in another order.
    """

    def __init__(self, model, share=False):
        quantizers = [q for _, q in named_quantizers(model)]
        per_tensor = [q for q in quantizers if q._axis is None]
        numbers = torch.stack([q.scale for q in per_tensor]).tolist()  # the one wait
        self.scales = {q: (q.scale, torch.zeros_like(q._amax)) for q in quantizers if q._axis is not None}
        self.scales.update({q: (number, 0) for q, number in zip(per_tensor, numbers)})
        self.rounded = WeakTensorKeyDictionary() if share else None  # tensor → {quantizer: rounded}

    def _quantize(self, quantizer, inputs):
        return quantizer._fake_quantize(inputs, *self.scales[quantizer])

    def _forward(self, quantizer, inputs):
        if self.rounded is None or quantizer._axis is not None:
            return self._quantize(quantizer, inputs)
        known = self.rounded.setdefault(inputs, {})
        if quantizer not in known:
            known[quantizer] = self._quantize(quantizer, inputs)
        return known[quantizer]

    def __enter__(self):
        for q in self.scales:
            q.__dict__['_fixed'] = self._forward

    def __exit__(self, *_):
        for q in self.scales:
            del q.__dict__['_fixed']
        if self.rounded is not None:
            self.rounded.clear()
