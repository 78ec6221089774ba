"""Laws of the quantized twins; those of the fake-quantizer inside them are in test_quantizer.py."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers.zoo import same
from models.common import AConv, ADown, Bottleneck, CBFuse, RepNBottleneck
from models.yolo import BaseModel

from models.quantize.blocks import ACTIVATIONS, TWINS, QuantConv2d, without_groups
from models.quantize.checkpoint import fuse
from models.quantize.quantizers import collecting, named_quantizers, quantizers_off
from test_quantizer import reference
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


@pytest.mark.parametrize('groups, dense', [(1, True), (2, True), (4, True), (8, False)])
@torch.no_grad()
def test_dense_convolutions_compute_what_groups_do(groups, dense):
    """In double precision. Those with a group for each channel stay."""
    torch.manual_seed(0)
    conv = calibrated(QuantConv2d.from_float(nn.Conv2d(8, 16, 3, groups=groups)).double())
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    before = conv(x)
    assert (without_groups(nn.Sequential(conv))[0].groups == 1) == dense
    torch.testing.assert_close(conv(x), before, rtol=1e-12, atol=1e-12)
