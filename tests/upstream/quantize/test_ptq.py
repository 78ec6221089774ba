"""Laws of PTQ after calibration: biases are corrected, the least divergence on held-out images wins, SQNR is its formula."""

import math

import pytest
import torch
from helpers.faults import sampled
from helpers.zoo import image, same, settings, state

from models.quantize.blocks import QuantConv2d
from models.quantize.calibration import ptq
from models.quantize.calibration.bias_correction import (
    convs_with_bias,
    correct_biases,
    mean_window,
    own_errors,
    shrunk_mean,
)
from models.quantize.calibration.calibrate import collect_histograms, over
from models.quantize.calibration.divergence import HeadOutputs, typical, typical_divergence
from models.quantize.calibration.ptq import (
    CANDIDATES,
    CORRECTED,
    UNUSABLE,
    choose_calibration,
    every_third,
    is_behind,
    race,
)
from models.quantize.quantizers import quantizers_off
from models.quantize.run import scorer
from models.quantize.run.scorer import ComparedModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.log import unshown
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders, channels_last

BATCHES = [channels_last(image(96, 2, seed)) for seed in range(3)]  # as a TorchModel lays them
ONE_BY_ONE = torch.cat(BATCHES).split(1)  # in batches of one shape, whose INT8 values are the same bit for bit


@torch.no_grad()
def raw_maps(model, batches):
    return [HeadOutputs.of(model.eval()(images)) for images in batches]


@torch.no_grad()
def test_own_errors_by_hand(small):
    """Of the first convolution and a later one: output with rounded input and weights, minus the exact output."""
    model = small.quantized_model().eval()
    convs = {path: m for path, m in model.named_modules() if isinstance(m, QuantConv2d)}
    found = own_errors(model, BATCHES)
    assert found.keys() == convs.keys() and not any(m._forward_hooks for m in model.modules())
    for path in ('model.0.conv', [*convs][-1]):
        conv, seen, errors = convs[path], [], []
        hook = conv.register_forward_hook(lambda conv, inputs, output: seen.append((inputs[0].clone(), output.clone())))
        for images in BATCHES:
            model(images)
        hook.remove()
        for x, y in seen:
            errors.append(
                (y - torch.nn.functional.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)).mean((2, 3))
            )
        size = max(y.mean((2, 3)).abs().max().item() for _, y in seen)  # of the means whose difference an error is
        assert torch.allclose(found[path], torch.cat(errors), atol=1e-6 * size)
        assert found[path].shape == (6, conv.out_channels) and found[path].abs().max() > 1e-4 * size


def test_certain_is_near_the_mean_and_chance_near_zero():
    noise = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    assert shrunk_mean(noise).square().mean() < 0.6 * noise.mean(0).square().mean(), 'chance is no shift'
    assert torch.allclose(shrunk_mean(5 + noise), (5 + noise).mean(0), rtol=1e-2)
    assert torch.equal(shrunk_mean(noise[:1]), noise[0]) and torch.equal(shrunk_mean(torch.zeros(4, 3)), torch.zeros(3))
    shift = shrunk_mean(torch.cat((noise + 0.2, noise - 0.2), 1)) / torch.cat((noise + 0.2, noise - 0.2), 1).mean(0)
    assert (0 <= shift).all() and (shift <= 1).all(), 'never further than the mean'


def test_the_errors_of_corrected_convolutions_have_no_mean(small):
    """All images are alike here. Only biases move, and no hook is left."""
    model, images = small.quantized_model(), [BATCHES[0][:1]]
    before, errors = state(model), own_errors(model, images)
    shifts = {path: shrunk_mean(of_images) for path, of_images in errors.items()}
    means = []
    first = model.model[0].conv
    hook = first.register_forward_hook(lambda conv, inputs, output: means.append(output.mean((0, 2, 3))))
    with torch.no_grad():
        model(images[0])
        correct_biases(model, {path: model.get_submodule(path).bias.clone() for path in shifts}, shifts)
        model(images[0])
    hook.remove()
    assert (
        torch.allclose(means[0] - means[1], errors['model.0.conv'][0], atol=1e-5)
        and max(s.abs().max() for s in shifts.values()) > 0.01
    )
    moved = {k for k, v in state(model).items() if not torch.equal(v, before[k])}
    assert moved and moved <= {f'{path}.bias' for path in shifts} and not any(m._forward_hooks for m in model.modules())


