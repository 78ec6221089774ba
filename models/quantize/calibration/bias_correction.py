"""Bias correction: rounding moves the mean of a convolution's outputs, and a new bias cancels this shift at no cost.

Only the error of a convolution's own rounding (of input and weights) is corrected. It is measured on the inputs in the
quantized model, and corrected as far as it is the same on all images. Errors of earlier layers stay: they differ from
image to image, and their mean over a few images is chance. Sources: Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction" (arXiv:1906.04721), section 4.2, on the correction; James
and Stein, "Estimation with Quadratic Loss" (1961), on shrinking an estimate by its variance.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.quantize.blocks import QuantConv2d
from models.quantize.network import removed_after
from models.quantize.quantizers import RoundedOnce
from utils.qat.core.upstream import Network


def convs_with_bias(model: Network) -> list[tuple[str, QuantConv2d]]:
    """List the quantized convolutions that have a bias, with their paths."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, QuantConv2d) and m.bias is not None]


def biases_of(model: Network) -> dict[str, torch.Tensor]:
    """Return the biases of the convolutions, float or quantized, by their paths."""
    convs = ((path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d))
    return {path: conv.bias for path, conv in convs if conv.bias is not None}


def read_by(kernel: int, stride: int, dilation: int, size: int) -> torch.Tensor:
    """Tell which pixels each row of a kernel reads: FP32 [kernel, size], 1 / number of output places if read, else 0."""
    steps = torch.arange(size) - dilation * torch.arange(kernel)[:, None]
    positions = (size - dilation * (kernel - 1) - 1) // stride + 1
    return ((steps >= 0) & (steps < positions * stride) & (steps % stride == 0)) / positions


def mean_window(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Average the windows that a convolution reads over all places of an image: FP32 [B, C, H, W] → [B, C, k, k].

    A convolution is linear: this one window yields the mean of its outputs, at the cost of a single place.
    """
    x = F.pad(
        x, conv._reversed_padding_repeated_twice, 'constant' if conv.padding_mode == 'zeros' else conv.padding_mode
    )
    rows, columns = (read_by(*of).to(x) for of in zip(conv.kernel_size, conv.stride, conv.dilation, x.shape[2:]))
    of_rows = rows @ x.permute(0, 2, 3, 1).flatten(2)  # no copy on a CPU, where maps are channels-last
    return (columns @ of_rows.unflatten(2, (x.shape[3], -1))).permute(0, 3, 1, 2)


@torch.no_grad()
def own_errors(model: Network, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Measure how far each quantized convolution's rounding moves the mean of its own outputs.

    `batches` are images, FP32 [B, 3, H, W] in 0..1 on the model's device. Returns path of a convolution → shift of the
    mean over the places of an image, FP32 [images, C].
    """
    convs = convs_with_bias(model)
    errors: dict[str, list[torch.Tensor]] = {path: [] for path, _ in convs}

    def note(path: str) -> Callable[..., None]:
        def hook(conv: QuantConv2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            wanted = F.conv2d(mean_window(conv, inputs[0]), conv.weight, conv.bias, groups=conv.groups)
            errors[path].append(output.mean((2, 3)) - wanted[:, :, 0, 0])

        return hook

    hooks = [conv.register_forward_hook(note(path)) for path, conv in convs]
    with removed_after(hooks), RoundedOnce(model):
        for images in batches:
            model.eval()(images)
    return {path: torch.cat(of_images) for path, of_images in errors.items()}


def shrunk_mean(errors: torch.Tensor) -> torch.Tensor:
    """Compute the mean over images, [images, C] → [C], shrunk towards zero by its variance; of one image as it is."""
    mean = errors.mean(0)
    if len(errors) == 1:
        return mean
    variance = errors.var(0) / len(errors)  # of the mean
    return mean * (1 - variance / mean.square()).nan_to_num(nan=0).clamp(min=0)


def own_shifts(model: Network, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Measure the shifts [C] that `correct_biases` cancels, by path; arguments as in `own_errors`."""
    return {path: shrunk_mean(errors) for path, errors in own_errors(model, batches).items()}


def correct_biases(model: Network, biases: Mapping[str, torch.Tensor], shifts: Mapping[str, torch.Tensor]) -> None:
    """Set each convolution's bias to `biases` minus its shift, if it has one; both are [C] by path."""
    of_model = biases_of(model)
    for path, bias in biases.items():
        of_model[path].data.copy_(bias - shifts[path] if path in shifts else bias)
