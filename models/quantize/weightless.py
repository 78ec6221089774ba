"""The YAML of a network → the shapes of its parameters, at no cost: weights are made without memory (the device `meta`).

A YAML of a few lines can ask for layers of terabytes. What upstream is about to build for real is built this way first, and has to have the
parameters that are there already.
"""

from copy import deepcopy

import torch
from models.common import Conv, RepConvN
from models.yolo import parse_model
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from utils.qat.core.errors import QatError
from utils.qat.untrusted.model_yaml import require_network

LAYERS = 8000  # modules within modules; the largest of upstream's has 1800
SIDE = 256  # pixels of the image that upstream runs a new model on
VALUES = 2**26  # of all maps of it


class Weightless(TorchFunctionMode):
    """Tensors that are made to be filled take no memory. What computes a few numbers for its layers still does."""

    made = torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **{**(kwargs or {}), **({'device': 'meta'} if function in self.made else {})})


def parameter_shapes(content, source):
    """{name in the state dict: shape} of the network that the YAML `content` describes.

    Raises QatError, naming `source`, if it is none that upstream builds by numbers alone (see require_network), does not fit together, or is too large.
    """
    require_network(content, source)
    count, values = 0, 0

    def counted(*_):
        nonlocal count
        count += 1
        if count > LAYERS:
            raise QatError(f'{source}: has more than {LAYERS} layers')

    activations = {kind: kind.default_act for kind in (Conv, RepConvN)}  # parse_model leaves that of the YAML there
    hook = register_module_module_registration_hook(counted)
    try:
        for kind, activation in activations.items():
            kind.default_act = deepcopy(activation)
        with Weightless():
            layers, saved = parse_model(deepcopy(content), ch=[content.get('ch') or 3])
            layers, maps, x = layers.to('meta'), [], torch.zeros(1, content.get('ch') or 3, SIDE, SIDE)
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
    except Exception as e:  # whatever layers raise that do not fit together
        raise QatError(
            f'{source}: upstream cannot build it ({type(e).__name__}: {" ".join(str(e).split())[:200]})'
        ) from e
    finally:
        hook.remove()
        for kind, activation in activations.items():
            kind.default_act = activation
    return {f'model.{name}': tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
