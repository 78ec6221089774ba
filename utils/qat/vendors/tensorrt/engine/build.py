"""ONNX → engine, with a sidecar that describes it: by the Python API of TensorRT's builder, by NVIDIA's program trtexec, or several at a time.

A build also writes a timing cache, which the next one reuses. TensorRT-RTX builds without a GPU. The flags of trtexec depend on its
version: 8.6 and 10 choose precisions by flags; 11 has no such flags, and its defaults for measurements are those needed here.
"""

import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from utils.qat.config.deploy import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import usable_cores
from utils.qat.vendors.tensorrt.engine.api import (
    Capability,
    capabilities,
    load_tensorrt,
    logger,
    product,
    progress_monitor,
)
from utils.qat.vendors.tensorrt.engine.plan import Plan
from utils.qat.vendors.tensorrt.engine.sidecar import write_sidecar

MIB = 1 << 20
# On one H100 (TensorRT 10.6) three builds of YOLOv9-t at a time took 767 to 1,086 s, and 200 to 350 s each alone: each times its kernels on the GPU
# that they share. Builds of level 0 time none: 52 s alone, 84 s eight at a time. Not threads of one process: TensorRT's lock and Python's wait for
# each other.
FAST_JOBS = 8


class EngineFromOnnx:
    """A build of one engine from one ONNX file, through the Python API. `progress` makes the tqdm that shows it."""

    def __init__(self, config: BuildConfig, progress: Callable[[], Any] | None = None) -> None:
        """Read the ONNX file and plan the build; nothing is built yet."""
        self.config, self.progress = config, progress
        self.trt = load_tensorrt(config.backend, '--backend ' + config.backend)
        self.can, self.product = capabilities(self.trt), product(self.trt)
        self.log = logger(self.trt, LOGGER.warning)
        self.plan = Plan(config, self.can, self.product)

    def build(self) -> dict[str, object]:
        """Write config.engine, its sidecar and the timing cache; return the content of the sidecar."""
        trt, config, start = self.trt, self.config, time.perf_counter()
        self.builder = trt.Builder(self.log)  # kept: networks and settings must not outlive it
        network = self._parse()
        settings = self.builder.create_builder_config()
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.workspace * MIB)
        # for scripts/draw_engine.py; costs nothing at run time
        settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if config.level is not None:
            settings.builder_optimization_level = config.level
        for flag in self.plan.builder:
            settings.set_flag(getattr(trt.BuilderFlag, flag))
        if self.plan.dynamic:
            profile = self.builder.create_optimization_profile()
            for name, shapes in self.plan.shapes.items():
                profile.set_shape(name, *shapes)
            settings.add_optimization_profile(profile)
        with warnings.catch_warnings():
            # TensorRT-RTX keeps no timings, but accepts the calls
            warnings.filterwarnings('ignore', 'Use Deprecated in TensorRT-RTX')
            reused = self._use_timing_cache(settings)
            engine = self._serialize(network, settings)
            for file in (config.timing_cache, config.engine):
                file.parent.mkdir(parents=True, exist_ok=True)
            self._write_timing_cache(settings)
        with atomic(config.engine) as tmp:
            tmp.write_bytes(engine)
        return write_sidecar(
            self.plan,
            timing_cache_reused=reused,
            seconds=round(time.perf_counter() - start, 1),
        )

    def _parse(self) -> object:
        trt, flags = self.trt, 0
        for flag in self.plan.network:
            flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, flag))
        network = self.builder.create_network(flags)
        trt.init_libnvinfer_plugins(self.log, '')  # for files with EfficientNMS inside
        parser = trt.OnnxParser(network, self.log)
        if not parser.parse_from_file(str(self.config.onnx)):
            raise QatError(f'{self.config.onnx}: {self.product} cannot take it: {self._complaint(parser)}')
        self.parser = parser  # kept: the network refers to its weights
        return network

    def _complaint(self, parser: Any) -> str:
        """Give the parser's first error, with the name of its node if it is of one."""
        if not parser.num_errors:
            return self.log.reason()
        error = parser.get_error(0)
        if Capability.NODE_NAMES in self.can and error.node_name():
            node = f'node {error.node_name()} ({error.node_operator()}): '
        else:
            node = f'node {self.plan.nodes[error.node()]}: ' if 0 <= error.node() < len(self.plan.nodes) else ''
        return node + ' '.join(error.desc().split())

    def _use_timing_cache(self, settings: Any) -> bool:
        """Reuse config.timing_cache if it exists and fits this TensorRT and GPU; return whether it was reused."""
        file = self.config.timing_cache
        kept = file.read_bytes() if file.exists() else b''
        cache = settings.create_timing_cache(kept)  # an empty cache if `kept` cannot be read
        taken = cache and settings.set_timing_cache(cache, False)  # False: no cache of another TensorRT or GPU
        whole = taken and len(bytes(cache.serialize())) == len(kept)
        if kept and not whole:
            LOGGER.warning(f'{file} is no timing cache of {self.product} on this GPU, or not whole; it is made anew')
        if not taken:
            settings.set_timing_cache(settings.create_timing_cache(b''), False)
        return bool(kept and whole)

    def _write_timing_cache(self, settings: Any) -> None:
        """Write the timings of this build, and those that other builds have written into the file since it was read."""
        file, cache = self.config.timing_cache, settings.get_timing_cache()
        if file.exists():
            cache.combine(settings.create_timing_cache(file.read_bytes()), False)  # False: as in _use_timing_cache
        with atomic(file) as tmp:
            tmp.write_bytes(bytes(cache.serialize()))

    def _serialize(self, network: object, settings: Any) -> bytes:
        monitor = None
        if self.progress and Capability.PROGRESS in self.can:
            bar = self.progress()
            settings.progress_monitor = monitor = progress_monitor(self.trt, bar)
        engine = self.builder.build_serialized_network(network, settings)
        if monitor:
            bar.close()
            if monitor.interrupted:
                raise KeyboardInterrupt
        if engine is None:  # by the last error: earlier ones need not end a build
            raise QatError(f'{self.config.onnx}: {self.product} could not build an engine: {self.log.reason(-1)}')
        return bytes(engine)


