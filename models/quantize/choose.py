"""Which calibration keeps the detections: each is tried, and the one whose outputs are closest to the float model's is kept.

No criterion for the range of a single tensor is best for all models: clipping large values helps one and harms the next. The same
holds for a correction of biases. What counts is what becomes of the detections, and that can be measured on a few images, without
labels. Nothing is fitted to the images that it is measured on.
"""
import torch

from models.quantize.bias import certain, correct_biases, own_errors
from models.quantize.calibrate import calibrate_weights, histogram_amax, raised_ranges, require_values, set_ranges
from models.quantize.divergence import divergence
from models.quantize.fisher import fisher_amax
from models.quantize.outputs import Raw, has_known_head, require_known_head
from utils.qat.distributed import from_first

CANDIDATES = 'mse', 'l1.5', 'l2.4', 'l3', 'fisher'
CORRECTED = ', biases corrected'  # behind the name of a method, in the divergences
UNUSABLE = 1.0  # divergence from which on detections are lost, see docs/calibration.md


def halves(batches):
    """A list of batches of one shape → every second image, and the others; of a single image twice that one."""
    images, size = torch.cat(batches), len(batches[0])
    return images[::2].split(size), (images[1::2] if len(images) > 1 else images).split(size)


def choose(model, reference, histograms, images, config, progress=iter):
    """Calibrate `model` by config.calib_method, or where that is 'auto' by the best of CANDIDATES, and correct its biases where that
    brings the detections closer to those of the float model (with a known head, see outputs.py; any other model is calibrated by the
    first of CANDIDATES, and its biases are corrected).

    reference: the float model that it was made of. histograms: see calibrate.observe. images: a list of batches, FP32
    [B, 3, H, W] in 0..1: corrections and 'fisher' are fitted to half of them, and all is compared on the other half. progress: wraps
    the methods, e.g. tqdm. Returns ({method, and method + CORRECTED: divergence of those that were compared}, method, whether biases
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
    ranges, found = {}, {}
    for method in progress(methods):
        ranges[method] = (fisher_amax(model, histograms, fitting, config) if method == 'fisher' else
                          dict(zip(histograms, histogram_amax(histograms, method, config))))
        set_ranges(model, ranges[method])
        if known:
            found[method] = divergence(model, others, wanted)
    best = from_first(min(found, key=found.get)) if known else methods[0]
    set_ranges(model, ranges[best])

    corrected = config.bias_correction
    if corrected:
        shifts = {path: certain(errors) for path, errors in own_errors(model, fitting).items()}
        before = {path: model.get_submodule(path).bias.detach().clone() for path in shifts}
        correct_biases(model, shifts)
        if known:
            found[best + CORRECTED] = divergence(model, others, wanted)
            corrected = from_first(found[best + CORRECTED] < found[best])
            if not corrected:
                for path, bias in before.items():
                    model.get_submodule(path).bias.data.copy_(bias)
    return found, best, corrected, raised_ranges(model)
