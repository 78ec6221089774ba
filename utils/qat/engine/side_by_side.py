"""Build several engines side by side: a build keeps one CPU core busy, and the GPU idle most of the time."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from utils.qat.config.deploy import WORKSPACE, BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import usable_cores
from utils.qat.engine.build import MIB, EngineFromOnnx

BESIDES = 2048  # MiB of a build's GPU memory besides its workspace: CUDA's own, kernels, weights


def jobs_here(asked: int | None, workspace: int = WORKSPACE) -> int:
    """Return the number of builds at a time: as asked, or by the CPU cores and the free GPU memory. workspace: MiB of each."""
    if asked:
        return asked
    jobs = usable_cores()
    if torch.cuda.is_available():
        jobs = min(jobs, torch.cuda.mem_get_info()[0] // ((workspace + BESIDES) * MIB))
    return max(1, jobs)


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
