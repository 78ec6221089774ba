"""ONNX → engine: TensorRT's builder through its Python API, and the sidecar that says what the engine is for.

in:  an ONNX file, float or with Q/DQ, in FP32 or typed FP16 (export_qat.py --trt 8|10|11)
out: MODEL.engine, MODEL.engine.json beside it, and a timing cache that the next build goes on from

TensorRT-RTX builds without a GPU.
"""
import time
import warnings
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from utils.qat.errors import QatError, atomic
from utils.qat.files import sha256
from utils.qat.log import LOGGER
from utils.qat.onnx_audit import load
from utils.qat.onnx_graph import count_qdq, name_of
from utils.qat.report import write_json
from utils.qat.sidecar import VERSION, sidecar_of, this_gpu
from utils.qat.tensorrt_api import capabilities, load_tensorrt, logger, product, progress_monitor

MIB = 1 << 20


@dataclass
class Plan:
    """How a file is built: flags by name, and the precision that the engine will have, in words."""
    network: list  # of NetworkDefinitionCreationFlag
    builder: list  # of BuilderFlag
    precision: str


def plan(can, int8, half, wanted, what, file):
    """Plan of a file with Q/DQ (`int8`) or FP16 inside (`half`), for a TensorRT that has `can`, see Capabilities.

    wanted: --precision. what: TensorRT and its version, in words. Raises QatError if that precision cannot come of the file.
    """
    export = f'python export_qat.py --weights {file.with_suffix(".pt").name}'
    if int8 and wanted in ('fp32', 'fp16'):
        raise QatError(f'--precision {wanted}: {file} has Q/DQ, which are INT8; leave the flag out, or give the export of the float checkpoint')
    if not int8 and wanted == 'int8':
        raise QatError(f'--precision int8: {file} has no Q/DQ, so nothing in it can be INT8; export the quantized checkpoint '
                       '(qat.py quantize, then export_qat.py)')
    parts = ['INT8'] * int8 + (['FP16'] if half else ['FP32'])
    if half or not can.precision_flags:
        if not can.typed:
            raise QatError(f'{file}: FP16 outside Q/DQ, which {what} cannot take; {export} --trt 8')
        if (wanted == 'fp16' and not half) or (wanted == 'fp32' and half):
            raise QatError(f"--precision {wanted}: {what} computes in the types of the file, and {file} is {' and '.join(parts)}; "
                           f"{export} --trt 11{' --half' * (wanted == 'fp16')}")
        return Plan(['STRONGLY_TYPED'] + ['EXPLICIT_BATCH'] * can.explicit_batch, [], ' and '.join(parts))
    flags = ['FP16'] * (wanted != 'fp32') + ['INT8'] * int8
    return Plan(['EXPLICIT_BATCH'] * can.explicit_batch, flags, ' and '.join(flags[::-1]) or 'FP32')


