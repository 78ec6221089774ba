"""Un-augmented images → amax of every quantizer.

Activations: one histogram of |x| per quantizer, collected on the device the model runs on without waiting for it, then one
search for the amax that loses least, for all of them together. Weights: the largest magnitude of each output channel, or
the amax of least squared error, of a histogram per channel.
"""

import torch

from models.quantize.calibration.amax_search import SEARCH, amax_mse
from models.quantize.quantizers import MIN_AMAX, collecting, named_quantizers
from utils.qat.core.distributed import all_reduce
from utils.qat.core.errors import QatError

BITS = 12
BINS = 1 << BITS
WEIGHT_BINS = 2048  # from 0 to the largest magnitude of a channel, which is known beforehand
MIN_EXPONENT = -100  # limits go down to 2^-100; no range is below MIN_AMAX
HISTC_CHUNK = 1 << 24  # torch.histc counts in the input's FP32, exact up to 2^24 per bin


class Histogram:
    """Histogram of |x| over [0, limit), BINS bins, where limit is a power of two that grows with the data.

    Powers of two make growing exact (neighbouring bins are added) and let histograms of different data be summed exactly.
    The limit lives on the device with the counts: to know it here would be to wait for the device. What is not finite is
    not counted, but seen in `largest`.
    Follows pytorch_quantization's calibrator protocol, as far as its TensorQuantizer calls it (`collect`).
    """

    def __init__(self, device='cpu'):
        self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)  # integers, exact up to 2^53
        self.exponent = torch.tensor(MIN_EXPONENT, dtype=torch.int32, device=device)  # limit = 2 ** exponent
        self.largest = torch.tensor(0.0, device=device)  # |x| of all so far; NaN once there was one

    def collect(self, x):
        """Count the values of `x` (any shape, float)."""
        x = x.detach().abs().float().flatten()  # a copy
        self.largest = torch.maximum(self.largest, x.max())
        self.grow(exponent_above(self.largest))
        self.counts += count(x.div_(bin_width(self.exponent)))

    def grow(self, exponent):
        """Raise the limit to 2 ** `exponent` (INT32 [], not below the present one)."""
        index = torch.arange(BINS, device=self.counts.device) >> (exponent - self.exponent).clamp(max=BITS)
        self.counts = torch.zeros_like(self.counts).index_add_(0, index, self.counts)
        self.exponent = exponent


def merge(histograms):
    """Each of `histograms` (a list, the same on every process of a torchrun) becomes that of what all processes saw, exactly.

    Three exchanges, however many there are.
    """
    largest = torch.stack([h.largest for h in histograms])
    largest = all_reduce(largest.nan_to_num(nan=float('inf'), posinf=float('inf')), 'MAX')  # a maximum may lose NaN
    exponents = all_reduce(torch.stack([h.exponent for h in histograms]), 'MAX')
    for histogram, exponent in zip(histograms, exponents):
        histogram.grow(exponent)
    counts = all_reduce(torch.stack([h.counts for h in histograms]))
    for histogram, *merged in zip(histograms, largest, counts):
        histogram.largest, histogram.counts = merged


def exponent_above(largest):
    """The exponents e, INT32, of the smallest limits 2^e above `largest` (FP32, any shape); 128 for what is not finite."""
    finite = largest.nan_to_num(nan=torch.finfo(torch.float32).max)
    return finite.clamp(min=2.0 ** (MIN_EXPONENT - 1)).frexp().exponent


def bin_width(exponent):
    """Of a histogram with the limit 2^exponent (INT32, any shape), FP32, exact."""
    return torch.exp2((exponent - BITS).double()).float()


def count(x):
    """How many of `x`, FP32 [n] in bins, lie in each: FP64 [BINS]. What is not finite lies in the first or in none."""
    if x.is_cuda:  # torch.bincount would wait for the device, to know the size of its result
        return sum(torch.histc(part, BINS, 0, BINS).double() for part in x.split(HISTC_CHUNK))
    return torch.bincount(x.nan_to_num_(0, 0).short(), minlength=BINS).double()  # torch.histc takes five times as long


