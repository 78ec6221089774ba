"""Build the network of a YAML on the device `meta`, without memory for its weights.

A YAML of a few lines can ask for layers of terabytes. So a network is built this way first, and its parameters must match
a checkpoint's before it is built with memory.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from models.common import Conv, RepConvN
from models.yolo import parse_model
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from utils.qat.core.errors import QatError
from utils.qat.untrusted.model_yaml import require_network

LAYERS = 8000  # modules at all depths, at most; upstream's largest model has 1800
WEIGHTS = 10**9  # values, at most; upstream's largest model has 70 million
SIDE = 256  # pixels; upstream runs a new model on such an image
VALUES = 2**26  # in all maps of this image, at most


class Weightless(TorchFunctionMode):
    """Context in which tensors for weights take no memory; the few numbers that layers compute still do."""

    made = torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return function(*args, **{**(kwargs or {}), **({'device': 'meta'} if function in self.made else {})})


def network_layers(content: Any, source: str, weights: bool = False) -> tuple[nn.Sequential, list[int]]:
    """Build the layers of a YAML, with memory for their weights only if told, and list those that later layers read.

    Raises:
        QatError: `source` does not describe a network by numbers alone (see require_network), its layers do not fit
            together, or there are too many of them or of their weights.
    """
    require_network(content, source)
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > LAYERS:
            raise QatError(f'{source}: has more than {LAYERS} layers')

    activations = {kind: kind.default_act for kind in (Conv, RepConvN)}  # parse_model sets the YAML's activation there
    hook = register_module_module_registration_hook(counted)
    try:
        for kind, activation in activations.items():
            kind.default_act = deepcopy(activation)
        with _in_one_line(source), nullcontext() if weights else Weightless():
            layers, read = parse_model(deepcopy(content), ch=[content.get('ch') or 3])
    finally:
        hook.remove()
        for kind, activation in activations.items():
            kind.default_act = activation
    if sum(p.numel() for p in layers.parameters()) > WEIGHTS:
        raise QatError(f'{source}: has more than {WEIGHTS / 1e6:.0f} million weights')
    return layers, read


@contextmanager
def _in_one_line(source: str) -> Iterator[None]:
    """Turn an error of upstream's layers into a QatError."""
    try:
        yield
    except QatError:
        raise
    except Exception as e:  # layers that do not fit together raise errors of any kind
        raise QatError(
            f'{source}: upstream cannot build it ({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        ) from e


def shapes_of(layers: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's parameters and buffers by their names in its state dict."""
    return {f'model.{name}': tuple(tensor.shape) for name, tensor in layers.state_dict().items()}


def parameter_shapes(content: Any, source: str) -> dict[str, tuple[int, ...]]:
    """Compute `shapes_of` the network of a YAML. Raises QatError as `network_layers` does."""
    return shapes_of(network_layers(content, source)[0])


@torch.no_grad()
def require_small_maps(content: Any, source: str) -> None:
    """Check that a network whose weights fit into memory can run on one image, before upstream runs it.

    Raises:
        QatError: as `network_layers` does; or the outputs of its layers are too large.
    """
    layers, read = network_layers(content, source, weights=True)
    x: Any = torch.zeros(0, content.get('ch') or 3, SIDE, SIDE)  # a batch of none has shapes and no values
    values = 0
    maps: list[Any] = []  # outputs of the layers so far; None for an output that no later layer reads
    with _in_one_line(source):
        for layer in layers[:-1].eval():
            if layer.f != -1:
                x = maps[layer.f] if isinstance(layer.f, int) else [x if f == -1 else maps[f] for f in layer.f]
            x = layer(x)
            values += sum(math.prod(t.shape[1:]) for t in (x if isinstance(x, (list, tuple)) else [x]))
            if values > VALUES:
                raise QatError(
                    f'{source}: needs maps of more than {VALUES / 1e6:.0f} million values for an image of {SIDE} x {SIDE} pixels'
                )
            maps.append(x if layer.i in read else None)