class EngineFromOnnx:
    """Builds an engine of config.onnx; see deploy_config.BuildConfig. Raises QatError where file and settings do not fit."""

    def __init__(self, config, progress=None):
        """progress: function that returns a tqdm to show how far the build is; None = silent."""
        self.config, self.progress = config, progress
        self.trt = load_tensorrt(config.backend, '--backend ' + config.backend)
        self.can, self.product = capabilities(self.trt), product(self.trt)
        self.log = logger(self.trt, LOGGER.info)
        model = load(config.onnx)
        self.metadata = {p.key: p.value for p in model.metadata_props}
        self.int8 = any(count_qdq(model))
        self.half = any(i.data_type == TensorProto.FLOAT16 for i in model.graph.initializer)
        self.plan = plan(self.can, self.int8, self.half, config.precision, self.product, config.onnx)
        if not self.can.precision_flags and self.int8 and not self.half:
            LOGGER.info(f'warning: {config.onnx} is FP32 outside Q/DQ, and {self.product} computes it so: slower than FP16. '
                        'Export it with --trt 11')
        self.nodes = [name_of(n) for n in model.graph.node]

    def build(self):
        """Write config.engine and its sidecar; returns what the sidecar holds."""
        trt, config, start = self.trt, self.config, time.perf_counter()
        self.builder = trt.Builder(self.log)  # kept: networks and configurations must not outlive it
        network = self._parse()
        settings = self.builder.create_builder_config()
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.workspace * MIB)
        settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for scripts/draw_engine.py; costs nothing at run time
        if config.level is not None:
            settings.builder_optimization_level = config.level
        for flag in self.plan.builder:
            settings.set_flag(getattr(trt.BuilderFlag, flag))
        shapes = self._shapes(network, settings)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Use Deprecated in TensorRT-RTX')  # which keeps no timings, but takes the calls
            reused = self._use_timing_cache(settings)
            engine = self._serialize(network, settings)
            with atomic(config.timing_cache) as tmp:
                tmp.write_bytes(bytes(settings.get_timing_cache().serialize()))
        with atomic(config.engine) as tmp:
            tmp.write_bytes(engine)
        content = {'sidecar': VERSION, 'built_by': self.product, 'gpu': this_gpu(), 'bytes': config.engine.stat().st_size,
                   'onnx': config.onnx.name, 'onnx_sha256': sha256(config.onnx), 'precision': self.plan.precision,
                   'typed': 'STRONGLY_TYPED' in self.plan.network, 'inputs': shapes, 'metadata': self.metadata,
                   'workspace_mib': config.workspace, 'level': config.level, 'timing_cache_reused': reused,
                   'seconds': round(time.perf_counter() - start, 1)}
        write_json(sidecar_of(config.engine), content)
        return content

    def _parse(self):
        trt, flags = self.trt, 0
        for flag in self.plan.network:
            flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, flag))
        network = self.builder.create_network(flags)
        parser = trt.OnnxParser(network, self.log)
        if not parser.parse_from_file(str(self.config.onnx)):
            raise QatError(f'{self.config.onnx}: {self.product} cannot take it: {self._complaint(parser)}')
        self.parser = parser  # the network refers to weights that it holds
        return network

    def _complaint(self, parser):
        """The parser's first error, with the node it is about."""
        if not parser.num_errors:
            return '; '.join(self.log.errors[:1]) or 'no reason given'
        error = parser.get_error(0)
        if self.can.node_names and error.node_name():
            node = f'{error.node_name()} ({error.node_operator()})'
        else:
            node = self.nodes[error.node()] if 0 <= error.node() < len(self.nodes) else 'the graph'
        return f"node {node}: {' '.join(error.desc().split())}"

    def _shapes(self, network, settings):
        """Give inputs with an open axis a profile. Returns {name: {'min', 'opt', 'max': shape}} of all inputs."""
        config, found, profile, open_axes = self.config, {}, self.builder.create_optimization_profile(), False
        for tensor in map(network.get_input, range(network.num_inputs)):
            shape = tuple(tensor.shape)
            smallest, best, largest = self._batch(shape[0])
            rest = self._size(shape)
            found[tensor.name] = {'min': [smallest, *rest], 'opt': [best, *rest], 'max': [largest, *rest]}
            if -1 in shape:
                open_axes = True
                profile.set_shape(tensor.name, *found[tensor.name].values())
        if open_axes:
            settings.add_optimization_profile(profile)
        return found

    def _batch(self, own):
        """Smallest, best and largest batch, where the file has `own`, -1 if it is open."""
        wanted = self.config.batch
        if own == -1:
            return wanted or (1, 1, 1)
        if wanted and set(wanted) != {own}:
            raise QatError(f"--batch {','.join(map(str, wanted))}: {self.config.onnx} has a fixed batch of {own}; leave the flag out, or "
                           'export with --dynamic')
        return own, own, own

    def _size(self, shape):
        """The axes behind the batch: those of the file, or --imgsz where they are open."""
        own, wanted = shape[1:], self.config.imgsz
        if -1 not in own:
            if wanted and list(own[-2:]) != list(wanted):
                raise QatError(f"--imgsz {' '.join(map(str, wanted))}: {self.config.onnx} takes {own[-2]} x {own[-1]}; leave the flag out, "
                               'or export with that --imgsz')
            return own
        if not wanted:
            raise QatError(f'--imgsz: {self.config.onnx} leaves the image size open ({list(shape)}); say which to build for')
        return tuple(w if o == -1 else o for o, w in zip(own, (own[0], *wanted)))

    def _use_timing_cache(self, settings):
        """Go on from config.timing_cache if it is there and of this TensorRT and GPU; tells whether."""
        file = self.config.timing_cache
        kept = file.read_bytes() if file.exists() else b''
        if kept:
            cache = settings.create_timing_cache(kept)
            if cache and settings.set_timing_cache(cache, False):  # False: not of another TensorRT or GPU
                return True
            LOGGER.info(f'warning: {file} is no timing cache of {self.product} on this GPU; it is made anew')
        settings.set_timing_cache(settings.create_timing_cache(b''), False)
        return False

    def _serialize(self, network, settings):
        """The engine, as bytes."""
        monitor = None
        if self.progress and self.can.progress:
            bar = self.progress()
            settings.progress_monitor = monitor = progress_monitor(self.trt, bar)
        engine = self.builder.build_serialized_network(network, settings)
        if monitor:
            bar.close()
            if monitor.interrupted:
                raise KeyboardInterrupt
        if engine is None:
            raise QatError(f"{self.config.onnx}: {self.product} could not build an engine: "
                           f"{'; '.join(self.log.errors[:2]) or 'no reason given'}")
        return bytes(engine)
