"""Backends whose full speed needs more than a session: pinned buffers, CUDA graphs, fused kernels, streams, engines.

An engine is built from an ONNX file for one batch and precision once, and reused. Each batch has its own engine, as in
sweeps with trtexec: the builder chooses kernels for one shape, and an engine for 1 to 12 images would be measured at 11
shapes for which it was not optimized.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from utils.qat.backends.litert import LiteRT, load_litert
from utils.qat.backends.onnxruntime import AS_WRITTEN, OnnxRuntime, cuda_missing
from utils.qat.backends.openvino import OpenVINO, float_precisions
from utils.qat.backends.pytorch import TorchModel, stride_of
from utils.qat.backends.tensorrt import TensorRT
from utils.qat.benchmark.baseline import SIMULATED
from utils.qat.benchmark.measured import Conditions, Measured, MeasuredSession, Measurement
from utils.qat.benchmark.model_files import Inputs, ModelFile, OpenInputs, fixed_batch
from utils.qat.config.deploy import BuildConfig
from utils.qat.config.settings import require_multiples
from utils.qat.config.tables import ENGINES
from utils.qat.core.errors import QatError
from utils.qat.core.files import sha256
from utils.qat.engine.api import load_tensorrt, product
from utils.qat.engine.side_by_side import build_engines, jobs_here
from utils.qat.engine.sidecar import read_sidecar, require_fit, this_gpu
from utils.qat.graph.openvino_layers import layers_of, run_layers
from utils.qat.graph.openvino_model import load_openvino


def file_to_run(measurement: Measurement, conditions: Conditions) -> Path:
    """Return the file that runs: the measurement's own, or for an .onnx file in TensorRT its engine in PROJECT/engines.

    Raises:
        QatError: the engine could not be built.
    """
    config = engine_of(measurement, conditions)
    if config is None:
        return measurement.file
    if not _fits(config.engine, config.backend, config.workspace, conditions.device):
        build_missing([measurement], conditions)
    if why := conditions.failed.get(config.engine):
        raise QatError(why)
    return config.engine


def build_missing(measurements: Sequence[Measurement], conditions: Conditions) -> None:
    """Build the engines of measurements that do not exist or do not fit the device, side by side; a failure is in conditions.failed."""
    planned = [config for one in measurements if (config := engine_of(one, conditions))]
    missing = {
        config.engine: config
        for config in planned
        if config.engine not in conditions.failed
        and not _fits(config.engine, config.backend, config.workspace, conditions.device)
    }
    if missing:
        conditions.failed.update(
            build_engines(list(missing.values()), jobs_here(conditions.config.jobs), conditions.device)
        )


def engine_of(measurement: Measurement, conditions: Conditions) -> BuildConfig | None:
    """Return how the engine of a measurement is built; None if its file runs as it is."""
    onnx, backend = measurement.file, measurement.backend
    if backend not in ENGINES or onnx.suffix.lower() != '.onnx':
        return None
    config, imgsz, batch = conditions.config, measurement.imgsz, measurement.batch
    size = ''.join(f'-{n}' for n in imgsz or ())
    name = f'{onnx.stem}-{sha256(onnx)[:12]}-{backend}-{measurement.precision}-b{batch}{size}'
    return BuildConfig(
        onnx,
        config.project / 'engines' / f'{name}.engine',
        imgsz,
        None if fixed_batch(measurement.model.inputs) == batch else (batch,) * 3,
        measurement.precision,
        config.workspace,
        timing_cache=config.project / 'engines' / f'{backend}.timing.cache',
        backend=backend,
    )


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


class MeasuredOnnxRuntime(MeasuredSession):
    """ONNX Runtime with its own optimizations, such as Q/DQ fused into INT8 kernels, where it can load them."""

    session: OnnxRuntime

    @override
    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> OnnxRuntime:
        options: dict[str, Any] = {'threads': torch.get_num_threads()}  # as many as PyTorch has
        if self.stream:
            options['user_compute_stream'] = str(self.stream.cuda_stream)
        try:
            session = OnnxRuntime(file, self.device, {}, **options)
            self.types = SIMULATED if session.notes else self.types
            return session
        except QatError:
            if 'INT8' not in self.types:
                raise
        # FP16 scales: its fused Concat does not load (1.31)
        self.types = f'{self.types}, Q/DQ not fused'
        return OnnxRuntime(file, self.device, AS_WRITTEN, **options)

    @classmethod
    @override
    def missing(cls, backend: str, device: torch.device) -> str:
        if device.type == 'cuda' and cuda_missing():
            return (
                'ONNX Runtime: the one installed has no CUDA (onnxruntime-gpu has); --device cpu measures it on the CPU'
            )
        return ''

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        where, index = self.device.type, self.device.index or 0
        bound, self.binding = super().bind(host), self.session.session.io_binding()
        for name, tensor in bound.items():
            kind = host[name].numpy().dtype.type
            self.binding.bind_input(name, where, index, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self.session.session.get_outputs():
            self.binding.bind_output(output.name, where, index)
        return bound

    @override
    def compute(self) -> None:
        try:
            self.session.session.run_with_iobinding(self.binding)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise self.session.refused(e, 'run') from e

    @override
    def download(self) -> None:
        if self.stream:
            self.binding.copy_outputs_to_cpu()


class MeasuredOpenVINO(MeasuredSession):
    """OpenVINO, which answers several queries in streams."""

    runs_on = ('cpu',)
    several = True
    session: OpenVINO

    @override
    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> OpenVINO:
        session = OpenVINO(file, self.device, measurement.precision)
        self.types = session.types
        if file.suffix.lower() == '.xml':
            self.size += file.with_suffix('.bin').stat().st_size
        return session

    @staticmethod
    @override
    def require(backend: str, title: str) -> None:
        load_openvino(title)

    @staticmethod
    @override
    def precisions(model: ModelFile, device: torch.device) -> tuple[str, ...]:
        return ('int8',) if model.precision == 'int8' else float_precisions()

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        session = self.session
        session.compile_for({name: tuple(tensor.shape) for name, tensor in host.items()})
        self.layers = len(run_layers(layers_of(session.compiled)))
        self.outputs = [torch.from_numpy(session.request.get_tensor(port).data) for port in session.compiled.outputs]
        return host

    @override
    def compute(self) -> None:
        self.session.infer({name: tensor.numpy() for name, tensor in self.inputs.items()})

    @cached_property
    def queue(self) -> Any:
        """The streams, as OpenVINO recommends for throughput."""
        compiled = self.session.compile('THROUGHPUT')
        self.streams = compiled.get_property('NUM_STREAMS')
        return self.session.library.AsyncInferQueue(compiled, compiled.get_property('OPTIMAL_NUMBER_OF_INFER_REQUESTS'))

    @override
    def serve(self, seconds: float, least: int) -> tuple[int, float, float]:
        queue, busy = self.queue, list[float]()  # ms of each query
        arrays = {name: tensor.numpy() for name, tensor in self.inputs.items()}
        queue.set_callback(lambda *_: None)
        for _ in queue:  # the first run of a request sets things up
            queue.start_async(arrays, share_inputs=True)
        queue.wait_all()
        queue.set_callback(lambda request, _: busy.append(request.latency))
        start, ordered = time.perf_counter(), 0
        while ordered < least or time.perf_counter() - start < seconds:
            queue.start_async(arrays, share_inputs=True)  # waits for a free request
            ordered += 1
        queue.wait_all()
        return ordered, time.perf_counter() - start, sum(busy) / 1000


class MeasuredLiteRT(MeasuredSession):
    """LiteRT, whose input is written before the time is taken."""

    runs_on = ('cpu',)
    session: LiteRT

    @staticmethod
    @override
    def require(backend: str, title: str) -> None:
        load_litert(title)

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.session.give(*host.values())
        return host

    @override
    def compute(self) -> None:
        self.outputs = list(self.session.compute().values())


class MeasuredTensorRT(MeasuredSession):
    """An engine of TensorRT or TensorRT-RTX, with its own buffers, optionally as a CUDA graph."""

    runs_on = ('cuda',)
    session: TensorRT

    @override
    def open(self, measurement: Measurement, file: Path, conditions: Conditions) -> TensorRT:
        session = TensorRT(file, self.device, measurement.backend, conditions.config.cuda_graph)
        self.types = (session.sidecar or {}).get('precision') or self.types or 'as built'
        self.stream, self.layers = session.stream, session.engine.num_layers
        return session

    @staticmethod
    @override
    def require(backend: str, title: str) -> None:
        load_tensorrt(backend, title)

    @staticmethod
    @override
    def precisions(model: ModelFile, device: torch.device) -> tuple[str, ...]:
        if model.file.suffix.lower() == '.onnx' and model.types == 'FP32':
            return 'fp32', 'fp16'  # chosen when the engine is built
        return (model.precision,)

    @property
    @override
    def accepts(self) -> OpenInputs:
        """Return the inputs of the engine; an axis is open where the profile has a range."""
        return {
            name: (self.session.dtype(name), tuple(a if a == b else None for a, b in zip(smallest, largest)))
            for name, (smallest, _, largest) in self.session.inputs.items()
        }

    @override
    def bind(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.outputs = list(self.session.prepare({name: tensor.shape for name, tensor in host.items()}).values())
        return {name: self.session.buffers[name][: tensor.numel()].view(tensor.shape) for name, tensor in host.items()}

    @override
    def compute(self) -> None:
        self.session.enqueue()


class HalfModel(TorchModel):
    """A model of PyTorch in FP16, for images and predictions in FP32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.half())

    @override
    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found = super().__call__(images.half())
        return tuple(part.float() for part in found) if isinstance(found, tuple) else found.float()


