"""Outputs of a model's head beside the float model's: divergence, measured and estimated by one backward pass, and SQNR.

The divergence chooses calibrations and ranks units. It is a Kullback-Leibler divergence, summed over every place of the head. Three
parts count at a place: the scores of the classes, the distances to the four sides of the box (the mean of the four), and
the points of the mask (the mean inside the float model's box). The last two have a weight, the float model's best score
at that place. The sum is divided by the sum of these weights, which is near the number of places with an object.

A few images with doubtful detections, which every rounding moves, can make up most of the sum. So calibrations are
compared by `typical_divergence`, in which every image counts the same. Units are ranked by the sum over all images.

To second order, the divergence is half the squared change of the outputs, measured with their Fisher information F as
metric. If a random vector v has the covariance F, the mean of (v · change)² is this square. So one backward pass from v
shows, at every place that is rounded, how much its values matter. Sources: Martens, "New Insights and Perspectives on the
Natural Gradient Method" (arXiv:1412.1193), section 5, on the metric; Yuan et al., "PTQ4ViT" (arXiv:2111.12293), section
3.3, on ranges by squared gradients.

The SQNR in dB is the ratio of signal to quantization noise, 10 log10(sum of t² / sum of (s - t)²), over images, positions and
channels; t comes from the float model, s from the quantized one. Each part of the outputs has its own: otherwise the large
negative logits of the background would hide the rest. 6 dB more is half the noise amplitude.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from utils.general import xywh2xyxy
from utils.segment.general import crop_mask

from models.quantize.calibration.calibrate import Histogram, added, histogram_amax, in_memory_order
from models.quantize.network import head_of, removed_after
from models.quantize.quantizers import Quantizer, RoundedOnce, named_quantizers, quantizers_off, rounded
from utils.qat.core.upstream import Network
from utils.qat.data.masks import COARSE
from utils.qat.evaluation.classes import divergence

OBJECTS = 100  # places per image whose masks count: the places with the highest scores, as many as COCO scores
TRIED = 10  # candidate ranges of each scale
ON_CPU = 1 << 20  # values that all candidates round one after the other: few for a cache, enough for all threads
AT_ONCE = 4  # images in a backward pass: it keeps all activations in FP32
Draw = Callable[[Sequence[int]], torch.Tensor]  # shape → FP32 of that shape, uniform in 0..1


@dataclass
class ClassScores:
    """Outputs of a classifier, as HeadOutputs for a detector: the logits [B, classes] of one categorical variable."""

    logits: torch.Tensor

    def parts(self, classes: int) -> list[Sequence[torch.Tensor]]:
        """List the tensors of each part, in the order of Task.parts."""
        return [[self.logits]]

    def divergence_sums(self, wanted: 'ClassScores', bins: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the Kullback-Leibler divergence from `wanted`, and the weight of each image, 1: FP64 [B]."""
        apart = divergence(self.logits, wanted.logits)
        return apart, torch.ones_like(apart)

    def probe(self, bins: int, draw: Draw) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Draw a random v whose covariance is the Fisher information of the logits; see HeadOutputs.probe."""
        p = self.logits.detach().softmax(1)
        one = (len(p), 1)
        index = (p.cumsum(1) < draw(one)).sum(1, keepdim=True).clamp_(max=p.shape[1] - 1)
        drawn = torch.zeros_like(p).scatter_(1, index, 1.0)
        return [self.logits], [(drawn - p) * (draw(one) - 0.5).sign()], p.new_tensor(float(len(p)))


@dataclass
class HeadOutputs:
    """Outputs of the head, raw but for the boxes. N is the number of places of all levels, level by level.

    A detector has no coefficients and prototypes, which are of masks.
    """

    # of each level [B, 4 bins + classes, H, W]: logits of the distances to the four sides, and of the classes
    maps: Sequence[torch.Tensor]
    boxes: torch.Tensor  # [B, 4, N], decoded: centre, width and height in pixels
    coefficients: Any = None  # [B, nm, N]
    prototypes: Any = None  # [B, nm, H / 4, W / 4]

    @classmethod
    def of(cls, output: Any) -> Any:
        """Split the output of a model in eval mode with one of network.HEADS; for a classifier return its ClassScores."""
        if isinstance(output, torch.Tensor):
            return ClassScores(output)
        predictions, rest = output
        maps, *masks = rest if isinstance(rest, tuple) else (rest,)
        return cls(maps, predictions[:, :4], *masks)

    def parts(self, classes: int) -> list[Sequence[torch.Tensor]]:
        """List the tensors of each part, in the order of Task.parts."""
        of_levels = zip(*(m.split((m.shape[1] - classes, classes), 1) for m in self.maps))
        return [*of_levels, *([x] for x in (self.coefficients, self.prototypes) if x is not None)]

    def divergence_sums(self, wanted: 'HeadOutputs', bins: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the divergence from `wanted`, of the float model, and its weights, over the places of each image: FP64 [B] both.

        The weights are about the number of places with an object.
        """
        parts, weights = [], []
        for raw, true_raw in zip(self.maps, wanted.maps):
            (sides, scores), (true_sides, true_scores) = split_map(raw, bins), split_map(true_raw, bins)
            of_sides, weight = divergence_of_sides(sides, true_sides, true_scores)
            parts.append(bernoulli_divergence(scores, true_scores).sum((1, 2, 3), dtype=torch.float64))
            parts.append(of_sides.sum((1, 2), dtype=torch.float64))
            weights.append(weight.sum((1, 2), dtype=torch.float64))
        if wanted.prototypes is not None:
            anchors, weight = strongest_places(wanted, bins)
            of_masks = bernoulli_divergence(mask_logits(self, anchors), mask_logits(wanted, anchors)) * weight
            parts.append(of_masks.sum((1, 2, 3), dtype=torch.float64))
        return added(parts), added(weights)

    def probe(self, bins: int, draw: Draw) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Draw a random v for each tensor of outputs: return these tensors, the vectors, and the weight, see `probe`.

        The tensors are the maps and the logits of the masks that count, whose points are Bernoulli variables with a weight.
        """
        vectors, weight = probe([m.detach() for m in self.maps], bins, draw)
        if self.prototypes is None:
            return [*self.maps], vectors, weight
        with torch.no_grad():
            anchors, weights = strongest_places(self, bins)
        logits = mask_logits(self, anchors)
        return [*self.maps, logits], [*vectors, probe_bernoulli(logits.detach(), draw) * weights.sqrt()], weight


def bins_of(model: Network) -> int:
    """Return the number of bins in the head's distribution of a distance; 0 for a classifier."""
    return getattr(head_of(model), 'reg_max', 0)


