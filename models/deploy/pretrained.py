"""A network of torchvision by its name, such as resnet18, or a file of its weights → a checkpoint as classify/train.py writes it."""

import pickle
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn

from utils.qat.core.errors import QatError
from utils.qat.core.files import write_torch
from utils.qat.core.log import LOGGER


def network_of(weights: Path) -> str | None:
    """Find the network that a file of torchvision's weights is of: its name begins the file's, such as resnet18-f37072fd.pth."""
    known = sorted(torchvision.models.list_models(module=torchvision.models), key=len)
    return next((name for name in reversed(known) if re.fullmatch(rf'{name}([-_.].*)?', weights.name)), None)


def checkpoint_of(weights: Path) -> Path:
    """Write a checkpoint of a network, named after it, into the current folder, and return its path.

    Args:
        weights: name of a network, whose pretrained weights are fetched, or a file of its weights (a state_dict) whose name
            begins with the network's.

    Raises:
        QatError: there is no such network, its weights cannot be fetched, or the file has others. No file is written.
            A file with more than tensors is returned as it is.
    """
    name = network_of(weights)
    if not name:
        raise QatError(
            f'--weights {weights}: no such file, and no network of torchvision, such as resnet50, is called so'
        )
    path = Path(f'{name}.pt')
    if not weights.exists() and path.is_file():
        return path
    known: Any = torchvision.models.get_model_weights(name).DEFAULT
    state = _read(weights) if weights.exists() else _fetch(weights, known)
    if state is None:  # a checkpoint; whoever loads it says what is wrong with it
        return weights
    classes = next((len(v) for v in reversed(list(state.values())) if isinstance(v, torch.Tensor) and v.dim()), 0)
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes or 1000)
    try:
        model.load_state_dict(state)
    except RuntimeError as e:
        raise QatError(
            f'--weights {weights}: these weights are not of {name}, whose name it begins with ({" ".join(str(e).split())[:150]})'
        ) from e
    names = known.meta['categories']
    model.names = names if len(names) == classes else [str(i) for i in range(classes)]
    write_torch(path, {'model': model, 'ema': None, 'epoch': -1, 'optimizer': None})
    LOGGER.info(f'{name} of torchvision with the weights {weights if weights.exists() else known.url} -> {path}')
    return path


def _read(weights: Path) -> dict[str, torch.Tensor] | None:
    """Read tensors by name, by PyTorch's reader of weights, which builds nothing else; None if the file has anything else."""
    try:
        state = torch.load(weights, map_location='cpu', weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        return None
    return state if isinstance(state, dict) and all(isinstance(v, torch.Tensor) for v in state.values()) else None


def _fetch(weights: Path, known: Any) -> dict[str, torch.Tensor]:
    """Fetch pretrained weights, or take them from where torchvision keeps what it fetched."""
    try:
        return known.get_state_dict(progress=False, check_hash=True)
    except (URLError, OSError, RuntimeError) as e:
        raise QatError(
            f'--weights {weights}: no such file, and the pretrained weights of torchvision cannot be fetched '
            f'({" ".join(str(e).split())[:100]}); fetch {known.url} elsewhere and give that file'
        ) from e
