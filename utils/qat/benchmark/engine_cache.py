"""Build an engine from an ONNX file for one batch and precision once, and reuse it.

Each batch has its own engine, as in sweeps with trtexec: the builder chooses kernels for one shape, and an engine for 1 to 12
images would be measured at 11 shapes for which it was not optimized.
"""

from pathlib import Path

import torch

from utils.qat.benchmark.measurement import Conditions, Measurement
from utils.qat.benchmark.model_files import fixed_batch
from utils.qat.config.deploy import BuildConfig
from utils.qat.config.tables import ENGINES
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.core.log import LOGGER
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.build import EngineFromOnnx
from utils.qat.engine.sidecar import read_sidecar, require_fit, this_gpu


def file_to_run(measurement: Measurement, conditions: Conditions) -> Path:
    """Return the file that runs: the measurement's own, or for an .onnx file in TensorRT its engine in PROJECT/engines.

    Build the engine unless one that fits the device exists.

    Raises:
        QatError: the engine cannot be built.
    """
    onnx, backend = measurement.file, measurement.backend
    if backend not in ENGINES or onnx.suffix.lower() != '.onnx':
        return onnx
    config, imgsz, batch = conditions.config, measurement.imgsz, measurement.batch
    size = ''.join(f'-{n}' for n in imgsz or ())
    name = f'{onnx.stem}-{sha256(onnx)[:12]}-{backend}-{measurement.precision}-b{batch}{size}'
    engine = config.project / 'engines' / f'{name}.engine'
    if not _fits(engine, backend, config.workspace, conditions.device):
        LOGGER.info(f'building {engine}')
        own = fixed_batch(measurement.model.inputs)
        EngineFromOnnx(
            BuildConfig(
                onnx,
                engine,
                imgsz,
                None if own == batch else (batch,) * 3,
                measurement.precision,
                config.workspace,
                timing_cache=engine.with_name(f'{backend}.timing.cache'),
                backend=backend,
            )
        ).build()
    return engine


def _fits(file: Path, backend: str, workspace: int, device: torch.device) -> bool:
    """Tell whether `file` exists, and this TensorRT built it for this GPU with this workspace (MiB)."""
    try:
        sidecar = read_sidecar(file)
        if not file.exists() or sidecar is None:
            return False
        require_fit(file, sidecar, product(load_tensorrt(backend)), this_gpu(device))
    except QatError:
        return False
    return sidecar.get('workspace_mib') == workspace
