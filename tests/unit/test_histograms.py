"""Laws of histograms: they lose no value, and searches find the amax of brute force."""

import numpy as np
import pytest
import torch
from helpers.commands import sampled
from torch.utils._python_dispatch import TorchDispatchMode

from models.quantize.calibration.calibrate import BINS, MIN_EXPONENT, SEARCH, Histogram, bin_width


def activations(seed, size=20_000, scale=1.0):
    """Values like the output of a layer: SiLU of a Gaussian with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    x[:20] *= 6
    return torch.nn.functional.silu(x) * scale


def histogram(*batches):
    hist = Histogram()
    for x in batches:
        hist.collect(x)
    return hist


def edges(hist):
    """Edges of all bins, from 0 on: FP64 [BINS + 1]."""
    return np.arange(BINS + 1) * bin_width(hist.exponent).item()


def search(method, *batches, percentile=99.99):
    """The amax that `method` finds for a histogram of `batches`."""
    hist = histogram(*batches)
    return (SEARCH[method](hist.counts[None], percentile) * bin_width(hist.exponent)).item()


# ---- histograms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('scales', [(1, 1, 1), (1e-3, 1, 40), (40, 1, 1e-3), (1e-20, 1e20, 1), (2.0, 1.0, 0.5)])
def test_counts_are_those_of_numpy(scales):
    batches = [activations(seed, scale=scale) for seed, scale in enumerate(scales)]
    hist = histogram(*batches)
    values = np.abs(torch.cat(batches).numpy())
    expected, _ = np.histogram(values, edges(hist))
    assert np.array_equal(hist.counts.numpy(), expected) and expected.sum() == values.size
    assert edges(hist)[-1] / 2 <= values.max() < edges(hist)[-1]
    assert hist.largest == values.max()


def test_order_and_slicing_do_not_matter():
    batches = [activations(seed, scale=scale) for seed, scale in enumerate((1, 30, 0.01))]
    first = histogram(*batches)
    for other in (
        histogram(*batches[::-1]),
        histogram(torch.cat(batches).view(3, -1)),
        histogram(*(-b for b in batches)),
    ):
        assert torch.equal(other.counts, first.counts) and other.exponent == first.exponent


@pytest.mark.parametrize('largest', [1.0, 2.0, 0.5, 127.0, 2.0**127, 3.4e38, 2.0**-100, 2.0**-130])
def test_a_power_of_two_still_fits(largest):
    hist = histogram(torch.tensor([largest, largest / 3]))
    assert hist.counts.sum() == 2 and largest < edges(hist)[-1] <= max(2 * largest, 2.0**MIN_EXPONENT)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_what_is_not_finite_is_seen_and_spoils_no_index(value):
    for batches in ([[1.0, value]], [[1.0], [value, 3e38]], [[value], [1e-30, 5.0]]):
        hist = histogram(*map(torch.tensor, batches))
        assert not hist.largest.isfinite() and hist.counts.sum() >= sum(map(len, batches)) - 1


def test_histograms_of_parts_add_up():
    """Processes that saw different images widen their histograms to one limit and add them."""
    batches = [activations(seed, scale=scale) for seed, scale in enumerate((1, 30, 0.01))]
    whole, parts = histogram(*batches), [histogram(b) for b in batches]
    for part in parts:
        part.grow(whole.exponent)
    assert torch.equal(sum(part.counts for part in parts), whole.counts)


def test_more_than_fp32_can_count():
    n = 2**24 + 3
    hist = histogram(torch.full((n,), 0.7), torch.full((5,), 0.7))
    assert hist.counts.max() == hist.counts.sum() == n + 5


class NoValueIsRead(TorchDispatchMode):
    """Refuses to read a value (`.item()`, `float()`, `if`, `tolist()`): on a GPU, reading waits for all work."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_collecting_waits_for_no_value():
    with NoValueIsRead():
        histogram(activations(0), 30 * activations(1), torch.zeros(5))
    with pytest.raises(AssertionError), NoValueIsRead():
        float(torch.ones(()))


def test_half_precision_is_counted_as_it_is():
    x = activations(0).half()
    assert torch.equal(histogram(x).counts, histogram(x.float()).counts)


# ---- searches -----------------------------------------------------------------------------------------------------------

SAMPLES = {
    'activations': activations(0, 50_000),
    'uniform': torch.rand(50_000),
    'large': activations(1, scale=300.0),
    'few values': torch.tensor([0.1, 0.1, 3.0]),
    'one outlier': torch.cat((activations(2), torch.tensor([90.0]))),
}
LARGE_SAMPLES = {name: x for name, x in SAMPLES.items() if len(x) > 1000}
each_sample = pytest.mark.parametrize('x', SAMPLES.values(), ids=SAMPLES)


def squared_error(x, amax):
    """Squared error of the INT8 approximation for each amax: x [N], amax [K] → [K]."""
    scale = np.atleast_1d(amax)[:, None] / 127
    return np.array([((np.clip(np.round(x / s), -128, 127) * s - x) ** 2).sum() for s in scale])


@each_sample
def test_max_covers_everything_and_no_bin_more(x):
    assert 0 <= search('max', x) - x.abs().max() <= edges(histogram(x))[1]


@each_sample
@pytest.mark.parametrize('percentile', [50, 99, 99.9, 99.99, 100])
def test_percentile_is_the_first_edge_that_covers_it(x, percentile):
    amax = search('percentile', x, percentile=percentile)
    values, width = x.abs().double(), edges(histogram(x))[1]
    assert (values < amax).double().mean() >= percentile / 100
    assert (values < amax - width).double().mean() < percentile / 100


@pytest.mark.parametrize('x', sampled(SAMPLES.values(), 2), ids=SAMPLES)
@pytest.mark.parametrize('method, power', [('mse', 2), ('l2.4', 2.4), ('l3', 3)])
def test_a_power_of_the_error_is_the_least_of_all_edges(x, method, power):
    """Brute force tries every edge. It takes each value as the centre of its bin, as the histogram does."""
    hist = histogram(x)
    top = hist.counts.nonzero().max().item() + 1
    [filled], counts = hist.counts.numpy().nonzero(), hist.counts.numpy()
    centers, counts = filled + 0.5, counts[filled]
    scale = np.arange(128, top + 1)[:, None] / 127
    error = (np.abs(np.clip(np.round(centers / scale), -128, 127) * scale - centers) ** power) @ counts
    found = SEARCH[method](hist.counts[None], 99.99).item()
    assert error[int(found) - 128] <= error.min() * (1 + 1e-9)


@pytest.mark.parametrize('x', LARGE_SAMPLES.values(), ids=LARGE_SAMPLES)
def test_mse_loses_no_more_than_brute_force(x):
    values = x.abs().double().numpy()
    best = squared_error(values, np.linspace(values.max() / 64, values.max() * 1.01, 1500)).min()
    # the histogram knows a value to half a bin, 2^-13 of its range
    assert squared_error(values, search('mse', x))[0] <= 1.02 * best + values.size * (values.max() / 4096) ** 2


@pytest.mark.parametrize('method', list(SEARCH))
def test_rows_are_searched_as_if_alone(method):
    counts = torch.stack([histogram(x).counts for x in SAMPLES.values()] * 4)
    together = SEARCH[method](counts, 99.99)
    alone = torch.cat([SEARCH[method](row[None], 99.99) for row in counts[:5]]).repeat(4)
    assert torch.allclose(together, alone, rtol=1e-3), (
        'sums of more rows may end otherwise, which decides between bins of equal error'
    )
