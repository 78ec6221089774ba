"""Bias correction: rounding moves the mean of a convolution's outputs, and its bias can take that back, at no cost.

The rounded input and the rounded weights of a convolution make an error that does not average out over an image. Only this error of
its own is taken back, on the inputs that the quantized model has, and only as far as it is the same on all images. The errors of
earlier layers are left alone: they differ from image to image, and their mean over a few images is chance (docs/calibration.md).
Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv:1906.04721), section 4.2, on the
correction; James and Stein, "Estimation with Quadratic Loss" (1961), on shrinking an estimate by its variance.
"""

import torch

from models.quantize.blocks import QuantConv2d


def quantized_convs(model):
    """List (path, convolution) of those that are quantized and have a bias."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, QuantConv2d) and m.bias is not None]


@torch.no_grad()
def own_errors(model, batches):
    """Measure what its own roundings move the outputs of each quantized convolution by: {path: mean over an image's places, [N, C]}.

    model: calibrated. batches: images, FP32 [B, 3, H, W] in 0..1 on the model's device.
    """
    convs = quantized_convs(model)
    errors = {path: [] for path, _ in convs}

    def note(path):
        def hook(conv, inputs, output):
            errors[path].append((output - conv._conv_forward(inputs[0], conv.weight, conv.bias)).mean((2, 3)))

        return hook

    hooks = [conv.register_forward_hook(note(path)) for path, conv in convs]
    try:
        for images in batches:
            model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {path: torch.cat(of_images) for path, of_images in errors.items()}


def certain(errors):
    """Shrink the mean over images, [C], the nearer to zero the less certain it is. errors: [N, C]; a single image is certain."""
    mean = errors.mean(0)
    if len(errors) == 1:
        return mean
    variance = errors.var(0) / len(errors)  # of the mean
    return mean * (1 - variance / mean.square()).nan_to_num(nan=0).clamp(min=0)


def correct_biases(model, biases, shifts):
    """Take `shifts` back, or where there is none make a bias its own again.

    biases: {path of a convolution: its own bias, [C]}. shifts: {path: what the mean of its outputs moved by, [C]}.
    """
    for path, bias in biases.items():
        model.get_submodule(path).bias.data.copy_(bias - shifts[path] if path in shifts else bias)
