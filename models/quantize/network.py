"""The layers of a network, whatever its task, and the folding of its batch norms."""

import torch
import torch.nn as nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """List the layers that a network computes one after the other, by path.

    Of an upstream model these are its numbered layers; of a network of torchvision its parts, and those of a
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


@torch.no_grad()
def fold_batch_norms(model: nn.Module, size: int = 64) -> nn.Module:
    """Fold each batch norm that follows a convolution into it, in place, and return the model.

    Which one follows which is seen on one blank image; names do not matter. Upstream's models have a `fuse` of their own.
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
    try:
        parameter = next(model.parameters())
        model.eval()(torch.zeros(1, 3, size, size, device=parameter.device))
    finally:
        for hook in hooks:
            hook.remove()
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if norm in pairs:
                conv, n = pairs[norm], norm
                conv.weight, conv.bias = fuse_conv_bn_weights(
                    conv.weight, conv.bias, n.running_mean, n.running_var, n.eps, n.weight, n.bias
                )
                setattr(parent, name, nn.Identity())
    return model
