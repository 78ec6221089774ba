"""Laws of float model ↔ quantized model: no value changes, no operation is left out, no class is patched."""

import inspect
from copy import deepcopy

import models.common
import models.yolo
import pytest
import torch
import torch.nn as nn
from helpers.faults import sampled
from helpers.zoo import DUAL, SEGMENT, SINGLE, build, fuse, image, output, same, settings
from models.common import AConv, ADown, CBFuse, RepConvN, RepNCSPELAN4

from models.quantize.blocks import TWINS, QuantConv2d, Twin, is_quantized
from models.quantize.calibration.ptq import prepare
from models.quantize.convert import quantize_model
from models.quantize.quantizers import named_quantizers, quantizers_off
from models.quantize.scales import scale_groups, tie_scales


@pytest.mark.parametrize('name', sampled([*DUAL, *SINGLE, *SEGMENT], 7))
def test_every_law_on_every_model(name):
    unfused = build(name)
    model = fuse(deepcopy(unfused))
    quantized = deepcopy(model)
    done = quantize_model(quantized)
    for law in (
        fusing_changes_nothing_and_is_complete,
        off_is_float,
        every_convolution_is_accounted_for,
        only_the_ends_of_the_head_stay_float,
        every_other_operation_is_swapped,
        nothing_is_unknown_but_a_dual_head,
        upstream_finds_its_attributes,
        only_one_is_quantized,
        tying_scales_changes_no_float_value,
    ):
        law(unfused=unfused, model=model, quantized=quantized, done=done)