def weight_amax(weight, method):
    """Range of each output channel. weight: float [K, ...]; method: 'max' or 'mse'. Returns FP32 [K]."""
    weight = weight.detach().abs().float().flatten(1)
    largest = weight.amax(1)
    if method == 'max':
        return largest
    width = largest.clamp(min=2.0**MIN_EXPONENT) / WEIGHT_BINS  # [K]
    index = (weight / width[:, None]).long().clamp_(max=WEIGHT_BINS - 1)
    counts = torch.zeros(len(weight), WEIGHT_BINS, dtype=torch.float64, device=weight.device)
    counts.scatter_add_(1, index, torch.ones_like(weight, dtype=torch.float64))
    return amax_mse(counts).float() * width


def calibrate_weights(model, method):
    """Set the amax of every weight quantizer by `method`, 'max' or 'mse'."""
    for module in model.modules():
        quantizer = getattr(module, 'weight_quantizer', None)
        if quantizer is not None:
            quantizer.set_amax(weight_amax(module.weight, method))


def require_values(histograms):
    """Raise QatError naming those of `histograms` (name → Histogram) that can have no amax."""
    largest = dict(zip(histograms, torch.stack([h.largest for h in histograms.values()]).tolist()))
    broken = [name for name, value in largest.items() if not value < float('inf')]
    if broken:
        raise QatError(
            f'calibration: {broken[0]} met a value that is not finite: the float model is broken, or the images'
        )
    empty = [name for name, value in largest.items() if value == 0]
    if empty:
        raise QatError(
            f'calibration: {len(empty)} quantizer(s) saw no data or only zeros: {", ".join(empty[:5])}'
            f'{" …" if len(empty) > 5 else ""}; use more or other images (--calib-images, train: in --data)'
        )


def histogram_amax(histograms, method, config):
    """The amax of each of `histograms`, FP32 [Q]. method: a key of amax_search.SEARCH. config: percentile."""
    counts, exponents = (torch.stack([getattr(h, key) for h in histograms.values()]) for key in ('counts', 'exponent'))
    return (SEARCH[method](counts, config) * bin_width(exponents)).float()


@torch.no_grad()
def collect(model, batches, calibrators):
    """Show `calibrators` (path of a quantizer → an object with `collect(x)`) what their quantizers see; all compute in float."""
    quantizers = named_quantizers(model)
    try:
        with collecting(model):
            for name, q in quantizers:
                q._calibrator, q._disabled = calibrators.get(name), name not in calibrators
            for images in batches:
                model(images)
    finally:
        for _, q in quantizers:
            q._calibrator = None


def observe(model, batches):
    """What every activation quantizer of `model` sees: path → Histogram. Under torchrun the batches of all processes count.

    batches: iterable of images, FP32 [B, 3, H, W] in 0..1 on the model's device.
    """
    device = next(model.parameters()).device
    histograms = {name: Histogram(device) for name, q in named_quantizers(model) if q._axis is None}
    collect(model, batches, histograms)
    merge(list(histograms.values()))
    return histograms


def set_ranges(model, ranges):
    """Give quantizers of `model` an amax, whether they had one before or not. ranges: path → amax."""
    quantizers = dict(named_quantizers(model))
    for path, amax in ranges.items():
        quantizers[path].set_amax(amax)


def raised_ranges(model):
    """{path of a quantizer: how many of its ranges are MIN_AMAX, to which smaller ones are raised}; a dead channel is one."""
    raised = {name: (q._amax <= MIN_AMAX).sum().item() for name, q in named_quantizers(model)}
    return {name: channels for name, channels in raised.items() if channels}


def calibrate(model, batches, config):
    """Every quantizer of `model` gets its amax, those of activations by what they see on `batches`; see `observe`.

    config: calib_method (a key of amax_search.SEARCH), percentile, weight_calib. Returns `raised_ranges`. Raises QatError naming the
    quantizers that saw no data, only zeros, or a value that is not finite.
    """
    histograms = observe(model, batches)
    require_values(histograms)
    calibrate_weights(model, config.weight_calib)
    set_ranges(model, dict(zip(histograms, histogram_amax(histograms, config.calib_method, config))))
    return raised_ranges(model)
