"""A file of any kind → the model in it, ready to predict."""

from models.quantize.checkpoint import CheckpointFile, fuse, load_any
from models.quantize.reparameterize import HEADS, reparameterize
from utils.qat.core.log import quiet_upstream
from utils.qat.prediction.pytorch import TorchModel
from utils.qat.prediction.registry import open_file

SUFFIXES = '.pt', '.pth', '.onnx', '.engine'


def load_model(path, device, backend='tensorrt'):
    """The model of a checkpoint (float or quantized), an ONNX file or an engine. Raises QatError if it is none, or cannot run here.

    path: a Path that ends in one of SUFFIXES. backend: what runs an engine. Returns a callable as utils/qat/prediction/file_model.py describes.
    """
    if path.suffix.lower() not in ('.pt', '.pth'):
        return open_file(path, device, backend)
    with quiet_upstream():
        return TorchModel(load_any(path, device)[0])


def load_main_branch(path):
    """(model, `quant` dict or None, class of the head in the file): as load_any, and of a checkpoint that still has its auxiliary
    branches the main one, reparameterized in memory. On the CPU."""
    file = CheckpointFile(path)
    if file.kind == 'float':
        _, model = file.load_dual_or_float()
        head = type(model.model[-1]).__name__
        return fuse(reparameterize(model).model if head in HEADS else model), None, head
    model, quant = file.load_any()
    return model, quant, type(model.model[-1]).__name__
