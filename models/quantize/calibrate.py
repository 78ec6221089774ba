"""Un-augmented images → amax of every quantizer.

Activations: one histogram of |x| per quantizer, collected on the device the model runs on, then one search for the
amax that loses least. Weights: the largest magnitude of each output channel.

Source of the criteria: Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602), section 5.
"""
import torch

from models.quantize.quantizers import MIN_AMAX, QMAX, QMIN, collecting, named_quantizers
from utils.qat.errors import QatError

BINS = 4096
CANDIDATES = 512  # amax values tried by the MSE search
HISTC_CHUNK = 1 << 24  # torch.histc counts in the input's FP32, exact up to 2^24 per bin


class Histogram:
    """Histogram of |x| over [0, limit), BINS bins, where limit is a power of two that grows with the data.

    Powers of two make growing exact (pairs of bins are added) and let histograms of different data be summed exactly.
    Follows pytorch_quantization's calibrator protocol, as far as its TensorQuantizer calls it (`collect`).
    """

    def __init__(self, name='a histogram'):
        self.name = name  # for messages
        self.counts = None  # FP64 [BINS]: integers, exact up to 2^53
        self.exponent = None  # limit = 2 ** exponent

    def collect(self, x):
        """Count the values of `x` (any shape, float, finite)."""
        x = x.detach().abs().float().flatten()
        largest = x.max().item()
        if largest == 0:
            return
        if largest != largest or largest == float('inf'):
            raise QatError(f'calibration: {self.name} met a value that is not finite: the float model is broken, or the images')
        exponent = int(torch.tensor(largest).frexp().exponent)  # 2^(e-1) <= largest < 2^e
        if self.counts is None:
            self.counts, self.exponent = torch.zeros(BINS, dtype=torch.float64, device=x.device), exponent
        while self.exponent < exponent:
            self._grow()
        limit = 2.0 ** self.exponent
        for part in x.split(HISTC_CHUNK):
            self.counts += torch.histc(part, BINS, 0, limit).double()

    def _grow(self):
        """Double the limit."""
        pairs = self.counts.view(BINS // 2, 2).sum(1)
        self.counts = torch.cat((pairs, torch.zeros_like(pairs)))
        self.exponent += 1

    @property
    def edges(self):
        """Upper edges of the bins, FP64 [BINS]."""
        return torch.arange(1, BINS + 1, dtype=torch.float64, device=self.counts.device) * 2.0 ** self.exponent / BINS


def amax_max(hist):
    """Upper edge of the last bin that holds anything: nothing is clipped."""
    return hist.edges[hist.counts.nonzero().max()]


def amax_percentile(hist, percentile):
    """The smallest bin edge that covers `percentile` % of the values."""
    share = hist.counts.cumsum(0) / hist.counts.sum()
    return hist.edges[torch.searchsorted(share, share.new_tensor(percentile / 100)).clamp(max=BINS - 1)]


def amax_mse(hist):
    """The amax of least squared error between the histogram's values and their INT8 approximation."""
    top = hist.counts.nonzero().max() + 1
    counts, edges = hist.counts[:top].float(), hist.edges[:top].float()
    centers = edges - edges[0] / 2  # [N]
    tried = edges[torch.linspace(top // 16, top - 1, CANDIDATES, device=edges.device).round().long().unique()]
    scale = tried[:, None] / QMAX  # [K, 1]
    error = (centers / scale).round_().clamp_(QMIN, QMAX).mul_(scale).sub_(centers).square_() @ counts  # [K]
    return tried[error.argmin()]


SEARCH = {
    'mse': lambda hist, config: amax_mse(hist),
    'percentile': lambda hist, config: amax_percentile(hist, config.percentile),
    'max': lambda hist, config: amax_max(hist),
}


def calibrate_weights(model):
    """Set the amax of every weight quantizer to the largest magnitude of each output channel."""
    for module in model.modules():
        quantizer = getattr(module, 'weight_quantizer', None)
        if quantizer is not None:
            quantizer.set_amax(module.weight.detach().abs().amax(dim=(1, 2, 3)))  # [K]


@torch.no_grad()
def calibrate(model, batches, config):
    """Give every quantizer of `model` its amax, whether it had one before or not.

    batches: iterable of images, FP32 [B, 3, H, W] in 0..1 on the model's device. config: calib_method, percentile.
    Returns {path of a quantizer: how many of its ranges were raised to MIN_AMAX}; a dead channel is one.
    Raises QatError naming the quantizers that saw no data or only zeros.
    """
    calibrate_weights(model)
    quantizers = named_quantizers(model)
    waiting = {name: q for name, q in quantizers if q._axis is None}
    try:
        for name, q in waiting.items():
            q._calibrator = Histogram(name)
        with collecting(model):
            for _, q in quantizers:
                q._disabled = q._axis is not None  # weights are calibrated already
            for images in batches:
                model(images)
        empty = [name for name, q in waiting.items() if q._calibrator.counts is None]
        if empty:
            raise QatError(f"calibration: {len(empty)} quantizer(s) saw no data or only zeros: {', '.join(empty[:5])}"
                           f"{' …' if len(empty) > 5 else ''}; use more or other images (--calib-images, train: in --data)")
        for q in waiting.values():
            q.set_amax(SEARCH[config.calib_method](q._calibrator, config))
    finally:
        for q in waiting.values():
            q._calibrator = None
    raised = {name: (q._amax <= MIN_AMAX).sum().item() for name, q in quantizers}
    return {name: channels for name, channels in raised.items() if channels}
