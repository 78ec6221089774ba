"""What is measured: a network made ready by a backend, all with the same few verbs.

in:  a file and a device
out: a Runner. `prepare` once; then `upload`, `compute` and `download`, in this order, as often as wanted

On a GPU the three order work on `runner.stream`, which is to be the current one, and whoever measures waits for it (ONNX
Runtime waits by itself). On a CPU nothing is transferred: inputs are where they are computed on.
"""

from abc import ABC, abstractmethod

import torch


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

    @classmethod
    def of(cls, case, file, device, config, load):
        """The runner of a benchmark's Case. file: what is run. config: a BenchmarkConfig. load: file, device → (model, whether it is
        quantized), for checkpoints."""
        return cls(file, case.network.types, device)

    @staticmethod
    def missing(backend, device):
        """Why `backend` cannot run on `device`; '' if it can."""
        return ''

    @staticmethod
    def precisions(network, device):
        """Those of fp32, fp16 and int8 in which a Network can run."""
        return (network.precision,)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prepare(self, inputs):
        """Make data for inputs {name: (torch.dtype, shape)} and run once, after which the sizes of all outputs are known."""
        self.host = {name: example(*what) for name, what in inputs.items()}
        if self.stream:
            self.host = {
                name: tensor.pin_memory() for name, tensor in self.host.items()
            }  # or no copy runs beside the host
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
