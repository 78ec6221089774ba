"""The stage of --activation, before the calibration: exchange activation functions, and teach the float model those that it has to learn."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch.nn as nn

from models.quantize.activations import chosen_activations, exchanged, exchanges, finished, restored
from models.quantize.calibration.ptq import FloatBlocks, within_budget
from models.quantize.finetuning.adapt import adapt
from models.quantize.finetuning.loop import Epoch, UnfitState
from models.quantize.run.inputs import CalibrationInputs, Inputs
from models.quantize.run.keeper import Keeper
from models.quantize.run.scorer import StageScorer
from utils.qat.core.log import LOGGER, bar
from utils.qat.data.loaders import TrainingImages
from utils.qat.run.state import ADAPTED, EPOCH, State, unfit_state


def run_adaptation(
    inputs: Inputs,
    calibration: CalibrationInputs,
    state: State,
    scorer: StageScorer,
    keeper: Keeper,
) -> nn.Module:
    """Exchange activation functions, teach the float model those that it has to learn, save and score it, and return it.

    With a summary that ranks them as many stay as config.max_drop needs before the model learns. Goes on from the last finished
    epoch.
    """
    config, blocks = inputs.config, calibration.float_blocks
    if state.adapted:
        return keeper.load(state.adapted)
    paths = chosen_activations(inputs.model, config)
    student = exchanged(inputs.model, config.activation, paths)

    def attempt(tried: FloatBlocks) -> tuple[float, Any]:
        trial = finished(restored(deepcopy(student), tried.activations))
        return scorer.points_lost(trial, config.max_drop, tried is calibration.float_blocks), None

    if not state.training:
        if blocks.ranks_activations and config.max_drop is not None:
            blocks, _ = within_budget(blocks, config.max_drop, attempt)
        state.kept_activations = blocks.activations
    student = restored(student, state.kept_activations)
    LOGGER.info(f'{len(exchanges(student))} activation functions become {config.activation}')
    loss = learn(student, inputs, calibration.adaptation, state, keeper) if calibration.adaptation else None
    score = (lambda saved: scorer.of_quantized(saved, ADAPTED)) if config.eval_ptq else None
    result = keeper.save(finished(student).eval(), f'float_{config.activation}', state, score)
    state.adapted, state.training = {'loss': loss, **result}, None
    keeper.keep(state)
    return keeper.load(state.adapted)


def learn(student: nn.Module, inputs: Inputs, images: TrainingImages, state: State, keeper: Keeper) -> float:
    """Teach an exchanged model in place, from the last finished epoch on; returns the loss of the last epoch."""
    config = inputs.config
    after = Epoch(**state.training) if state.training else None
    images.epoch = after.number if after else 0

    def shown(batches: Iterable, epoch: int, steps: int) -> Iterable:
        return bar(batches, f'{config.activation}, epoch {epoch}/{config.activation_epochs}', steps)

    try:
        for epoch in adapt(student, deepcopy(inputs.model), images, config, shown, after):
            keeper.clear_up()
            state.training = vars(epoch)
            state.times[f'{config.activation} {EPOCH.format(epoch.number)}'] = round(epoch.seconds, 2)
            LOGGER.info(f'{config.activation}, epoch {epoch.number}: loss {epoch.loss:.4f}')
            keeper.keep(state)
            keeper.report(state)
    except UnfitState as e:
        raise unfit_state(keeper.folder, str(e)) from e
    return epoch.loss
