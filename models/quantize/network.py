"""Layers, units, head, hooks and batch-norm folding of a network of any task.

Units are layers, blocks or convolutions that are measured, and kept in float, as a whole. The name of a unit is its path. It
contains the quantized twins at that path and below (see blocks.py).
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn as nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.hooks import RemovableHandle

from utils.qat.backends.pytorch import task_of
from utils.qat.core.errors import QatError
from utils.qat.core.upstream import Network

BLANK = 64  # pixels: height and width of the image of a dry run
HEADS = 'Detect', 'DDetect', 'Segment', 'DSegment'  # whose outputs are compared, see divergence.HeadOutputs
CONTAINERS = (nn.Sequential, nn.ModuleList)


def layers(model: Network) -> dict[str, nn.Module]:
    """List the layers that a network computes one after the other, by path.

    An upstream model has numbered layers. The layers of a torchvision network are its children, and the members of a
    Sequential.
    """
    if hasattr(model, 'model'):
        return {f'model.{i}': layer for i, layer in enumerate(model.model)}
    by_path: dict[str, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if type(child) is nn.Sequential:
                visit(child, f'{prefix}{name}.')
            else:
                by_path[f'{prefix}{name}'] = child

    visit(model, '')
    return by_path


def head_of(model: Network) -> nn.Module:
    """Return the last layer of a model."""
    return [*layers(model).values()][-1]


def has_known_head(model: Network) -> bool:
    """Tell whether `model` is a classifier, or its head is one of HEADS."""
    return not task_of(model).boxes or type(head_of(model)).__name__ in HEADS


def require_known_head(model: Network, purpose: str, instead: str) -> None:
    """Raise QatError if the model's head is not one of HEADS; `purpose` needs one, `instead` is a clause of advice."""
    if not has_known_head(model):
        raise QatError(
            f"{purpose}: only for the heads {', '.join(HEADS)}, and the model's is {type(head_of(model)).__name__}; {instead}"
        )


@contextmanager
def removed_after(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Context that removes registered hooks at its end."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


def run_on_blank_image(model: Network) -> None:
    """Run a model in eval mode on one blank image, for hooks and modes that watch it."""
    parameter = next(model.parameters())
    model.eval()(torch.zeros(1, 3, BLANK, BLANK, device=parameter.device, dtype=parameter.dtype))


@torch.no_grad()
def fold_batch_norms(model: Network) -> Network:
    """Fold each batch norm that follows a convolution into it, in place, and return the model.

    A run on one blank image shows which one follows which; names do not matter. Upstream's models have their own `fuse`.
    """
    made: dict[int, tuple[torch.Tensor, nn.Conv2d]] = {}  # identity of an output → the output, and its convolution
    pairs: dict[nn.BatchNorm2d, nn.Conv2d] = {}

    def note(conv: nn.Conv2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        made[id(output)] = output, conv

    def follow(norm: nn.BatchNorm2d, inputs: tuple[torch.Tensor, ...]) -> None:
        if id(inputs[0]) in made:
            pairs[norm] = made[id(inputs[0])][1]

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(follow) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with removed_after(hooks):
        run_on_blank_image(model)
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.BatchNorm2d) and norm in pairs:
                conv, whole = pairs[norm], fuse_conv_bn_eval(pairs[norm], norm)
                conv.weight, conv.bias = whole.weight, whole.bias
                setattr(parent, name, nn.Identity())
    return model


def within(path: str, unit: str) -> bool:
    """Tell whether `path` is the unit `unit` or lies inside it."""
    return path == unit or path.startswith(f'{unit}.')


def layer_of(model: Network, path: str) -> tuple[str, nn.Module]:
    """Find the path and module of the layer (see network.layers) that is or contains `path`."""
    return next((at, layer) for at, layer in layers(model).items() if within(path, at))


def _block(model: Network, path: str) -> str:
    """Find the path of the block that the twin at `path` belongs to.

    A layer that is built of blocks (ELAN, the head) keeps them in containers: its blocks are the parts that are no
    containers. Any other layer is one block, and so is each layer of a torchvision classifier.
    """
    unit, module = layer_of(model, path)
    names = path[len(unit) + 1 :].split('.') if path != unit else []
    if not hasattr(model, 'model') or not any(isinstance(m, CONTAINERS) for m in module.modules()):
        return unit
    for name in names:
        module, unit = getattr(module, name), f'{unit}.{name}'
        if not isinstance(module, CONTAINERS):
            break
    return unit


def find_units(model: Network, twins: Collection[str], granularity: str) -> dict[str, list[str]]:
    """Group twins (paths) into units, by one of GRANULARITIES: unit → paths of its twins, in the order of the network."""
    unit_of: dict[str, Callable[[str], str]] = {  # granularity → (path of a twin → its unit)
        'layer': lambda path: layer_of(model, path)[0],
        'block': lambda path: _block(model, path),
        'conv': lambda path: path.removesuffix('act') + 'conv' if path.endswith('.act') else path,
    }
    units: dict[str, list[str]] = {}
    for path, _ in model.named_modules(remove_duplicate=False):  # upstream's blocks share one activation function
        if path in twins:
            units.setdefault(unit_of[granularity](path), []).append(path)
    return units


def replace_module(model: Network, path: str, module: nn.Module) -> None:
    """Put a module in the place of that at a path of a model."""
    parent, _, name = path.rpartition('.')
    model.get_submodule(parent)._modules[name] = module
