"""Laws of the quantized twins and of the fake-quantizer inside them."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from models.common import AConv, ADown, Bottleneck, CBFuse, RepNBottleneck
from models.yolo import BaseModel
from zoo import same

from models.quantize.blocks import ACTIVATIONS, TWINS
from models.quantize.checkpoint import fuse
from models.quantize.quantizers import (
    MAX_AMAX,
    MIN_AMAX,
    QMAX,
    QMIN,
    Quantizer,
    collecting,
    named_quantizers,
    quantizers_off,
)
from utils.qat.core.log import quiet_upstream

SAMPLES = {  # upstream class → a block with the operation its twin is for
    nn.Conv2d: lambda: nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2),
    Bottleneck: lambda: Bottleneck(8, 8),
    RepNBottleneck: lambda: RepNBottleneck(8, 8),
    AConv: lambda: AConv(8, 16),
    ADown: lambda: ADown(8, 16),
    CBFuse: lambda: CBFuse([0, 1]),
    **{cls: cls for cls in ACTIVATIONS},
}
EVERY = TWINS | ACTIVATIONS
each_block = pytest.mark.parametrize('cls', SAMPLES, ids=lambda c: c.__name__)


def block_of(cls):
    """A block with upstream's attributes whose batch norms (not identity) are folded away, as in a fused model."""
    torch.manual_seed(1)
    block = SAMPLES[cls]()
    for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 1.5)
        for tensor in (norm.bias, norm.running_mean):
            nn.init.normal_(tensor)
    model = BaseModel()
    model.model = nn.Sequential(block)
    with quiet_upstream():
        fuse(model.eval())
    block.i, block.f, block.type, block.np = 7, [-1, 4], 'models.common.X', 123
    return block


def input_of(cls):
    generator = torch.Generator().manual_seed(2)

    def rand(size, channels=8):
        return torch.randn(2, channels, size, size, generator=generator)

    if cls is CBFuse:
        return [(rand(4), rand(4, 3)), (rand(8, 5), rand(8)), rand(16)]  # entries 0 and 1 of the tuples are fused
    return rand(16)


def calibrated(module, amax=1.5):
    """Give every quantizer of `module` the amax `amax`; a weight quantizer gets one amax per channel."""
    for m in module.modules():
        if hasattr(m, 'weight_quantizer'):
            m.weight_quantizer.set_amax(m.weight.detach().abs().amax((1, 2, 3)))
    for _, q in named_quantizers(module):
        if not hasattr(q, '_amax'):
            q.set_amax(torch.tensor(amax))
    return module


def reference(x, scale):
    """Quantize and dequantize in NumPy (FP64): round half to even, INT8 in full range."""
    return np.clip(np.round(np.asarray(x, np.float64) / scale), -128, 127) * scale  # np.round rounds halves to even


# ---- twins --------------------------------------------------------------------------------------------------------------


def test_every_twin_is_tested():
    assert set(SAMPLES) == set(EVERY)


@each_block
@torch.no_grad()
def test_off_is_float(cls):
    block = block_of(cls)
    twin = EVERY[cls].from_float(block)
    with quantizers_off(twin):
        assert same(twin(input_of(cls)), block(input_of(cls)))
    assert not same(calibrated(twin)(input_of(cls)), block(input_of(cls))), 'on, it makes a difference'


@each_block
@torch.no_grad()
def test_a_twin_shares_what_its_block_has_and_leaves_it_as_it_is(cls):
    block = block_of(cls)
    expected, keys = block(input_of(cls)), set(block.state_dict())
    twin = EVERY[cls].from_float(block)
    assert isinstance(calibrated(twin), cls) and type(block) is cls
    assert all(dict(twin.named_parameters())[name] is p for name, p in block.named_parameters()), 'shared, not copied'
    assert (twin.i, twin.f, twin.type, twin.np) == (7, [-1, 4], 'models.common.X', 123)
    assert twin.training == block.training and set(block.state_dict()) == keys
    assert named_quantizers(twin) and not named_quantizers(block)
    assert same(block(input_of(cls)), expected)


@pytest.mark.parametrize('cls', [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish], ids=lambda cls: cls.__name__)
@torch.no_grad()
def test_an_activation_in_place_leaves_its_input(cls):
    """Calibrators and the backward pass look at it later."""
    twin, x = ACTIVATIONS[cls].from_float(cls(inplace=True)), torch.linspace(-9, 9, 99)
    with quantizers_off(twin):
        y = twin(x)
    assert same(x, torch.linspace(-9, 9, 99)) and same(y, cls()(x))


@torch.no_grad()
def test_silu_rounds_its_input_and_the_sigmoid():
    """By NumPy: the sigmoid in steps of 1/256, at most 255 of them; with the gradient recorded the same."""
    twin = calibrated(ACTIVATIONS[nn.SiLU].from_float(nn.SiLU()), amax=127 / 16)
    x = torch.linspace(-20, 20, 4001)
    rounded = reference(x, 1 / 16)
    expected = rounded * np.minimum(np.round(1 / (1 + np.exp(-rounded)) * 256), 255) / 256
    assert np.allclose(twin(x), expected, atol=1e-6)
    with torch.enable_grad():
        assert same(twin(x.requires_grad_()).detach(), twin(x.detach()))


