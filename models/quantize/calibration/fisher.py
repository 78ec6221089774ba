"""What a small change of the head's outputs does to the detections, and the ranges that change them least.

To second order, the divergence of the outputs (see divergence.py) is half the square of their change in the metric of their
Fisher information. A random vector v whose covariance is that information stands for it: the mean of (v · change)² is the square. So
one backward pass from v gives, at every place where something is rounded, how much its values matter.
Sources: Martens, "New Insights and Perspectives on the Natural Gradient Method" (arXiv:1412.1193), section 5, on the metric; Yuan et al.,
"PTQ4ViT" (arXiv:2111.12293), section 3.3, on ranges by squared gradients.
"""

import torch

from models.quantize.calibration.calibrate import histogram_amax
from models.quantize.calibration.divergence import mask_logits, split, strongest
from models.quantize.head_outputs import Raw
from models.quantize.quantizers import named_quantizers, quantizers_off, rounded, usable_scale

TRIED = 10  # ranges for each scale
AT_ONCE = 4  # images in a backward pass, which keeps all activations in FP32


def bernoulli(logits, draw):
    """A random v whose covariance is the Fisher information of the `logits` of Bernoulli variables."""
    p = logits.sigmoid()
    return (p * (1 - p)).sqrt() * (draw(p.shape) - 0.5).sign()


def probe(maps, bins, draw):
    """(v, weight): for each of a head's raw maps [B, 4 bins + classes, H, W] a random v whose covariance is their Fisher information,
    and the sum that the divergence is relative to. draw: shape → uniform in 0..1.

    As divergence.py weighs them: a class is a Bernoulli variable, the distance to a side a categorical one, of a weight.
    """
    vectors, weights = [], 0.0
    for raw in maps:
        sides, logits = split(raw, bins)
        scores, sides = logits.sigmoid(), sides.softmax(2)
        weight = scores.amax(1)[:, None, None]  # [B, 1, 1, H, W]
        one = (len(raw), 4, 1, *raw.shape[2:])  # a number for each side
        index = (sides.cumsum(2) < draw(one)).sum(2, keepdim=True).clamp_(max=bins - 1)
        drawn = torch.zeros_like(sides).scatter_(2, index, 1.0)
        of_sides = (drawn - sides) * (weight / 4).sqrt() * (draw(one) - 0.5).sign()
        vectors.append(torch.cat((of_sides.flatten(1, 2), bernoulli(logits, draw)), 1))
        weights += weight.sum()
    return vectors, weights


def probe_masks(raw, bins, draw):
    """The logits of the masks that count in a Raw, and a v for them, as `probe`: a point of a mask is a Bernoulli variable of a weight."""
    with torch.no_grad():
        places, weights = strongest(raw, bins)
    logits = mask_logits(raw, places)
    return logits, bernoulli(logits.detach(), draw) * weights.sqrt()


def backward(model, images, generator):
    """A forward pass of `model` (with a known head, in eval mode), and the backward pass from a probe of its outputs; hooks see the
    gradients. Returns the weight, see `probe`.

    images: FP32 [B, 3, H, W] in 0..1.
    """

    def draw(shape):
        return torch.rand(shape, generator=generator).to(images)

    images, bins = images.detach().requires_grad_(), model.model[-1].reg_max
    with torch.enable_grad():
        raw = Raw.of(model(images))
        outputs = list(raw.maps)
        vectors, weight = probe([m.detach() for m in raw.maps], bins, draw)
        if raw.prototypes is not None:
            logits, vector = probe_masks(raw, bins, draw)
            outputs.append(logits)
            vectors.append(vector)
        torch.autograd.backward(outputs, vectors, inputs=[images])
    return weight


def fisher_amax(model, histograms, images, config):
    """The amax of each activation quantizer of `model` that changes the detections least, by what each rounding error does alone:
    that of the least sum of (gradient · error)². {path: FP32 []}.

    model: quantized, its biases those of the float model. histograms: see calibrate.observe; the ranges tried lie between the
    smallest of 'mse' and 'l3', a little less, and the largest value. images: a list of batches, FP32 [B, 3, H, W] in 0..1.
    """
    least = torch.minimum(*(histogram_amax(histograms, method, config) for method in ('mse', 'l3'))) * 0.8
    ratio = histogram_amax(histograms, 'max', config) / least
    tried = least * ratio ** torch.linspace(0, 1, TRIED, device=ratio.device)[:, None]  # [TRIED, Q]
    scales = dict(zip(histograms, usable_scale(tried).t()))
    errors = {path: torch.zeros(TRIED, dtype=torch.float64, device=ratio.device) for path in histograms}

    def watch(path):
        def hook(quantizer, inputs, output):
            values, output = inputs[0].detach(), output.view_as(output)  # a view: others read the input as well

            def note(gradient):
                errors[path] += torch.stack(
                    [((rounded(values, scale) - values) * gradient).square().sum() for scale in scales[path]]
                )

            output.register_hook(note)
            return output

        return hook

    learning = [p for p in model.parameters() if p.requires_grad]
    hooks = [q.register_forward_hook(watch(path)) for path, q in named_quantizers(model) if path in scales]
    generator = torch.Generator().manual_seed(config.seed)
    try:
        with quantizers_off(model.eval().requires_grad_(False)):
            for part in (part for batch in images for part in batch.split(AT_ONCE)):
                backward(model, part, generator)
    finally:
        for hook in hooks:
            hook.remove()
        for p in learning:
            p.requires_grad_()
    best = torch.stack([e.argmin() for e in errors.values()])
    return dict(zip(histograms, tried.gather(0, best[None])[0]))
