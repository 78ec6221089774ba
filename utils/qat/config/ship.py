"""Settings of `qat.py ship`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.qat.config.common import SIZE
from utils.qat.config.qat import ACTIVATIONS, AUTO, CalibrationConfig, ModelConfig
from utils.qat.config.settings import Range, Sides, option, run
from utils.qat.config.tables import TARGETS
from utils.qat.core.files import require_data, require_source

verdict = partial(option, group='verdict')
quantization = partial(option, group='quantization')
EPOCHS = 10  # on a GPU


@dataclass(frozen=True, kw_only=True)
class ShipConfig(ModelConfig):
    """Settings of `qat.py ship`."""

    project: Path = Path('runs/ship')
    imgsz: Sides = option(  # None until the model is known
        None,
        'height and width in pixels, or one number for both; default: 640, of a classifier 224',
        *SIZE,
        allowed=Range(32),
    )
    for_: str | None = option(
        None,
        'engine that runs the file; default: TensorRT with a GPU, else OpenVINO, else ONNX Runtime',
        allowed=tuple(TARGETS),
    )
    max_drop: float = verdict(
        1.0,
        'points of AP that INT8 may cost; if it costs more, blocks return to float',
        metavar='POINTS',
        allowed=Range(0, 100, words='lie in [0, 100] points of AP, such as 0.5'),
    )
    min_speedup: float = verdict(
        1.05,
        'INT8 must be so many times as fast as the fastest float precision',
        allowed=Range(0, words='be 0 or more, such as 1.05'),
    )
    batch: int = verdict(1, 'images per query whose speed counts', allowed=Range(1))
    epochs: int | None = quantization(
        None, f'epochs of fine-tuning; default: {EPOCHS} on a GPU, on a CPU 0', allowed=Range(0)
    )
    calib_images: int = quantization(
        CalibrationConfig.calib_images, 'training images to calibrate on, at most', allowed=Range(1)
    )
    activation: str = quantization(
        AUTO,
        'function in place of SiLU, as in `quantize`',
        allowed=(AUTO, *ACTIVATIONS),
    )
    overlap: bool = option(False, '')
    mask_ratio: int = option(1, '')
    resume: bool = run(False, 'go on in PROJECT/NAME, and keep what is finished there')

    def require_files(self) -> None:
        """Check also that files can be named after the weights; see ModelConfig.require_files."""
        require_source(self.weights, '--weights', self.SUFFIXES)
        require_data(self.data)
