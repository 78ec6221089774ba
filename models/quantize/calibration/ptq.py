"""Post-training quantization (PTQ): make a calibrated quantized model of a float model; blocks may stay in float."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.nn as nn

from models.quantize.calibration.calibrate import collect_histograms
from models.quantize.calibration.choose_calibration import CORRECTED, UNUSABLE, choose_calibration
from models.quantize.convert import Conversion, find_twins, quantize_model
from models.quantize.scales import shared_scales, tie_scales
from models.quantize.units import left_out
from utils.qat.backends.pytorch import task_of
from utils.qat.config.qat import CalibrationConfig, QuantizeConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, unshown
from utils.qat.data.loaders import Images, spread_images
from utils.qat.run.sensitivity_summary import by_distortion_per_flop, read_summary, share_int8, worst
from utils.qat.targets.target import load_target

COMPARED = 36  # calibration images that choose a calibration: a third to fit, the others to compare

T = TypeVar('T')


def prepare(
    model: nn.Module, config: CalibrationConfig, keep_float: Sequence[str] = ()
) -> tuple[Conversion, list[list[str]]]:
    """Quantize a fused float model in place, without a calibration; `keep_float` has paths, see convert.find_twins.

    Returns the conversion, and the groups of quantizers that share a scale, see scales.shared_scales. Raises QatError
    if no block is left to quantize.
    """
    conversion = quantize_model(model, keep_float, load_target(config.target))
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


def calibrated(
    reference: nn.Module,
    images: Images,
    config: CalibrationConfig,
    progress: Callable[..., Iterable] = unshown,
    keep_float: Sequence[str] = (),
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a calibrated quantized copy of a fused float model; `keep_float` has paths, see convert.find_twins.

    Returns plain values for the report too: 'method', 'biases' ('all' or 'none' were corrected), and 'divergence', the
    compared divergences. `progress` is called as log.bar is. Raises QatError, see `prepare` and
    `choose_calibration`.
    """
    model = deepcopy(reference)
    prepare(model, config, keep_float)
    histograms = collect_histograms(model, progress(images, 'calibrating'))
    found, method, corrected, raised = choose_calibration(
        model,
        reference,
        histograms,
        list(spread_images(images, COMPARED, config)),
        config,
        progress,
    )
    for layer, channels in raised.items():
        LOGGER.warning(f'{layer}: {channels} range(s) raised to the smallest that an FP16 scale covers')
    outputs = task_of(model).found
    compared = ', '.join(f'{name} {value:.4f}' for name, value in found.items())
    biases = 'biases corrected' if corrected else 'no bias corrected'
    LOGGER.info(
        f'calibrated on {min(config.calib_images, len(images.loader.dataset))} images, {method}'
        f'{f" (divergence of the {outputs}: {compared})" if found else ""}, {biases}'
    )
    divergence = found.get(method + CORRECTED * corrected, 0)
    if not divergence < UNUSABLE:
        LOGGER.warning(
            f'--calib-method {config.calib_method}: the {outputs} are far from those of the float model (divergence {divergence:.2f}, '
            f'{UNUSABLE} and more is unusable); use auto, other images (train: in --data), or more (--calib-images)'
        )
    return model, {'method': method, 'biases': 'all' if corrected else 'none', 'divergence': found}


@dataclass
class FloatBlocks:
    """The blocks that stay in float: named by path, by a number of units, or as many as a budget needs."""

    paths: list[str]  # of blocks, see convert.find_twins
    summary: Any = None  # content of the file of --sensitive, see sensitivity_summary.read_summary; None without it

    @classmethod
    def of(cls, reference: nn.Module, config: QuantizeConfig, source: str) -> 'FloatBlocks':
        """Choose the blocks of the fused float model `reference` by --exclude, --only and --keep-float.

        `source` is the SHA-256 of the model's file, in hex digits. Raises QatError if a setting names blocks or units that
        the model or the summary lacks, or if nothing is left to quantize.
        """
        target = load_target(config.target)
        twins = list(find_twins(reference, target))
        summary = read_summary(config.sensitive, source, twins, target) if config.sensitive else None
        if summary and config.keep_float >= len(summary['units']):
            raise QatError(
                f'--keep-float {config.keep_float}: {config.sensitive} has {len(summary["units"])} units, and one at least '
                'must be quantized'
            )
        blocks = cls(left_out(twins, config.exclude, config.only), summary)
        return blocks.adding(worst(summary)[: config.keep_float]) if summary and config.keep_float else blocks

    def adding(self, units: Sequence[dict[str, Any]]) -> 'FloatBlocks':
        """Add `units` of the summary, and log them."""
        paths = {*self.paths, *(path for unit in units for path in unit['twins'])}
        LOGGER.info(
            f'kept in float: {", ".join(u["unit"] for u in units)}; {share_int8(self.summary, units):.1%} of the FLOPs stay INT8 '
            f'(all: {share_int8(self.summary, []):.1%})'
        )
        return FloatBlocks(sorted(paths), self.summary)


def within_budget(
    blocks: FloatBlocks, budget: float, attempt: Callable[[FloatBlocks], tuple[float, T]]
) -> tuple[FloatBlocks, T]:
    """Find the fewest float blocks that keep the loss of AP within `budget`, in points (0.01).

    Add units of blocks.summary to `blocks` in the order of their cost per FLOP. Double their number until the budget is
    kept, then bisect between the last two numbers. `attempt` quantizes all but these blocks, and returns the points lost (0
    for a loss within chance) and any result, which is returned with the blocks. Raises QatError if no number of units
    keeps the budget.
    """
    order = by_distortion_per_flop(blocks.summary)
    lost: dict[int, float] = {}  # number of units → points lost
    kept: dict[int, tuple[FloatBlocks, T]] = {}  # the smallest number that keeps the budget → (blocks, result)

    def keeps(n: int) -> bool:
        of_n = blocks.adding(order[:n]) if n else blocks
        lost[n], result = attempt(of_n)
        if lost[n] <= budget:
            kept.clear()  # the results with more units
            kept[n] = of_n, result
        return n in kept

    most, below, n = len(order) - 1, -1, 0
    while not keeps(n):
        if n == most:
            best = min(lost, key=lost.__getitem__)
            raise QatError(
                f'--max-drop {budget}: not kept with any number of units in float; {best} lose {lost[best]:.2f} points; '
                'use a larger one, or more images in val'
            )
        below, n = n, min(max(1, 2 * n), most)
    while n - below > 1:
        middle = (n + below) // 2
        n, below = (middle, below) if keeps(middle) else (n, middle)
    return kept[n]