def fusing_changes_nothing_and_is_complete(unfused, model, **_):
    """In FP64 only a mistake makes a difference. Upstream's fuse() builds layers of the default type."""
    exact, default = unfused.double(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for ours, theirs in zip(
            output(fuse(deepcopy(exact)), image().double()), output(exact, image().double()), strict=True
        ):
            assert ours.dtype == torch.float64 and (ours - theirs).norm() <= 1e-9 * theirs.norm()
    finally:
        torch.set_default_dtype(default)
    assert not [
        m for m in model.modules() if isinstance(m, nn.BatchNorm2d) or (isinstance(m, RepConvN) and hasattr(m, 'conv1'))
    ]


def off_is_float(model, quantized, **_):
    with quantizers_off(quantized):
        assert same(output(quantized, image()), output(model, image()))


def every_convolution_is_accounted_for(model, quantized, done, **_):
    convs = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    after = {n for n, m in quantized.named_modules() if isinstance(m, QuantConv2d)}
    assert after.isdisjoint(done.kept_float) and after | set(done.kept_float) == convs
    assert after == {n for n, kind in done.swapped.items() if kind == 'Conv2d'}


def only_the_ends_of_the_head_stay_float(model, done, **_):
    """Each of three levels has two towers of convolutions (box, class), or three with masks. A branch has one DFL.

    The outputs of cv2 and cv3 are INT8: boxes and classes of a head of one branch. Only such a head is exported.
    """
    head, i = type(model.model[-1]).__name__, len(model.model) - 1
    branches = {'Dual': 2, 'Trip': 3}.get(head[:4], 1)
    ends = {
        f'model.{i}.cv{2 + tower}.{level}.2'
        for tower in range(2, (3 if 'Segment' in head else 2) * branches)
        for level in range(3)
    }
    ends |= {f'model.{i}.dfl{branch or ""}.conv' for branch in (0, 2, 3)[:branches]}
    assert set(done.kept_float) == ends and all(done.kept_float.values())
    assert all(type(model.get_submodule(n)) is nn.Conv2d and model.get_submodule(n).kernel_size == (1, 1) for n in ends)


def every_other_operation_is_swapped(model, quantized, done, **_):
    left = [n for n, m in quantized.named_modules() if type(m) in TWINS and TWINS[type(m)].suits(m)]
    assert set(left) == set(done.kept_float)
    wanted = [
        type(m).__name__ for m in model.modules() if isinstance(m, (AConv, ADown, CBFuse)) or getattr(m, 'add', False)
    ]
    found = [kind for kind in done.swapped.values() if kind != 'Conv2d']
    assert sorted(found) == sorted(wanted) and found
    assert all(str(n) in done.summary() for n in (len(done.swapped), len(done.kept_float), found.count(found[0])))


def nothing_is_unknown_but_a_dual_head(model, done, **_):
    """Dual heads stay unknown, because reparameterization comes first."""
    assert set(done.unknown.values()) <= {'DualDDetect', 'TripleDDetect', 'DualDSegment'}


def upstream_finds_its_attributes(model, quantized, **_):
    for ours, theirs in zip(quantized.model, model.model, strict=True):
        assert isinstance(ours, type(theirs))
        assert (ours.i, ours.f, ours.type, ours.np) == (theirs.i, theirs.f, theirs.type, theirs.np)


def only_one_is_quantized(model, quantized, **_):
    assert is_quantized(quantized) and not is_quantized(model) and not named_quantizers(model)


def tying_scales_changes_no_float_value(model, quantized, **_):
    tied, before = deepcopy(quantized), activations(quantized)
    groups = scale_groups(tied)
    assert sorted(p for g in groups for p in g) == sorted(before), 'each quantizer is in one group'
    with quantizers_off(tied):
        assert tie_scales(tied) == groups
        assert same(output(tied, image()), output(model, image()))
    assert len(activations(tied)) == len(groups) < len(before)
    assert [len(g) for g in scale_groups(tied)] == [1] * len(groups), 'nothing is left to tie'


def activations(model):
    return [n for n, q in named_quantizers(model) if q._axis is None]


def test_quantized_model_has_only_quantizers_more():
    model = fuse(build('demo'))
    before = dict(model.named_parameters())
    quantize_model(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is p for name, p in before.items())
    twins = sum(len(m.quantizer_names) for m in model.modules() if isinstance(m, Twin))
    assert len(named_quantizers(model)) == twins, 'every quantizer belongs to a twin'
    kinds = [(n, type(m)) for n, m in model.named_modules()]
    assert not quantize_model(model).swapped and [(n, type(m)) for n, m in model.named_modules()] == kinds, 'nor again'


def test_no_class_is_patched():
    """Neither upstream's classes nor PyTorch's change when a model is quantized and run."""
    spaces = [
        cls for module in (models.common, models.yolo, nn) for _, cls in inspect.getmembers(module, inspect.isclass)
    ]
    spaces += [models.common, models.yolo, nn, nn.functional, torch.Tensor]
    model = fuse(build('demo'))
    before = [dict(vars(space)) for space in spaces]
    quantize_model(model)
    with quantizers_off(model):
        output(model, image())
    assert [dict(vars(space)) for space in spaces] == before


class UsersBlock(nn.Module):
    """A block of a user, with a residual Add that the toolkit does not know."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x)


def test_a_block_of_the_users_is_quantized_at_its_convolution_and_reported():
    model = fuse(build('demo'))
    i, elan = next((m.i, m) for m in model.model if isinstance(m, RepNCSPELAN4))
    elan.cv2[1] = nn.Sequential(elan.cv2[1], UsersBlock(elan.cv2[1].conv.out_channels))
    done = quantize_model(model)
    assert done.unknown == {f'model.{i}.cv2.1.1': 'UsersBlock', f'model.{len(model.model) - 1}': 'DualDDetect'}
    assert done.swapped[f'model.{i}.cv2.1.1.conv'] == 'Conv2d'


class Odd(nn.Module):
    """A block that nobody reviewed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)


def test_what_is_not_known_is_named(small, capsys):
    """A layer without a twin stays float, the convolutions of an unknown block are quantized, and a warning names it."""
    model = small.float_model()
    model.model[1].wider, model.model[1].odd = nn.ConvTranspose2d(4, 4, 2), Odd()
    done, _ = prepare(model, settings())
    assert done.kept_float['model.1.wider'] == 'no INT8 twin of ConvTranspose2d'
    assert done.swapped['model.1.odd.conv'] == 'Conv2d' and done.unknown == {'model.1.odd': 'Odd'}
    assert 'warning: not known to this toolkit: model.1.odd (Odd)' in capsys.readouterr().out
