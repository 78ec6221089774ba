"""Bias correction: rounding moves the mean of a convolution's outputs, and its bias can take that back, at no cost.

SiLU's small negative values round to zero, large ones are clipped: such errors do not average out over an image, and every
later layer sees them. So each bias is moved by what its channel's mean differs from the float model's, in the order of the
network, later layers seeing the corrected outputs of earlier ones.
Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv:1906.04721), section 4.2.
"""
import contextlib

import torch


def _biased_convs(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, torch.nn.Conv2d) and m.bias is not None}


@contextlib.contextmanager
def _hooked(model, hook):
    """Context: `hook(path)` is a forward hook of every convolution with a bias."""
    handles = [conv.register_forward_hook(hook(path)) for path, conv in _biased_convs(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def watch(reference, batches):
    """What the float model `reference` computes: yields for each batch ({path of a convolution with a bias: mean of each output
    channel, [C]}, the model's output).

    batches: iterable of images, FP32 [B, 3, H, W] in 0..1 on the model's device.
    """
    means = {}

    def note(path):
        return lambda conv, inputs, output: means.__setitem__(path, output.mean((0, 2, 3)))

    with _hooked(reference.eval(), note):
        for images in batches:
            output = reference(images)
            yield dict(means), output


@torch.no_grad()
def correct_biases(model, batches, wanted):
    """Change the biases of `model` (calibrated), in place, so that the mean of every output channel is as wanted.

    batches: see `watch`; a few dozen images are enough for a mean. wanted: for each batch, the means of the float model that
    `model` was made of.
    """
    means, number = {}, 0

    def correct(path):
        def hook(conv, inputs, output):
            step = (means[path] - output.mean((0, 2, 3))) / number  # the mean over all batches so far
            conv.bias += step
            return output + step[:, None, None]
        return hook

    with _hooked(model.eval(), correct):
        for number, (images, means) in enumerate(zip(batches, wanted), 1):
            model(images)
