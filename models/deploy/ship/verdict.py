"""INT8 or float: the decision from speed and accuracy, and its words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from utils.qat.evaluation.chance import UNKNOWN, in_points

EXPECTED = {  # --activation → what is known of its speed and price, see docs/activations.md
    'polynomial': 'in OpenVINO INT8 of yolov9-t took 0.61 to 0.92 of its time with SiLU, and AP stayed within chance',
    'relu': 'INT8 of yolov9-t took 0.5 to 0.74 of its time with SiLU; the model learns it from your labels, at next to no cost with '
    'few classes, and for 6.5 points of AP with the 80 of COCO',
}


@dataclass(frozen=True)
class Outcome:
    """INT8 against float, of the files as they are deployed."""

    engine: str  # its title
    precision: str  # the fastest float one there, in capitals
    speedup: float  # INT8 is so many times as fast
    metric: str  # AP or top-1
    difference: float  # of INT8 from float, in 0..1; of boxes and masks the lower
    chance: float  # half of its 95 % interval

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of `difference`; None if one image tells nothing of it."""
        known = self.chance != UNKNOWN
        return (self.difference - self.chance, self.difference + self.chance) if known else None

    @property
    def speed(self) -> str:
        """The speed in words."""
        return f'{self.speedup:.2f} times as fast as {self.precision}'

    @property
    def cost(self) -> str:
        """The difference in words."""
        points = in_points({'difference': self.difference, 'chance': self.chance})
        return f'{points} points'


def against_int8(found: Outcome, max_drop: float, min_speedup: float) -> dict[str, str]:
    """Return why INT8 is not shipped: 'speed' and 'accuracy' → reason; empty if it is. max_drop is in points."""
    reasons = {}
    if not found.speedup >= min_speedup:  # NaN is no gain either
        reasons['speed'] = f'it is {found.speed}, and --min-speedup is {min_speedup:g}'
    if not round(-100 * found.difference, 6) <= max_drop:
        reasons['accuracy'] = f'it changes {found.metric} by {found.cost}, and --max-drop is {max_drop:g}'
    return reasons


def sentence(found: Outcome, reasons: dict[str, str], file: object, size: float, float_size: float) -> str:
    """State the verdict. size, float_size: bytes of the INT8 file and the float file."""
    int8, whole = f'{size / 1e6:.1f} MB', f'{float_size / 1e6:.1f} MB'
    if not reasons:
        return (
            f'Ship {file}: in {found.engine} INT8 is {found.speed}, the fastest float precision '
            f'here. It changes {found.metric} by {found.cost} and has {int8}, the float file {whole}.'
        )
    rest = [
        f'It changes {found.metric} by {found.cost}.' * ('accuracy' not in reasons),
        f'It is {found.speed}.' * ('speed' not in reasons),
    ]
    return ' '.join(
        [
            f'Ship the float file, {file} ({whole}), in {found.precision}: in {found.engine} INT8 ({int8}) does not pay, because',
            f'{"; and ".join(reasons.values())}.',
            *filter(None, rest),
        ]
    )


def would_change(
    reasons: Collection[str], gains: Collection[str], taken: str, epochs: int, batch: int, imgsz: int, amx: bool
) -> list[str]:
    """Say what would change a verdict for float. gains: activations that are faster in the engine; taken: the one of the model."""
    said = []
    if 'speed' in reasons:
        faster = [name for name in gains if name != taken and taken != 'relu']
        said += [f'Another activation would change that: --activation {name} ({EXPECTED[name]}).' for name in faster]
        said += [
            f'A larger batch, such as --batch {8 * batch}, larger images than {imgsz} pixels, or a larger model: the more there is to '
            'compute, the more INT8 gains.'
        ]
        said += ['Another CPU: AMX makes BF16 fast, so that INT8 gains less than on one without.'] * amx
    if 'accuracy' in reasons:
        said += ['Fine-tuning: --epochs 10, best on a GPU.'] * (not epochs)
        said += ['More or other images of train, of the kind that the model will see: INT8 takes its ranges from them.']
        said += ['More images of val: the interval narrows with their number.']
    return said
