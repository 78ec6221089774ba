"""A TensorRT engine that runs on PyTorch's CUDA tensors: the name-based interface, which TensorRT 8.6, 10 and 11 have alike.

    with EngineRunner(Path('model.engine')) as run:
        outputs = run({'images': images})          # {name: tensor}, on the device, valid until the next call

No copy goes through the host. What the runner calls is in all three versions: tests/engine/test_tensorrt_api.py.
"""

import json

import torch

from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.engine.api import capabilities, load_tensorrt, logger, product
from utils.qat.engine.sidecar import read_sidecar, require_fit, this_gpu

DTYPES = {
    'FLOAT': torch.float32,
    'HALF': torch.float16,
    'BF16': torch.bfloat16,
    'INT8': torch.int8,
    'UINT8': torch.uint8,
    'INT32': torch.int32,
    'INT64': torch.int64,
    'BOOL': torch.bool,
}  # trt.DataType → torch.dtype


def require_within(file, name, shape, profile):
    """Raise QatError unless input `name` of the engine in `file` takes `shape`. profile: its (smallest, best, largest shape)."""
    smallest, _, largest = profile
    if len(shape) != len(largest) or not all(a <= n <= b for a, n, b in zip(smallest, shape, largest)):
        bounds = list(largest) if smallest == largest else f'{list(smallest)} to {list(largest)}'
        raise QatError(
            f'{file}: {name} of shape {list(shape)}, and the engine takes {bounds}; give another --batch-size or --imgsz, or build it '
            'for that: scripts/generate_trt_engine.sh MODEL.onnx IMGSZ --batch MIN,OPT,MAX'
        )


