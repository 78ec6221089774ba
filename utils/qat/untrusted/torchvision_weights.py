"""Build a torchvision network from a file of weights, such as resnet18-f37072fd.pth, and find the weights of a network."""

import pickle
import re
from collections.abc import Container
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision

from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import is_network
from utils.qat.core.log import LOGGER
from utils.qat.core.upstream import Network
from utils.qat.untrusted.torch_archive import AGAIN

ZIP = b'PK\3\4'  # start of files that PyTorch has written since 1.6
SAFE = 2, 10  # the first PyTorch whose weights_only runs nothing: CVE-2025-32434 (2.6), GHSA-63cw-57p8-fm3p (2.10)


def network_of(weights: Path) -> str | None:
    """Find the network of a file of torchvision's weights: the file's name starts with it, as in resnet18-f37072fd.pth."""
    known = sorted(torchvision.models.list_models(module=torchvision.models), key=len)
    return next((name for name in reversed(known) if re.fullmatch(rf'{name}([-_.].*)?', weights.name)), None)


def network_with(state: object, weights: Path, modules: Container[str]) -> Network:
    """Build the network of a file of weights, with its class names. `state` has the tensors by name.

    Raises QatError if they are not of the network with which the name of the file starts, or that network is of none of `modules`.
    """
    name: Any = network_of(weights)
    if torchvision.models.get_model_builder(name).__module__ not in modules:
        raise QatError(
            f'--weights {weights}: {name} is no network that this toolkit quantizes; docs/classification.md#networks lists them'
        )
    known = torchvision.models.get_model_weights(name).DEFAULT
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise QatError(f'--weights {weights}: holds other things than the tensors of {name}, whose name it begins with')
    classes = next((len(v) for v in reversed(list(state.values())) if v.dim()), 0)
    model: Network = torchvision.models.get_model(name, weights=None, num_classes=classes or 1000)
    with reporting(f'--weights {weights}: these weights are not of {name}, whose name it begins with', RuntimeError):
        model.load_state_dict(dict(state))
    names = known.meta['categories']
    model.names = dict(enumerate(names if len(names) == classes else map(str, range(classes))))
    return model


def old_state(weights: Path) -> object:
    """Read a file of weights in the format of PyTorch before 1.6, which some of torchvision's have; None for another file.

    Raises QatError if this PyTorch has no reader that is safe for such a file.
    """
    with weights.open('rb') as file:
        if file.read(4) == ZIP:
            return None
    if tuple(map(int, torch.__version__.split('.')[:2])) < SAFE:
        raise QatError(
            f'--weights {weights}: in the format of PyTorch before 1.6, which can run code in PyTorch {torch.__version__}; use PyTorch '
            f'{".".join(map(str, SAFE))}, or {AGAIN}'
        )
    try:
        return torch.load(weights, map_location='cpu', weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        return None


def fetch(network: Path, folder: Path | None = None) -> Path:
    """Return the file of a network's pretrained weights; download it if it is missing. The path of a file is returned as it is.

    `folder` is for the download; None = torchvision's cache. Raises QatError if there is no such network, or its weights cannot be
    fetched.
    """
    if not is_network(network):
        return network
    name = network_of(network)
    if not name:
        raise QatError(
            f'--weights {network}: no such file, and no network of torchvision, such as resnet50, is called so'
        )
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    kept = Path(torch.hub.get_dir(), 'checkpoints', url.rpartition('/')[2])
    if kept.is_file():
        return kept
    file = folder / kept.name if folder else kept
    problem = f'--weights {network}: no such file, and the pretrained weights of torchvision cannot be fetched'
    remedy = f'fetch {url} elsewhere and give that file'
    with reporting(problem, URLError, OSError, RuntimeError, remedy=remedy, most=100):
        file.parent.mkdir(parents=True, exist_ok=True)
        # the name has the start of the SHA-256, which is checked before the file gets this name
        torch.hub.download_url_to_file(url, str(file), file.stem.rpartition('-')[2], progress=False)
    LOGGER.info(f'{name} of torchvision: {url} -> {file}')
    return file
