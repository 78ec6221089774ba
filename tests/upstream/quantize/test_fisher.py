"""Laws of the Fisher metric: probes measure the divergence, and ranges have the least error in that metric."""

import pytest
import torch
from helpers.zoo import image, same, settings, state

from models.quantize.calibration.calibrate import collect_histograms, histogram_amax, over
from models.quantize.calibration.divergence import TRIED, HeadOutputs, fisher_amax, probe, typical_divergence
from models.quantize.quantizers import Quantizer, named_quantizers, quantizers_off

BATCHES = [image(96, 2, seed) for seed in range(2)]


class Fixed(torch.nn.Module):
    """A detector that returns given raw maps."""

    def __init__(self, maps, bins):
        super().__init__()
        self.maps, self.model = maps, [torch.nn.Module()]
        self.model[-1].reg_max = bins

    def forward(self, images):
        return torch.zeros(1, 4, 1), self.maps


def draws(generator):
    return lambda shape: torch.rand(shape, generator=generator)


def test_the_square_of_a_projection_is_twice_the_divergence():
    """It holds for the mean of many probes and for a small change."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 4 * 5 + 3, size, size, generator=generator).double() for size in (3, 2)]
    change = [0.01 * torch.randn(m.shape, generator=generator).double() for m in maps]
    moved = typical_divergence(Fixed([m + c for m, c in zip(maps, change)], 5), [None], [HeadOutputs(maps, None)])
    squares = []
    for _ in range(4000):
        vectors, weight = probe(maps, 5, draws(generator))
        squares.append(sum((v * c).sum() for v, c in zip(vectors, change)).square() / 2 / weight)
    assert torch.stack(squares).mean().item() == pytest.approx(moved, rel=0.1)  # 4000 probes: 2 % and the third order


def test_a_probe_knows_what_changes_nothing():
    """The same number, added to all logits of a side, does not change their distribution."""
    maps = [torch.randn(2, 4 * 5 + 3, 3, 3, generator=torch.Generator().manual_seed(0))]
    [v], _ = probe(maps, 5, draws(torch.Generator().manual_seed(1)))
    assert torch.allclose(v[:, :20].unflatten(1, (4, 5)).sum(2), torch.zeros(2, 4, 3, 3), atol=1e-6) and v.norm() > 0.1


def test_the_range_is_the_best_of_all_tried(demo):
    """For a quantizer that many tensors share: gradients from autograd, errors from its own rounding."""
    model, config = demo.quantized_model(), settings()
    histograms = collect_histograms(model, over(BATCHES))
    found = fisher_amax(model, histograms, BATCHES, config.seed)
    assert found.keys() == histograms.keys()
    path = next(
        p
        for p, q in named_quantizers(model)
        if q._axis is None and sum(m is q for m in model.modules()) == 1 and p.endswith('cv1.conv.input_quantizer')
    )
    quantizer, seen = model.get_submodule(path), []
    low = 0.8 * min(histogram_amax(histograms, method)[list(histograms).index(path)].item() for method in ('mse', 'l3'))
    high = histograms[path].largest.item()

    def keep(q, inputs, output):
        output = output * 1.0
        output.retain_grad()
        seen.append((inputs[0].detach(), output))
        return output

    hook, generator = quantizer.register_forward_hook(keep), torch.Generator().manual_seed(config.seed)
    with quantizers_off(model):
        for images in BATCHES:
            maps = model(images.clone().requires_grad_())[1]
            torch.autograd.backward(maps, probe([m.detach() for m in maps], 16, draws(generator))[0])
    hook.remove()

    def loss(amax):
        other = Quantizer()
        other.set_amax(torch.tensor(amax))
        return sum(((other(x) - x) * y.grad).square().sum().item() for x, y in seen)

    tried = [low * (high / low) ** (i / (TRIED - 1)) for i in range(TRIED)]
    losses = [loss(amax) for amax in tried]
    assert found[path].item() == pytest.approx(tried[losses.index(min(losses))], rel=2e-3)
    assert max(losses) > 1.05 * min(losses), 'there was something to choose'


def test_nothing_is_left_behind(demo):
    model = demo.quantized_model().requires_grad_(True)
    before, flags = state(model), [p.requires_grad for p in model.parameters()]
    first = fisher_amax(model, collect_histograms(model, over(BATCHES)), BATCHES, 57)
    again = fisher_amax(model, collect_histograms(model, over(BATCHES)), BATCHES, 57)
    assert same(first, again) and same(state(model), before) and [p.requires_grad for p in model.parameters()] == flags
    assert not any(m._forward_hooks for m in model.modules()) and all(p.grad is None for p in model.parameters())
    assert not any(q._disabled for _, q in named_quantizers(model))