def test_a_float_model_needs_no_correction(small):
    model, means = small.quantized_model(), {}
    for path, conv in convs_with_bias(model):
        conv.register_forward_hook(lambda conv, inputs, y, path=path: means.update({path: y.mean((2, 3)).abs().max()}))
    with quantizers_off(model):
        errors = own_errors(model, BATCHES[:1])
    assert errors.keys() == means.keys() and all(errors[path].abs().max() < 1e-6 * means[path] for path in means)


@pytest.mark.parametrize(
    'options',
    [
        dict(kernel_size=1),
        dict(kernel_size=3, padding=1),
        dict(kernel_size=3, padding=1, stride=2),
        dict(kernel_size=3, padding=2, dilation=2, stride=2, groups=4),
        dict(kernel_size=2),
        dict(kernel_size=1, stride=2),
        dict(kernel_size=(1, 7), padding=(0, 3)),
        dict(kernel_size=5, padding='same', padding_mode='reflect'),
    ],
)
def test_of_the_mean_window_a_convolution_gives_its_mean_output(options):
    conv, x = torch.nn.Conv2d(8, 12, **options), torch.rand(2, 8, 21, 34)
    of_window = torch.nn.functional.conv2d(mean_window(conv, x), conv.weight, conv.bias, groups=conv.groups)
    assert torch.allclose(of_window[:, :, 0, 0], conv(x).mean((2, 3)), atol=1e-6)


# ---- which calibration --------------------------------------------------------------------------------------------------


