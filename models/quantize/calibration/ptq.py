"""Post-training quantization (PTQ): make a calibrated quantized model of a float model; blocks may stay in float.

Each calibration is tried, and the one with the least divergence from the float model is kept. No criterion for the range of
a single tensor is best for all models: clipping of large values helps one model and harms the next. The same is true of bias
correction. Only the effect on the detections counts, and it can be measured on a few images without labels. Nothing is
fitted to the images of this measurement. docs/measured/calibration_ways.csv has measurements of all calibrations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy

import torch

from models.quantize.blocks import is_quantized
from models.quantize.calibration.bias_correction import biases_of, correct_biases, own_shifts
from models.quantize.calibration.calibrate import (
    ForwardLoop,
    Histogram,
    calibrate_weights,
    collect_histograms,
    histogram_amax,
    over,
    raised_ranges,
    require_values,
    set_ranges,
)
from models.quantize.calibration.divergence import HeadOutputs, fisher_amax, log_divergences, typical
from models.quantize.convert import Conversion, quantize_model
from models.quantize.network import has_known_head, require_known_head
from models.quantize.quantizers import has_ranges, quantizers_off
from models.quantize.scales import shared_scales, tie_scales
from utils.qat.backends.pytorch import task_of
from utils.qat.config.qat import CANDIDATES, PtqConfig
from utils.qat.core.distributed import from_first
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, unshown
from utils.qat.core.text import counted
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Images, channels_last
from utils.qat.run.state import Calibration

CORRECTED = ' + biases'  # follows the name of a method if the divergence was measured with corrected biases
UNUSABLE = 0.5  # at this divergence and above detections are lost
BEHIND = 4  # standard errors of the mean over images: a calibration that far behind the best is dropped
Tensors = dict[str, torch.Tensor]  # by path: ranges of quantizers, shifts of convolutions
Part = tuple[Sequence[torch.Tensor], Sequence[object]]  # images, and what the float model returns for them
COMPARED = 36  # calibration images that choose a calibration: a third to fit, the others to compare


class Sample:
    """The images that choose a calibration: `images`, or at least COMPARED of those that a model gets, evenly spread over them.

    It is a forward pre-hook, which counts the images. Those of another shape than the first are not kept.
    """

    def __init__(self, images: Images | None = None) -> None:
        self.images, self.count = images, 0 if images is None else len(images.loader.dataset)
        self.batch_size, self.step = 0, 1  # every `step`-th image is kept
        self.kept: list[torch.Tensor] = []  # [3, H, W] each

    def __call__(self, model: Network, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Take note of a batch, and give it to the model in the layout of all other passes."""
        self.batch_size = self.batch_size or len(inputs[0])
        for image in inputs[0] if self.images is None else ():
            if self.count % self.step == 0 and (not self.kept or image.shape == self.kept[0].shape):
                self.kept.append(image.detach().clone())  # the loop may write into its batch
            if len(self.kept) == 2 * COMPARED:
                self.kept, self.step = self.kept[::2], 2 * self.step
            self.count += 1
        return channels_last(inputs[0])

    def batches(self) -> list[torch.Tensor]:
        """Return COMPARED of the images, or all if they are fewer, in batches of one shape, FP32 [B, 3, H, W] in 0..1."""
        if self.images is not None:
            return list(self.images.spread(COMPARED))
        number = min(COMPARED, len(self.kept))
        chosen = [self.kept[i * len(self.kept) // number] for i in range(number)]
        return [channels_last(batch) for batch in torch.stack(chosen).split(self.batch_size)]


def every_third(batches: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Split batches of one shape into two sets: every third image, and all others. A single image is in both."""
    images, size = torch.cat([*batches]), len(batches[0])
    others = torch.tensor([i for i in range(len(images)) if i % 3 or len(images) == 1])
    return images[::3].split(size), images[others].split(size)


def is_behind(logs: torch.Tensor, best: torch.Tensor) -> bool:
    """Tell whether a divergence is BEHIND standard errors larger than the best. Both are logarithms for the same images, FP64 [images]."""
    behind = logs - best
    if len(behind) == 1:
        return False
    return bool(behind.mean() > BEHIND * behind.std() / len(behind) ** 0.5)


def race(
    names: Sequence[str],
    parts: Sequence[Part],
    measure: Callable[[str, Part], tuple[torch.Tensor, torch.Tensor]],
    progress: Callable[..., Iterable[str]],
) -> dict[str, float]:
    """Measure calibrations on the first of two parts; drop those clearly behind, and measure the others on the second too.

    `measure` takes a name and a part, see divergence.log_divergences. Returns name → typical divergence. A dropped
    calibration gets the leader's divergence times their ratio on the first part, so it never becomes the least.
    """
    first = {name: measure(name, parts[0]) for name in progress(names, 'comparing', unit='calibrations')}
    leader = min(first, key=lambda name: first[name][0].mean())
    left = [name for name, (logs, _) in first.items() if not is_behind(logs, first[leader][0])]
    leader, left = from_first((leader, left))
    whole = {}
    for name in progress(left, 'comparing the best', unit='calibrations'):
        logs, weights = map(torch.cat, zip(first[name], measure(name, parts[1])))
        whole[name] = logs, weights
    typicals = {name: typical(*measured) for name, measured in whole.items()}
    for name in first.keys() - whole.keys():
        typicals[name] = typicals[leader] * float((first[name][0] - first[leader][0]).mean().exp())
    return {name: typicals[name] for name in names}


def ranges_by(
    method: str, model: Network, histograms: Mapping[str, Histogram], fitting: Sequence[torch.Tensor], config: PtqConfig
) -> Tensors:
    """Find the amax (FP32 []) of each activation quantizer, by path, with one method other than 'auto'.

    `model` still has the float model's biases. `fitting` are images for 'fisher', FP32 [B, 3, H, W] in 0..1.
    """
    if method == 'fisher':
        return fisher_amax(model, histograms, fitting, config.seed)
    return dict(zip(histograms, histogram_amax(histograms, method, config.percentile)))


def choose_calibration(
    model: Network,
    histograms: Mapping[str, Histogram],
    images: Sequence[torch.Tensor],
    config: PtqConfig,
    progress: Callable[..., Iterable[str]] = unshown,
) -> tuple[dict[str, float], str, bool, dict[str, int]]:
    """Calibrate `model` in place, in every way that `config` allows, and keep the way with the least divergence from float.

    The methods are config.calib_method or, for 'auto', all of CANDIDATES. With config.bias_correction each one is tried
    with corrected biases too. Models without a known head (see network.HEADS) cannot be compared: for them 'auto' is
    the first of CANDIDATES, and config.bias_correction alone decides about the biases.

    `images` are batches of one shape, FP32 [B, 3, H, W] in 0..1, the same in every process of a torchrun. 'fisher' and
    the corrections are fitted to every third image, and the others compare. `progress` is called as log.bar is.

    Returns the compared divergences (method, or method + CORRECTED → divergence), the chosen method, whether its biases
    are corrected, and `raised_ranges`. Raises QatError if a histogram gives no amax (see
    `require_values`), or if 'fisher' meets an unknown head.
    """
    require_values(histograms)
    known, auto = has_known_head(model), config.calib_method == 'auto'
    if config.calib_method == 'fisher':
        require_known_head(model, '--calib-method fisher', 'use another, such as mse')
    fitting, others = every_third(images)
    with torch.no_grad(), quantizers_off(model.eval()):
        parts = [(part, [HeadOutputs.of(model(x)) for x in part]) for part in every_third(others)] if known else []
    calibrate_weights(model, config.reduce_range)

    methods = [config.calib_method] if not auto else CANDIDATES if known else CANDIDATES[:1]
    biases = {path: bias.detach().clone() for path, bias in biases_of(model).items()}
    tried: dict[str, tuple[str, Tensors, Tensors]] = {}  # name → (method, ranges, shifts)

    def set_calibration(name: str) -> None:
        _, ranges, shifts = tried[name]
        set_ranges(model, ranges, histograms)
        correct_biases(model, biases, shifts)

    def measure(name: str, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        set_calibration(name)
        return log_divergences(model, *part)

    for method in progress(methods, 'choosing ranges', unit='methods'):
        correct_biases(model, biases, {})  # the method before may have corrected them
        ranges = ranges_by(method, model, histograms, fitting, config)
        tried[method] = method, ranges, {}
        if config.bias_correction:
            set_calibration(method)
            tried[method + CORRECTED] = method, ranges, own_shifts(model, fitting)
    divergences = race(list(tried), parts, measure, progress) if known else {}
    best = from_first(min(divergences, key=divergences.__getitem__)) if known else [*tried][-1]
    set_calibration(best)
    method, _, shifts = tried[best]
    return divergences, method, bool(shifts), raised_ranges(model)


def prepare(model: Network, config: PtqConfig, keep_float: Sequence[str] = ()) -> tuple[Conversion, list[list[str]]]:
    """Quantize a fused float model in place, without a calibration; `keep_float` has paths, see convert.find_twins.

    Returns the conversion, and the groups of quantizers that share a scale, see scales.shared_scales. Raises QatError
    if no block is left to quantize.
    """
    conversion = quantize_model(model, keep_float, config.made_for)
    if not conversion.swapped:
        raise QatError('--exclude, --only, --keep-float: nothing is left to quantize; leave less in float')
    if conversion.unknown:
        unknown = ', '.join(f'{path} ({name})' for path, name in conversion.unknown.items())
        LOGGER.warning(
            f'not known to this toolkit: {unknown}; their convolutions are quantized, their other operations are '
            'not looked at: export, then check with scripts/audit_onnx.py'
        )
    if config.scale_policy == 'tied':
        tie_scales(model, config.made_for.split_sums)
    groups = shared_scales(model)
    LOGGER.info(
        f'{conversion.summary()}\n{sum(map(len, groups))} activation quantizers, {len(groups)} scales ({config.scale_policy})'
    )
    return conversion, groups


def calibrate(
    model: Network,
    forward_loop: ForwardLoop,
    sample: Sample,
    config: PtqConfig,
    progress: Callable[..., Iterable] = unshown,
) -> Calibration:
    """Calibrate a model of `prepare` in place on the images of a loop; `sample` chooses between the calibrations.

    `progress` is called as log.bar is. Raises QatError, see `choose_calibration`, or if the model has ranges: its biases may be
    corrected, and it would be compared with itself.
    """
    if not is_quantized(model) or has_ranges(model):
        raise QatError('calibration: takes a model once, after it was prepared; take the float model, and prepare it')
    with model.register_forward_pre_hook(sample):
        histograms = collect_histograms(model, forward_loop)
    require_values(histograms)  # before the sample is asked for images that it may not have
    divergences, method, corrected, raised = choose_calibration(model, histograms, sample.batches(), config, progress)
    if raised:
        number = sum(raised.values())
        LOGGER.warning(
            f'{number} ranges of {len(raised)} quantizers raised to the smallest that an FP16 scale covers: of {next(iter(raised))}'
        )
    outputs = task_of(model).results
    compared = ', '.join(f'{name} {value:.4f}' for name, value in divergences.items())
    closest = f': the closest to float of {len(divergences)} calibrations' if len(divergences) > 1 else ''
    LOGGER.info(
        f'calibrated on {counted(sample.count, "image")}, ranges by {method}, '
        f'{"biases corrected" if corrected else "no bias corrected"}{closest}'
    )
    LOGGER.debug(f'divergence of the {outputs}: {compared or "not measured"}')
    divergence = divergences.get(method + CORRECTED * corrected, 0)
    if not divergence < UNUSABLE:
        other = 'auto, ' * (config.calib_method != 'auto')
        LOGGER.warning(
            f'--calib-method {config.calib_method}: the {outputs} are far from those of the float model (divergence {divergence:.2f}, '
            f'{UNUSABLE} and more is unusable); use {other}other images (train: in --data), or more (--calib-images)'
        )
    biases = 'all' if corrected else 'none'
    return {'images': sample.count, 'method': method, 'biases': biases, 'divergence': divergences}


def calibrated(
    reference: Network,
    images: Images,
    config: PtqConfig,
    progress: Callable[..., Iterable] = unshown,
    keep_float: Sequence[str] = (),
) -> tuple[Network, Calibration]:
    """Make a calibrated quantized copy of a fused float model; `keep_float` has paths, see convert.find_twins.

    Returns also the values of `calibrate`. Raises QatError, see `prepare` and `calibrate`.
    """
    model = deepcopy(reference)
    prepare(model, config, keep_float)
    return model, calibrate(model, over(progress(images, 'calibrating')), Sample(images), config, progress)