class EngineRunner:
    """inputs, outputs: {name: (smallest, best, largest shape)} and {name: shape, -1 where it follows the batch}.

    A call takes tensors of any float type on any device: they are copied into the engine's own buffers, in its own types. The
    outputs are views of its buffers: clone what shall outlive the next call.
    """

    def __init__(self, file, device=torch.device('cuda', 0), cuda_graph=False, backend='tensorrt'):
        """cuda_graph: record a run for every batch size that comes, and replay it from then on. Raises QatError if the engine
        does not fit this machine."""
        self.file, self.device, self.cuda_graph = file, device, cuda_graph
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
        torch.cuda.set_device(device)
        self.log = logger(self.trt, LOGGER.warning)
        self.trt.init_libnvinfer_plugins(self.log, '')  # engines with NMS inside
        self.runtime = self.trt.Runtime(self.log)
        self.engine = self.runtime.deserialize_cuda_engine(file.read_bytes())
        if self.engine is None:
            raise QatError(
                f'{file}: {product(self.trt)} cannot load it ({"; ".join(self.log.errors[:1]) or "no reason given"}); build it '
                'again here: scripts/generate_trt_engine.sh'
            )
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise QatError(
                f'{file}: no memory for it on {device} ({"; ".join(self.log.errors[:1])}); end other processes, or build it '
                'for a smaller batch'
            )
        self.stream = torch.cuda.Stream(device)
        self.inputs, self.outputs, self.buffers, self.graphs = {}, {}, {}, {}
        for name in map(self.engine.get_tensor_name, range(self.engine.num_io_tensors)):
            if self.engine.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT:
                shape = tuple(self.engine.get_tensor_shape(name))
                self.inputs[name] = (
                    tuple(map(tuple, self.engine.get_tensor_profile_shape(name, 0))) if -1 in shape else (shape,) * 3
                )
            else:
                self.outputs[name] = tuple(self.engine.get_tensor_shape(name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Give back what is on the device, in the order in which it depends on each other."""
        self.stream.synchronize()
        self.graphs.clear()
        self.buffers.clear()
        self.context = self.engine = self.runtime = None

    @property
    def memory(self):
        """Bytes that the engine works in, weights and inputs apart."""
        return self.engine.device_memory_size_v2 if capabilities(self.trt).memory_v2 else self.engine.device_memory_size

    def dtype(self, name):
        """torch.dtype of an input or output."""
        return DTYPES[self.engine.get_tensor_dtype(name).name]

    def prepare(self, shapes):
        """Buffers for inputs of `shapes` ({name: shape}); returns the outputs' buffers. Raises QatError if the engine does not take them."""
        for name, shape in shapes.items():
            require_within(self.file, name, shape, self.inputs[name])
            self.context.set_input_shape(name, tuple(shape))
            self._buffer(name, shape)
        found = {}
        for name in self.outputs:
            shape = tuple(self.context.get_tensor_shape(name))
            if -1 in shape:
                raise QatError(
                    f'{self.file}: the size of {name} {list(shape)} is known only after a run; export with a fixed number of detections'
                )
            found[name] = self._buffer(name, shape)
        return found

    def _buffer(self, name, shape):
        """The tensor that the engine reads or writes as `name`."""
        count = int(torch.Size(shape).numel())
        kept = self.buffers.get(name)
        if kept is None or kept.numel() < count:
            self.stream.synchronize()  # a run may still use the old one
            self.graphs.clear()  # they were recorded with its address
            kept = self.buffers[name] = torch.empty(count, dtype=self.dtype(name), device=self.device)
        self.context.set_tensor_address(name, kept.data_ptr())
        return kept[:count].view(tuple(shape))

    def __call__(self, tensors):
        """{input name: tensor} → {output name: tensor} on the device. Work of the caller's stream comes before and after."""
        caller = torch.cuda.current_stream(self.device)
        outputs = self.prepare({name: tensor.shape for name, tensor in tensors.items()})
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            for name, tensor in tensors.items():
                self.buffers[name][: tensor.numel()].view(tensor.shape).copy_(tensor, non_blocking=True)
            self.enqueue()
        caller.wait_stream(self.stream)
        return outputs

    def enqueue(self):
        """One run on the buffers as they are, on the runner's stream; the host does not wait."""
        key = tuple(tuple(self.context.get_tensor_shape(name)) for name in self.inputs)
        if self.cuda_graph and key not in self.graphs:
            self._execute()  # the first run of a shape sets things up, which a graph cannot record
            self.stream.synchronize()
            self.graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[key], stream=self.stream):
                self._execute()
        if self.cuda_graph:
            self.graphs[key].replay()
        else:
            self._execute()

    def _execute(self):
        if not self.context.execute_async_v3(self.stream.cuda_stream):
            raise QatError(
                f'{self.file}: the engine did not run ({"; ".join(self.log.errors[-1:]) or "no reason given"})'
            )

    def layers(self):
        """The engine inspector's account of the layers, for draw_engine.py: a dict."""
        inspector = self.engine.create_engine_inspector()
        return json.loads(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))

    def profile(self, tensors, runs=20):
        """Mean time of every layer over `runs`, as trtexec --exportProfile writes it: [{'count'}, {'name', 'timeMs', 'averageMs', ...}].

        Layers are timed one by one: their sum is more than a run takes.
        """
        trt, times = self.trt, {}

        class Times(trt.IProfiler):
            def __init__(self):
                trt.IProfiler.__init__(self)

            def report_layer_time(self, name, ms):
                times.setdefault(name, []).append(ms)

        self(tensors)
        self.stream.synchronize()
        self.context.profiler = self.profiler = Times()  # the context holds no reference of its own
        for _ in range(runs):
            self._execute()
            self.stream.synchronize()
        whole = sum(map(sum, times.values()))
        return [{'count': runs}] + [
            {
                'name': name,
                'timeMs': sum(t),
                'averageMs': sum(t) / len(t),
                'medianMs': sorted(t)[len(t) // 2],
                'percentage': 100 * sum(t) / whole,
            }
            for name, t in times.items()
        ]
