"""Exchange activation functions for ones that INT8 engines compute faster, in a float model.

SiLU takes a quarter of the time of an INT8 network, because an engine computes its exponential in float. A polynomial in its
place changes the outputs less than rounding does. A ReLU costs nothing, but with it the model has to learn to reproduce the
unchanged one (adapt.py). The model is then quantized like any float model.

The class path of PolynomialSiLU is a file format, because checkpoints pickle it. Do not rename or move it.
"""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial

import torch
import torch.nn as nn
from torchvision.ops.misc import SqueezeExcitation

from models.quantize.network import replace_module
from utils.qat.config.qat import AUTO, PtqConfig, QuantizeConfig
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.core.upstream import Network

# The clamp, and the coefficients of x, x³ and x⁵. Of all such functions it has the least squared error for values around 0 with a
# standard deviation of 1.5
POLYNOMIAL = 4.25, (0.23613467, -0.012394885, 0.00032304592)


class PolynomialSiLU(nn.Module):
    """x · p(clamp(x, ±limit)) with a polynomial p that is near to the sigmoid: 0 at -limit, 1 at limit, so the result is 0 or x beyond.

    `odd` are the coefficients of p's odd powers; the constant is 0.5.
    """

    def __init__(self, limit: float, odd: Sequence[float]) -> None:
        super().__init__()
        self.limit, self.odd = limit, tuple(odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the function: any shape → the same shape."""
        clipped = x.clamp(-self.limit, self.limit)
        square = clipped * clipped
        *lower, highest = self.odd
        p: torch.Tensor | float = highest
        for coefficient in reversed(lower):
            p = square * p + coefficient
        return x * (clipped * p + 0.5)


class Exchange(nn.Module):
    """An activation function on its way to another: `old` at share 0, `new` at share 1, between them their weighted mean.

    `share` is a tensor [], which several may share.
    """

    def __init__(self, old: nn.Module, new: nn.Module, share: torch.Tensor) -> None:
        super().__init__()
        self.old, self.new = old, new
        self.share = share  # no buffer: it follows from the number of the step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the function: any shape → the same shape."""
        y = self.old(x)
        return y + self.share * (self.new(x) - y)


# --activation → the classes that it replaces
REPLACED: dict[str, tuple[type[nn.Module], ...]] = {
    'polynomial': (nn.SiLU,),
    'relu': (nn.SiLU, nn.Hardswish, PolynomialSiLU),
    'relu6': (nn.SiLU, nn.Hardswish, PolynomialSiLU, nn.ReLU),
}
NEW: dict[str, Callable[[], nn.Module]] = {
    'relu': nn.ReLU,
    'relu6': nn.ReLU6,
    'polynomial': partial(PolynomialSiLU, *POLYNOMIAL),
}


def exchangeable(model: Network, activation: str) -> list[str]:
    """List the paths of the activation functions that `activation`, a key of REPLACED, replaces, in the order of the network.

    Those of squeeze-and-excitation stay: they compute a few values.
    """
    gates = tuple(f'{path}.' for path, m in model.named_modules() if isinstance(m, SqueezeExcitation))
    return [
        path
        for path, m in model.named_modules(remove_duplicate=False)  # upstream's blocks share one activation function
        if type(m) in REPLACED[activation] and not path.startswith(gates)
    ]


def activation_for(model: Network, config: PtqConfig) -> str:
    """Decide what the activation functions of a float model become: config.activation, 'keep' for nothing.

    AUTO is the target's in a run of `quantize`, for a network of YOLOv9 that has a function to exchange; networks of torchvision were not
    measured. Raises QatError if config.activation replaces nothing in `model`, or the target's engine gains nothing by it.
    """
    target, activation = config.made_for, config.activation
    if activation == AUTO:
        known = isinstance(config, QuantizeConfig) and hasattr(model, 'model') and target.activation in REPLACED
        if not (known and exchangeable(model, target.activation)):
            return 'keep'
        LOGGER.info(f'--activation {target.activation}: {target.title} computes it faster than SiLU; keep leaves SiLU')
        return target.activation
    if activation != 'keep' and activation not in target.gains_by:
        slow = 'a ReLU' if activation == 'relu6' else 'SiLU'
        raise QatError(
            f'--activation {activation}: {target.title} computes it no faster than {slow}; use {" or ".join(target.gains_by)}, '
            'or leave it out'
        )
    if activation != 'keep' and not exchangeable(model, activation):
        names = ', '.join(kind.__name__ for kind in REPLACED[activation])
        raise QatError(
            f'--activation {activation}: the model has no {names} to exchange for it; leave --activation out'
        )
    return activation


def exchanged(model: Network, activation: str, paths: Sequence[str]) -> Network:
    """Make a copy of a float model with an Exchange, at share 0, in place of the activation functions at `paths`."""
    model = deepcopy(model).eval()
    share = torch.zeros((), device=next(model.parameters()).device)
    for path in paths:
        old = deepcopy(model.get_submodule(path))
        vars(old)['inplace'] = False  # its input is read again
        replace_module(model, path, Exchange(old, NEW[activation](), share))
    return model


def exchanges(model: Network) -> dict[str, Exchange]:
    """Find the exchanges of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, Exchange)}


def restore(model: Network, paths: Collection[str]) -> Network:
    """Put the old activation functions back in the place of the exchanges at `paths`, in place, and return the model.

    Raises QatError if no exchange is left.
    """
    known = exchanges(model)
    if paths and not known.keys() - set(paths):
        raise QatError('--activation-only, --keep-float: no activation function is left to exchange; keep less')
    for path in known.keys() & set(paths):
        replace_module(model, path, known[path].old)
    return model


def is_exchanged(model: Network) -> bool:
    """Tell whether the new activation functions of all exchanges compute alone."""
    return all(exchange.share == 1 for exchange in exchanges(model).values())


def finish_exchange(model: Network) -> Network:
    """Put the new activation functions in the place of the exchanges, in place, and return the model."""
    for path, exchange in exchanges(model).items():
        replace_module(model, path, exchange.new)
    return model
