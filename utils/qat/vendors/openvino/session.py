"""OpenVINO: .onnx files and its own .xml files, on the CPU, with explicit precision and number of threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from utils.qat.vendors.measured import Conditions, Measured, Measurement, ModelFile, OpenInputs, input_type
from utils.qat.vendors.openvino.layers import Int8Layers, layers_of, quantized_convs, run_layers, sums_fit
from utils.qat.vendors.openvino.model import load_openvino, metadata, one_core, read_model, refusing
from utils.qat.vendors.session import Session, Signature, padded_note

if TYPE_CHECKING:
    import openvino

# --precision → INFERENCE_PRECISION_HINT, the type of float layers, and both in words. A layer with Q/DQ is in INT8 anyway. Without
# the hint OpenVINO takes BF16 where the CPU has it.
HINTS = {
    'fp32': ('f32', 'FP32'),
    'bf16': ('bf16', 'BF16'),
    'fp16': ('f16', 'FP16'),
    'int8': ('f32', 'INT8 and FP32'),
}
OVERFLOW = (
    'in OpenVINO sums of two INT8 products overflow 16 bits here, which costs AP: this CPU has no VNNI, or ONEDNN_MAX_CPU_ISA forbids it; '
    'quantize with --reduce-range, or use ONNX Runtime'
)
ON_CPU = torch.device('cpu')


@cache
def float_precisions() -> tuple[str, ...]:
    """Return the keys of HINTS that this CPU has instructions for, INT8 aside."""
    able = one_core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES')
    return 'fp32', *(name for name in ('bf16', 'fp16') if name.upper() in able)


@cache
def int8_overflows() -> bool:
    """Tell whether sums of two INT8 products overflow 16 bits in OpenVINO on this CPU, by a convolution of the largest integers.

    OpenVINO's names of instruction sets change with each generation of CPUs.
    """
    library, channels = load_openvino(), 64
    ops, largest = library.opset13, np.full((1, channels, 1, 1), 127, np.float32)
    x, weight = ops.parameter(largest.shape, np.float32), ops.constant(largest)
    ends = [np.float32(end) for end in (-128, 127, -128, 127)]
    quantized = (ops.fake_quantize(tensor, *ends, levels=256) for tensor in (x, weight))
    model = library.Model([ops.convolution(*quantized, [1, 1], [0, 0], [0, 0], [1, 1])], [x])
    compiled = one_core().compile_model(model, 'CPU', {'INFERENCE_PRECISION_HINT': 'f32', 'INFERENCE_NUM_THREADS': 1})
    return compiled(largest)[0].item() != channels * 127**2


class OpenVINO(Session):
    """An .onnx or .xml file in OpenVINO, compiled for every new shape of the inputs.

    Attributes:
        types: what it computes in, in words.
        int8: how much of a quantized model runs in INT8, known after the first run; None of a float model.
    """

    int8: Int8Layers | None = None

    def __init__(
        self, file: Path, device: torch.device, precision: str = 'fp32', settings: Mapping[str, object] | None = None
    ) -> None:
        """Read an .onnx file, or an .xml with its .bin beside it. Raises QatError without OpenVINO, or if it cannot read the file.

        `device` is that of the outputs; the CPU computes. `precision` is a key of HINTS; `settings` are of OpenVINO, besides those for
        precision and threads.
        """
        super().__init__(file, device)
        self.library = load_openvino(str(file))
        self.model = read_model(file)
        self.quantized = quantized_convs(self.model)
        hint, self.types = HINTS['int8' if any(self.quantized.values()) else precision]
        self.settings: dict[str, object] = {
            'INFERENCE_PRECISION_HINT': hint,
            'INFERENCE_NUM_THREADS': torch.get_num_threads(),  # as many as PyTorch has
            **(settings or {}),
        }
        self.shapes: dict[str, tuple[int, ...]] = {}

    @classmethod
    @override
    def open(cls, file: Path, device: torch.device, backend: str) -> OpenVINO:
        # Pinned threads of two processes share cores while others are idle: 1.4 times slower, docs/cpu.md.
        return cls(file, device, settings={'ENABLE_CPU_PINNING': False})

    @property
    @override
    def notes(self) -> Sequence[str]:
        """Return version, precision and threads, how much runs in INT8, and whether widths are padded."""
        version = self.library.get_version().split('-')[0]
        threads = self.settings['INFERENCE_NUM_THREADS']
        said = f'OpenVINO {version}, {self.types}, {threads} thread{"s" * (threads != 1)}'
        padded = padded_note(metadata(self.model), 'openvino')
        return [said, *[str(self.int8)] * (self.int8 is not None), *[OVERFLOW] * self.saturates, *padded]

    @property
    def saturates(self) -> bool:
        """Tell whether sums of INT8 products overflow here. Known after the first run."""
        return self.int8 is not None and int8_overflows() and not self.sums_fit

    @cached_property
    def sums_fit(self) -> bool:
        """Whether no sum of two products leaves 16 bits; of a large model that takes a second."""
        return sums_fit(self.model)

    @override
    def signature(self) -> Signature:
        def shapes(ports: Sequence[openvino.Output]) -> dict[str, list[int | None]]:
            return {
                port.any_name: [None if d.is_dynamic else d.get_length() for d in port.partial_shape] for port in ports
            }

        return Signature(shapes(self.model.inputs), shapes(self.model.outputs), metadata(self.model))

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        arrays = {name: tensor.to(ON_CPU).contiguous().numpy() for name, tensor in tensors.items()}
        self.compile_for({name: array.shape for name, array in arrays.items()})
        self.infer(arrays)
        return {  # names of the compiled model are others where operators were fused
            named.any_name: torch.from_numpy(self.request.get_tensor(port).data).to(self.device)
            for named, port in zip(self.model.outputs, self.compiled.outputs)
        }

    def profile(self, shapes: dict[str, tuple[int, ...]], runs: int = 20) -> Int8Layers:
        """Time each layer of a quantized model on inputs of `shapes`: the mean over `runs`, in ms."""
        self.settings['PERF_COUNT'] = True
        self.compile_for(shapes)
        arrays = {name: torch.rand(shape).numpy() for name, shape in shapes.items()}
        ms: dict[str, float] = {}
        for run in range(runs + 1):
            self.infer(arrays)
            for layer in self.request.profiling_info if run else ():  # the first run sets things up
                ms[layer.node_name] = ms.get(layer.node_name, 0) + layer.real_time.total_seconds() * 1000 / runs
        return Int8Layers(layers_of(self.compiled, ms), self.quantized)

    def compile_for(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compile the model for inputs of these shapes, unless it is."""
        if shapes == self.shapes:
            return
        self.shapes = shapes
        self.compiled = self.compile('LATENCY')
        self.request = self.compiled.create_infer_request()
        if any(self.quantized.values()):
            self.int8 = Int8Layers(layers_of(self.compiled), self.quantized)

    def compile(self, purpose: str) -> openvino.CompiledModel:
        """Compile the model for self.shapes. purpose: LATENCY, a query at a time, or THROUGHPUT, several in streams."""
        model = self.model
        sizes = ', '.join(f'{name} {list(shape)}' for name, shape in self.shapes.items())
        with refusing(self.file, f'compile it for {sizes}', 'export it with export_qat.py'):
            if model.is_dynamic():
                model = model.clone()
                model.reshape(dict(self.shapes))
            return one_core().compile_model(model, 'CPU', {'PERFORMANCE_HINT': purpose, **self.settings})

    def infer(self, arrays: dict[str, np.ndarray]) -> None:
        """Run once, on arrays of the shapes that the model is compiled for."""
        with refusing(self.file, 'run it'):
            self.request.start_async(arrays, share_inputs=True)
            self.request.wait()


class MeasuredOpenVINO(Measured):
    """OpenVINO, which answers several queries in streams."""

    opens = OpenVINO
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

    @classmethod
    @override
    def overflows(cls) -> bool:
        return not cls.missing('openvino', ON_CPU) and int8_overflows()

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
    def queue(self) -> openvino.AsyncInferQueue:
        """Return the streams, as OpenVINO recommends for throughput."""
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

    @staticmethod
    @override
    def describe(file: Path) -> ModelFile:
        """Describe an .xml file of OpenVINO."""
        model = read_model(file)
        inputs: OpenInputs = {}
        for port in model.inputs:
            dtype = input_type(file, port.any_name, port.get_element_type(), lambda kind: kind.to_dtype())
            inputs[port.any_name] = dtype, tuple(None if d.is_dynamic else d.get_length() for d in port.partial_shape)
        types = 'INT8 and FP32' if any(quantized_convs(model).values()) else 'FP32'
        return ModelFile(file, inputs, types, task=metadata(model).get('task', ''))


MEASURED = MeasuredOpenVINO
