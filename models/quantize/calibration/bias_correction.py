"""Bias correction: rounding moves the mean of a convolution's outputs, and its bias takes this shift back at no cost.

The rounded input and the rounded weights of a convolution make an error whose mean over an image is not zero. Only this
error, the convolution's own error, is taken back. It is measured on the inputs in the quantized model, and it is taken
back as far as it is the same on all images. Errors of earlier layers stay: they differ from image to image, and their
mean over a few images is chance (docs/calibration.md). Sources: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (arXiv:1906.04721), section 4.2, on the correction; James and Stein, "Estimation with
Quadratic Loss" (1961), on shrinking an estimate by its variance.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn as nn

from models.quantize.blocks import QuantConv2d
from models.quantize.quantizers import RoundedOnce


def quantized_convs(model: nn.Module) -> list[tuple[str, QuantConv2d]]:
    """List the quantized convolutions that have a bias, each with its path."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, QuantConv2d) and m.bias is not None]


@torch.no_grad()
def own_errors(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Measure how far the roundings of each quantized convolution move the mean of its own outputs.

    Args:
        model: calibrated.
        batches: images, FP32 [B, 3, H, W] in 0..1 on the model's device.

    Returns:
        Path of a convolution → shift of the mean over the places of an image, FP32 [images, C].
    """
    convs = quantized_convs(model)
    errors: dict[str, list[torch.Tensor]] = {path: [] for path, _ in convs}

    def note(path: str) -> Callable[..., None]:
        def hook(conv: QuantConv2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            errors[path].append((output - conv._conv_forward(inputs[0], conv.weight, conv.bias)).mean((2, 3)))

        return hook

    hooks = [conv.register_forward_hook(note(path)) for path, conv in convs]
    try:
        with RoundedOnce(model):
            for images in batches:
                model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: torch.cat(of_images) for path, of_images in errors.items()}


def shrunk_mean(errors: torch.Tensor) -> torch.Tensor:
    """Compute the mean over images, shrunk towards zero by its variance.

    Args:
        errors: [images, C]. A single image has no variance, and its errors are returned as they are.

    Returns:
        [C].
    """
    mean = errors.mean(0)
    if len(errors) == 1:
        return mean
    variance = errors.var(0) / len(errors)  # of the mean
    return mean * (1 - variance / mean.square()).nan_to_num(nan=0).clamp(min=0)


def own_shifts(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Measure the shifts that `correct_biases` takes back: path of a convolution → [C]. Arguments: see `own_errors`."""
    return {path: shrunk_mean(errors) for path, errors in own_errors(model, batches).items()}


def correct_biases(model: nn.Module, biases: Mapping[str, torch.Tensor], shifts: Mapping[str, torch.Tensor]) -> None:
    """Set the bias of each convolution to its original value minus the shift; without a shift, to the original value.

    Args:
        model: quantized; its biases change in place.
        biases: path of a convolution → original bias, [C].
        shifts: path of a convolution → shift of the mean of its outputs, [C].
    """
    for path, bias in biases.items():
        model.get_submodule(path).bias.data.copy_(bias - shifts[path] if path in shifts else bias)
