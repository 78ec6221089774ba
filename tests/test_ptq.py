"""Laws of what follows calibration: biases are corrected to the float model's means, the calibration that keeps the detections
best is chosen, and SQNR is what its formula says."""
import math

import pytest
import torch
from models.quantize.bias import correct_biases, watch
from models.quantize.calibrate import observe
from models.quantize.choose import CANDIDATES, choose
from models.quantize.divergence import divergence
from models.quantize.outputs import Raw
from models.quantize.quantizers import quantizers_off
from models.quantize.sqnr import ComparedModel
from utils.qat.backends import TorchModel
from zoo import image, same, settings, state

BATCHES = [image(96, 2, seed) for seed in range(3)]


def means(model, batches):
    """For each batch {path of a convolution with a bias: mean of each output channel}."""
    return [found for found, _ in watch(model, batches)]


def raw_maps(model, batches):
    return [Raw.of(output) for _, output in watch(model, batches)]


@torch.no_grad()
def test_watching_is_looking_at_every_convolution(demo):
    model = demo.float_model()
    found = list(watch(model, BATCHES))
    convs = {path: m for path, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and m.bias is not None}
    assert all(m.keys() == convs.keys() for m, _ in found) and not any(m._forward_hooks for m in model.modules())
    first = model.model[0].conv
    for images, (seen, output) in zip(BATCHES, found, strict=True):
        assert torch.equal(seen['model.0.conv'], first(images).mean((0, 2, 3))) and same(output, model(images))


def test_means_become_those_of_the_float_model(demo):
    model, reference = demo.quantized_model(), demo.float_model()
    [wanted], [before] = means(reference, BATCHES[:1]), means(model, BATCHES[:1])
    correct_biases(model, BATCHES[:1], [wanted])
    [after] = means(model, BATCHES[:1])
    assert wanted.keys() == after.keys() and len(after) > 50
    for path, mean in wanted.items():
        assert torch.allclose(after[path], mean, rtol=1e-4, atol=1e-5), path
    shift = [(before[path] - mean).norm() / mean.norm() for path, mean in wanted.items()]
    assert max(shift) > 0.01, 'there was something to correct'


def test_several_batches_count_alike(demo):
    """The first layer sees the same images whatever was corrected, so its step is the mean of those of the batches."""
    alone, wanted = [], means(demo.float_model(), BATCHES)
    for images, seen in zip(BATCHES, wanted):
        model = demo.quantized_model()
        before = model.model[0].conv.bias.clone()
        correct_biases(model, [images], [seen])
        alone.append(model.model[0].conv.bias - before)
    model = demo.quantized_model()
    correct_biases(model, BATCHES, wanted)
    # a later batch sees what the earlier ones have corrected: x1, x1 + (x2 - x1) / 2, ...
    assert torch.allclose(model.model[0].conv.bias - before, sum(alone) / 3, rtol=1e-3, atol=1e-6)


def test_only_biases_move_and_nothing_is_left(demo):
    model, reference = demo.quantized_model(), demo.float_model()
    before, float_before = state(model), state(reference)
    correct_biases(model, BATCHES[:1], means(reference, BATCHES[:1]))
    moved = {k for k, v in state(model).items() if not torch.equal(v, before[k])}
    assert moved and all(k.endswith('.bias') for k in moved) and same(state(reference), float_before)
    assert not any(m._forward_hooks for net in (model, reference) for m in net.modules())


def test_a_float_model_needs_no_correction(demo):
    model = demo.quantized_model()
    before = state(model)
    with quantizers_off(model):
        correct_biases(model, BATCHES[:1], means(demo.float_model(), BATCHES[:1]))
    assert all(torch.allclose(v, before[k], atol=1e-5) for k, v in state(model).items())


# ---- which calibration --------------------------------------------------------------------------------------------------

def test_divergence_by_hand(demo):
    """Place by place, in plain Python, for one image."""
    model, reference = demo.quantized_model(), demo.float_model()
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
    assert divergence(model, [images], raw_maps(reference, [images])) == pytest.approx(total / weights, rel=1e-6) and total > 0
    assert divergence(reference, [images], raw_maps(demo.float_model(), [images])) == pytest.approx(0, abs=1e-12)


def calibrated(demo, **changes):
    model, reference, config = demo.quantized_model(), demo.float_model(), settings(**changes)
    found, method, _ = choose(model, reference, observe(model, BATCHES), BATCHES[:1], config)
    return model, found, method


@pytest.mark.parametrize('correcting', [True, False])
def test_the_calibration_that_keeps_the_detections_best_is_kept(demo, correcting):
    best, found, method = calibrated(demo, calib_method='auto', bias_correction=correcting)
    assert tuple(found) == CANDIDATES and method == min(found, key=found.get) and len(set(found.values())) == len(CANDIDATES)
    for name, value in found.items():
        model, nothing, same_name = calibrated(demo, calib_method=name, bias_correction=correcting)
        assert nothing == {} and same_name == name
        assert divergence(model, BATCHES[:1], raw_maps(demo.float_model(), BATCHES[:1])) == pytest.approx(value, rel=1e-9)
        assert same(state(model), state(best)) == (name == method), 'what a candidate changed is undone'


def test_without_correction_no_bias_moves(demo):
    model, _, _ = calibrated(demo, calib_method='l3', bias_correction=False)
    before = state(demo.float_model())
    assert all(torch.equal(v, before[k]) for k, v in state(model).items() if k.endswith('.bias'))


# ---- SQNR ---------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_sqnr_by_hand(demo):
    model, reference = demo.quantized_model(), demo.float_model()
    compared = ComparedModel(model, reference)
    predictions = [compared(images) for images in BATCHES]
    assert same(predictions, [TorchModel(model)(images) for images in BATCHES]), 'comparing changes no prediction'
    for part, channels in (('boxes', slice(0, -10)), ('classes', slice(-10, None))):  # the demo has ten classes
        signal = noise = 0
        for images in BATCHES:
            for s, t in zip(model(images)[1], reference(images)[1], strict=True):
                signal += t[:, channels].double().square().sum().item()
                noise += (s[:, channels].double() - t[:, channels].double()).square().sum().item()
        assert compared.sqnr()[part] == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)
        assert 5 < compared.sqnr()[part] < 60


@torch.no_grad()
def test_sqnr_falls_by_six_db_for_twice_the_noise(demo):
    """Of the convolution that writes the classes, whose bias is moved."""
    values = []
    for shift in (0.1, 0.2):
        model = demo.float_model()
        for branch in model.model[-1].cv3:
            branch[-1].bias += shift
        compared = ComparedModel(model, demo.float_model())
        compared(BATCHES[0])
        assert compared.sqnr()['boxes'] > 100
        values.append(compared.sqnr()['classes'])
    assert values[0] - values[1] == pytest.approx(20 * math.log10(2), abs=0.01)
