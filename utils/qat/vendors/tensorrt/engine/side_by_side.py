"""Build several engines, one after the other or side by side."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from utils.qat.config.deploy import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import usable_cores
from utils.qat.vendors.tensorrt.engine.build import EngineFromOnnx

# On one H100 (TensorRT 10.6) three builds of YOLOv9-t at a time took 767 to 1,086 s, and 200 to 350 s each alone: each times its kernels on the GPU
# that they share. Builds of level 0 time none: 52 s alone, 84 s eight at a time. Not threads of one process: TensorRT's lock and Python's wait for
# each other.
FAST_JOBS = 8


def jobs_here(asked: int | None, level: int | None) -> int:
    """Return the number of builds at a time: as asked, else one, or of level 0 FAST_JOBS, if two CPU cores are there for each."""
    return asked or (max(1, min(usable_cores() // 2, FAST_JOBS)) if level == 0 else 1)


def build_engines(configs: Sequence[BuildConfig], jobs: int, device: torch.device) -> dict[Path, str]:
    """Build engines on a device, `jobs` at a time, each in a process of its own. Returns engine → reason for those that failed."""
    with ThreadPoolExecutor(jobs) as pool:
        failed = pool.map(partial(_failure, device), configs)
        return {config.engine: why for config, why in zip(configs, failed) if why}


def _failure(device: torch.device, config: BuildConfig) -> str:
    """Build an engine in a process of its own; return why it failed, or ''."""
    LOGGER.info(f'building {config.engine}')
    try:
        with ProcessPoolExecutor(1, get_context('spawn')) as process:
            process.submit(_build, device, config).result()
    except QatError as e:
        return str(e)
    except BrokenProcessPool:
        return f'{config.onnx}: the process that built {config.engine} crashed'
    return ''


def _build(device: torch.device, config: BuildConfig) -> None:
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    EngineFromOnnx(config).build()
