"""What is measured: a network made ready by PyTorch, ONNX Runtime or TensorRT, all with the same few verbs.

in:  a file and a device
out: a Runner. `prepare` once; then `upload`, `compute` and `download`, in this order, as often as wanted

On a GPU the three order work on `runner.stream`, which is to be the current one, and whoever measures waits for it (ONNX
Runtime waits by itself). On a CPU nothing is transferred: inputs are where they are computed on.
"""
from abc import ABC, abstractmethod

import torch

from utils.qat.core.errors import QatError
from utils.qat.core.threads import onnx_options
from utils.qat.engine.runner import EngineRunner

BACKENDS = {'tensorrt': 'TensorRT', 'rtx': 'TensorRT-RTX', 'onnxruntime': 'ONNX Runtime', 'pytorch': 'PyTorch'}


def example(dtype, shape):
    """Data to compute on: floats in 0..1, the same every time; ones of any other type, which are valid as token, mask and flag."""
    if dtype.is_floating_point:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.ones(shape, dtype=dtype)


class Runner(ABC):
    """inputs: {name: tensor}, what is computed on. types: in words, such as 'INT8 and FP16'. size: bytes of the file.

    parameters, layers: numbers, None if unknown. accepts: inputs as in Network, of an engine, which knows them better than the file
    it was built of. outputs: tensors on the device, known after `compute`.
    """

    outputs, stream, parameters, layers, accepts = (), None, None, None, None

    def __init__(self, file, types, device):
        self.file, self.types, self.device, self.size = file, types, device, file.stat().st_size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prepare(self, inputs):
        """Make data for inputs {name: (torch.dtype, shape)} and run once, after which the sizes of all outputs are known."""
        self.host = {name: example(*what) for name, what in inputs.items()}
        if self.stream:
            self.host = {name: tensor.pin_memory() for name, tensor in self.host.items()}  # or no copy runs beside the host
        with torch.cuda.stream(self.stream):  # None leaves everything as it is
            self.inputs = self.bind(self.host)
            self.upload()
            self.compute()
        if self.stream:
            self.stream.synchronize()
            self.results = [torch.empty(o.shape, dtype=o.dtype).pin_memory() for o in self.outputs]

    def bind(self, host):
        """Tensors on the device in the shapes of `host`, which `compute` reads."""
        return {name: tensor.to(self.device) for name, tensor in host.items()}

    def upload(self):
        if self.stream:
            for name, tensor in self.host.items():
                self.inputs[name].copy_(tensor, non_blocking=True)

    @abstractmethod
    def compute(self):
        """Order one run on `inputs`; afterwards `outputs` are known."""

    def download(self):
        if self.stream:
            for result, output in zip(self.results, self.outputs):
                result.copy_(output, non_blocking=True)


class TorchRunner(Runner):
    """A YOLOv9 checkpoint, eager. A quantized one computes in FP32 and rounds to what INT8 can hold: its time is not INT8's."""

    def __init__(self, file, half, device, load):
        """load: file, device → (model, whether it is quantized)."""
        self.model, quantized = load(file, device)
        if half:
            self.model.half()
        super().__init__(file, 'INT8 simulated' if quantized else 'FP16' if half else 'FP32', device)
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
        self.dtype = torch.float16 if half else torch.float32
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.layers = sum(any(True for _ in m.parameters(recurse=False)) for m in self.model.modules())

    def prepare(self, inputs):
        stride = int(max(self.model.stride))
        for _, shape in inputs.values():
            if any(n % stride for n in shape[2:]):
                raise QatError(f"--imgsz {' '.join(map(str, shape[2:]))}: {self.file} takes multiples of {stride}")
        super().prepare({name: (self.dtype, shape) for name, (_, shape) in inputs.items()})

    @torch.inference_mode()
    def compute(self):
        self.outputs = self.model(*self.inputs.values())[:1]  # the decoded predictions; the rest is for training


class OnnxRuntimeRunner(Runner):
    """An .onnx with ONNX Runtime's own optimizations, Q/DQ fused into INT8 kernels where it can load that."""

    def __init__(self, file, types, device):
        import onnxruntime as ort
        super().__init__(file, types, device)
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
        try:
            self.session = self._session(ort, {})
        except QatError:
            if 'INT8' not in types:
                raise
            self.session = self._session(ort, {'session.disable_quant_qdq': '1'})  # FP16 scales: its fused Concat does not load (1.31)
            self.types = f'{types}, Q/DQ not fused'
        self.binding = self.session.io_binding()

    def _session(self, ort, entries):
        options = onnx_options(entries)
        options.intra_op_num_threads = torch.get_num_threads()  # as many as PyTorch has
        providers = ['CPUExecutionProvider']
        if self.stream:
            settings = {'device_id': self.device.index, 'user_compute_stream': str(self.stream.cuda_stream)}
            providers.insert(0, ('CUDAExecutionProvider', settings))
        try:
            return ort.InferenceSession(str(self.file), options, providers=providers)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise QatError(f"{self.file}: ONNX Runtime cannot load it: {' '.join(str(e).split())[:300]}") from e

    def bind(self, host):
        where, index = self.device.type, self.device.index or 0
        bound = super().bind(host)
        for name, tensor in bound.items():
            kind = host[name].numpy().dtype.type
            self.binding.bind_input(name, where, index, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self.session.get_outputs():
            self.binding.bind_output(output.name, where, index)
        return bound

    def compute(self):
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as e:  # as above
            raise QatError(f"{self.file}: ONNX Runtime cannot run it: {' '.join(str(e).split())[:300]}") from e

    def download(self):
        if self.stream:
            self.binding.copy_outputs_to_cpu()


class TensorRTRunner(Runner):
    """An engine of TensorRT or TensorRT-RTX."""

    def __init__(self, file, types, device, backend, cuda_graph):
        super().__init__(file, types, device)
        self.run = EngineRunner(file, device, cuda_graph, backend)
        self.stream, self.layers = self.run.stream, self.run.engine.num_layers
        self.types = (self.run.sidecar or {}).get('precision') or types or 'as built'

    def __exit__(self, *_):
        self.run.__exit__()

    @property
    def accepts(self):
        """{name: (torch.dtype, shape, None where the profile has a range)}, as Network.inputs."""
        return {name: (self.run.dtype(name), tuple(a if a == b else None for a, b in zip(smallest, largest)))
                for name, (smallest, _, largest) in self.run.inputs.items()}

    def bind(self, host):
        self.outputs = list(self.run.prepare({name: tensor.shape for name, tensor in host.items()}).values())
        return {name: self.run.buffers[name][:tensor.numel()].view(tensor.shape) for name, tensor in host.items()}

    def compute(self):
        self.run.enqueue()
