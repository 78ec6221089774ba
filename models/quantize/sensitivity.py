"""What the quantization of each place does to the detections: for all places at once, by one backward pass an image.

Rounding moves what a place computes by δ, and the outputs by J δ. With a probe v of the outputs (see fisher.py) the backward pass
gives v · J δ for every place, and half the mean square of these is the divergence that this place alone causes, to second order. Each
image has a probe of its own: n images estimate a figure to sqrt(2 / n) of itself. Places that are kept in float together are
added before they are squared. Where δ is not small, or one place's rounding changes another's, only measuring tells.
"""
import contextlib
from copy import deepcopy

import torch

from models.quantize.blocks import QuantConv2d, Twin
from models.quantize.fisher import AT_ONCE, backward
from models.quantize.quantizers import Quantizer, quantizers_off


def untied(model):
    """A copy of the quantized `model` in which every place has a quantizer of its own, with the range that it shared."""
    model = deepcopy(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                module._modules[name] = deepcopy(child)
    return model


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
        for part in images.split(AT_ONCE):
            found = {path: torch.zeros(len(part), dtype=torch.float64, device=part.device) for path in self.projections}
            with self._places(found), quantizers_off(self.model):
                self.weight += backward(self.model, part, self.generator).item()
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
