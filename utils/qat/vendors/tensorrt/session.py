"""TensorRT and TensorRT-RTX: .engine files, on PyTorch's CUDA tensors, by the name-based interface of TensorRT 8.6, 10 and 11.

No copy goes through the host. All three versions have the functions that are called here: tests/unit/test_tensorrt_api.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.vendors.session import Session, Signature
from utils.qat.vendors.tensorrt.engine.api import load_tensorrt, logger, product
from utils.qat.vendors.tensorrt.engine.sidecar import read_sidecar, require_fit, this_gpu

DTYPES = {  # name of a trt.DataType → torch.dtype
    'FLOAT': torch.float32,
    'HALF': torch.float16,
    'BF16': torch.bfloat16,
    'INT8': torch.int8,
    'UINT8': torch.uint8,
    'INT32': torch.int32,
    'INT64': torch.int64,
    'BOOL': torch.bool,
}

Shape = Sequence[int]
RUNS = 20  # of a profile


def require_within(file: Path, name: str, shape: Shape, profile: Sequence[Shape]) -> None:
    """Raise QatError unless an input accepts a shape, given its smallest, best and largest one (`profile`)."""
    smallest, _, largest = profile
    if len(shape) != len(largest) or not all(a <= n <= b for a, n, b in zip(smallest, shape, largest)):
        bounds = list(largest) if smallest == largest else f'{list(smallest)} to {list(largest)}'
        raise QatError(
            f'{file}: {name} of shape {list(shape)}, and the engine takes {bounds}; give another --batch-size or --imgsz, or build it '
            'for that: scripts/generate_trt_engine.sh MODEL.onnx IMGSZ --batch MIN,OPT,MAX'
        )


class TensorRT(Session):
    """An engine that is loaded on a GPU and ready to run. It keeps GPU memory until it is closed.

    A run copies tensors of any float type on any device into the engine's own buffers, in the engine's types. The outputs are views
    of its buffers. With `cuda_graph` it records a run for every new batch size, then replays it.

    Attributes:
        inputs: input name → (smallest, best, largest shape).
        outputs: output name → shape, with -1 for an axis that depends on the batch.
    """

    def __init__(
        self,
        file: Path,
        device: torch.device = torch.device('cuda', 0),
        backend: str = 'tensorrt',
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(file, device)
        self.cuda_graph = cuda_graph
        self.trt = load_tensorrt(backend, str(file))
        if device.type != 'cuda':
            raise QatError(
                f'{file}: an engine runs on an NVIDIA GPU, not on {device.type}; ONNX Runtime evaluates the .onnx on a CPU'
            )
        self.sidecar = read_sidecar(file)
        if self.sidecar:
            require_fit(file, self.sidecar, product(self.trt), this_gpu(device))
        else:
            LOGGER.warning(f'no {file.name}.json beside the engine, so nothing tells what it was built of and for')
        self.log = logger(self.trt, LOGGER.warning)
        self.trt.init_libnvinfer_plugins(self.log, '')  # for engines with NMS inside
        self.runtime = self.trt.Runtime(self.log)
        self.engine = self.runtime.deserialize_cuda_engine(file.read_bytes())
        if self.engine is None:
            raise QatError(
                f'{file}: {product(self.trt)} cannot load it ({self.log.reason()}); build it again here: '
                'scripts/generate_trt_engine.sh'
            )
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise QatError(
                f'{file}: no memory for it on {device} ({self.log.reason()}); end other processes, or build it for a smaller batch'
            )
        self.stream = torch.cuda.Stream(device)
        self.inputs: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        # shapes of the inputs → a recorded run
        self.graphs: dict[tuple[tuple[int, ...], ...], torch.cuda.CUDAGraph] = {}
        for name in map(self.engine.get_tensor_name, range(self.engine.num_io_tensors)):
            if self.engine.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT:
                shape = tuple(self.engine.get_tensor_shape(name))
                self.inputs[name] = (
                    tuple(map(tuple, self.engine.get_tensor_profile_shape(name, 0))) if -1 in shape else (shape,) * 3
                )
            else:
                self.outputs[name] = tuple(self.engine.get_tensor_shape(name))

    @classmethod
    @override
    def open(cls, file: Path, device: torch.device, backend: str) -> TensorRT:
        return cls(file, device, backend)

    @override
    def __exit__(self, *_: object) -> None:
        self.stream.synchronize()  # then dependent objects first
        self.graphs.clear()
        self.buffers.clear()
        self.context = self.engine = self.runtime = None

    @override
    def signature(self) -> Signature:
        batch = None
        if len(self.inputs) == 1:
            ((smallest, _, largest),) = self.inputs.values()
            batch = smallest[0], largest[0]
        metadata = self.sidecar['metadata'] if self.sidecar else {}
        return Signature({name: largest for name, (*_, largest) in self.inputs.items()}, self.outputs, metadata, batch)

    def dtype(self, name: str) -> torch.dtype:
        """Return the data type of an input or output."""
        return DTYPES[self.engine.get_tensor_dtype(name).name]

    def prepare(self, shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
        """Make the buffers of a run, and return those of the outputs, on the device."""
        for name, shape in shapes.items():
            require_within(self.file, name, shape, self.inputs[name])
            self.context.set_input_shape(name, tuple(shape))
            self._buffer(name, shape)
        held = {}
        for name in self.outputs:
            shape = tuple(self.context.get_tensor_shape(name))
            if -1 in shape:
                raise QatError(
                    f'{self.file}: the size of {name} {list(shape)} is known only after a run; export with a fixed number of detections'
                )
            held[name] = self._buffer(name, shape)
        return held

    def _buffer(self, name: str, shape: Shape) -> torch.Tensor:
        """Return the tensor that the engine reads or writes as `name`, and make it if it is missing or too small."""
        count = int(torch.Size(shape).numel())
        kept = self.buffers.get(name)
        if kept is None or kept.numel() < count:
            self.stream.synchronize()  # a run may still use the old buffer
            self.graphs.clear()  # they were recorded with the address of the old buffer
            kept = self.buffers[name] = torch.empty(count, dtype=self.dtype(name), device=self.device)
        self.context.set_tensor_address(name, kept.data_ptr())
        return kept[:count].view(tuple(shape))

    @override
    def run(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        caller = torch.cuda.current_stream(self.device)
        outputs = self.prepare({name: tensor.shape for name, tensor in tensors.items()})
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            with torch.cuda.nvtx.range('inputs {}', self.file.name):
                for name, tensor in tensors.items():
                    self.buffers[name][: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            self.enqueue()
        caller.wait_stream(self.stream)  # so that the run is ordered with the caller's work
        return outputs

    def enqueue(self) -> None:
        """Queue one run on the current content of the buffers, on the session's stream; the host does not wait."""
        key = tuple(tuple(self.context.get_tensor_shape(name)) for name in self.inputs)
        if self.cuda_graph and key not in self.graphs:
            self._execute()  # the first run of a shape does set-up that a graph cannot record
            self.stream.synchronize()
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], stream=self.stream):
                self._execute()
        with torch.cuda.nvtx.range('run {}', self.file.name):  # for nsys; docs/tensorrt.md#profile
            if self.cuda_graph:
                self.graphs[key].replay()
            else:
                self._execute()

    def _execute(self) -> None:
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise QatError(f'{self.file}: the engine did not run ({self.log.reason(-1)})')

    def layers(self) -> dict[str, object]:
        """Ask the engine inspector for the layer information, which draw_engine.py reads."""
        inspector = self.engine.create_engine_inspector()
        return json.loads(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))

    def profile(self, tensors: dict[str, torch.Tensor]) -> Sequence[Mapping[str, object]]:
        """Measure the time of every layer, one after the other, in the format of trtexec --exportProfile."""
        trt: Any = self.trt
        times: dict[str, list[float]] = {}

        class Times(trt.IProfiler):
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)

            def report_layer_time(self, name: str, ms: float) -> None:
                times.setdefault(name, []).append(ms)

        self.run(tensors)
        self.stream.synchronize()
        self.context.profiler = self.profiler = Times()  # kept, because the context holds no reference to it
        for _ in range(RUNS):
            self._execute()
            self.stream.synchronize()
        whole = sum(map(sum, times.values()))
        return [{'count': RUNS}] + [
            {
                'name': name,
                'timeMs': sum(t),
                'averageMs': sum(t) / len(t),
                'medianMs': sorted(t)[len(t) // 2],
                'percentage': 100 * sum(t) / whole,
            }
            for name, t in times.items()
        ]
