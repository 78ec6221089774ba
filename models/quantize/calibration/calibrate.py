"""Set the amax of every quantizer from un-augmented images.

Activations: each quantizer collects a histogram of |x| on the model's device, and the host does not wait. Then one search
finds the amax of all histograms at once. Weights: the amax of an output channel is its largest magnitude.

Each search takes `counts`, FP64 [Q, N]: a row is the histogram of |x| of a quantizer, and bin j has the values in [j, j
+ 1). It returns the amax of each row, FP64 [Q], in bins. Every candidate is a whole number of bins, so the search needs no
bin widths, although they differ from row to row. One table of INT8 cells serves all rows, and the sum over the bins of
a cell is a difference of running sums.

Source of the criteria: Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602), section 5.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
import torch.nn.functional as F

from models.quantize.quantizers import MIN_AMAX, QMAX, Quantizer, collecting, join_strides, named_quantizers
from utils.qat.config.qat import PtqConfig
from utils.qat.core.distributed import all_reduce
from utils.qat.core.errors import QatError
from utils.qat.core.upstream import Network

CELLS = QMAX + 1  # INT8 values that are not negative
SMALLEST = CELLS  # the smallest candidate, in bins: below it an INT8 step is finer than a bin
TRIED = 512  # candidates whose error is computed at once; together they need 16 MB per intermediate tensor
REDUCED = QMAX // 2  # of weights with --reduce-range
BITS = 12
BINS = 1 << BITS
MIN_EXPONENT = -100  # the smallest limit is 2^-100, because no range is below MIN_AMAX
HISTC_CHUNK = 1 << 24  # values: torch.histc counts in FP32, which is exact up to 2^24 per bin


def added(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one shape, at least one, one after the other."""
    return reduce(torch.add, tensors)


def amax_max(counts: torch.Tensor) -> torch.Tensor:
    """Find the upper edge of the last bin that is not empty: nothing is clipped."""
    edges = torch.arange(1, counts.shape[1] + 1, dtype=counts.dtype, device=counts.device)
    return ((counts > 0) * edges).amax(1)


def amax_percentile(counts: torch.Tensor, percentile: float) -> torch.Tensor:
    """Find the smallest bin edge that covers `percentile` % of the values."""
    share = counts.cumsum(1) / counts.sum(1, keepdim=True)
    wanted = share.new_full((len(share), 1), percentile / 100)
    return (torch.searchsorted(share, wanted)[:, 0] + 1).clamp(max=counts.shape[1]).double()


def amax_mse(counts: torch.Tensor) -> torch.Tensor:
    """Find the amax with the least squared error of the INT8 approximation.

    Every value counts as the centre of its bin. Let s be a step, b(q) the first bin that rounds to q or more, T0 the
    sum of counts from a bin to the end, and T1 the same sum of counts x centre. Then the error is a constant, the error
    if all values became 0, plus the sum over q = 1..127 of (2q - 1) s² T0[b(q)] - 2 s T1[b(q)].
    """
    bins = counts.shape[1]
    tried = torch.arange(SMALLEST, bins + 1, dtype=torch.float64, device=counts.device)  # [K]
    q = torch.arange(1, CELLS, dtype=torch.float64, device=counts.device)
    scale = tried[:, None] / QMAX
    first = ((q - 0.5) * scale - 0.5).ceil().long().clamp(max=bins)  # [K, 127]
    centers = torch.arange(bins, dtype=torch.float64, device=counts.device) + 0.5
    error = (
        F.embedding_bag(first, _to_the_end(counts), mode='sum', per_sample_weights=(2 * q - 1).expand(len(tried), -1))
        * scale
        - 2 * F.embedding_bag(first, _to_the_end(counts * centers), mode='sum')
    ) * scale  # [K, Q]
    return _best(error.t(), tried, counts)


def amax_power(counts: torch.Tensor, power: float) -> torch.Tensor:
    """Find the amax with the least sum of |error| ** `power`; see `amax_mse`. A higher power clips less."""
    bins = counts.shape[1]
    tried = torch.arange(SMALLEST, bins + 1, dtype=torch.float64, device=counts.device)  # [K]
    centers = torch.arange(bins, dtype=torch.float64, device=counts.device) + 0.5
    errors = []
    for scale in (tried / QMAX)[:, None].split(TRIED):
        cells = (centers / scale).round_().clamp_(max=QMAX)
        errors.append(cells.mul_(scale).sub_(centers).abs_().pow_(power) @ counts.t())
    return _best(torch.cat(errors).t(), tried, counts)


