"""Build several engines side by side: a build alone keeps one CPU core busy, and the GPU idle most of the time."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from utils.qat.config.deploy import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import usable_cores
from utils.qat.engine.build import EngineFromOnnx

# On one H100 (TensorRT 10.6) a build takes 5 to 6 minutes alone, 7 to 13 beside two or three others; of 12 at a time none had ended after 18:
# each times its kernels on the GPU, which the processes share by turns.
ON_A_GPU = 3


def jobs_here(asked: int | None) -> int:
    """Return the number of builds at a time: as asked, or by the CPU cores and the GPUs that PyTorch sees."""
    return asked or max(1, min(usable_cores(), ON_A_GPU * torch.cuda.device_count() or ON_A_GPU))


def build_engines(configs: Sequence[BuildConfig], jobs: int) -> dict[Path, str]:
    """Build engines, `jobs` at a time, each in a process of its own. Returns engine → reason for those that failed."""
    with ThreadPoolExecutor(jobs) as pool:
        failed = pool.map(_failure, configs)
        return {config.engine: why for config, why in zip(configs, failed) if why}


def _failure(config: BuildConfig) -> str:
    """Build an engine in a process of its own; return why it failed, or ''."""
    LOGGER.info(f'building {config.engine}')
    try:
        with ProcessPoolExecutor(1, get_context('spawn')) as process:
            process.submit(_build, config).result()
    except QatError as e:
        return str(e)
    except BrokenProcessPool:
        return f'{config.onnx}: the process that built {config.engine} crashed'
    return ''


def _build(config: BuildConfig) -> None:
    EngineFromOnnx(config).build()
