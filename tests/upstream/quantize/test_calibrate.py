"""Laws of the calibration of a model: every quantizer gets its range, and bad input is named."""

import pytest
import torch
from helpers.faults import sampled
from helpers.zoo import image, same, settings, state

from models.quantize.calibration.calibrate import BINS, SEARCH, clamp_weights, fit_ranges, weights_of
from models.quantize.convert import quantize_model
from models.quantize.quantizers import MIN_AMAX, named_quantizers, quantizers_off
from utils.qat.config.qat import CALIB_METHODS
from utils.qat.core.errors import QatError


@pytest.fixture
def model(small):
    model = small.float_model()
    quantize_model(model)
    return model


BATCHES = [image(seed=seed, batch=2) for seed in range(3)]


def amaxes(model):
    return {name: q._amax.clone() for name, q in named_quantizers(model)}


def assert_ready(model):
    for name, q in named_quantizers(model):
        assert (q._disabled, q._if_quant, q._if_calib, q._calibrator) == (False, True, False, None), name
        assert q._amax.isfinite().all() and (q._amax > 0).all() and q._amax.dtype == torch.float32, name


SEARCHED = [method for method in SEARCH if method != 'l3']  # l3 only bounds fisher's search, no option names it


def test_every_search_is_an_option():
    assert {'auto', 'fisher', *SEARCHED} == {*CALIB_METHODS}


@pytest.mark.parametrize('method', sampled(SEARCHED, 3))
def test_every_quantizer_is_ready(model, method):
    before = state(model)
    fit_ranges(model, BATCHES, settings(calib_method=method))
    assert_ready(model)
    after = state(model)
    assert same({k: after[k] for k in before}, before), 'calibration changes no weight'
    for m in model.modules():
        if hasattr(m, 'weight_quantizer'):
            largest = m.weight.detach().abs().amax((1, 2, 3)).clamp(min=MIN_AMAX)
            assert torch.equal(m.weight_quantizer.scale, (largest / 127).half().float())  # a scale is an FP16 number
            assert m.weight_quantizer._amax.shape == (m.out_channels,) and m.input_quantizer._amax.shape == ()


def test_with_a_reduced_range_two_weights_make_at_most_128(model):
    fit_ranges(model, BATCHES, settings(reduce_range=True))
    for m in model.modules():
        if hasattr(m, 'weight_quantizer'):
            steps = (m.weight.detach().flatten(1).T / m.weight_quantizer.scale).abs().round().amax(0)
            assert (steps == 63)[m.weight_quantizer._amax > MIN_AMAX].all()
            m.weight.data *= 1.5
    clamp_weights(model)
    for quantizer, weight in weights_of(model):
        assert (weight.flatten(1).T / quantizer.scale).abs().max() < 63.5, 'as fine-tuning leaves it'


def test_it_is_the_float_model_that_is_measured(model):
    """A scale that is set does not change the input of later quantizers: they see float values."""
    fit_ranges(model, BATCHES, settings(calib_method='max'))
    largest = {}

    def note(name):
        def hook(m, inputs):
            values = [t.abs().max().item() for t in _flat(m, inputs[0])]
            largest[name] = max(largest.get(name, 0), *values)

        return hook

    for name, m in model.named_modules():
        if hasattr(m, 'input_quantizer'):
            m.register_forward_pre_hook(note(name))
    with torch.no_grad(), quantizers_off(model):
        for images in BATCHES:
            model(images)
    for name, value in largest.items():
        amax = model.get_submodule(name).input_quantizer._amax.item()
        rounding = 1 + 2.0**-11  # to an FP16 scale
        assert value <= amax * rounding and amax <= max(value * (1 + 2 / BINS), MIN_AMAX) * rounding, name


def _flat(module, x):
    """The tensors that a twin quantizes; CBFuse gets tuples and quantizes one entry of each."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [*(parts[i] for parts, i in zip(x[:-1], module.idx)), x[-1]]


def test_same_images_same_scales(model):
    fit_ranges(model, BATCHES, settings())
    first = amaxes(model)
    fit_ranges(model, BATCHES[::-1], settings())
    assert same(amaxes(model), first)


def test_other_images_other_scales(model, small):
    """A second calibration forgets the first."""
    fit_ranges(model, [10 * b for b in BATCHES], settings())
    fit_ranges(model, BATCHES, settings())
    fresh = small.float_model()
    quantize_model(fresh)
    fit_ranges(fresh, BATCHES, settings())
    assert same(amaxes(model), amaxes(fresh))


def test_ranges_too_small_are_raised_and_named(model):
    assert fit_ranges(model, BATCHES, settings()) == {}
    conv = model.model[0].conv
    conv.weight.data[2:5] = 0
    assert fit_ranges(model, BATCHES, settings()) == {'model.0.conv.weight_quantizer': 3}
    assert (conv.weight_quantizer._amax == MIN_AMAX).tolist()[:6] == [False, False, True, True, True, False]


@pytest.mark.parametrize(
    'batches, message',
    [
        ([], r'(?s)quantizer\(s\) saw no data or only zeros: model\.0\.conv\.input_quantizer.*…'),
        ([torch.zeros(1, 3, 64, 64)], r'1 quantizer\(s\) saw no data or only zeros: model\.0\.conv\.input_quantizer;'),
        ([torch.full((1, 3, 64, 64), float('nan'))], r'model\.0\.conv\.input_quantizer met a value that is not finite'),
        ([BATCHES[0], torch.full((1, 3, 64, 64), float('inf'))], 'not finite'),
    ],
    ids=['none', 'zeros', 'nan', 'inf'],
)
def test_what_cannot_be_calibrated_is_named_and_can_be_tried_again(model, batches, message):
    with pytest.raises(QatError, match=message):
        fit_ranges(model, batches, settings())
    for _, q in named_quantizers(model):
        assert (q._disabled, q._if_quant, q._if_calib, q._calibrator) == (False, True, False, None)
    fit_ranges(model, BATCHES, settings())
    assert_ready(model)
