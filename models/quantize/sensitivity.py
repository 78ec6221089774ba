"""What each quantizer does to the outputs: for all of them at once, by one backward pass, and for some of them measured.

To second order the divergence of the outputs (see `choose.divergence`) is half the square of what rounding moves them by, in the
metric of their Fisher information. With a random vector v whose covariance is that information, the mean over v of
(v · J δ)² is that square, and one backward pass from v gives v · J δ for the rounding errors δ of every place where something
is quantized. Each image draws a v of its own, so that n images estimate a figure to sqrt(2 / n) of itself; the figures of units
made of several places follow by adding, before they are squared.
Sources: Hutchinson's trace estimator; Martens, "New Insights and Perspectives on the Natural Gradient Method"
(arXiv:1412.1193), section 5: the Fisher information as the metric of outputs.
"""
import contextlib
from copy import deepcopy

import torch

from models.quantize.blocks import QuantConv2d, Twin
from models.quantize.losses import is_plain_detector
from models.quantize.quantizers import Quantizer, quantizers_off


def untied(model):
    """A copy of the quantized `model` in which every place has a quantizer of its own, with the range that it shared."""
    model = deepcopy(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                module._modules[name] = deepcopy(child)
    return model


def probe(maps, model, generator):
    """(v, weight): for each of the head's raw maps [B, C, H, W] a random v whose covariance is their Fisher information, and the
    sum that the divergence is relative to.

    Of a plain detector, as `choose.divergence` weighs it: classes are independent Bernoulli variables, the distance to a side is
    a category. Of any other model v · δ is relative to the maps' own energy, so that the square is the relative squared error.
    """
    def signs(shape):
        return torch.randint(2, shape, generator=generator).mul_(2).sub_(1).to(maps[0].device)

    if not is_plain_detector(model):
        return [signs(m.shape).to(m) for m in maps], sum(m.square().sum() for m in maps) / 2
    bins, vectors, weights = model.model[-1].reg_max, [], 0.0
    for raw in maps:
        sides, scores = raw.split((4 * bins, raw.shape[1] - 4 * bins), 1)
        scores, sides = scores.sigmoid(), sides.unflatten(1, (4, bins)).softmax(2)
        weight = scores.amax(1)[:, None]  # [B, 1, H, W]
        drawn = _draw(sides, generator)
        of_sides = (drawn - sides) * (weight / 4).sqrt()[:, :, None] * signs((len(raw), 4, 1, *raw.shape[2:]))
        vectors.append(torch.cat((of_sides.flatten(1, 2), (scores * (1 - scores)).sqrt() * signs(scores.shape)), 1))
        weights += weight.sum()
    return vectors, weights


def _draw(chances, generator):
    """One-hot draws along axis 2 of `chances` [B, 4, bins, H, W], which add up to 1 there."""
    uniform = torch.rand(chances[:, :, :1].shape, generator=generator).to(chances)
    index = (chances.cumsum(2) < uniform).sum(2, keepdim=True).clamp_(max=chances.shape[2] - 1)
    return torch.zeros_like(chances).scatter_(2, index, 1.0)


class Sensitivity:
    """Estimates for a calibrated `model`, whose biases are those of the float model: feed it images, then ask for units.

    Biases that were corrected for one quantization are wrong for all others, the float model among them.
    """

    def __init__(self, model, seed=0):
        self.model = untied(model).eval().requires_grad_(False)
        self.generator = torch.Generator().manual_seed(seed)
        self.projections = {path: [] for path, m in self.model.named_modules() if isinstance(m, Twin)}  # v · J δ, [B] per batch
        self.weight = 0.0

    def see(self, images):
        """images: FP32 [B, 3, H, W] in 0..1. One forward and one backward pass of the float model."""
        found = {path: torch.zeros(len(images), dtype=torch.float64, device=images.device) for path in self.projections}
        with self._places(found), quantizers_off(self.model), torch.enable_grad():
            maps = self.model(images.requires_grad_())[1]
            vectors, weight = probe([m.detach() for m in maps], self.model, self.generator)
            torch.autograd.backward(maps, vectors, inputs=[images])
        self.weight += weight.item()
        for path, values in found.items():
            self.projections[path].append(values)

    @contextlib.contextmanager
    def _places(self, found):
        """Context: the backward pass adds the share of each twin's roundings to `found`."""
        def note(path, tensor, error):
            def add(gradient):
                found[path] += (gradient * error).flatten(1).sum(1, dtype=torch.float64)
            tensor.register_hook(add)

        def of_input(path):
            def hook(quantizer, inputs, output):
                with torch.no_grad():
                    error = quantizer._quant_forward(inputs[0]) - inputs[0]
                output = output.view_as(output)  # it is the input, which others read as well
                note(path, output, error)
                return output
            return hook

        def of_weight(path):
            def hook(conv, inputs, output):
                with torch.no_grad():
                    error = conv._conv_forward(inputs[0], conv.weight_quantizer._quant_forward(conv.weight) - conv.weight, None)
                note(path, output, error)
            return hook

        handles = []
        for path, twin in self.model.named_modules():
            if not isinstance(twin, Twin):
                continue
            for name in twin.quantizer_names:
                quantizer = getattr(twin, name)
                if quantizer._axis is None:
                    handles.append(quantizer.register_forward_hook(of_input(path)))
            if isinstance(twin, QuantConv2d):
                handles.append(twin.register_forward_hook(of_weight(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def distortion(self, twins):
        """Estimated divergence if only these places (paths of twins) are quantized."""
        return self._divergence(sum(torch.cat(self.projections[path]) for path in twins))

    def without(self, twins):
        """Estimated divergence if all but these are."""
        rest = self.projections.keys() - set(twins)
        return self._divergence(sum(torch.cat(self.projections[path]) for path in sorted(rest)))

    def _divergence(self, projections):
        return (projections.square().sum() / 2 / self.weight).item()