def test_divergence_by_hand(small):
    """For one image, anchor by anchor, in plain Python."""
    model, reference = small.quantized_model(), small.float_model()
    images = image(64, 1, 5)
    with torch.no_grad():
        mine, theirs = (net.eval()(images)[1] for net in (model, reference))
    total = weights = 0.0
    for m, t in zip(mine, theirs):
        for y in range(m.shape[2]):
            for x in range(m.shape[3]):
                p, q = (torch.sigmoid(raw[0, 64:, y, x].double()) for raw in (t, m))
                total += (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum().item()
                sides, true = (raw[0, :64, y, x].double().view(4, 16).softmax(1) for raw in (m, t))
                total += p.max().item() * (true * (true / sides).log()).sum(1).mean().item()
                weights += p.max().item()
    assert (
        typical_divergence(model, [images], raw_maps(reference, [images])) == pytest.approx(total / weights, rel=1e-4)
        and total > 0
    )
    assert typical_divergence(reference, [images], raw_maps(small.float_model(), [images])) == pytest.approx(
        0, abs=1e-12
    )


def test_one_odd_image_does_not_decide(small):
    """The divergence of an image as a whole counts by its logarithm: ten times as much on one of four is 10 ** (1 / 4)."""
    model, reference = small.quantized_model(), small.float_model()
    images = image(64, 4, 5)
    (raw,) = raw_maps(reference, [images])
    (mine,) = raw_maps(model, [images])
    totals, weights = mine.divergence_sums(raw, 16)
    typical = typical_divergence(model, [images], [raw])
    assert typical == pytest.approx((totals.prod() ** 0.25 / weights.mean()).item(), rel=1e-6)


def test_batches_do_not_matter(small):
    """For a float model: with INT8, other shapes may take other kernels, whose last bits round some values the other way."""
    model, reference, images = small.float_model(), small.float_model(), image(64, 4, 5)
    for branch in model.model[-1].cv3:
        branch[-1].bias.data += 0.1
    whole, parts = (typical_divergence(model, b, raw_maps(reference, b)) for b in ([images], images.split(2)))
    assert parts == pytest.approx(whole, rel=1e-3) and whole > 0


def calibrated(small, images=ONE_BY_ONE, **changes):
    model, config = small.quantized_model(), settings(**changes)
    found, method, corrected, _ = choose_calibration(model, collect_histograms(model, over(BATCHES)), images, config)
    return model, found, method, corrected


def held_out(small, model, images=ONE_BY_ONE):
    _, others = every_third(images)
    return typical_divergence(model, others, raw_maps(small.float_model(), others))


def test_no_image_is_both_every_third():
    images = torch.cat(BATCHES)
    fitted, compared = every_third(BATCHES)
    assert torch.equal(torch.cat(fitted), images[[0, 3]]) and torch.equal(torch.cat(compared), images[[1, 2, 4, 5]])
    assert {len(x) for x in (*fitted, *compared)} <= {1, 2}
    one = BATCHES[0][:1]
    assert all(torch.equal(torch.cat(part), one) for part in every_third([one]))


def test_a_calibration_that_is_clearly_behind_sees_a_third_of_the_images():
    """The three differ by a factor that is the same on all images, but for a noise of 0.1."""
    generator = torch.Generator().manual_seed(0)
    images, weights = torch.randn(24, generator=generator, dtype=torch.float64), torch.rand(24, generator=generator)
    factors, parts = {'good': 1.0, 'near': 1.02, 'bad': 3.0}, (slice(0, 8), slice(8, 24))
    noise = {name: 0.1 * torch.randn(24, generator=generator, dtype=torch.float64) for name in factors}
    logs = {name: images + noise[name] + math.log(factor) for name, factor in factors.items()}
    seen = []

    def measure(name, part):
        seen.append((name, part))
        return logs[name][part], weights[part]

    found = race(list(factors), parts, measure, unshown)
    assert seen == [(name, parts[0]) for name in factors] + [(name, parts[1]) for name in ('good', 'near')]
    for name in ('good', 'near'):
        assert found[name] == pytest.approx(typical(logs[name], weights))
    assert found['bad'] > max(found['good'], found['near']) and found['bad'] == pytest.approx(
        3 * found['good'], rel=0.2
    )
    assert not is_behind(logs['bad'][:1], logs['good'][:1]), 'one image is chance'
    assert not is_behind(logs['good'], logs['good'])


def test_the_least_divergence_was_measured_on_all_images():
    """'late' is uncertain on the first third, where it is worse than the dropped 'behind', and the best on the others."""
    zeros, ones = torch.zeros(8, dtype=torch.float64), torch.ones(24)
    logs = {
        'leader': torch.zeros(24, dtype=torch.float64),
        'behind': torch.full((24,), 0.1, dtype=torch.float64),
        'late': torch.cat((zeros + torch.tensor([-1.0, 1.5] * 4), zeros - 1, zeros - 1)),
    }
    parts, seen = (slice(0, 8), slice(8, 24)), []

    def measure(name, part):
        seen.append(name)
        return logs[name][part], ones[part]

    found = race(list(logs), parts, measure, unshown)
    assert seen.count('behind') == 1 and found['behind'] == pytest.approx(math.exp(0.1)), 'as behind the leader'
    assert min(found, key=found.get) == 'late' and found['late'] == pytest.approx(typical(logs['late'], ones))


@pytest.mark.parametrize('correcting', sampled([True, False], 2))
def test_no_alternative_is_better_than_the_choice(small, correcting):
    """The measure is the divergence on held-out images. Without correction no bias moves."""
    best, found, method, corrected = calibrated(small, calib_method='auto', bias_correction=correcting)
    assert corrected or same(biases(best), biases(small.float_model()))
    assert {*found} == {*CANDIDATES, *(name + CORRECTED for name in CANDIDATES if correcting)}
    assert len(set(found.values())) == len(found)
    kept = method + CORRECTED * corrected
    assert kept == min(found, key=found.get) and held_out(small, best) == pytest.approx(found[kept], rel=1e-9)
    for name in CANDIDATES:
        model, alone, same_name, _ = calibrated(small, calib_method=name, bias_correction=correcting)
        # `found` has estimates of those that were dropped
        assert same_name == name and min(alone.values()) >= found[kept] * (1 - 1e-9)
        assert name != method or alone[kept] == pytest.approx(found[kept], rel=1e-9)
        assert same(state(model), state(best)) == (name == method), 'what a candidate changed is undone'


def biases(model):
    return {k: v for k, v in state(model).items() if k.endswith('.bias')}


def test_a_correction_that_harms_is_not_kept(small):
    """It is fitted to far brighter images than it is compared on."""
    kinds = [x for one in ONE_BY_ONE for x in (20 * one, one, one)]  # every third one is bright
    model, found, method, corrected = calibrated(small, kinds, calib_method='mse')
    assert found['mse' + CORRECTED] > found['mse'] and method == 'mse' and not corrected
    assert same(biases(model), biases(small.float_model())), 'and taken back bit for bit'
    assert held_out(small, model, kinds) == pytest.approx(found['mse'], rel=1e-9)


def test_a_correction_that_helps_is_kept(demo):
    """The ranges are so small that clipping shifts the mean. `small` is another network on each CPU, on some of which that does not matter."""
    model, found, _, corrected = calibrated(demo, calib_method='percentile', percentile=90.0)
    assert (
        corrected
        and found['percentile' + CORRECTED] < found['percentile']
        and not same(biases(model), biases(demo.float_model()))
    )


@pytest.mark.parametrize(
    'changes, said',
    [
        ({'calib_method': 'percentile', 'percentile': 50.0}, True),
        ({'calib_method': 'max'}, False),
        ({'calib_method': 'auto'}, False),
    ],
)
def test_an_unusable_calibration_is_said(small, capsys, changes, said):
    config = settings(imgsz=96, calib_images=12, **changes)
    images = Loaders(load_data(small.data), config, 32, torch.device('cpu')).calibration()
    _, found = ptq.calibrated(small.float_model(), images, config, unshown)
    text = capsys.readouterr().out
    assert said == (min(found['divergence'].values()) >= UNUSABLE) == ('unusable' in text) == ('--calib-images' in text)
    assert found['biases'] in ('all', 'none') and ('no bias corrected' in text) == (found['biases'] == 'none')


# ---- SQNR ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_dead_channels_are_one_warning(small, capsys):
    """Two of two convolutions: their weights have no range, which is raised."""
    model = small.float_model()
    dead = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)][:2]
    for conv in dead:
        conv.weight.data[:2] = 0
    config = settings(imgsz=64, calib_images=4, calib_method='mse')
    ptq.calibrated(
        model, Loaders(load_data(small.data), config, 32, torch.device('cpu')).calibration(), config, unshown
    )
    [line] = [line for line in ''.join(capsys.readouterr()).splitlines() if 'raised' in line]
    assert line.startswith('warning: 4 ranges of 2 quantizers raised ')


