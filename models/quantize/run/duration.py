"""How long work takes, said before it begins: an image takes so many passes of the float model, and one is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from models.quantize.adapt import expected_loss
from models.quantize.run.run import Run, Work
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.log import LOGGER
from utils.qat.core.text import in_words
from utils.qat.core.upstream import Network

FEW = 4  # passes that are timed, of which the fastest counts
# Images of a pass. A GPU takes as long for few, because it waits for the host; its learning does not, by compiled steps
IMAGES = {'cpu': 4, 'cuda': 32}
# Passes of PyTorch for an image that is scored, observed, compared under several calibrations, learnt from
SCORED, CALIBRATED, CHOSEN, LEARNT = 1.3, 4.5, 10, 5


def seconds_per_image(model: Network, imgsz: Sequence[int], device: torch.device) -> float:
    """Time passes of a model over images of height and width `imgsz`."""
    images, taken = torch.rand(IMAGES[device.type], 3, *imgsz, device=device), []
    with torch.inference_mode():
        for _ in range(FEW):
            start = time.perf_counter()
            model(images)
            if images.is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken) / len(images)


def announce(run: Run, plan: QuantizeConfig, work: Work) -> None:
    """Say what a learnt activation function will cost, and on a CPU how long the epochs that are left will take."""
    state = run.state
    if work.adaptation and not state.adapted:
        said = f'--activation {plan.activation}: the model learns it'
        if run.task.boxes:  # classifiers of many classes were not measured
            steps = plan.activation_epochs * min(plan.iters, len(work.adaptation))
            said += f'; {expected_loss(plan.activation, len(run.data.names), state.images["train"], steps)}'
        LOGGER.info(said)
    if run.device.type == 'cuda':
        return
    learnt = state.training['number'] if state.training and not state.adapted else 0
    ahead = [
        ('--activation-epochs', work.adaptation, 0 if state.adapted else plan.activation_epochs - learnt),
        ('--epochs', work.training, plan.epochs - len(state.epochs)),
    ]
    for flag, images, epochs in ahead:
        if images and epochs:
            an_image = LEARNT * seconds_per_image(run.model, plan.imgsz, run.device)
            seconds = epochs * an_image * plan.batch_size * min(plan.iters, len(images))
            hint = '; --epochs 0, calibration alone, is often enough' * (flag == '--epochs')
            LOGGER.info(f'{flag} {epochs} will take about {in_words(seconds)} on this CPU{hint}')
