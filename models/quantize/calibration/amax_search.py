"""Search the amax with the least loss, for the histograms of all quantizers at once.

Each search takes `counts`, FP64 [Q, N]: a row is the histogram of |x| of a quantizer, and bin j has the values in [j, j
+ 1). It returns the amax of each row, FP64 [Q], in bins. Every candidate is a whole number of bins, so the search needs no
bin widths, although they differ from row to row. One table of INT8 cells serves all rows, and the sum over the bins of
a cell is a difference of running sums.

Source of the criteria: Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602), section 5.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from models.quantize.quantizers import QMAX
from utils.qat.config.qat import CalibrationConfig

CELLS = QMAX + 1  # INT8 values that are not negative
SMALLEST = CELLS  # the smallest candidate, in bins: below it an INT8 step is finer than a bin
TRIED = 512  # candidates whose error is computed at once; together they need 16 MB per intermediate tensor


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


SEARCH: dict[str, Callable[[torch.Tensor, CalibrationConfig], torch.Tensor]] = {
    'mse': lambda counts, config: amax_mse(counts),
    'l2.4': lambda counts, config: amax_power(counts, 2.4),
    'l3': lambda counts, config: amax_power(counts, 3),  # no method by itself, see fisher_amax
    'percentile': lambda counts, config: amax_percentile(counts, config.percentile),
    'max': lambda counts, config: amax_max(counts),
}
