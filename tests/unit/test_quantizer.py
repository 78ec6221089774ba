"""Laws of the fake-quantizer."""

import numpy as np
import pytest
import torch
from helpers.commands import same

from models.quantize.quantizers import MAX_AMAX, MIN_AMAX, QMAX, QMIN, Quantizer


def reference(x, scale):
    """Quantize and dequantize in NumPy (FP64): round half to even, INT8 in full range."""
    return np.clip(np.round(np.asarray(x, np.float64) / scale), -128, 127) * scale  # np.round rounds halves to even


@pytest.mark.parametrize(
    'low, high, amax, scale, zero_point',
    [
        (0.0, 255 / 64, 99.0, 1 / 64, -128),  # of ReLU, or images
        (-0.25, 239 / 64, 99.0, 1 / 64, -112),  # about SiLU's
        (-3.0, 1.0, 127.5 / 64, (1 + 127.5 / 64) / 255, None),  # cut on one side
        (-99.0, 99.0, 127.5 / 64, 1 / 64, 0),  # cut on both sides
        (0.5, 255 / 64, 99.0, 1 / 64, -128),  # 0 is in the range in any case
        (-255 / 64, -1.0, 99.0, 1 / 64, 127),
    ],
)
def test_the_integers_lie_where_the_values_are(low, high, amax, scale, zero_point):
    quantizer, other = Quantizer(), Quantizer()
    quantizer.shifts = True
    for q in (quantizer, other):
        q.set_amax(torch.tensor(amax), torch.tensor(low), torch.tensor(high))
    assert not other._zero_point and other.scale == (torch.tensor(amax) / 127).half().float(), 'only with shifts'
    assert quantizer.scale.item() == pytest.approx(scale, rel=2**-11)
    zero = quantizer._zero_point.item()
    assert zero_point in (None, zero)
    x, step = torch.linspace(low - 1, high + 1, 4001), quantizer.scale.item()
    expected = (np.clip(np.round(np.float64(x) / step) + zero, -128, 127) - zero) * step
    with torch.no_grad():
        assert np.allclose(quantizer(x), expected, atol=1e-6)
    assert torch.equal(quantizer(x.requires_grad_()).detach(), quantizer(x.detach()))
    inside = (x >= max(low, -amax)) & (x <= min(high, amax))
    assert (quantizer(x) - x)[inside].abs().max() <= 1.01 * step, 'half a step, and another half at an end'


def test_exact_on_powers_of_two():
    q = Quantizer()
    q.set_amax(torch.tensor(127 / 8))
    x = torch.arange(-2100, 2100) / 128  # 16 values per step, beyond the range on both sides
    assert np.array_equal(q(x).numpy(), reference(x, 1 / 8))
    assert q(x).min() == QMIN / 8 and q(x).max() == QMAX / 8


@pytest.mark.parametrize('axis', [None, 0])
def test_any_scale_rounds_to_the_nearest_step(axis):
    torch.manual_seed(0)
    x = torch.randn(5, 7, 31)
    amax = torch.tensor(2.7) if axis is None else x.abs().amax((1, 2)) * torch.tensor([1, 0.5, 1, 2, 0.1])
    q = Quantizer(axis)
    q.set_amax(amax)
    assert torch.equal(q.scale, (amax / 127).half().float())
    scale = q.scale.double().view(-1, 1, 1).numpy()
    steps, exact = q(x).double().numpy() / scale, x.double().numpy() / scale
    assert np.abs(steps - np.round(steps)).max() < 1e-4 and steps.min() >= -128 - 1e-4 and steps.max() <= 127 + 1e-4
    assert (np.abs(steps - np.clip(exact, -128, 127)) <= 0.5 + 1e-4).all()


