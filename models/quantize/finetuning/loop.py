"""Quantization-aware fine-tuning (QAT): the quantized student learns to reproduce the float teacher, layer by layer.

The student starts as the teacher plus rounding noise, and the target of every layer is the output of the teacher's
layer. So only --task-loss needs labels. A student with other activation functions cannot reproduce every layer: there the
divergence of the boxes counts too, at the places with an object, and in the end the labels, because the errors of the teacher's
boxes add to the student's. Fake-quantizers pass gradients straight through inside their range. Scales stay as calibrated.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn as nn

from models.quantize.activations import exchanges
from models.quantize.calibration.divergence import bins_of
from models.quantize.finetuning.training_step import GraphedStep, NotFinite, TrainingStep
from models.quantize.network import has_known_head
from models.quantize.network import layers as layers_of
from utils.qat.backends.pytorch import task_of
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.distributed import take_from_first
from utils.qat.core.errors import QatError
from utils.qat.data.loaders import TrainingImages

ADAPTATION_RATE = 1e-3  # the highest learning rate of an adaptation
EXCHANGED_AT = 0.3  # share of the steps of an adaptation after which only the new functions are left
LOOK_EVERY = 50  # steps between two checks of the device; the host waits for each check


class UnfitState(QatError):
    """The state to continue from does not fit the student; the message names the place in it."""


@dataclass
class Epoch:
    """The result of one epoch of fine-tuning."""

    number: int  # from 1
    loss: float  # mean over the steps
    steps: int
    seconds: float
    state: dict[str, Any]  # of the training step, to continue from (see TrainingStep.state_dict)


def supervised_layers(model: nn.Module, stride: int) -> list[int]:
    """List the top-level layers whose outputs are compared: the head, and every `stride`-th layer with weights."""
    parts = [*layers_of(model).values()]
    with_weights = [i for i, layer in enumerate(parts) if any(True for _ in layer.parameters())]
    head = len(parts) - 1
    return sorted({*with_weights[:-1][::-1][::stride], head})


def learning_rate_share(step: int, total: int) -> float:
    """Compute the learning rate at a step (from 0) as a share, 0..1, of the highest.

    It rises over the first 5 % of the steps, then falls along a cosine.
    """
    return min((step + 1) / max(1, 0.05 * total), 0.5 + 0.5 * math.cos(math.pi * step / total))


def finetune(
    student: nn.Module,
    teacher: nn.Module,
    loader: Any,
    config: QuantizeConfig,
    progress: Callable[[Iterator, int, int], Iterable] | None = None,
    after: Epoch | None = None,
    begin: Callable[[float], Any] = lambda done: None,
) -> Iterator[Epoch]:
    """Fine-tune `student` in place, and yield after each epoch, so that the caller can score and save the student.

    Under torchrun each process has its own loader. All loaders have the same length, and a step follows the mean of the
    gradients of all processes. Raises UnfitState if `after` does not fit, and QatError if the loss or a gradient is not finite:
    the step is skipped, and the message names the first layer or parameter.

    Args:
        student: calibrated, fused.
        teacher: the float model.
        loader: sized and re-iterable over images, FP32 [B, 3, H, W] in 0..1 on the model's device. With
            config.label_weight it gives (images, labels) or (images, labels, masks).
        config: settings of the fine-tuning.
        progress: wraps the iterator of batches, such as tqdm; it also takes the number of the epoch and the number of
            batches.
        after: the last epoch of an interrupted fine-tuning. It is yielded again, with its weights in `student`, and the
            next epochs follow. A loader that counts epochs must be set to it.
        begin: called before each step with the share of all steps that are done, in [0, 1).
    """
    take_from_first(student.state_dict().values())  # two kinds of GPU may differ in the last bit of the calibration
    layers = supervised_layers(student, config.supervision_stride)
    on_labels = task_of(student).label_loss(student, config.label_weight) if config.label_weight else None
    ungraphed = TrainingStep(
        student,
        teacher,
        layers,
        config.highest_rate,
        config.precision(next(student.parameters()).device.type),
        capturable=bool(config.compile),
        label_loss=on_labels,
        box_bins=bins_of(student) if config.learns_activations and has_known_head(student) else 0,
    )
    step: TrainingStep | GraphedStep = GraphedStep(ungraphed) if config.compile else ungraphed
    per_epoch = min(config.iters, len(loader))
    total = config.epochs * per_epoch

    if after:
        try:
            step.load_state_dict(after.state)
        except ValueError as e:
            raise UnfitState(str(e)) from e
        yield after
    for number in range(after.number + 1 if after else 1, config.epochs + 1):
        start = time.perf_counter()
        losses: list[torch.Tensor] = []
        batches = islice(loader, per_epoch)
        try:
            for batch in progress(batches, number, per_epoch) if progress else batches:
                done = (number - 1) * per_epoch + len(losses)
                step.set_rate(learning_rate_share(done, total))
                begin(done / total)
                losses.append(step(*batch) if on_labels else step(batch))
                if len(losses) % LOOK_EVERY == 0:
                    step.check()
            step.check()
        except NotFinite as e:
            raise QatError(
                f'fine-tuning: {e} (epoch {number}); finished epochs are kept; try a smaller --lr than {config.highest_rate}'
            ) from e
        student.zero_grad(set_to_none=True)
        yield Epoch(
            number, torch.stack(losses).mean().item(), len(losses), time.perf_counter() - start, step.state_dict()
        )


def adapt(
    student: nn.Module,
    teacher: nn.Module,
    images: TrainingImages,
    config: QuantizeConfig,
    progress: Callable[[Iterator, int, int], Iterable] | None = None,
    after: Epoch | None = None,
) -> Iterator[Epoch]:
    """Teach an exchanged float model (see activations.exchanged) in place, and yield after each epoch, see `finetune`.

    The functions change gradually: all at once the network begins with no detection at all, and ends lower. Quantizers are not there yet,
    so the calibration that follows sees the values of the model that was learnt. There are config.activation_epochs epochs of
    config.iters steps, whatever the number of images.
    """
    share = next(iter(exchanges(student).values())).share
    images.fill(config.iters)
    learning = replace(config, epochs=config.activation_epochs, lr=ADAPTATION_RATE, task_loss=0.0)
    yield from finetune(
        student, teacher, images, learning, progress, after, lambda done: share.fill_(min(1.0, done / EXCHANGED_AT))
    )
