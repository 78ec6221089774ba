"""Histograms of |x| → the amax that loses least, for all quantizers together.

In: counts, FP64 [Q, N], integers: bin j of a row holds the values in [j, j + 1). Out: amax [Q], FP64, counted in bins. Rows
differ in what a bin is worth, but the search need not know: every amax tried is a whole number of bins, so that one table
of INT8 cells serves all rows, and sums over the bins of a cell are differences of running sums.

Source of the criteria: Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602), section 5.
"""

import torch
import torch.nn.functional as F

from models.quantize.quantizers import QMAX

CELLS = QMAX + 1  # of INT8, for values that are not negative
SMALLEST = CELLS  # amax tried, in bins: below, an INT8 step is finer than a bin
ROWS = 4  # histograms whose entropy is computed at once, with 4 MB for each in every intermediate
TRIED = 512  # ranges whose error is computed at once, with 16 MB in every intermediate
TINY = torch.finfo(torch.float64).tiny  # has a logarithm


def amax_max(counts):
    """Upper edge of the last bin that holds anything: nothing is clipped."""
    edges = torch.arange(1, counts.shape[1] + 1, dtype=counts.dtype, device=counts.device)
    return ((counts > 0) * edges).amax(1)


def amax_percentile(counts, percentile):
    """The smallest bin edge that covers `percentile` % of the values."""
    share = counts.cumsum(1) / counts.sum(1, keepdim=True)
    wanted = share.new_full((len(share), 1), percentile / 100)
    return (torch.searchsorted(share, wanted)[:, 0] + 1).clamp(max=counts.shape[1]).double()


def amax_mse(counts):
    """The amax of least squared error between the histogram's values, its bins' centres, and their INT8 approximation.

    With s a step, b(q) the first bin that rounds to q or more, and T0, T1 the sums of counts and counts x centre from a bin
    to the end, the error is that of rounding all to zero and a sum over q = 1..127 of (2q - 1) s² T0[b(q)] - 2 s T1[b(q)].
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


def amax_power(counts, power):
    """As `amax_mse`, but of least sum of |error| ** power: the higher, the less is clipped."""
    bins = counts.shape[1]
    tried = torch.arange(SMALLEST, bins + 1, dtype=torch.float64, device=counts.device)  # [K]
    centers = torch.arange(bins, dtype=torch.float64, device=counts.device) + 0.5
    errors = []
    for scale in (tried / QMAX)[:, None].split(TRIED):
        cells = (centers / scale).round_().clamp_(max=QMAX)
        errors.append(cells.mul_(scale).sub_(centers).abs_().pow_(power) @ counts.t())
    return _best(torch.cat(errors).t(), tried, counts)


def amax_entropy(counts):
    """The amax of least Kullback-Leibler divergence from the values, clipped to it, to their approximation in 128 cells.

    As pytorch_quantization's `compute_amax('entropy')` defines it: bin 0 is taken to be as full as bin 1; what is clipped is
    added to the last bin; a cell's values are spread evenly over those of its bins that hold any; of equals the largest.
    """
    counts = torch.cat((counts[:, 1:2], counts[:, 1:]), 1)
    bins = counts.shape[1]
    tried = torch.arange(bins, SMALLEST - 1, -1, device=counts.device)  # [K], the largest first
    edges = (
        torch.arange(CELLS + 1, device=counts.device) * tried[:, None] + CELLS - 1
    ) // CELLS  # of the cells, [K, 129]
    divergence = torch.cat([_divergence(part, tried, edges) for part in counts.split(ROWS)])
    return _best(divergence, tried.double(), counts)


def _divergence(counts, tried, edges):
    """[Q, K]: of the values from their approximation; infinite where clipped values meet an empty bin."""
    sums, filled = _from_the_start(counts), _from_the_start((counts > 0).double())
    within, last = sums[tried], counts.t()[tried - 1]  # [K, Q]
    clipped = sums[-1] - within
    content = sums[edges].diff(dim=1)  # [K, 128, Q]
    spread = filled[edges].diff(dim=1).clamp_(min=1).reciprocal_().mul_(content)
    reference = _from_the_start(torch.xlogy(counts, counts))[tried - 1] + torch.xlogy(last + clipped, last + clipped)
    cross = torch.xlogy(clipped, spread[:, -1] * (last > 0)) + spread.clamp_(min=TINY).log_().mul_(content).sum(1)
    return ((reference - cross) / sums[-1] + within.log() - sums[-1].log()).t()


def _best(loss, tried, counts):
    """Of `tried` [K] that of least `loss` [Q, K] for each row, the first of equals, not above the largest value."""
    above = tried > amax_max(counts).clamp(min=SMALLEST)[:, None]
    return tried[loss.nan_to_num(nan=float('inf'), posinf=float('inf')).masked_fill(above, float('inf')).argmin(1)]


def _from_the_start(x):
    """[Q, N] → [N + 1, Q]: sums of the bins before each edge."""
    return F.pad(x.cumsum(1), (1, 0)).t().contiguous()


def _to_the_end(x):
    """[Q, N] → [N + 1, Q]: sums of the bins from each edge on."""
    return F.pad(x.flip(1).cumsum(1).flip(1), (0, 1)).t().contiguous()


SEARCH = {
    'mse': lambda counts, config: amax_mse(counts),
    'l1.5': lambda counts, config: amax_power(counts, 1.5),
    'l2.4': lambda counts, config: amax_power(counts, 2.4),
    'l3': lambda counts, config: amax_power(counts, 3),
    'entropy': lambda counts, config: amax_entropy(counts),
    'percentile': lambda counts, config: amax_percentile(counts, config.percentile),
    'max': lambda counts, config: amax_max(counts),
}