def arguments(
    plan: Plan, major: int, layer: Path | None = None, profile: Path | None = None, tuning: Sequence[str] = ()
) -> list[str]:
    """List the arguments of trtexec for a build.

    layer, profile: JSON files for a measurement of its layers; None = none. tuning: arguments of a search, which runs every engine.
    """
    config = plan.config
    args = [
        f'--onnx={config.onnx}',
        f'--saveEngine={config.engine}',
        f'--timingCacheFile={config.timing_cache}',
        f'--memPoolSize=workspace:{config.workspace}',
        '--profilingVerbosity=detailed',
    ]
    if major < 11:
        args += [{'FP16': '--fp16', 'INT8': '--int8'}[flag] for flag in plan.builder]
        args += ['--stronglyTyped'] * ('STRONGLY_TYPED' in plan.network)
    if config.level is not None:
        args.append(f'--builderOptimizationLevel={config.level}')
    if plan.dynamic:
        for which, number in (('min', 0), ('opt', 1), ('max', 2)):
            shapes = (f'{name}:{"x".join(map(str, shapes[number]))}' for name, shapes in plan.shapes.items())
            args.append(f'--{which}Shapes={",".join(shapes)}')
    if layer is None:
        return [*args, *(tuning or ['--skipInference'])]
    # the defaults of trtexec 11, which warns if they are given
    return [
        *args,
        f'--exportLayerInfo={layer}',
        f'--exportProfile={profile}',
        *(['--useCudaGraph', '--useSpinWait', '--noDataTransfers', '--separateProfileRun'] if major < 11 else []),
    ]


def build_with_trtexec(
    trtexec: str,
    major: int,
    plan: Plan,
    progress: Callable[..., Iterable[str]] = iter,
    layer: Path | None = None,
    profile: Path | None = None,
    tuning: Sequence[str] = (),
) -> dict[str, object]:
    """Build the engine plan.config.engine and write its sidecar, whose content is returned; see `arguments`."""
    config, start = plan.config, time.perf_counter()
    config.engine.parent.mkdir(parents=True, exist_ok=True)
    with atomic(config.engine) as tmp:
        command = [trtexec, *arguments(plan, major, layer, profile, tuning)]
        command[command.index(f'--saveEngine={config.engine}')] = f'--saveEngine={tmp}'
        errors = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            for line in progress(running.stdout):
                LOGGER.debug(line.rstrip())
                errors += [line.strip()] * ('[E]' in line)
        if running.returncode or not Path(tmp).exists():
            raise QatError(
                f'{config.onnx}: {trtexec} failed: {errors[-1] if errors else f"exit code {running.returncode}"}'
            )
    return write_sidecar(plan, trtexec=' '.join(command), seconds=round(time.perf_counter() - start, 1))


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