@each_block
def test_an_instance_forward_does_not_shadow_the_twin(cls):
    block = block_of(cls)
    block.forward = lambda x: 1 / 0  # what upstream's fuse() leaves on some blocks is set the same way
    twin = EVERY[cls].from_float(block)
    assert 'forward' not in vars(twin)
    calibrated(twin)(input_of(cls))


@pytest.mark.parametrize(
    'block',
    [Bottleneck(8, 8, shortcut=False), Bottleneck(8, 16), RepNBottleneck(8, 16), type('Derived', (AConv,), {})(8, 8)],
    ids=['no shortcut', 'widens', 'widens', 'derived'],
)
def test_blocks_without_the_operation_get_no_twin(block):
    assert not any(twin.suits(block) for twin in TWINS.values())


WITH_QUANTIZED_INPUTS = {  # what each twin computes, written with its float block and one function q
    AConv: lambda b, x, q: b(q(x)),
    ADown: lambda b, x, q: b(q(x)),
    CBFuse: lambda b, x, q: b([(q(x[0][0]),), (None, q(x[1][1])), q(x[2])]),
}


@pytest.mark.parametrize('cls', WITH_QUANTIZED_INPUTS, ids=lambda c: c.__name__)
@torch.no_grad()
def test_twin_quantizes_the_inputs_of_its_operation(cls):
    block = block_of(cls)
    twin = calibrated(EVERY[cls].from_float(block))
    [(_, q)] = named_quantizers(twin)
    assert same(twin(input_of(cls)), WITH_QUANTIZED_INPUTS[cls](block, input_of(cls), q))


ADDED = {  # policy → the Add of a twin t, of its shortcut x and its branch
    'both': lambda t, x, branch: t.add_quantizer(x) + t.add_quantizer(branch),
    'residual': lambda t, x, branch: t.add_quantizer(x) + branch,
    'each': lambda t, x, branch: t.add_quantizer(x) + t.branch_quantizer(branch),
}


@pytest.mark.parametrize('cls', [Bottleneck, RepNBottleneck], ids=lambda c: c.__name__)
@pytest.mark.parametrize('policy', ADDED)
@torch.no_grad()
def test_the_policy_names_the_addends_that_are_quantized(cls, policy):
    block, x = block_of(cls), input_of(cls)
    twin = EVERY[cls].from_float(block)
    twin.set_add_policy(policy)
    calibrated(twin)
    if policy == 'each':
        twin.branch_quantizer.set_amax(torch.tensor(0.5))
    assert [name for name, _ in named_quantizers(twin)] == list(twin.quantizer_names)
    assert same(twin(x), ADDED[policy](twin, x, twin.cv2(twin.cv1(x))))
    with quantizers_off(twin):
        assert same(twin(x), block(x))


@torch.no_grad()
def test_quant_conv_is_the_reference():
    conv, x = block_of(nn.Conv2d), input_of(nn.Conv2d)
    twin = calibrated(TWINS[nn.Conv2d].from_float(conv), amax=127 / 64)  # scale 1/64: halves are hit exactly
    x = (x * 128).round() / 128
    assert (x * 64 % 1 == 0.5).float().mean() > 0.3, 'many inputs lie between two steps'
    scales = (conv.weight.detach().abs().amax((1, 2, 3)) / 127).half().double().numpy()  # a scale is an FP16 number
    weight = torch.from_numpy(reference(conv.weight, scales[:, None, None, None]))
    expected = F.conv2d(
        torch.from_numpy(reference(x, 1 / 64)),
        weight,
        conv.bias.double(),
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
    )
    torch.testing.assert_close(twin(x).double(), expected, rtol=1e-5, atol=1e-5)  # one step is 1/64


# ---- the fake-quantizer -------------------------------------------------------------------------------------------------


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


# ---- contexts -----------------------------------------------------------------------------------------------------------


def flags(model):
    return [(q._disabled, q._if_quant, q._if_calib) for _, q in named_quantizers(model)]


@pytest.mark.parametrize(
    'context, inside',
    [(quantizers_off, {(True, True, False), (True, False, False)}), (collecting, {(False, False, True)})],
)
def test_contexts_restore_what_was(context, inside):
    model = nn.Sequential(*(TWINS[nn.Conv2d].from_float(nn.Conv2d(3, 3, 1)) for _ in range(3)))
    model[1].input_quantizer._disabled = True  # whatever was there before, not a default
    model[2].weight_quantizer._if_quant = False
    before = flags(model)
    with context(model):
        assert set(flags(model)) == inside
    assert flags(model) == before
    with pytest.raises(KeyboardInterrupt), context(model), quantizers_off(model):
        raise KeyboardInterrupt
    assert flags(model) == before


def test_collecting_changes_no_output_and_shows_every_tensor():
    seen = []
    block = block_of(Bottleneck)
    twin = TWINS[Bottleneck].from_float(block)
    twin.add_quantizer._calibrator = type('Recorder', (), {'collect': staticmethod(seen.append)})
    x = input_of(Bottleneck)
    with torch.no_grad(), collecting(twin):
        assert same(twin(x), block(x))
    assert len(seen) == 2 and seen[0] is x, 'both addends pass the one quantizer'
