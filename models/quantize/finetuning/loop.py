"""Quantization-aware fine-tuning (QAT): the quantized student learns to reproduce the float teacher, layer by layer.

The student starts as the teacher plus rounding noise, and the target of every layer is the output of the teacher's
layer. So only --task-loss needs labels. A student with other activation functions cannot reproduce every layer: there the
divergence of the boxes counts too, at the places with an object, and in the end the labels, because the errors of the teacher's
boxes add to the student's. Fake-quantizers pass gradients straight through inside their range. Scales stay as calibrated.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from models.quantize.calibration.calibrate import clamp_weights
from models.quantize.calibration.divergence import bins_of
from models.quantize.finetuning.training_step import GraphedStep, NotFinite, StepState, TrainingStep
from models.quantize.network import has_known_head
from models.quantize.network import layers as layers_of
from utils.qat.backends.pytorch import task_of
from utils.qat.core.distributed import take_from_first
from utils.qat.core.errors import QatError
from utils.qat.core.log import unshown
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Images

LOOK_EVERY = 50  # steps between two checks of the device; the host waits for each check


@dataclass(frozen=True)
class Learning:
    """How a student learns to reproduce its teacher."""

    epochs: int
    iters: int  # steps of an epoch, at most
    rate: float  # the highest learning rate
    label_weight: float = 0.0  # of upstream's loss on the labels
    amp: str = 'off'  # autocast, see config.qat.AMP
    compile: bool = False  # replay a CUDA graph
    supervision_stride: int = 1  # every n-th layer is compared
    boxes: bool = False  # whether the divergence of the boxes counts, of a head that is known
    reduce_range: bool = False  # whether quantized weights stay in half of the INT8 range


@dataclass
class Epoch:
    """The result of one epoch of fine-tuning."""

    number: int  # from 1
    loss: float  # mean over the steps
    steps: int
    seconds: float
    state: StepState  # to continue from


def supervised_layers(model: Network, stride: int) -> list[int]:
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
    student: Network,
    teacher: Network,
    loader: Images | Sequence,
    how: Learning,
    progress: Callable[[Iterator, int, int], Iterable] = unshown,
    after: Epoch | None = None,
    begin: Callable[[float], object] = lambda done: None,
) -> Iterator[Epoch]:
    """Fine-tune `student` in place, and yield after each epoch, so that the caller can score and save the student.

    Under torchrun each process has its own loader. All loaders have the same length, and a step follows the mean of the
    gradients of all processes. Raises training_step.UnfitState if `after` does not fit, and QatError if the loss or a gradient is not finite:
    the step is skipped, and the message names the first layer or parameter.

    Args:
        student: calibrated, fused.
        teacher: the float model.
        loader: sized and re-iterable over images, FP32 [B, 3, H, W] in 0..1 on the model's device. With
            how.label_weight it gives (images, labels).
        how: the recipe.
        progress: wraps the iterator of batches, such as tqdm; it also takes the number of the epoch and the number of
            batches.
        after: the last epoch of an interrupted fine-tuning. It is yielded again, with its weights in `student`, and the
            next epochs follow. A loader that counts epochs must be set to it.
        begin: called before each step with the share of all steps that are done, in [0, 1).
    """
    take_from_first(student.state_dict().values())  # two kinds of GPU may differ in the last bit of the calibration
    layers = supervised_layers(student, how.supervision_stride)
    on_labels = task_of(student).label_loss(student, how.label_weight) if how.label_weight else None
    ungraphed = TrainingStep(
        student,
        teacher,
        layers,
        how.rate,
        how.amp,
        capturable=how.compile,
        label_loss=on_labels,
        box_bins=bins_of(student) if how.boxes and has_known_head(student) else 0,
    )
    step: TrainingStep | GraphedStep = GraphedStep(ungraphed) if how.compile else ungraphed
    per_epoch = min(how.iters, len(loader))
    total = how.epochs * per_epoch
    if not total:
        raise QatError('fine-tuning: takes images, and epochs of 1 or more')

    if after:
        step.load_state_dict(after.state)
        yield after
    for number in range(after.number + 1 if after else 1, how.epochs + 1):
        start = time.perf_counter()
        losses: list[torch.Tensor] = []
        batches = islice(loader, per_epoch)
        try:
            for batch in progress(batches, number, per_epoch):
                done = (number - 1) * per_epoch + len(losses)
                step.set_rate(learning_rate_share(done, total))
                begin(done / total)
                losses.append(step(*batch) if on_labels else step(batch))
                if len(losses) % LOOK_EVERY == 0:
                    step.check()
            step.check()
        except NotFinite as e:
            raise QatError(
                f'fine-tuning: {e} (epoch {number}); finished epochs are kept; try a smaller --lr than {how.rate}'
            ) from e
        student.zero_grad(set_to_none=True)
        if how.reduce_range:
            clamp_weights(student)
        yield Epoch(
            number, torch.stack(losses).mean().item(), len(losses), time.perf_counter() - start, step.state_dict()
        )
    student.eval(), teacher.eval()  # the heads too
