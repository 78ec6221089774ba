"""The user names blocks that stay in float and activation functions that are not exchanged, or a budget decides how many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from models.quantize.activations import exchangeable
from models.quantize.convert import find_twins
from models.quantize.network import left_out
from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.tables import load_target
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.upstream import Network
from utils.qat.run.sensitivity_summary import Summary, Unit, read_summary, worst

T = TypeVar('T')


@dataclass(frozen=True)
class Kept:
    """Paths of blocks, see convert.find_twins, or of activation functions; and the units that may be added to them."""

    paths: list[str]
    summary: Summary | None = None  # of the units; None if none may be added

    def by_distortion_per_flop(self) -> list[Unit]:
        """Sort the units in the order in which they are added: most distortion per FLOP first."""
        return sorted(
            self.summary['units'] if self.summary else (), key=lambda u: -u['distortion'] / max(u['flops'], 1)
        )

    def _share_changed(self, kept: Sequence[Unit]) -> float:
        """Compute the share of the model's FLOPs that are not in the units `kept`, 0..1."""
        assert self.summary
        return sum(u['flops'] for u in self.summary['units'] if u not in kept) / self.summary['flops']

    def adding(self, units: Sequence[Unit]) -> 'Kept':
        """Add `units` of the summary, and log them."""
        names, share = ', '.join(u['unit'] for u in units), self._share_changed(units)
        if ranks_activations(self.summary):
            LOGGER.info(f'activation functions that stay: {names}; {share:.1%} of the values are those of others')
        else:
            whole = self._share_changed([])
            LOGGER.info(f'kept in float: {names}; {share:.1%} of the FLOPs stay INT8 (all: {whole:.1%})')
        return replace(self, paths=sorted({*self.paths, *(path for unit in units for path in unit['twins'])}))


def ranks_activations(summary: Summary | None) -> bool:
    """Tell whether a summary ranks exchanged activation functions, and not INT8."""
    return summary is not None and summary['settings']['activation'] != 'keep'


def kept_of(reference: Network, config: QuantizeConfig, source: str) -> tuple[Kept, Kept]:
    """Choose the blocks of the fused float model `reference` that stay in float, and the activation functions that stay.

    `source` is the SHA-256 of the model's file, in hex digits. Raises QatError if --exclude, --only or --keep-float name blocks or
    units that the model or the summary lacks, or if nothing is left to quantize.
    """
    target = load_target(config.target)
    twins = list(find_twins(reference, target))
    blocks, functions = Kept(left_out(twins, config.exclude, config.only)), Kept([])
    if not config.sensitive:
        return blocks, functions
    own = exchangeable(reference, config.activation) if config.exchanges else []
    summary = read_summary(config.sensitive, source, twins, target, config.activation, own)
    units = worst(summary)[: config.keep_float]
    if len(units) == len(summary['units']):
        raise QatError(
            f'--keep-float {config.keep_float}: {config.sensitive} has {len(units)} units, and one at least must be quantized'
        )
    chosen = replace(functions if ranks_activations(summary) else blocks, summary=summary)
    chosen = chosen.adding(units) if units else chosen
    return (blocks, chosen) if ranks_activations(summary) else (chosen, functions)


def within_budget(first: Kept, budget: float, attempt: Callable[[Kept], tuple[float, T]]) -> tuple[Kept, T]:
    """Find the fewest units that must stay to keep the loss of AP within `budget`, in points (0.01).

    Add units of first.summary to `first` in the order of their cost per FLOP. Double their number until the budget is
    kept, then bisect between the last two numbers. `attempt` changes all but what stays, and returns the points lost (0
    for a loss within the confidence interval) and any result, which is returned with what stays. Raises QatError if no number of units
    keeps the budget.
    """
    order = first.by_distortion_per_flop()
    lost: dict[int, float] = {}  # number of units → points lost
    kept: dict[int, tuple[Kept, T]] = {}  # the smallest number that keeps the budget → (what stays, result)

    def keeps(n: int) -> bool:
        of_n = first.adding(order[:n]) if n else first
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
