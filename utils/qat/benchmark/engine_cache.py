"""An ONNX file → an engine for one batch and precision, built once and found again.

One engine per batch, as sweeps with trtexec have it: the builder chooses kernels for one shape, and an engine for 1 to 12 images
would be measured at 11 shapes that it was not made for.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from utils.qat.benchmark.model_files import Network, fixed_batch
from utils.qat.config.engine import BenchmarkConfig, BuildConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.build import EngineFromOnnx
from utils.qat.engine.sidecar import read_sidecar, require_fit, this_gpu


def engine_for(
    network: Network,
    backend: str,
    precision: str,
    batch: int,
    imgsz: Sides | None,
    config: BenchmarkConfig,
    device: torch.device,
    say: Callable[[str], object],
) -> Path:
    """Return the engine of an .onnx file in PROJECT/engines, which is built unless one that fits the device is there.

    Raises:
        QatError: the file cannot be built so.
    """
    size = ''.join(f'-{n}' for n in imgsz or ())
    name = f'{network.file.stem}-{sha256(network.file)[:12]}-{backend}-{precision}-b{batch}{size}'
    file = config.project / 'engines' / f'{name}.engine'
    if not _fits(file, backend, config.workspace, device):
        say(f'building {file}')
        own = fixed_batch(network.inputs)
        EngineFromOnnx(
            BuildConfig(
                network.file,
                file,
                imgsz,
                None if own == batch else (batch,) * 3,
                precision,
                config.workspace,
                timing_cache=file.with_name(f'{backend}.timing.cache'),
                backend=backend,
            )
        ).build()
    return file


def _fits(file: Path, backend: str, workspace: int, device: torch.device) -> bool:
    """Tell whether `file` is there, and made by this TensorRT for this GPU, with that workspace (MiB)."""
    try:
        sidecar = read_sidecar(file)
        if not file.exists() or sidecar is None:
            return False
        require_fit(file, sidecar, product(load_tensorrt(backend)), this_gpu(device))
    except QatError:
        return False
    return sidecar.get('workspace_mib') == workspace
