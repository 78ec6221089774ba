"""A file of any kind → the model in it, ready to predict."""
from models.quantize.checkpoint import load_any
from utils.qat.backends import EngineModel, OnnxModel, TorchModel
from utils.qat.log import quiet_upstream

SUFFIXES = '.pt', '.pth', '.onnx', '.engine'


def load_model(path, device, backend='tensorrt'):
    """The model of a checkpoint (float or quantized), an ONNX file or an engine. Raises QatError if it is none, or cannot run here.

    path: a Path that ends in one of SUFFIXES. backend: what runs an engine. Returns a callable as utils/qat/backends.py describes.
    """
    if path.suffix == '.onnx':
        return OnnxModel(path, device)
    if path.suffix == '.engine':
        return EngineModel(path, device, backend)
    with quiet_upstream():
        return TorchModel(load_any(path, device)[0])
