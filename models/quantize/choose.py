"""Which calibration keeps the detections: each is tried, and the one whose outputs are closest to the float model's is kept.

No criterion for the range of a single tensor is best for all models: clipping large values helps one and harms the next. What
counts is what becomes of the detections, and that can be measured on a few images, without labels.
"""
import torch

from models.quantize.bias import correct_biases, watch
from models.quantize.calibrate import calibrate_weights, histogram_amax, raised_ranges, require_values, set_ranges
from models.quantize.divergence import divergence
from models.quantize.fisher import fisher_amax
from models.quantize.outputs import Raw, has_known_head, require_known_head
from utils.qat.distributed import from_first

CANDIDATES = 'mse', 'l1.5', 'l2.4', 'l3', 'fisher'


def choose(model, reference, histograms, images, config, progress=iter):
    """Calibrate `model` by config.calib_method, or where that is 'auto' by the best of CANDIDATES (with a known head, see
    outputs.py; any other model by the first of them), and correct its biases.

    reference: the float model that it was made of. histograms: see calibrate.observe. images: a list of batches, FP32
    [B, 3, H, W] in 0..1, to correct the biases on (config.bias_correction) and to compare. progress: wraps the candidates, e.g.
    tqdm. Returns ({method: divergence of those that were compared}, method, raised_ranges). Every process of a torchrun calls it
    with the same images.
    """
    require_values(histograms)
    auto = config.calib_method == 'auto'
    if config.calib_method == 'fisher':
        require_known_head(model, '--calib-method fisher', 'use another, such as mse')
    comparing = auto and has_known_head(model)
    float_model = [(means, Raw.of(output) if comparing else None) for means, output in watch(reference, images)] if comparing or config.bias_correction else []
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

    methods, found = CANDIDATES if comparing else [CANDIDATES[0] if auto else config.calib_method], {}
    for method in progress(methods):
        calibrate_by(method)
        if comparing:
            found[method] = divergence(model, images, [wanted for _, wanted in float_model])
    best = from_first(min(found, key=found.get)) if comparing else methods[0]
    if best != methods[-1]:
        calibrate_by(best)
    return found, best, raised_ranges(model)
