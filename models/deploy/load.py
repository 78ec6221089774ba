"""Load a model from a file of any kind, ready to predict; and what writes a kind of file."""

from importlib import import_module
from pathlib import Path

import torch

from models.deploy.formats.format import Format
from models.quantize.checkpoint import CheckpointFile
from models.quantize.quantizers import RoundedOnce
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.tables import CHECKPOINTS, FORMATS
from utils.qat.core.log import quiet_upstream
from utils.qat.core.upstream import Network
from utils.qat.vendors.load import open_file


def load_model(path: Path, device: torch.device, backend: str | None = None) -> TorchModel | FileModel:
    """Load the model of a checkpoint (float or quantized) or of an exported file, such as an engine.

    path: ends in one of CHECKPOINTS or EXPORTED. backend: a key of BACKENDS, for an exported file; None = the first that takes it.
    The model is a callable, images → predictions; see utils/qat/backends/file_model.py.

    Raises:
        QatError: the file has no such model, or it cannot run here.
    """
    if path.suffix.lower() not in CHECKPOINTS:
        return open_file(path, device, backend)
    with quiet_upstream():
        model, quant = CheckpointFile(path).load_any(device)
        return TorchModel(model, quant, RoundedOnce(model))


def predicting(model: Network) -> TorchModel:
    """Wrap a model of yolov9_qat.py, whose attribute `quant` has its recipe if it is quantized. Raises QatError if it is not calibrated."""
    quant = getattr(model, 'quant', {})
    return TorchModel(model, quant if 'recipe' in quant else None, RoundedOnce(model))


def load_format(name: str) -> Format:
    """Import a format. name: a key of FORMATS."""
    module, _, attribute = FORMATS[name].module.partition(':')
    return getattr(import_module(module), attribute or 'FORMAT')