def test_sqnr_by_hand(small):
    model, reference = small.quantized_model(), small.float_model()
    compared = ComparedModel(model, reference)
    predictions = [compared(images) for images in BATCHES]
    assert same(predictions, [TorchModel(model)(images) for images in BATCHES]), 'comparing changes no prediction'
    for part, channels in (('boxes', slice(0, -10)), ('classes', slice(-10, None))):  # of ten classes
        signal = noise = 0
        for images in BATCHES:
            for s, t in zip(model(images)[1], reference(images)[1], strict=True):
                signal += t[:, channels].double().square().sum().item()
                noise += (s[:, channels].double() - t[:, channels].double()).square().sum().item()
        assert compared.sqnr()[part] == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)
        assert 5 < compared.sqnr()[part] < 60


@torch.no_grad()
def test_sqnr_is_of_the_first_images(small, monkeypatch):
    monkeypatch.setattr(scorer, 'COMPARED', 3)
    every, two = (ComparedModel(small.quantized_model(), small.float_model()) for _ in range(2))
    predictions = [every(images) for images in BATCHES]
    for images in BATCHES[:2]:  # of two images each
        two(images)
    assert every.sqnr() == two.sqnr() and same(predictions[2], TorchModel(small.quantized_model())(BATCHES[2]))
