"""The choice of a calibration: each one is tried, and the one with the least divergence from the float model is kept.

No criterion for the range of a single tensor is best for all models. Clipping of large values helps one model and harms
the next. The same is true of bias correction. Only the effect on the detections counts, and it can be measured on a few
images without labels. Nothing is fitted to the images of this measurement. A calibration that is clearly behind after a
third of them does not see the others. docs/calibration.md has the measurements behind the numbers below.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from models.quantize.calibration.bias_correction import correct_biases, own_shifts, quantized_convs
from models.quantize.calibration.calibrate import (
    Histogram,
    calibrate_weights,
    histogram_amax,
    raised_ranges,
    require_values,
    set_ranges,
)
from models.quantize.calibration.divergence import log_divergences, typical
from models.quantize.calibration.fisher import fisher_amax
from models.quantize.head_outputs import Raw, has_known_head, require_known_head
from utils.qat.config.qat import CANDIDATES, CalibrationConfig
from utils.qat.core.distributed import from_first

CORRECTED = ' + biases'  # follows the name of a method if the divergence was measured with corrected biases
UNUSABLE = 0.5  # at this divergence and above detections are lost
BEHIND = 4  # standard errors of the mean over images: a calibration that far behind the best is dropped

Tensors = dict[str, torch.Tensor]  # by path: ranges of quantizers, shifts of convolutions


def every_third(batches: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Split batches of one shape into two sets: every third image, and the other images. A single image is in both."""
    images, size = torch.cat(batches), len(batches[0])
    others = torch.tensor([i for i in range(len(images)) if i % 3 or len(images) == 1])
    return images[::3].split(size), images[others].split(size)


def is_behind(logs: torch.Tensor, best: torch.Tensor) -> bool:
    """Tell whether a divergence is larger beyond chance; by the logarithms of the same images, FP64 [images]."""
    behind = logs - best
    return bool(
        behind.mean() > BEHIND * behind.std() / len(behind) ** 0.5
    )  # of one image std is NaN: not beyond chance


def race(
    names: Sequence[str],
    parts: Sequence[Any],
    measure: Callable[[str, Any], tuple[torch.Tensor, torch.Tensor]],
    progress: Callable[..., Iterable[str]],
) -> dict[str, float]:
    """Measure calibrations on the first of two parts of the images, and on the second those that are not clearly behind.

    Args:
        names: of the calibrations.
        parts: images, as `measure` takes them.
        measure: name, part → see divergence.log_divergences.
        progress: see `choose_calibration`.

    Returns:
        Name → typical divergence. Of a calibration that was dropped: the divergence of the best one, times the ratio of
        both on the first part.
    """
    first = {name: measure(name, parts[0]) for name in progress(names, 'comparing', unit='calibrations')}
    leader = min(first, key=lambda name: first[name][0].mean())
    left = from_first([name for name, (logs, _) in first.items() if not is_behind(logs, first[leader][0])])
    whole = {}
    for name in progress(left, 'comparing the best', unit='calibrations'):
        logs, weights = map(torch.cat, zip(first[name], measure(name, parts[1])))
        whole[name] = logs, weights
    best = min(whole, key=lambda name: whole[name][0].mean())

    def ratio(name: str) -> float:
        seen = whole if name in whole else first
        return float((seen[name][0] - seen[best][0]).mean().exp())

    return {name: typical(*whole[best]) * ratio(name) for name in first}


def ranges_by(
    method: str,
    model: nn.Module,
    histograms: Mapping[str, Histogram],
    fitting: Sequence[torch.Tensor],
    config: CalibrationConfig,
) -> Tensors:
    """Find the range of each activation quantizer by one method.

    Args:
        method: one of CALIB_METHODS, but not 'auto'.
        model: quantized; its biases are the biases of the float model.
        histograms: see calibrate.collect_histograms.
        fitting: images for 'fisher', FP32 [B, 3, H, W] in 0..1.
        config: percentile and seed are read.

    Returns:
        Path of a quantizer → amax, FP32 [].
    """
    if method == 'fisher':
        return fisher_amax(model, histograms, fitting, config)
    return dict(zip(histograms, histogram_amax(histograms, method, config)))


def choose_calibration(
    model: nn.Module,
    reference: nn.Module,
    histograms: Mapping[str, Histogram],
    images: Sequence[torch.Tensor],
    config: CalibrationConfig,
    progress: Callable[..., Iterable[str]] = lambda steps, *_, **__: steps,
) -> tuple[dict[str, float], str, bool, dict[str, int]]:
    """Calibrate `model` in place, in each way that `config` allows, and keep the way with the least divergence.

    The methods are config.calib_method or, for 'auto', all of CANDIDATES. With config.bias_correction each one is tried
    with corrected biases too. Without a known head (see head_outputs.py) nothing can be compared: then 'auto' is the
    first of CANDIDATES, and config.bias_correction alone decides about the biases. Every process of a torchrun calls
    this function with the same images.

    Args:
        model: quantized.
        reference: the float model that `model` was made from.
        histograms: see calibrate.collect_histograms.
        images: batches of one shape, FP32 [B, 3, H, W] in 0..1. `fisher` and the corrections are fitted to every third
            image, and the others compare.
        config: calib_method, percentile, weight_calib, bias_correction and seed are read.
        progress: wraps an iterable, with a text and the name of its items, see log.bar.

    Returns:
        The divergences that were compared (method, or method + CORRECTED → divergence), the method that is kept,
        whether its biases are corrected, and `raised_ranges`.

    Raises:
        QatError: a histogram gives no amax (see `require_values`), or 'fisher' meets an unknown head.
    """
    require_values(histograms)
    known, auto = has_known_head(model), config.calib_method == 'auto'
    if config.calib_method == 'fisher':
        require_known_head(model, '--calib-method fisher', 'use another, such as mse')
    fitting, others = every_third(images)
    with torch.no_grad():
        parts = [(part, [Raw.of(reference.eval()(x)) for x in part]) for part in every_third(others)] if known else []
    calibrate_weights(model, config.weight_calib)

    methods = [config.calib_method] if not auto else CANDIDATES if known else CANDIDATES[:1]
    biases = {path: m.bias.detach().clone() for path, m in quantized_convs(model)}
    tried: dict[str, tuple[str, Tensors, Tensors]] = {}  # name → (method, ranges, shifts)

    def set_calibration(name: str) -> None:
        _, ranges, shifts = tried[name]
        set_ranges(model, ranges, histograms)
        correct_biases(model, biases, shifts)

    def measure(name: str, part: tuple[Sequence[torch.Tensor], Sequence[Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        set_calibration(name)
        return log_divergences(model, *part)

    for method in progress(methods, 'choosing ranges', unit='methods'):
        correct_biases(model, biases, {})  # the method before may have corrected them
        ranges = ranges_by(method, model, histograms, fitting, config)
        tried[method] = method, ranges, {}
        if config.bias_correction:
            set_calibration(method)
            tried[method + CORRECTED] = method, ranges, own_shifts(model, fitting)
    found = race(list(tried), parts, measure, progress) if known else {}
    best = from_first(min(found, key=found.__getitem__)) if known else [*tried][-1]
    set_calibration(best)
    method, _, shifts = tried[best]
    return found, method, bool(shifts), raised_ranges(model)
