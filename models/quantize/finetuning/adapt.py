"""The float model with ReLU learns to reproduce the unchanged one, before it is quantized.

The functions change gradually: all at once the network begins with no detection at all, and ends lower. Quantizers are
not there yet, so the calibration that follows sees the values of the model that was learnt.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch.nn as nn

from models.quantize.activations import exchanges
from models.quantize.finetuning.loop import Epoch, finetune
from utils.qat.config.qat import QuantizeConfig

RATE = 1e-3  # the highest learning rate
EXCHANGED_AT = 0.6  # share of the steps after which only the new functions are left


def adapt(
    student: nn.Module,
    teacher: nn.Module,
    images: Any,
    config: QuantizeConfig,
    progress: Callable[[Iterator, int, int], Iterable] | None = None,
    after: Epoch | None = None,
) -> Iterator[Epoch]:
    """Teach an exchanged model (see activations.exchanged) in place, and yield after each epoch, see loop.finetune.

    There are config.activation_epochs epochs of config.iters steps, whatever the number of images.
    """
    share = next(iter(exchanges(student).values())).share
    images.passes = -(-config.iters // len(images.loader))
    learning = replace(config, epochs=config.activation_epochs, lr=RATE, task_loss=0.0)
    yield from finetune(
        student, teacher, images, learning, progress, after, lambda done: share.fill_(min(1.0, done / EXCHANGED_AT))
    )