class MeasuredPyTorch(Measured):
    """A YOLOv9 checkpoint in eager mode. A quantized one simulates INT8 in FP32, so its time is not INT8's."""

    def __init__(self, measurement: Measurement, file: Path, conditions: Conditions) -> None:
        super().__init__(measurement, file, conditions)
        self.opened = conditions.open_checkpoint(file, self.device)
        self.model, self.dtype = self.opened.model, torch.float32
        self.types = SIMULATED if self.opened.recipe is not None else 'FP32'
        if measurement.precision == 'fp16':
            self.opened, self.dtype, self.types = HalfModel(self.model), torch.float16, 'FP16'
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.layers = sum(any(True for _ in m.parameters(recurse=False)) for m in self.model.modules())

    @staticmethod
    @override
    def precisions(model: ModelFile, device: torch.device) -> tuple[str, ...]:
        if model.precision == 'int8':
            return (model.precision,)
        return ('fp32', 'fp16') if device.type == 'cuda' else ('fp32',)

    @override
    def prepare(self, inputs: Inputs) -> None:
        for _, (*_, height, width) in inputs.values():
            require_multiples((height, width), stride_of(self.model))
        super().prepare({name: (self.dtype, shape) for name, (_, shape) in inputs.items()})

    @override
    @torch.inference_mode()
    def compute(self) -> None:
        output = self.model(*self.inputs.values())
        # A detector returns its decoded predictions first; the rest is for training
        self.outputs = [output if isinstance(output, torch.Tensor) else output[0]]

    @override
    def predicting(self) -> TorchModel:
        return self.opened


MEASURED: dict[str, type[Measured]] = {  # --backend → its class; others are measured as their session
    'tensorrt': MeasuredTensorRT,
    'rtx': MeasuredTensorRT,
    'onnxruntime': MeasuredOnnxRuntime,
    'openvino': MeasuredOpenVINO,
    'litert': MeasuredLiteRT,
    'pytorch': MeasuredPyTorch,
}


def measured_by(backend: str) -> type[Measured]:
    """Return the Measured class of a backend. backend: a key of BACKENDS."""
    return MEASURED.get(backend, MeasuredSession)