def _best(loss: torch.Tensor, tried: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Pick the one of `tried` [K] with the least `loss` [Q, K]: the first of equals, not above the largest value."""
    above = tried > amax_max(counts).clamp(min=SMALLEST)[:, None]
    return tried[loss.nan_to_num(nan=float('inf'), posinf=float('inf')).masked_fill(above, float('inf')).argmin(1)]


def _to_the_end(x: torch.Tensor) -> torch.Tensor:
    """Sum the bins from each edge on: [Q, N] → [N + 1, Q]."""
    return F.pad(x.flip(1).cumsum(1).flip(1), (0, 1)).t().contiguous()


SEARCH: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {  # the number is --percentile
    'mse': lambda counts, _: amax_mse(counts),
    'l2.4': lambda counts, _: amax_power(counts, 2.4),
    'l3': lambda counts, _: amax_power(counts, 3),  # no method by itself, see fisher_amax
    'percentile': amax_percentile,
    'max': lambda counts, _: amax_max(counts),
}


class Histogram:
    """Histogram of |x| with BINS bins over [0, limit); the limit is a power of two and grows with the data.

    So growth only adds neighbouring bins, which is exact, and histograms of different data have an exact sum. The limit
    stays on the device with the counts: to read it, the host would have to wait. Values that are not finite are not
    counted, but `largest` shows them. The class follows the calibrator protocol of pytorch_quantization (`collect`).
    """

    def __init__(self, device: torch.device | str = 'cpu', least: float = -float('inf')) -> None:
        self.least = least  # a smaller value counts as this one
        self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)  # integers, exact up to 2^53
        self.exponent = torch.tensor(MIN_EXPONENT, dtype=torch.int32, device=device)  # the limit is 2 ** exponent
        self.ends = torch.full((2,), -float('inf'), device=device)  # the largest -x and x; NaN after the first NaN
        self.bins = torch.arange(BINS, device=device)  # constant

    def collect(self, x: torch.Tensor) -> None:
        """Count the values of `x`, a float tensor of any shape."""
        x = in_memory_order(x.detach()).float()
        x = x.clamp(min=self.least) if self.least > -float('inf') else x
        low, high = x.aminmax()
        self.ends = torch.maximum(self.ends, torch.stack((-low, high)))
        self.grow(exponent_above(self.largest))
        self.counts += count_per_bin(x, bin_width(self.exponent))

    @property
    def largest(self) -> torch.Tensor:
        """The largest |x|, FP32 []; 0 before the first value, NaN after the first NaN."""
        return self.ends.max().clamp(min=0)

    @property
    def limits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The smallest and the largest value, FP32 []."""
        return -self.ends[0], self.ends[1]

    def grow(self, exponent: torch.Tensor) -> None:
        """Raise the limit to 2 ** `exponent`, INT32 [], which must not be below the present exponent."""
        index = self.bins >> (exponent - self.exponent).clamp(max=BITS)
        self.counts = torch.zeros_like(self.counts).index_add_(0, index, self.counts)
        self.exponent = exponent


def merge_histograms(histograms: Sequence[Histogram]) -> None:
    """Add up each histogram over the processes of a torchrun, in place and without error, in three exchanges.

    They are in the same order on every process.
    """
    inf = float('inf')
    ends = torch.stack([h.ends for h in histograms])
    ends = all_reduce(ends.nan_to_num(nan=inf, posinf=inf, neginf=-inf), 'MAX')  # a maximum may lose NaN
    exponents = all_reduce(torch.stack([h.exponent for h in histograms]), 'MAX')
    for histogram, exponent in zip(histograms, exponents):
        histogram.grow(exponent)
    counts = all_reduce(torch.stack([h.counts for h in histograms]))
    for histogram, of_all, merged in zip(histograms, ends, counts):
        histogram.ends, histogram.counts = of_all, merged


def exponent_above(largest: torch.Tensor) -> torch.Tensor:
    """Find the exponent e (INT32) of the smallest limit 2^e above each value (FP32); 128 if it is not finite."""
    finite = largest.nan_to_num(nan=torch.finfo(torch.float32).max)
    return finite.clamp(min=2.0 ** (MIN_EXPONENT - 1)).frexp().exponent


def bin_width(exponent: torch.Tensor) -> torch.Tensor:
    """Compute the exact bin width, FP32, of histograms with the limits 2^`exponent` (INT32, any shape)."""
    return torch.exp2((exponent - BITS).double()).float()


def in_memory_order(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Flatten `x` in the memory order of `like` (default: `x`), without a copy if it is dense in this order."""
    return x.permute(sorted(range(x.dim()), key=(x if like is None else like).stride, reverse=True)).flatten()


def count_per_bin(x: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Count |x| (FP32 [n]) in bins whose `width` is a power of two (FP32 []): FP64 [BINS].

    A value that is not finite counts in the first bin or in none.
    """
    x = x * width.reciprocal()  # exact, because it is a power of two; a division takes longer
    if x.is_cuda:  # torch.bincount would wait for the device to learn the size of its result
        return added(torch.histc(part, BINS, 0, BINS).double() for part in x.abs_().split(HISTC_CHUNK))
    # torch.histc takes five times as long on a CPU
    bins = x.nan_to_num_(0, 0, 0).short().abs_()  # .short() rounds towards zero, and INT16 is half as much memory
    return torch.bincount(bins, minlength=BINS).double()


def weights_of(model: Network) -> Iterator[tuple[Quantizer, torch.Tensor]]:
    """Yield the quantizer of each weight, and the weight."""
    for module in model.modules():
        quantizer, weight = (getattr(module, name, None) for name in ('weight_quantizer', 'weight'))
        if quantizer is not None and weight is not None:
            yield quantizer, weight.detach()


def calibrate_weights(model: Network, reduce_range: bool = False) -> None:
    """Set the amax of each output channel of every weight, so that its largest magnitude is 127 steps, with `reduce_range` 63."""
    wider = QMAX / REDUCED if reduce_range else 1.0
    for quantizer, weight in weights_of(model):
        quantizer.set_amax(wider * weight.abs().float().flatten(1).amax(1))


def clamp_weights(model: Network) -> None:
    """Clamp each weight to 63 steps, in place: fine-tuning may have moved it beyond a reduced range."""
    for quantizer, weight in weights_of(model):
        limit = REDUCED * quantizer.scale.view(-1, *[1] * (weight.ndim - 1))
        weight.clamp_(-limit, limit)


def require_values(histograms: Mapping[str, Histogram]) -> None:
    """Raise QatError if a histogram, by path, saw a value that is not finite, no value, or only zeros."""
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


def histogram_amax(histograms: Mapping[str, Histogram], method: str, percentile: float = 100) -> torch.Tensor:
    """Find the amax of each histogram by a `method` of SEARCH, one of them with a `percentile`: FP32 [Q], in their order."""
    counts, exponents = (torch.stack([getattr(h, key) for h in histograms.values()]) for key in ('counts', 'exponent'))
    return (SEARCH[method](counts, percentile) * bin_width(exponents)).float()


# It runs batches of images, FP32 [B, 3, H, W] in 0..1, through a model, on its device
ForwardLoop = Callable[[Network], object]


def over(batches: Iterable[torch.Tensor]) -> ForwardLoop:
    """Make the loop over these batches."""

    def loop(model: Network) -> None:
        for images in batches:
            model(images)

    return loop


@torch.no_grad()
def collect_histograms(model: Network, forward_loop: ForwardLoop) -> dict[str, Histogram]:
    """Collect a histogram of the inputs of every activation quantizer, by path, over all processes of a torchrun.

    The whole model computes in float meanwhile.
    """
    device, quantizers = next(model.parameters()).device, named_quantizers(model)
    histograms = {name: Histogram(device, q.least) for name, q in quantizers if q._axis is None}
    try:
        with collecting(model):
            for name, q in quantizers:
                q._calibrator, q._disabled = histograms.get(name), name not in histograms
            forward_loop(model)
    finally:
        for _, q in quantizers:
            q._calibrator = None
    merge_histograms(list(histograms.values()))
    return histograms


def set_ranges(model: Network, ranges: Mapping[str, torch.Tensor], histograms: Mapping[str, Histogram]) -> None:
    """Set the ranges of quantizers, by path, to an amax, FP32 []. Their histograms have the smallest and largest values."""
    quantizers = dict(named_quantizers(model))
    for path, amax in ranges.items():
        quantizers[path].set_amax(amax, *histograms[path].limits)
    join_strides(quantizers.values())


def raised_ranges(model: Network) -> dict[str, int]:
    """Count the ranges of each quantizer, by path, that were raised to MIN_AMAX, such as the range of a dead channel."""
    raised = {name: int((q._amax <= MIN_AMAX).sum()) for name, q in named_quantizers(model)}
    return {name: channels for name, channels in raised.items() if channels}


def fit_ranges(model: Network, batches: Iterable[torch.Tensor], config: PtqConfig) -> dict[str, int]:
    """Set the amax of every quantizer by config.calib_method, a key of SEARCH; returns `raised_ranges`.

    `batches` are as in `ForwardLoop`. Raises QatError, see `require_values`.
    """
    histograms = collect_histograms(model, over(batches))
    require_values(histograms)
    calibrate_weights(model, config.reduce_range)
    set_ranges(
        model, dict(zip(histograms, histogram_amax(histograms, config.calib_method, config.percentile))), histograms
    )
    return raised_ranges(model)
