"""The user names blocks that stay in float and activation functions that are not exchanged, or a budget decides how many."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from models.quantize.activations import exchangeable
from models.quantize.convert import find_twins
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.log import LOGGER
from utils.qat.core.text import counted
from utils.qat.core.upstream import Network
from utils.qat.evaluation.interval import Change, boxes_and_masks, in_words, points_lost
from utils.qat.run.sensitivity_summary import Summary, Unit, read_summary, worst

T = TypeVar('T')


@dataclass(frozen=True)
class Kept:
    """Paths of blocks, see convert.find_twins, or of activation functions; and the units that may be added to them."""

    paths: list[str]
    summary: Summary | None = None  # of the units; None if none may be added
    exchanged: Sequence[str] = ()  # paths of the activation functions of which these stay

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


def _matching(paths: Sequence[str], regex: str, flag: str) -> set[str]:
    """Select the paths that `regex`, given with `flag`, matches from their start up to their end or a dot."""
    with reporting(f'{flag} {regex}: no regular expression', re.error):
        pattern = re.compile(f'(?:{regex})(?:\\.|$)')
    matches = {path for path in paths if pattern.match(path)}
    of_functions = flag == '--activation-only'
    if not matches:
        raise QatError(
            f'{flag} {regex}: matches no {"activation function to exchange" if of_functions else "quantized layer"}; their paths start like '
            f'{min(paths)}, and sensitive --granularity conv{" with --activation" * of_functions} lists them all'
        )
    return matches


def left_out(
    paths: Sequence[str], exclude: Sequence[str] = (), only: Sequence[str] = (), flag: str = '--only'
) -> list[str]:
    """Select the twins, of `paths`, that stay in float by the regular expressions of --exclude and --only.

    They are matched from the start of a path: 'model.2' is layer 2 and everything in it, and not layer 22. With `only`,
    a twin that none of them matches stays in float. Raises QatError if an expression is invalid or matches nothing, or
    if no twin is left to quantize. `flag` is the option of `only`.
    """
    chosen: set[str] = set().union(*(_matching(paths, regex, flag) for regex in only)) if only else set(paths)
    chosen -= set().union(*(_matching(paths, regex, '--exclude') for regex in exclude))
    if not chosen:
        raise QatError('--exclude, --only: nothing is left to quantize')
    return [path for path in paths if path not in chosen]


def kept_of(reference: Network, config: QuantizeConfig, source: str) -> tuple[Kept, Kept]:
    """Choose the blocks of the fused float model `reference` that stay in float, and the activation functions that stay.

    `source` is the SHA-256 of the model's file, in hex digits. Raises QatError if --activation-only, --exclude, --only or --keep-float
    name what the model or the summary lacks, or if nothing is left to quantize.
    """
    own = exchangeable(reference, config.activation) if config.exchanges else []
    twins = list(find_twins(reference, config.made_for))
    others = left_out(own, only=config.activation_only, flag='--activation-only') if own else []
    blocks = Kept(left_out(twins, config.exclude, config.only))
    functions = Kept([], exchanged=[path for path in own if path not in others])
    if not config.sensitive:
        return blocks, functions
    summary = read_summary(config.sensitive, source, twins, config.made_for, config.activation, own)
    changing = {*functions.exchanged} if ranks_activations(summary) else {*twins} - {*blocks.paths}
    summary['units'] = [unit for unit in summary['units'] if changing.intersection(unit['twins'])]
    units = worst(summary)[: config.keep_float]
    if len(units) == len(summary['units']):
        flag = config.given(('keep_float', 'max_drop'))
        raise QatError(
            f'{flag}: {config.sensitive} has {counted(len(units), "unit")} not left out, and one at least must be quantized'
        )
    chosen = replace(functions if ranks_activations(summary) else blocks, summary=summary)
    chosen = chosen.adding(units) if units else chosen
    return (blocks, chosen) if ranks_activations(summary) else (chosen, functions)


def within_budget(
    first: Kept, budget: float, images: int, make: Callable[[Kept], T], score: Callable[[T], Change]
) -> tuple[Kept, T]:
    """Find the fewest units that must stay to keep the loss of AP within `budget`, in points (0.01).

    Add units of first.summary to `first` in the order of their cost per FLOP. Double their number until the budget is
    kept, then bisect between the last two numbers. `make` changes all but what stays, and `score` gives the change of AP of the
    result on `images` images. Returns what stays, and the result. Warn if the budget lies within the confidence interval, in which a
    loss counts as none. Raises QatError if no number of units keeps the budget.
    """
    order = first.by_distortion_per_flop()
    lost: dict[int, float] = {}  # number of units → points lost
    kept: dict[int, tuple[Kept, T]] = {}  # the smallest number that keeps the budget → (what stays, result)

    def keeps(n: int) -> bool:
        of_n = first.adding(order[:n]) if n else first
        result = make(of_n)
        change = score(result)
        half_width = 100 * max(part['chance'] for part in boxes_and_masks(change))
        if half_width > budget and not lost:
            LOGGER.warning(
                f'--max-drop {budget}: within the confidence interval, which is ± {half_width:.2f} points on these '
                f'{images} images: no layer is left in float for a loss within it; to keep so small a budget use more '
                'images (val in --data)'
            )
        lost[n] = points_lost(change)
        LOGGER.info(f'{in_words(change, "the score")}; at most {budget:g} points may be lost')
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
