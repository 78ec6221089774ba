"""Things that predict: each takes images FP32 [B, 3, H, W] in 0..1 and returns [B, 4 + nc, N], boxes xywh in pixels."""
import ast

import numpy as np
import torch

from utils.qat.errors import QatError


def select_device(text):
    """--device as upstream takes it ('', 'cpu', '0', 'cuda:0', 'mps') → torch.device. '' is the first GPU, else the CPU."""
    text = str(text).strip().lower().replace('cuda:', '')
    if text in ('cpu', '') and (text == 'cpu' or not torch.cuda.is_available()):
        return torch.device('cpu')
    if text == 'mps':
        if not torch.backends.mps.is_available():
            raise QatError('--device mps: not available here; use --device cpu')
        return torch.device('mps')
    index = text or '0'
    if not index.isdigit():
        raise QatError(f"--device {text}: use one GPU number (such as 0) or 'cpu'")
    if int(index) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        others = {0: '', 1: ' or 0'}.get(found, f' or 0..{found - 1}')
        raise QatError(f'--device {text}: this machine has {found or "no"} GPU{"s" * (found != 1)} that PyTorch can use; '
                       f'use --device cpu{others}')
    return torch.device('cuda', int(index))


def describe(device):
    """A device in words."""
    return f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device).upper()


class TorchModel:
    """A PyTorch YOLOv9 model, float or with fake quantization, in eval mode."""

    def __init__(self, model):
        self.model = model.eval()
        self.names, self.stride, self.nc = model.names, int(max(model.stride)), model.model[-1].nc
        self.device = next(model.parameters()).device

    def __call__(self, images):
        return self.model(images)[0]


class OnnxModel:
    """An ONNX file run by ONNX Runtime, its Q/DQ included.

    Its own size and batch size come from the graph: `imgsz` (height, width), `batch` (None if the axis is dynamic).
    """

    def __init__(self, path, device=torch.device('cpu')):
        import onnxruntime as ort
        options = ort.SessionOptions()
        options.log_severity_level = 3
        # The graph as it is, Q and DQ as written: what ONNX Runtime would fuse them into rounds otherwise, and its fused Concat
        # does not load with FP16 scales (1.31).
        options.add_session_config_entry('session.disable_quant_qdq', '1')
        wanted = [('CUDAExecutionProvider', {'device_id': device.index or 0})] if device.type == 'cuda' else []
        providers = [p for p in wanted if p[0] in ort.get_available_providers()] + ['CPUExecutionProvider']
        try:
            self.session = ort.InferenceSession(str(path), options, providers=providers)
        except Exception as e:  # onnxruntime's exceptions share no public base class
            raise QatError(f"--weights {path}: ONNX Runtime cannot load it: {' '.join(str(e).split())[:300]}") from e
        self.path, image = path, self.session.get_inputs()[0]
        output = self.session.get_outputs()[0]
        if len(image.shape) != 4 or len(output.shape) != 3:
            raise QatError(f'--weights {path}: expected images [B, 3, H, W] -> output0 [B, 4 + classes, N], '
                           f'found {image.shape} -> {output.shape}; export it with export_qat.py')
        self.input_name, self.device = image.name, device
        self.batch = image.shape[0] if isinstance(image.shape[0], int) else None
        self.imgsz = image.shape[2:]
        meta = self.session.get_modelmeta().custom_metadata_map
        self.stride = int(float(meta.get('stride', 32)))
        self.nc = output.shape[1] - 4
        self.names = ast.literal_eval(meta['names']) if 'names' in meta else {i: str(i) for i in range(self.nc)}

    def __call__(self, images):
        images, size, out = images.cpu().numpy(), self.batch or len(images), []
        for start in range(0, len(images), size):
            part = images[start:start + size]
            padding = np.zeros((size - len(part), *part.shape[1:]), part.dtype)  # a static graph wants full batches
            try:
                result = self.session.run(None, {self.input_name: np.concatenate((part, padding))})[0]
            except Exception as e:  # as above; such as of a file with FP32 scales beside FP16 values
                raise QatError(f'--weights {self.path}: ONNX Runtime cannot run it (a file with --fp32-scales is for TensorRT only): '
                               f"{' '.join(str(e).split())[:300]}") from e
            out.append(result[:len(part)])
        return torch.from_numpy(np.concatenate(out)).to(self.device)
