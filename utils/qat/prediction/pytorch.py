"""PyTorch: checkpoints, float or quantized."""

import torch

from utils.qat.core.errors import QatError
from utils.qat.prediction.runner import Runner


class TorchModel:
    """A PyTorch YOLOv9 model, float or with fake quantization, in eval mode. segments: whether it gives masks; kind: what says so."""

    def __init__(self, model):
        self.model = model.eval()
        self.names, self.stride, self.nc = model.names, int(max(model.stride)), model.model[-1].nc
        self.segments, self.kind = hasattr(model.model[-1], 'nm'), f'its head is {type(model.model[-1]).__name__}'
        self.device = next(model.parameters()).device

    def __call__(self, images):
        return self.predictions(self.model(images))

    def predictions(self, output):
        """What the model returns in eval mode, without what is only for its training."""
        predictions, rest = output
        return (predictions, rest[-1]) if self.segments else predictions


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

    @classmethod
    def of(cls, case, file, device, config, load):
        return cls(file, case.precision == 'fp16', device, load)

    @staticmethod
    def precisions(network, device):
        if network.precision == 'int8':
            return (network.precision,)
        return ('fp32', 'fp16') if device.type == 'cuda' else ('fp32',)

    def prepare(self, inputs):
        stride = int(max(self.model.stride))
        for _, shape in inputs.values():
            if any(n % stride for n in shape[2:]):
                raise QatError(f'--imgsz {" ".join(map(str, shape[2:]))}: {self.file} takes multiples of {stride}')
        super().prepare({name: (self.dtype, shape) for name, (_, shape) in inputs.items()})

    @torch.inference_mode()
    def compute(self):
        self.outputs = self.model(*self.inputs.values())[:1]  # the decoded predictions; the rest is for training


MODEL, RUNNER = None, TorchRunner  # see registry.py; a TorchModel is made of a model, not of a file
