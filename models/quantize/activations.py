"""Exchange activation functions for ones that INT8 engines compute for nothing, in a float model.

SiLU takes a quarter of the time of an INT8 network, because an engine computes its exponential in float. A ReLU, and in some
engines a Hardswish, is a part of the convolution in front of it. The exchanged model then learns to reproduce the unchanged
one (finetuning/adapt.py), and is quantized like any float model.

The class path of FittedHardswish is a file format, because checkpoints pickle it. Do not rename or move it.
"""

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy

import torch
import torch.nn as nn
from torchvision.ops.misc import SqueezeExcitation

from models.quantize.network import left_out
from utils.qat.config.qat import CalibrationConfig, QuantizeConfig
from utils.qat.core.distributed import all_reduce
from utils.qat.core.errors import QatError
from utils.qat.targets.target import load_target

SLOPES = [0.125 + 0.0025 * i for i in range(51)]  # candidates; that of Hardswish is 1/6
VALUES = 1 << 16  # of each activation function and batch, at most, which the slope is fitted to


class FittedHardswish(nn.Module):
    """x · clamp(slope · x + 0.5, 0, 1): with the slope 1/6 it is Hardswish, with another it is nearer to SiLU.

    It is written as a Clip, which OpenVINO computes in the convolution. It does not do so with a HardSigmoid of another
    slope than Hardswish's.
    """

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the function: any shape → the same shape."""
        return x * (x * self.slope + 0.5).clamp(0, 1)


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


class _Fit(nn.Module):
    """An activation function that measures how far FittedHardswish is from it, on the values that it meets, for all SLOPES."""

    def __init__(self, old: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.old = old
        self.slopes = torch.tensor(SLOPES, device=device)
        self.errors = torch.zeros(len(SLOPES), dtype=torch.float64, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.old(x)
        some, wanted = (t.flatten()[:: -(-t.numel() // VALUES)] for t in (x, y))
        for i, slope in enumerate(SLOPES):
            self.errors[i] += (some * (some * slope + 0.5).clamp(0, 1) - wanted).square().sum(dtype=torch.float64)
        return y


# --activation → the classes that it replaces
REPLACED: dict[str, tuple[type[nn.Module], ...]] = {
    'hardswish': (nn.SiLU,),
    'relu': (nn.SiLU, nn.Hardswish, FittedHardswish),
}


def exchangeable(model: nn.Module, activation: str) -> list[str]:
    """List the paths of the activation functions that `activation`, a key of REPLACED, replaces, in the order of the network.

    Those of squeeze-and-excitation stay: they compute a few values.
    """
    gates = tuple(f'{path}.' for path, m in model.named_modules() if isinstance(m, SqueezeExcitation))
    return [
        path
        for path, m in model.named_modules(remove_duplicate=False)  # upstream's blocks share one activation function
        if type(m) in REPLACED[activation] and not path.startswith(gates)
    ]


def require_exchange(model: nn.Module, config: CalibrationConfig) -> None:
    """Raise QatError if config.activation replaces nothing in `model`, or the target's engine gains nothing by it."""
    activation, target = config.activation, load_target(config.target)
    if activation not in target.gains_by:
        raise QatError(
            f'--activation {activation}: {target.title} computes it no faster than SiLU; use {" or ".join(target.gains_by)}, '
            'or leave it out'
        )
    if not exchangeable(model, activation):
        names = ', '.join(kind.__name__ for kind in REPLACED[activation])
        raise QatError(
            f'--activation {activation}: the model has no {names} to exchange for it; leave --activation out'
        )


def chosen_activations(model: nn.Module, config: QuantizeConfig) -> list[str]:
    """List the paths of the activation functions that config exchanges."""
    paths = exchangeable(model, config.activation)
    kept = left_out(paths, only=config.activation_only, flag='--activation-only') if config.activation_only else []
    return [path for path in paths if path not in kept]


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition('.')
    model.get_submodule(parent)._modules[name] = module


@torch.no_grad()
def exchanged(model: nn.Module, activation: str, paths: Sequence[str], batches: Iterable[torch.Tensor]) -> nn.Module:
    """Make a copy of a float model with an Exchange, at share 0, in place of the activation functions at `paths`.

    The Hardswish of each place has the slope whose squared error is least on the values of `batches`, images FP32
    [B, 3, H, W] in 0..1, over all processes of a torchrun. ReLU needs none.
    """
    model = deepcopy(model).eval()
    device = next(model.parameters()).device
    old = {path: deepcopy(model.get_submodule(path)) for path in paths}
    for module in old.values():
        module.inplace = False  # its input is read again
    new: dict[str, nn.Module] = {path: nn.ReLU() for path in paths}
    if activation == 'hardswish':
        fits = {path: _Fit(module, device) for path, module in old.items()}
        for path, fit in fits.items():
            _replace(model, path, fit)
        for images in batches:
            model(images)
        best = all_reduce(torch.stack([fit.errors for fit in fits.values()])).argmin(1).tolist()
        new = {path: FittedHardswish(round(SLOPES[i], 4)) for path, i in zip(paths, best)}
    share = torch.zeros((), device=device)
    for path in paths:
        _replace(model, path, Exchange(old[path], new[path], share))
    return model


def exchanges(model: nn.Module) -> dict[str, Exchange]:
    """Find the exchanges of a model, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, Exchange)}


def restored(model: nn.Module, paths: Collection[str]) -> nn.Module:
    """Put the old activation functions back in the place of the exchanges at `paths`, in place, and return the model.

    Raises QatError if no exchange is left.
    """
    found = exchanges(model)
    if paths and not found.keys() - set(paths):
        raise QatError('--activation-only, --keep-float: no activation function is left to exchange; keep less')
    for path in found.keys() & set(paths):
        _replace(model, path, found[path].old)
    return model


def finished(model: nn.Module) -> nn.Module:
    """Put the new activation functions in the place of the exchanges, in place, and return the model."""
    for path, exchange in exchanges(model).items():
        _replace(model, path, exchange.new)
    return model
