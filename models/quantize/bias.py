"""Bias correction: rounding moves the mean of a convolution's outputs, and its bias can take that back, at no cost.

SiLU's small negative values round to zero, large ones are clipped: such errors do not average out over an image, and every
later layer sees them. So each bias is moved by what its channel's mean differs from the float model's, in the order of the
network, later layers seeing the corrected outputs of earlier ones.
Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv:1906.04721), section 4.2.
"""
import torch


@torch.no_grad()
def correct_biases(model, reference, batches):
    """Change the biases of `model` (calibrated), in place, so that the mean of every output channel is that of `reference`.

    reference: the float model it was made of. batches: iterable of images, FP32 [B, 3, H, W] in 0..1 on the models' device;
    a few dozen images are enough for a mean.
    """
    theirs = dict(reference.eval().named_modules())
    convs = {path: m for path, m in model.eval().named_modules() if isinstance(m, torch.nn.Conv2d) and m.bias is not None}
    means, number = {}, 0

    def note(path):
        return lambda conv, inputs, output: means.__setitem__(path, output.mean((0, 2, 3)))

    def correct(path):
        def hook(conv, inputs, output):
            step = (means[path] - output.mean((0, 2, 3))) / number  # the mean over all batches so far
            conv.bias += step
            return output + step[:, None, None]
        return hook

    hooks = [theirs[path].register_forward_hook(note(path)) for path in convs]
    hooks += [conv.register_forward_hook(correct(path)) for path, conv in convs.items()]
    try:
        for number, images in enumerate(batches, 1):
            reference(images)
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
