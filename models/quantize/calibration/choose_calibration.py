"""Which calibration keeps the detections: each is tried, and the one whose outputs are closest to the float model's is kept.

No criterion for the range of a single tensor is best for all models: clipping large values helps one and harms the next. The same
holds for a correction of biases. What counts is what becomes of the detections, and that can be measured on a few images, without
labels. Nothing is fitted to the images that it is measured on.
"""

import torch

from models.quantize.calibration.bias_correction import certain, correct_biases, own_errors, quantized_convs
from models.quantize.calibration.calibrate import (
    calibrate_weights,
    histogram_amax,
    raised_ranges,
    require_values,
    set_ranges,
)
from models.quantize.calibration.divergence import divergence
from models.quantize.calibration.fisher import fisher_amax
from models.quantize.head_outputs import Raw, has_known_head, require_known_head
from utils.qat.core.distributed import from_first

CANDIDATES = 'mse', 'l1.5', 'l2.4', 'l3', 'fisher'
PROMISING = 3  # methods, those of least divergence, that are tried with corrected biases too
CORRECTED = ' + biases'  # behind the name of a method, in the divergences
UNUSABLE = 0.5  # divergence from which on detections are lost: docs/calibration.md has what was measured


def halves(batches):
    """A list of batches of one shape → every second image, and the others; of a single image twice that one."""
    images, size = torch.cat(batches), len(batches[0])
    return images[::2].split(size), (images[1::2] if len(images) > 1 else images).split(size)


def choose(model, reference, histograms, images, config, progress=iter):
    """Calibrate `model` by config.calib_method, or where that is 'auto' by each of CANDIDATES, and (config.bias_correction) the PROMISING
    ones with corrected biases too; the one whose detections are closest to the float model's stays. Without a known head, see
    head_outputs.py, nothing can be compared: 'auto' is the first of CANDIDATES then, and biases are corrected.

    reference: the float model that it was made of. histograms: see calibrate.observe. images: a list of batches, FP32
    [B, 3, H, W] in 0..1: corrections and 'fisher' are fitted to half of them, and all is compared on the other half.
    progress: wraps the methods, e.g. tqdm. Returns ({method, and method + CORRECTED: divergence of those that were compared}, method, whether biases
    were corrected, raised_ranges). Every process of a torchrun calls it with the same images.
    """
    require_values(histograms)
    known, auto = has_known_head(model), config.calib_method == 'auto'
    if config.calib_method == 'fisher':
        require_known_head(model, '--calib-method fisher', 'use another, such as mse')
    fitting, others = halves(images)
    with torch.no_grad():
        wanted = [Raw.of(reference.eval()(batch)) for batch in others] if known else []
    calibrate_weights(model, config.weight_calib)

    methods = [config.calib_method] if not auto else CANDIDATES if known else CANDIDATES[:1]
    biases = {path: m.bias.detach().clone() for path, m in quantized_convs(model)}
    tried, found = {}, {}  # name → (method, ranges, shifts), divergence

    def take(ranges, shifts):
        set_ranges(model, ranges)
        correct_biases(model, biases, shifts)

    def attempt(name, method, ranges, shifts):
        tried[name] = method, ranges, shifts
        take(ranges, shifts)
        if known:
            found[name] = divergence(model, others, wanted)

    for method in progress(methods):
        ranges = (
            fisher_amax(model, histograms, fitting, config)
            if method == 'fisher'
            else dict(zip(histograms, histogram_amax(histograms, method, config)))
        )
        attempt(method, method, ranges, {})
    promising = from_first(sorted(found, key=found.get)[:PROMISING]) if known else methods
    for method in progress(promising) if config.bias_correction else ():
        _, ranges, as_they_are = tried[method]
        take(ranges, as_they_are)
        attempt(
            method + CORRECTED,
            method,
            ranges,
            {path: certain(errors) for path, errors in own_errors(model, fitting).items()},
        )
    best = from_first(min(found, key=found.get)) if known else [*tried][-1]
    method, ranges, shifts = tried[best]
    take(ranges, shifts)
    return found, method, bool(shifts), raised_ranges(model)
