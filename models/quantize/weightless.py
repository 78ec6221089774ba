"""The shapes of a network's parameters follow from its YAML: weights are made without memory, on the device `meta`.

A YAML of a few lines can ask for layers of terabytes. So a network is built this way first, before upstream builds it
for real, and its parameters must be the parameters that the checkpoint has.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from models.common import Conv, RepConvN
from models.yolo import parse_model
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from models.quantize.weightless_operators import WEIGHTLESS
from utils.qat.core.errors import QatError
from utils.qat.untrusted.model_yaml import require_network

LAYERS = 8000  # modules at all depths, at most; upstream's largest model has 1800
SIDE = 256  # pixels; upstream runs a new model on such an image
VALUES = 2**26  # in all maps of this image, at most


class Weightless(TorchFunctionMode):
    """Context in which tensors that will be filled take no memory; the few numbers that layers compute still do."""

    made = torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = {'device': 'meta'} if function in self.made else {}
        return WEIGHTLESS.get(function, function)(*args, **{**(kwargs or {}), **made})


def parameter_shapes(content: dict[str, Any], source: str) -> dict[str, tuple[int, ...]]:
    """Compute the shapes of the parameters and buffers of a network.

    Args:
        content: of the YAML; it is checked here.
        source: name of the YAML in an error.

    Returns:
        Name in the state dict → shape.

    Raises:
        QatError: the YAML does not describe a network by numbers alone (see require_network), its layers do not fit
            together, or the network is too large.
    """
    require_network(content, source)
    count, values = 0, 0

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
        with Weightless():
            layers, saved = parse_model(deepcopy(content), ch=[content.get('ch') or 3])
            layers, x = layers.to('meta'), torch.zeros(1, content.get('ch') or 3, SIDE, SIDE)
            maps: list[Any] = []  # outputs of the layers so far; None for an output that no later layer reads
            for layer in layers:
                if layer.f != -1:
                    x = maps[layer.f] if isinstance(layer.f, int) else [x if f == -1 else maps[f] for f in layer.f]
                x = layer(x)
                values += sum(
                    t.numel() for t in (x if isinstance(x, (list, tuple)) else [x]) if isinstance(t, torch.Tensor)
                )
                if values > VALUES:
                    raise QatError(
                        f'{source}: needs maps of more than {VALUES / 1e6:.0f} million values for an image of {SIDE} x {SIDE} pixels'
                    )
                maps.append(x if layer.i in saved else None)
    except QatError:
        raise
    except Exception as e:  # layers that do not fit together raise errors of any kind
        raise QatError(
            f'{source}: upstream cannot build it ({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        ) from e
    finally:
        hook.remove()
        for kind, activation in activations.items():
            kind.default_act = activation
    return {f'model.{name}': tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
