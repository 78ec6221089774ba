"""Quantization-aware fine-tuning: the quantized student learns to repeat the float teacher, layer by layer.

Labels are needed only if they are to count: the student starts as the teacher plus rounding noise, and the target of every
layer is what the teacher computes there. The fake-quantizers pass gradients straight through inside their range; scales stay as
they were calibrated, unless those of activations are asked to learn too.
"""

import math
import time
from dataclasses import dataclass
from itertools import islice

import torch

from models.quantize.finetuning.losses import label_loss, relative_error
from models.quantize.finetuning.training_step import GraphedStep, NotFinite, Step
from utils.qat.core.distributed import take_from_first
from utils.qat.core.errors import QatError
from utils.qat.run.resume import unfit_state

LOOK_EVERY = 50  # steps between two looks at what the device says; a look waits for it


@dataclass
class Epoch:
    """What one epoch of fine-tuning did."""

    number: int  # from 1
    loss: float  # mean over the steps
    steps: int
    seconds: float
    state: dict  # of the step, to go on from here (see Step.state_dict)


def supervised_layers(model, stride):
    """Indices of the top-level layers whose outputs are compared: every `stride`-th that has weights, and the head."""
    with_weights = [i for i, layer in enumerate(model.model) if any(True for _ in layer.parameters())]
    head = len(model.model) - 1
    return sorted({*with_weights[:-1][::-1][::stride], head})


def rate(step, total):
    """Share of the learning rate at `step` of `total`: rises over the first 5 % of them, then falls along a cosine."""
    return min((step + 1) / max(1, 0.05 * total), 0.5 + 0.5 * math.cos(math.pi * step / total))


def finetune(student, teacher, loader, config, progress=None, after=None):
    """Fine-tune `student` (calibrated, fused) in place; yields an Epoch after each, for the caller to judge and save.

    loader: re-iterable over images, FP32 [B, 3, H, W] in 0..1 on the model's device; with task_loss over (images, labels, and masks where there are any).
    config: epochs, iters, lr, supervision_stride, amp, compile, task_loss, learn_scales (see QuantizeConfig). progress: wraps
    the iterator of batches, e.g. tqdm. after: the last Epoch of an interrupted fine-tuning; it is yielded again, with its
    weights in `student`, and the others follow (a loader with an epoch of its own must be set to it). Raises QatError if the
    loss is not finite, naming the first layer at fault, or if a gradient is not, and the step is not taken; and if `after` does not fit the student. Under torchrun each
    process has a loader of its own, all equally long, and a step follows the mean of their gradients.
    """
    take_from_first(student.state_dict().values())  # the calibration of two kinds of GPU may differ in the last bit
    layers = supervised_layers(student, config.supervision_stride)
    on_labels = label_loss(student, config.task_loss) if config.task_loss else None
    step = Step(
        student,
        teacher,
        layers,
        relative_error,
        config.lr,
        config.amp,
        capturable=config.compile,
        label_loss=on_labels,
        learn_scales=config.learn_scales,
    )
    if config.compile:
        step = GraphedStep(step)
    per_epoch = min(config.iters, len(loader))
    total = config.epochs * per_epoch

    if after:
        try:
            step.load_state_dict(after.state)
        except ValueError as e:
            raise unfit_state(config.resume, str(e)) from e
        yield after
    for number in range(after.number + 1 if after else 1, config.epochs + 1):
        start, losses = time.perf_counter(), []
        batches = islice(loader, per_epoch)
        try:
            for batch in progress(batches, number, per_epoch) if progress else batches:
                step.set_rate(rate((number - 1) * per_epoch + len(losses), total))
                losses.append(step(*batch) if on_labels else step(batch))
                if len(losses) % LOOK_EVERY == 0:
                    step.check()
            step.check()
        except NotFinite as e:
            raise QatError(
                f'fine-tuning: {e} (epoch {number}); finished epochs are kept; try a smaller --lr than {config.lr}'
            ) from e
        student.zero_grad(set_to_none=True)
        yield Epoch(
            number, torch.stack(losses).mean().item(), len(losses), time.perf_counter() - start, step.state_dict()
        )
