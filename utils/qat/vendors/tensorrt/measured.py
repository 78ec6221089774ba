"""TensorRT and TensorRT-RTX in the benchmark.

An engine is built from an ONNX file for one batch and precision once, and reused. Each batch has its own engine, as in
sweeps with trtexec: the builder chooses kernels for one shape, and an engine for 1 to 12 images would be measured at 11
shapes for which it was not optimized.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import override

from utils.qat.config.deploy import BuildConfig
from utils.qat.core.errors import QatError
from utils.qat.vendors.measured import Conditions, Measured, Measurement, ModelFile, OpenInputs, fixed_batch
from utils.qat.vendors.tensorrt.engine.api import load_tensorrt, product
from utils.qat.vendors.tensorrt.engine.build import build_engines, jobs_here
from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar, require_fit, this_gpu
from utils.qat.vendors.tensorrt.session import TensorRT


class MeasuredTensorRT(Measured):
    """An engine of TensorRT or TensorRT-RTX, with its own buffers, optionally as a CUDA graph."""

    opens = TensorRT
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

    @staticmethod
    @override
    def describe(file: Path) -> ModelFile:
        """Describe an .engine file from its sidecar."""
        sidecar = read_sidecar(file) or {}
        batches = {shape[0] for shapes in sidecar.get('inputs', {}).values() for shape in shapes.values()}
        return ModelFile(
            file,
            {},
            sidecar.get('precision', ''),
            tuple(sorted(batches)) or (1,),
            backend='rtx' if 'RTX' in sidecar.get('built_by', '') else 'tensorrt',
            task=sidecar.get('metadata', {}).get('task', ''),
        )

    @staticmethod
    @override
    def build_missing(measurements: Sequence[Measurement], conditions: Conditions) -> None:
        """Build the engines that do not exist or do not fit the device."""
        planned = [config for one in measurements if (config := engine_of(one, conditions))]
        missing = {
            config.engine: config
            for config in planned
            if config.engine not in conditions.failed and not _fits(config, conditions.device)
        }
        if missing:
            jobs = jobs_here(conditions.config.jobs, conditions.config.level)
            conditions.failed.update(build_engines(list(missing.values()), jobs, conditions.device))

    @staticmethod
    @override
    def file_to_run(measurement: Measurement, conditions: Conditions) -> Path:
        """Return the measurement's engine, for an .onnx file the one in PROJECT/engines."""
        config = engine_of(measurement, conditions)
        if config is None:
            return measurement.file
        MeasuredTensorRT.build_missing([measurement], conditions)
        if why := conditions.failed.get(config.engine):
            raise QatError(why)
        return config.engine

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


def engine_of(measurement: Measurement, conditions: Conditions) -> BuildConfig | None:
    """Return how the engine of a measurement is built; None if its file is an engine."""
    onnx, backend = measurement.file, measurement.backend
    if onnx.suffix.lower() != '.onnx':
        return None
    config, imgsz, batch = conditions.config, measurement.imgsz, measurement.batch
    size = ''.join(f'-{n}' for n in imgsz or ())
    level = '' if config.level is None else f'-level{config.level}'
    name = f'{onnx.stem}-{measurement.model.digest[:12]}-{backend}-{measurement.precision}-b{batch}{size}{level}'
    return BuildConfig(
        onnx,
        config.project / 'engines' / f'{name}.engine',
        imgsz,
        None if fixed_batch(measurement.model.inputs) == batch else (batch,) * 3,
        measurement.precision,
        config.workspace,
        timing_cache=config.project / 'engines' / f'{backend}.timing.cache',
        level=config.level,
        backend=backend,
    )


def _fits(config: BuildConfig, device: torch.device) -> bool:
    """Tell whether the engine exists, and this TensorRT built it for this GPU with this workspace."""
    try:
        sidecar = read_sidecar(config.engine)
        if not config.engine.exists() or sidecar is None:
            return False
        require_fit(config.engine, sidecar, product(load_tensorrt(config.backend)), this_gpu(device))
    except QatError:
        return False
    return sidecar.get('workspace_mib') == config.workspace


MEASURED = MeasuredTensorRT
