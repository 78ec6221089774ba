"""Which calibration keeps the detections: each is tried, and the one whose outputs are closest to the float model's is kept.

No criterion for the range of a single tensor is best for all models: clipping large values helps one and harms the next. What
counts is what becomes of the detections, and that can be measured on a few images, without labels.
"""
import torch
import torch.nn.functional as F

from models.quantize.bias import correct_biases, watch
from models.quantize.calibrate import calibrate_weights, histogram_amax, raised_ranges, require_values, set_ranges
from models.quantize.fisher import fisher_amax
from models.quantize.losses import is_plain_detector, require_detector
from utils.qat.distributed import from_first

CANDIDATES = 'mse', 'l2.4', 'l3', 'fisher'


def divergence_sums(maps, references, bins):
    """(divergence, places with an object), summed over all images and places: see `divergence`. FP64 scalars.

    maps, references: raw maps [B, 4 bins + classes, H, W] of a plain detector's head, and of the float model's.
    """
    total, weights = 0.0, 0.0
    for mine, theirs in zip(maps, references):
        (sides, scores), (true_sides, true_scores) = (
            raw.double().split((4 * bins, raw.shape[1] - 4 * bins), 1) for raw in (mine, theirs))
        sides, true_sides = (s.unflatten(1, (4, bins)).log_softmax(2) for s in (sides, true_sides))
        wanted = true_scores.sigmoid()
        weight = wanted.amax(1)  # [B, H, W]
        total = total + F.binary_cross_entropy_with_logits(scores, wanted, reduction='sum')
        total = total - F.binary_cross_entropy_with_logits(true_scores, wanted, reduction='sum')
        total = total + (F.kl_div(sides, true_sides, reduction='none', log_target=True).sum(2).mean(1) * weight).sum()
        weights = weights + weight.sum()
    return total, weights


@torch.no_grad()
def divergence(model, batches, references):
    """How far the detections of `model` are from a float model's, at least 0; plain detectors (losses.is_plain_detector).

    batches: a list of images, FP32 [B, 3, H, W] in 0..1. references: for each, the raw maps of the float model's head. It is the
    Kullback-Leibler divergence of the classes' scores, and of the distances to the four sides of a box (mean of the four), this
    weighted by the float model's best score at that place; over the sum of these best scores, which is near the number of
    places with an object.
    """
    head = model.eval().model[-1]
    total, weights = map(sum, zip(*(divergence_sums(model(images)[1], maps, head.reg_max) for images, maps in zip(batches, references))))
    return (total / weights).item()


def choose(model, reference, histograms, images, config, progress=iter):
    """Calibrate `model` by config.calib_method, or where that is 'auto' by the best of CANDIDATES (of a plain detector; any
    other model by the first of them), and correct its biases.

    reference: the float model that it was made of. histograms: see calibrate.observe. images: a list of batches, FP32
    [B, 3, H, W] in 0..1, to correct the biases on (config.bias_correction) and to compare. progress: wraps the candidates, e.g.
    tqdm. Returns ({method: divergence of those that were compared}, method, raised_ranges). Every process of a torchrun calls it
    with the same images.
    """
    require_values(histograms)
    auto = config.calib_method == 'auto'
    if config.calib_method == 'fisher':
        require_detector(model, '--calib-method fisher', 'use another, such as mse')
    comparing = auto and is_plain_detector(model)
    float_model = [(means, output[1]) for means, output in watch(reference, images)] if comparing or config.bias_correction else []
    biases = [m.bias for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.bias is not None]
    before = [bias.detach().clone() for bias in biases]
    calibrate_weights(model, config.weight_calib)

    def calibrate_by(method):
        for bias, value in zip(biases, before):
            bias.data.copy_(value)
        set_ranges(model, fisher_amax(model, histograms, images, config) if method == 'fisher' else
                   dict(zip(histograms, histogram_amax(histograms, method, config))))
        if config.bias_correction:
            correct_biases(model, images, [means for means, _ in float_model])

    if not comparing:
        method = CANDIDATES[0] if auto else config.calib_method
        calibrate_by(method)
        return {}, method, raised_ranges(model)
    found = {}
    for method in progress(CANDIDATES):
        calibrate_by(method)
        found[method] = divergence(model, images, [maps for _, maps in float_model])
    best = from_first(min(found, key=found.get))
    if best != CANDIDATES[-1]:
        calibrate_by(best)
    return found, best, raised_ranges(model)
