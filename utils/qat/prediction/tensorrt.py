"""TensorRT and TensorRT-RTX: .engine files."""

from utils.qat.config.backends import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.engine.api import load_tensorrt
from utils.qat.engine.runner import EngineRunner
from utils.qat.prediction.file_model import FileModel
from utils.qat.prediction.runner import Runner


class EngineModel(FileModel):
    """A TensorRT engine. It keeps GPU memory until it is closed."""

    def __init__(self, path, device, backend='tensorrt'):
        self.runner, self.device = EngineRunner(path, device, backend=backend), device
        if len(self.runner.inputs) != 1:
            raise QatError(f'--weights {path}: expected one input, the images, found {", ".join(self.runner.inputs)}')
        ((self.input_name, (smallest, _, largest)),) = self.runner.inputs.items()
        metadata = self.runner.sidecar['metadata'] if self.runner.sidecar else {}
        super().__init__(path, largest, self.runner.outputs, (smallest[0], largest[0]), metadata)

    def run(self, images):
        return self.runner({self.input_name: images})


class TensorRTRunner(Runner):
    """An engine of TensorRT or TensorRT-RTX."""

    def __init__(self, file, types, device, backend, cuda_graph):
        super().__init__(file, types, device)
        self.run = EngineRunner(file, device, cuda_graph, backend)
        self.stream, self.layers = self.run.stream, self.run.engine.num_layers
        self.types = (self.run.sidecar or {}).get('precision') or types or 'as built'

    @classmethod
    def of(cls, case, file, device, config, load):
        return cls(file, case.network.types, device, case.backend, config.cuda_graph)

    @staticmethod
    def missing(backend, device):
        title = BACKENDS[backend].title
        if device.type != 'cuda':
            return f'{title}: needs an NVIDIA GPU, and this is --device {device}'
        try:
            load_tensorrt(backend, title)
        except QatError as e:
            return str(e)
        return ''

    @staticmethod
    def precisions(network, device):
        if network.file.suffix.lower() == '.onnx' and network.types == 'FP32':
            return 'fp32', 'fp16'  # chosen when the engine is built
        return (network.precision,)

    def __exit__(self, *_):
        self.run.__exit__()

    @property
    def accepts(self):
        """{name: (torch.dtype, shape, None where the profile has a range)}, as Network.inputs."""
        return {
            name: (self.run.dtype(name), tuple(a if a == b else None for a, b in zip(smallest, largest)))
            for name, (smallest, _, largest) in self.run.inputs.items()
        }

    def bind(self, host):
        self.outputs = list(self.run.prepare({name: tensor.shape for name, tensor in host.items()}).values())
        return {name: self.run.buffers[name][: tensor.numel()].view(tensor.shape) for name, tensor in host.items()}

    def compute(self):
        self.run.enqueue()


MODEL, RUNNER = EngineModel, TensorRTRunner  # see registry.py