def split_map(raw: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the raw map of a level into the logits of its sides and of its classes.

    [B, 4 bins + classes, H, W] → [B, 4, bins, H, W] and [B, classes, H, W].
    """
    sides, scores = raw.split((4 * bins, raw.shape[1] - 4 * bins), 1)
    return sides.unflatten(1, (4, bins)), scores


def divergence_of_sides(
    sides: torch.Tensor, true_sides: torch.Tensor, true_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the divergence of a box's distances from the float model's at each place, and its weight: [B, H, W] both.

    `sides` [B, 4, bins, H, W] and `true_scores` [B, classes, H, W] are logits. The weight is in the divergence already.
    """
    log, true_log = sides.log_softmax(2), true_sides.log_softmax(2)
    weight = true_scores.amax(1).sigmoid()
    return (true_log.exp() * (true_log - log)).sum(2).mean(1) * weight, weight


def strongest_places(raw: HeadOutputs, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the places with the highest scores, whose masks count, and the weights of the points of these masks.

    Places are INT64 [B, K]. Weights are [B, K, H / 4, W / 4]: inside the box the score divided by the number of points in
    the box, outside 0.
    """
    scores, anchors = (
        torch.cat([split_map(m, bins)[1].flatten(2) for m in raw.maps], 2)
        .amax(1)
        .sigmoid()
        .topk(min(OBJECTS, raw.boxes.shape[2]))
    )
    boxes = xywh2xyxy(raw.boxes.transpose(1, 2).gather(1, anchors[..., None].expand(-1, -1, 4))) / COARSE
    inside = torch.stack([crop_mask(scores.new_ones(len(b), *raw.prototypes.shape[2:]), b) for b in boxes])
    return anchors, inside * (scores / inside.sum((2, 3)).clamp(min=1))[..., None, None]


def mask_logits(raw: HeadOutputs, anchors: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the masks at `anchors` (INT64 [B, K]): [B, K, H / 4, W / 4], not cut at the box."""
    chosen = raw.coefficients.transpose(1, 2).gather(1, anchors[..., None].expand(-1, -1, raw.coefficients.shape[1]))
    return (chosen @ raw.prototypes.flatten(2)).unflatten(2, raw.prototypes.shape[2:])


def bernoulli_divergence(mine: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Compute the divergence of sigmoid(mine) from sigmoid(theirs), element by element."""
    return wanted.sigmoid() * (wanted - mine) + F.softplus(mine) - F.softplus(wanted)


def energies(mine: ClassScores | HeadOutputs, wanted: ClassScores | HeadOutputs, classes: int) -> torch.Tensor:
    """Sum t² and (s - t)² over each part, of the quantized (`mine`) and the float model (`wanted`): FP64 [parts, 2]."""

    def sums(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.stack((t.double().square().sum(), (s.double() - t).square().sum()))

    pairs = zip(mine.parts(classes), wanted.parts(classes))
    return torch.stack([added(sums(s, t) for s, t in zip(part, true_part)) for part, true_part in pairs])


def decibels(sums: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Convert `energies` to dB, by the names of their parts; infinite for equal outputs."""
    signal, noise = sums.t()
    return dict(zip(names, (10 * (signal / noise).log10()).tolist()))


@torch.no_grad()
def log_divergences(
    model: Network, batches: Sequence[torch.Tensor], references: Sequence[object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logarithm of the divergence of each image, and its weight, see HeadOutputs.divergence_sums: FP64 [images] both.

    `batches` are images, FP32 [B, 3, H, W] in 0..1; `references` are outputs of the float model, one per batch.
    """
    bins = bins_of(model.eval())
    with RoundedOnce(model):
        sums = [
            HeadOutputs.of(model(images)).divergence_sums(wanted, bins) for images, wanted in zip(batches, references)
        ]
    totals, weights = map(torch.cat, zip(*sums))
    return totals.clamp(min=torch.finfo(totals.dtype).tiny).log(), weights


def typical(logs: torch.Tensor, weights: torch.Tensor) -> float:
    """Compute the divergence on a typical image: the geometric mean of the sums, divided by the mean of the weights."""
    return float(logs.mean().exp() / weights.mean())


def typical_divergence(model: Network, batches: Sequence[torch.Tensor], references: Sequence[object]) -> float:
    """Measure the divergence of `model` on a typical image; the arguments are as in `log_divergences`."""
    return typical(*log_divergences(model, batches, references))


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
    vectors, weights = [], []
    for raw in maps:
        sides, logits = split_map(raw, bins)
        scores, sides = logits.sigmoid(), sides.softmax(2)
        weight = scores.amax(1)[:, None, None]  # [B, 1, 1, H, W]
        one = (len(raw), 4, 1, *raw.shape[2:])  # one random number per side
        index = (sides.cumsum(2) < draw(one)).sum(2, keepdim=True).clamp_(max=bins - 1)
        drawn = torch.zeros_like(sides).scatter_(2, index, 1.0)
        of_sides = (drawn - sides) * (weight / 4).sqrt() * (draw(one) - 0.5).sign()
        vectors.append(torch.cat((of_sides.flatten(1, 2), probe_bernoulli(logits, draw)), 1))
        weights.append(weight.sum())
    return vectors, added(weights)


def backward_from_probe(model: Network, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Run a forward pass, and a backward pass from a probe of the outputs; hooks of the caller see the gradients.

    The model is in eval mode, with a known head (see network.HEADS). Images are FP32 [B, 3, H, W] in 0..1. A generator
    of the CPU draws the probe. Returns the weight, see `probe`.
    """

    def draw(shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(images)

    images, bins = images.detach().requires_grad_(), bins_of(model)
    with torch.enable_grad():
        outputs, vectors, weight = HeadOutputs.of(model(images)).probe(bins, draw)
        torch.stack([(x * v).sum() for x, v in zip(outputs, vectors)]).sum().backward(inputs=[images])
    return weight


def fisher_amax(
    model: Network,
    histograms: Mapping[str, Histogram],
    images: Sequence[torch.Tensor],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Find the amax of each activation quantizer with the least sum of (gradient · error)², which changes detections least.

    The sum treats rounding errors as independent. The candidates lie between 0.8 times the smaller amax of 'mse' and
    'l3' and the largest value. `model` still has the float model's biases. `images` are batches, FP32 [B, 3, H, W] in
    0..1. Returns path of a quantizer → amax, FP32 [].
    """
    least = torch.minimum(*(histogram_amax(histograms, method) for method in ('mse', 'l3'))) * 0.8
    ratio = histogram_amax(histograms, 'max') / least
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
    generator = torch.Generator().manual_seed(seed)
    try:
        with removed_after(hooks), quantizers_off(model.eval().requires_grad_(False)):
            for part in (part for batch in images for part in batch.split(AT_ONCE)):
                backward_from_probe(model, part, generator)
    finally:
        for p in learning:
            p.requires_grad_()
    best = torch.stack([e.argmin() for e in errors.values()])
    return dict(zip(histograms, tried.gather(0, best[None])[0]))