@pytest.mark.parametrize('axis', [None, 0, 1])
def test_without_gradient_the_values_are_the_same(axis):
    """Without gradient a CPU rounds by other code. Many of these values lie on or beside a half step."""
    torch.manual_seed(0)
    q = Quantizer(axis)
    q.set_amax(torch.tensor(2.7) if axis is None else torch.tensor([2.7, 0.3, 127 / 64, 1e-9, 3e4]))
    step = q.scale if axis is None else q.scale.view([5 if i == axis else 1 for i in range(3)])
    x = torch.randint(-150, 150, (5, 5, 4000)) * 0.5 * step
    x = torch.cat(
        (x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(-torch.tensor(torch.inf)), torch.randn(5, 5, 4000)), 2
    )
    expected = q(x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(q(x), expected)
    if axis is None:
        with torch.no_grad():
            assert torch.equal(q(torch.tensor([torch.inf, -torch.inf])), q.scale * torch.tensor([127, -128]))


@pytest.mark.parametrize('axis', [None, 0])
def test_gradients_pass_straight_through_inside_and_stop_outside(axis):
    q = Quantizer(axis)
    q.set_amax(torch.tensor(1.27) if axis is None else torch.tensor([1.27, 1.27]))
    x = torch.tensor([[-9.0, -1.30, -1.27, -0.004, 0.0, 0.003, 1.0, 1.27, 1.30, 9.0]] * 2, requires_grad=True)
    q(x).backward(torch.full_like(x, 3.0))
    assert x.grad.tolist() == [[0, 0, 3, 3, 3, 3, 3, 3, 0, 0]] * 2


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('axis', [None, 0])
def test_scales_stay_fp32(axis, dtype):
    q = Quantizer(axis)
    q.set_amax(torch.tensor(0.3) if axis is None else torch.tensor([0.3, 0.7]))
    amax, scale = q._amax.clone(), q.scale
    assert torch.equal(q.to(dtype)._amax, amax) and q._amax.dtype == torch.float32
    assert torch.equal(q.float()._amax, amax) and torch.equal(q.scale, scale)


@pytest.mark.parametrize('axis', [None, 0])
def test_half_model_quantizes_half_tensors(axis):
    q = Quantizer(axis).half()
    q.set_amax(torch.tensor(127 / 64) if axis is None else torch.full((3,), 127 / 64))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).half()
    assert q(x).dtype == torch.float16 and np.array_equal(q(x).numpy(), reference(x, 1 / 64))


@pytest.mark.parametrize('axis, amax', [(None, torch.tensor(127 / 512)), (0, torch.tensor([127 / 512, 381 / 512]))])
def test_state_dict_round_trip(axis, amax):
    source, fresh, other = Quantizer(axis), Quantizer(axis), Quantizer(axis)
    source.set_amax(amax)
    other.set_amax(amax * 2)
    assert not fresh.state_dict()
    for target in (fresh, other):
        target.load_state_dict(source.state_dict())
        assert torch.equal(target._amax, amax) and target._amax.device.type == 'cpu'
        assert same(target.state_dict(), source.state_dict()) and not target._zero_point.any()
    with pytest.raises(RuntimeError, match='_amax'):
        other.load_state_dict({})


def test_scale_is_never_too_small():
    q = Quantizer(0)
    q.set_amax(torch.tensor([0, 1e-30, 127 / 128]))
    assert (
        q._amax.tolist() == [MIN_AMAX, MIN_AMAX, 127 / 128] and q.scale.half().min() >= torch.finfo(torch.float16).tiny
    )
    assert q(torch.zeros(3, 1)).tolist() == [[0], [0], [0]]


def test_every_scale_is_an_fp16_number_close_to_the_amax_that_is_set():
    amax = torch.logspace(-12, 12, 4001)
    q = Quantizer(0)
    q.set_amax(amax)
    scale = q.scale
    assert torch.equal(scale.half().float(), scale) and scale.isfinite().all()
    inside = (amax >= MIN_AMAX) & (amax <= MAX_AMAX)
    assert inside.sum() > 1000 and ((q._amax - amax).abs() / amax)[inside].max() <= 2.0**-11
    assert torch.equal(scale * QMAX / QMAX, scale) and torch.equal(scale * QMAX, q._amax), 'exact both ways'
