"""Float model → calibrated quantized model, some of it left in float if that is asked for."""

from copy import deepcopy
from dataclasses import dataclass

from models.quantize.calibration.calibrate import observe
from models.quantize.calibration.choose_calibration import CORRECTED, UNUSABLE, choose
from models.quantize.convert import find_twins, quantize_model
from models.quantize.scales import shared_scales, tie_scales
from models.quantize.units import left_out
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.data.loaders import few
from utils.qat.run.sensitivity_summary import dearest, read_summary, share_int8, worst

COMPARED = 64  # calibration images: corrections are fitted to half of them, and calibrations compared on the other half


def prepare(model, config, keep_float=()):
    """Quantize `model` in place as `config` says, not calibrated yet; returns (Conversion, groups that share a scale).

    keep_float: paths of blocks that stay as they are, see convert.find_twins.
    """
    conversion = quantize_model(model, config.add_policy, keep_float)
    if not conversion.swapped:
        raise QatError('--exclude, --only, --keep-float: nothing is left to quantize; leave less in float')
    if conversion.unknown:
        unknown = ', '.join(f'{path} ({name})' for path, name in conversion.unknown.items())
        LOGGER.warning(
            f'not known to this toolkit: {unknown}; their convolutions are quantized, their other operations are '
            'not looked at: export, then check with scripts/audit_onnx.py'
        )
    if config.scale_policy == 'tied':
        tie_scales(model)
    groups = shared_scales(model)
    LOGGER.info(
        f'{conversion.summary()}\n{sum(map(len, groups))} activation quantizers, {len(groups)} scales ({config.scale_policy})'
    )
    return conversion, groups


def calibrated(reference, images, config, progress, keep_float=()):
    """A calibrated copy of the float model `reference`, and plain values: the method, which biases were corrected ('all' or 'none'),
    and the divergences that were compared.

    images: see loaders.calibration_images. progress: wraps an iterable, with a text and what it counts, see log.bar.
    """
    model = deepcopy(reference)
    prepare(model, config, keep_float)
    histograms = observe(model, progress(images, 'calibrating'))
    found, method, corrected, raised = choose(
        model,
        reference,
        histograms,
        list(few(images, COMPARED, config)),
        config,
        lambda methods: progress(methods, 'choosing ranges', unit='methods'),
    )
    for layer, channels in raised.items():
        LOGGER.warning(f'{layer}: {channels} range(s) raised to the smallest that an FP16 scale covers')
    compared = ', '.join(f'{name} {value:.4f}' for name, value in found.items())
    biases = 'biases corrected' if corrected else 'no bias corrected'
    LOGGER.info(
        f'calibrated on {min(config.calib_images, len(images.loader.dataset))} images, {method}'
        f'{f" (divergence of the detections: {compared})" if found else ""}, weights {config.weight_calib}, {biases}'
    )
    divergence = found.get(method + CORRECTED * corrected, 0)
    if not divergence < UNUSABLE:
        LOGGER.warning(
            f'--calib-method {config.calib_method}: the detections are far from those of the float model (divergence {divergence:.2f}, '
            f'{UNUSABLE} and more is unusable); use auto, other images (train: in --data), or more (--calib-images)'
        )
    return model, {'method': method, 'biases': 'all' if corrected else 'none', 'divergence': found}


@dataclass
class Choice:
    """What shall stay in float of `reference`, as config asks: by path, by number of units, or by as many as a budget needs.

    paths: of blocks, see convert.find_twins. summary: that of --sensitive, None without.
    """

    paths: list
    summary: dict = None

    @classmethod
    def of(cls, reference, config, source):
        """source: SHA-256 of the reference's file. Raises QatError for what is not there to choose."""
        twins = list(find_twins(reference))
        summary = read_summary(config.sensitive, source, twins) if config.sensitive else None
        if summary and config.keep_float >= len(summary['units']):
            raise QatError(
                f'--keep-float {config.keep_float}: {config.sensitive} has {len(summary["units"])} units, and one at least '
                'must be quantized'
            )
        choice = cls(left_out(twins, config.exclude, config.only), summary)
        return choice.adding(worst(summary)[: config.keep_float]) if config.keep_float else choice

    def adding(self, units):
        """This choice, and `units` of the summary."""
        paths = {*self.paths, *(path for unit in units for path in unit['twins'])}
        LOGGER.info(
            f'kept in float: {", ".join(u["unit"] for u in units)}; {share_int8(self.summary, units):.1%} of the FLOPs stay INT8 '
            f'(all: {share_int8(self.summary, []):.1%})'
        )
        return Choice(sorted(paths), self.summary)


def within_budget(choice, budget, attempt):
    """The smallest choice that keeps a budget: (Choice, what `attempt` returned for it).

    The units of choice.summary are left in float in the order of what they cost per FLOP, as many as it takes: twice as many each
    time until it is kept, then between the last two. budget: points (0.01) of AP. attempt: Choice → (points lost, 0 within
    chance, and the result).
    Raises QatError if the budget cannot be kept.
    """
    order, lost, kept = (
        dearest(choice.summary),
        {},
        {},
    )  # by number of units: points lost; (choice, result) where the budget is kept

    def keeps(n):
        of_n = choice.adding(order[:n]) if n else choice
        lost[n], result = attempt(of_n)
        if lost[n] <= budget:
            kept.clear()  # of more units
            kept[n] = of_n, result
        return n in kept

    most, below, n = len(order) - 1, -1, 0
    while not keeps(n):
        if n == most:
            best = min(lost, key=lost.get)
            raise QatError(
                f'--max-drop {budget}: not kept with any number of units in float; {best} lose {lost[best]:.2f} points; '
                'use a larger one, or more images in val'
            )
        below, n = n, min(max(1, 2 * n), most)
    while n - below > 1:
        middle = (n + below) // 2
        n, below = (middle, below) if keeps(middle) else (n, middle)
    return kept[n]
