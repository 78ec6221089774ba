"""ONNX → engine, by the Python API of TensorRT's builder, with a sidecar that describes the engine.

It also writes a timing cache, which the next build reuses. TensorRT-RTX builds without a GPU.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

from utils.qat.config.deploy import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
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


class EngineFromOnnx:
    """A build of one engine from one ONNX file, through the Python API. `progress` makes the tqdm that shows it."""

    def __init__(self, config: BuildConfig, progress: Callable[[], Any] | None = None) -> None:
        """Read the ONNX file and plan the build; nothing is built yet."""
        self.config, self.progress = config, progress
        self.trt = load_tensorrt(config.backend, '--backend ' + config.backend)
        self.can, self.product = capabilities(self.trt), product(self.trt)
        self.log = logger(self.trt, LOGGER.warning)
        self.plan = Plan(config, self.can, self.product)

    def build(self) -> dict[str, Any]:
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

    def _parse(self) -> Any:
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
        """Give the parser's first error, with the name of its node."""
        if not parser.num_errors:
            return '; '.join(self.log.errors[:1]) or 'no reason given'
        error = parser.get_error(0)
        if Capability.NODE_NAMES in self.can and error.node_name():
            node = f'{error.node_name()} ({error.node_operator()})'
        else:
            node = self.plan.nodes[error.node()] if 0 <= error.node() < len(self.plan.nodes) else 'the graph'
        return f'node {node}: {" ".join(error.desc().split())}'

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

    def _serialize(self, network: Any, settings: Any) -> bytes:
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
            raise QatError(
                f'{self.config.onnx}: {self.product} could not build an engine: '
                f'{"; ".join(self.log.errors[-1:]) or "no reason given"}'
            )
        return bytes(engine)
