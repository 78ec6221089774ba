"""INT8 or float: the decision from speed and accuracy, and its words."""

from collections.abc import Collection
from typing import NamedTuple

from utils.qat.benchmark.baseline import Gain
from utils.qat.config.qat import LEARNT, PRICES, QuantizeConfig
from utils.qat.config.ship import ShipConfig
from utils.qat.evaluation.interval import Part, in_points

SPEEDS = {  # engine, --activation → time of INT8 with it, of that with SiLU, docs/activations.md
    ('openvino', 'polynomial'): '0.61 to 0.92',
    ('openvino', 'relu'): '0.5 to 0.74',
    ('tensorrt', 'relu'): '0.82 to 0.93',
    ('onnxruntime', 'relu'): '0.75',
}


class Outcome(NamedTuple):
    """INT8 against float, of the files as they are deployed."""

    gain: Gain
    metric: str  # AP or top-1
    against_float: Part  # INT8 minus float, of boxes and masks the lower

    def __str__(self) -> str:
        return f'is {self.gain}, and changes {self.cost}'

    @property
    def cost(self) -> str:
        """The difference in words."""
        return f'{self.metric} by {in_points(self.against_float)} points'


def against_int8(outcome: Outcome, max_drop: float, min_speedup: float) -> dict[str, str]:
    """Return why INT8 is not shipped: 'speed' and 'accuracy' → reason; empty if it is. max_drop is in points."""
    reasons = {}
    if not outcome.gain.times >= min_speedup:  # NaN is no gain either
        reasons['speed'] = f'it is {outcome.gain}, and --min-speedup is {min_speedup:g}'
    if not round(-100 * outcome.against_float['difference'], 6) <= max_drop:
        reasons['accuracy'] = f'it changes {outcome.cost}, and --max-drop is {max_drop:g}'
    return reasons


def sentence(outcome: Outcome, reasons: dict[str, str], file: object, size: float, float_size: float) -> str:
    """State the verdict. size, float_size: bytes of the INT8 file and the float file."""
    int8, whole = (f'{number / 1e6:.1f} MB' for number in (size, float_size))
    changes = f'It changes {outcome.cost}'
    if not reasons:
        said = f'Ship {file}: in {outcome.gain.backend} INT8 is {outcome.gain}, the fastest float precision here.'
        return f'{said} {changes} and has {int8}, the float file {whole}.'
    said = f'Ship the float file, {file} ({whole}), in {outcome.gain.precision}: in {outcome.gain.backend} INT8 ({int8}) does not pay, because'
    rest = f' {changes}.' * ('accuracy' not in reasons) + f' It is {outcome.gain}.' * ('speed' not in reasons)
    return f'{said} {"; and ".join(reasons.values())}.{rest}'


def would_change(reasons: Collection[str], config: ShipConfig, gains: Collection[str], amx: bool) -> list[str]:
    """Say what would change a verdict for float. config: of the run; gains: activations that are faster in the engine."""
    said = []
    if 'speed' in reasons:
        for name in gains:
            if config.activation in (name, 'relu'):
                continue
            words = f'{name} --epochs {QuantizeConfig.epochs}' if name in LEARNT and not config.epochs else name
            share = SPEEDS.get((config.for_ or '', name))
            took = f' INT8 took {share} of the time with SiLU;' if share else ''
            said.append(f'Another activation: --activation {words}.{took} {PRICES[name]}.')
        size = max(config.imgsz)
        said += [f'More to compute: --batch {8 * config.batch}, images above {size} pixels, or a larger model.']
        said += ['Another CPU: AMX makes BF16 fast, so that INT8 gains less than on one without.'] * amx
    if 'accuracy' in reasons:
        said += ['Fine-tuning: --epochs 10, best on a GPU.'] * (not config.epochs)
        said += ['More or other images of train, of the kind that the model will see: INT8 takes its ranges from them.']
        said += ['More images of val: the interval narrows with their number.']
    return said
