"""Settings of `qat.py ship`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.qat.config.qat import ACTIVATIONS, AUTO, POINTS, FloatConfig, QuantizeConfig
from utils.qat.config.settings import Range, option, run
from utils.qat.config.tables import TARGETS

verdict = partial(option, group='verdict')


@dataclass(frozen=True, kw_only=True)
class ShipConfig(FloatConfig):
    """Settings of `qat.py ship`."""

    project: Path = Path('runs/ship')
    for_: str | None = option(
        None,
        'engine that runs the file; default: TensorRT with a GPU, else OpenVINO, else ONNX Runtime',
        allowed=tuple(TARGETS),
    )
    max_drop: float = verdict(
        1.0,
        'points of AP that INT8 may cost; if it costs more, blocks return to float',
        metavar='POINTS',
        allowed=POINTS,
    )
    min_speedup: float = verdict(
        1.05, 'INT8 must be so many times as fast as the fastest float precision', allowed=Range(0)
    )
    batch: int = verdict(1, 'images per query whose speed counts', allowed=Range(1))
    epochs: int | None = option(
        None, f'epochs of fine-tuning; default: {QuantizeConfig.epochs} on a GPU, on a CPU 0', allowed=Range(0)
    )
    activation: str = option(
        AUTO,
        'function in place of SiLU, as in `quantize`. auto: its own; on a GPU ReLU where that is faster and hardly costs AP',
        allowed=(AUTO, *ACTIVATIONS),
    )
    overlap: bool = option(False, '')  # not to be typed
    mask_ratio: int = option(1, '')
    resume: bool = run(False, 'go on in PROJECT/NAME, and keep what is finished there')
