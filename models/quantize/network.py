"""Layers, hooks and batch-norm folding of a network of any task."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn as nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils.hooks import RemovableHandle

BLANK = 64  # pixels: height and width of the image of a dry run


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """List the layers that a network computes one after the other, by path.

    An upstream model has numbered layers. The layers of a torchvision network are its children, and the members of a
    Sequential.
    """
    if hasattr(model, 'model'):
        return {f'model.{i}': layer for i, layer in enumerate(model.model)}
    found: dict[str, nn.Module] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if type(child) is nn.Sequential:
                visit(child, f'{prefix}{name}.')
            else:
                found[f'{prefix}{name}'] = child

    visit(model, '')
    return found


@contextmanager
def removed_after(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Context that removes registered hooks at its end."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


def run_on_blank_image(model: nn.Module) -> None:
    """Run a model in eval mode on one blank image, for hooks and modes that watch it."""
    parameter = next(model.parameters())
    model.eval()(torch.zeros(1, 3, BLANK, BLANK, device=parameter.device, dtype=parameter.dtype))


@torch.no_grad()
def fold_batch_norms(model: nn.Module) -> nn.Module:
    """Fold each batch norm that follows a convolution into it, in place, and return the model.

    A run on one blank image shows which one follows which; names do not matter. Upstream's models have their own `fuse`.
    """
    made: dict[int, tuple[torch.Tensor, nn.Conv2d]] = {}  # identity of an output → the output, and its convolution
    pairs: dict[nn.Module, nn.Conv2d] = {}

    def note(conv: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        made[id(output)] = output, conv

    def follow(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if id(inputs[0]) in made:
            pairs[norm] = made[id(inputs[0])][1]

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    hooks += [m.register_forward_pre_hook(follow) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with removed_after(hooks):
        run_on_blank_image(model)
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if norm in pairs:
                conv, n = pairs[norm], norm
                conv.weight, conv.bias = fuse_conv_bn_weights(
                    conv.weight, conv.bias, n.running_mean, n.running_var, n.eps, n.weight, n.bias
                )
                setattr(parent, name, nn.Identity())
    return model
