"""Fisher information of the head's outputs: it says how much a rounding error matters to the detections.

To second order, the divergence of the outputs (see divergence.py) is half their squared change, measured with the Fisher
information F as metric. If a random vector v has the covariance F, the mean of (v · change)² is this square. So one
backward pass from v shows, at every place that is rounded, how much its values matter. Sources:
Martens, "New Insights and Perspectives on the Natural Gradient Method" (arXiv:1412.1193), section 5, on the metric;
Yuan et al., "PTQ4ViT" (arXiv:2111.12293), section 3.3, on ranges by squared gradients.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn as nn

from models.quantize.calibration.calibrate import Histogram, histogram_amax, in_memory_order
from models.quantize.calibration.divergence import mask_logits, split_map, strongest_places
from models.quantize.head_outputs import ClassScores, HeadOutputs, bins_of
from models.quantize.network import removed_after
from models.quantize.quantizers import Quantizer, named_quantizers, quantizers_off, rounded
from utils.qat.config.qat import CalibrationConfig

TRIED = 10  # candidate ranges of each scale
ON_CPU = 1 << 20  # values that all candidates round one after the other: few for a cache, enough for all threads
AT_ONCE = 4  # images in a backward pass: it keeps all activations in FP32

Draw = Callable[[Sequence[int]], torch.Tensor]  # shape → FP32 of that shape, uniform in 0..1


def probe_bernoulli(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Draw a random v for the logits of Bernoulli variables; its covariance is their Fisher information."""
    p = logits.sigmoid()
    return (p * (1 - p)).sqrt() * (draw(p.shape) - 0.5).sign()


def probe(maps: Sequence[torch.Tensor], bins: int, draw: Draw) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw a random v for each raw map of a head; its covariance is the Fisher information of the map.

    As in divergence.py, a class is a Bernoulli variable, and the distance to a side is a categorical variable with a
    weight. Maps are FP32 [B, 4 bins + classes, H, W] per level. Returns the vectors, in the shapes of the maps, and the
    weight, FP32 [], to which the divergence is relative.
    """
    vectors, weights = [], 0.0
    for raw in maps:
        sides, logits = split_map(raw, bins)
        scores, sides = logits.sigmoid(), sides.softmax(2)
        weight = scores.amax(1)[:, None, None]  # [B, 1, 1, H, W]
        one = (len(raw), 4, 1, *raw.shape[2:])  # one random number per side
        index = (sides.cumsum(2) < draw(one)).sum(2, keepdim=True).clamp_(max=bins - 1)
        drawn = torch.zeros_like(sides).scatter_(2, index, 1.0)
        of_sides = (drawn - sides) * (weight / 4).sqrt() * (draw(one) - 0.5).sign()
        vectors.append(torch.cat((of_sides.flatten(1, 2), probe_bernoulli(logits, draw)), 1))
        weights += weight.sum()
    return vectors, weights


def probe_masks(raw: HeadOutputs, bins: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a random v for the masks that count: a point of a mask is a Bernoulli variable with a weight.

    Returns the logits of the masks, FP32 [B, K, H / 4, W / 4], and v, the same shape.
    """
    with torch.no_grad():
        places, weights = strongest_places(raw, bins)
    logits = mask_logits(raw, places)
    return logits, probe_bernoulli(logits.detach(), draw) * weights.sqrt()


def backward_from_probe(model: nn.Module, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Run a forward pass, and a backward pass from a probe of the outputs; hooks of the caller see the gradients.

    The model is in eval mode, with a known head (see head_outputs.py). Images are FP32 [B, 3, H, W] in 0..1. A generator
    of the CPU draws the probe. Returns the weight, see `probe`.
    """

    def draw(shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(images)

    images, bins = images.detach().requires_grad_(), bins_of(model)
    with torch.enable_grad():
        raw = HeadOutputs.of(model(images))
        if isinstance(raw, ClassScores):
            vector, weight = raw.probe(draw)
            (raw.logits * vector).sum().backward(inputs=[images])
            return weight
        outputs = list(raw.maps)
        vectors, weight = probe([m.detach() for m in raw.maps], bins, draw)
        if raw.prototypes is not None:
            logits, vector = probe_masks(raw, bins, draw)
            outputs.append(logits)
            vectors.append(vector)
        torch.stack([(x * v).sum() for x, v in zip(outputs, vectors)]).sum().backward(inputs=[images])
    return weight


def fisher_amax(
    model: nn.Module,
    histograms: Mapping[str, Histogram],
    images: Sequence[torch.Tensor],
    config: CalibrationConfig,
) -> dict[str, torch.Tensor]:
    """Find the amax of each activation quantizer with the least sum of (gradient · error)², which changes detections least.

    The sum treats rounding errors as independent. The candidates lie between 0.8 times the smaller amax of 'mse' and
    'l3' and the largest value. `model` still has the float model's biases. `images` are batches, FP32 [B, 3, H, W] in
    0..1. `config` gives seed and percentile. Returns path of a quantizer → amax, FP32 [].
    """
    least = torch.minimum(*(histogram_amax(histograms, method, config) for method in ('mse', 'l3'))) * 0.8
    ratio = histogram_amax(histograms, 'max', config) / least
    tried = least * ratio ** torch.linspace(0, 1, TRIED, device=ratio.device)[:, None]  # [TRIED, Q]
    quantizers = dict(named_quantizers(model))
    steps = {}  # path → pairs of scale and zero point; as a number, because a clamp at tensors is much slower
    for (path, histogram), amax in zip(histograms.items(), tried.t()):
        scales, zero_points = quantizers[path].steps(amax, *histogram.limits)
        steps[path] = list(zip(scales, zero_points.tolist()))
    errors = {path: torch.zeros(TRIED, dtype=torch.float64, device=ratio.device) for path in histograms}

    def watch(path: str) -> Callable[..., torch.Tensor]:
        def hook(quantizer: Quantizer, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            # A view of the output, because other layers read the input too
            values, output = inputs[0].detach(), output.view_as(output)

            def note(gradient: torch.Tensor) -> None:
                at_once = ON_CPU if values.device.type == 'cpu' else values.numel()
                parts = (in_memory_order(x, values).split(at_once) for x in (values, gradient))
                for part, slope in zip(*parts):
                    changes = (rounded(part, *step).sub_(part).mul_(slope) for step in steps[path])
                    errors[path] += torch.stack([change.dot(change) for change in changes])

            output.register_hook(note)
            return output

        return hook

    learning = [p for p in model.parameters() if p.requires_grad]
    hooks = [quantizers[path].register_forward_hook(watch(path)) for path in steps]
    generator = torch.Generator().manual_seed(config.seed)
    try:
        with removed_after(hooks), quantizers_off(model.eval().requires_grad_(False)):
            for part in (part for batch in images for part in batch.split(AT_ONCE)):
                backward_from_probe(model, part, generator)
    finally:
        for p in learning:
            p.requires_grad_()
    best = torch.stack([e.argmin() for e in errors.values()])
    return dict(zip(histograms, tried.gather(0, best[None])[0]))
