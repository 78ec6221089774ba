"""An ONNX file → an engine for one batch and precision, built once and found again.

One engine per batch, as sweeps with trtexec have it: the builder chooses kernels for one shape, and an engine for 1 to 12 images
would be measured at 11 shapes that it was not made for.
"""

from utils.qat.benchmark.model_files import fixed_batch
from utils.qat.config.engine import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.build import EngineFromOnnx
from utils.qat.engine.sidecar import read_sidecar, require_fit, this_gpu


def engine_for(network, backend, precision, batch, config, device, say):
    """Path of an engine of network.file (.onnx), in PROJECT/engines. config: BenchmarkConfig. say: takes a line about the build.

    Raises QatError where the file cannot be built so.
    """
    size = ''.join(f'-{n}' for n in config.imgsz or ())
    name = f'{network.file.stem}-{sha256(network.file)[:12]}-{backend}-{precision}-b{batch}{size}'
    file = config.project / 'engines' / f'{name}.engine'
    if not _fits(file, backend, config.workspace, device):
        say(f'building {file}')
        own = fixed_batch(network.inputs)
        EngineFromOnnx(
            BuildConfig(
                network.file,
                file,
                config.imgsz,
                None if own == batch else (batch,) * 3,
                precision,
                config.workspace,
                timing_cache=file.with_name(f'{backend}.timing.cache'),
                backend=backend,
            )
        ).build()
    return file


def _fits(file, backend, workspace, device):
    """Whether `file` is there, and made by this TensorRT for this GPU, with that workspace."""
    try:
        sidecar = read_sidecar(file)
        if not file.exists() or sidecar is None:
            return False
        require_fit(file, sidecar, product(load_tensorrt(backend)), this_gpu(device))
    except QatError:
        return False
    return sidecar['workspace_mib'] == workspace
