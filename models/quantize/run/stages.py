"""The stages of a run of `quantize`: exchange activation functions, calibrate, fine-tune, and score each model as it was saved."""

import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch.nn as nn

from models.quantize.activations import chosen_activations, exchanged, exchanges, finished, restored
from models.quantize.calibration.ptq import FloatBlocks, calibrated, within_budget
from models.quantize.finetuning.loop import Epoch, UnfitState, adapt, finetune
from models.quantize.run.inputs import CalibrationInputs, Inputs
from models.quantize.run.keeper import Keeper
from models.quantize.run.scorer import StageScorer
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.run_folder import DELIVERED
from utils.qat.data.loaders import TrainingImages
from utils.qat.evaluation.score_tables import is_scored
from utils.qat.run.state import ADAPTED, BEST, EPOCH, PTQ, unfit_state


def run_adaptation(inputs: Inputs, calibration: CalibrationInputs, scorer: StageScorer, keeper: Keeper) -> nn.Module:
    """Exchange activation functions, teach the float model those that it has to learn, save and score it, and return it.

    With a summary that ranks them as many stay as config.max_drop needs before the model learns.
    """
    config, blocks, state = inputs.config, calibration.float_blocks, keeper.state
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
    loss = None
    if calibration.adaptation:
        images, what = calibration.adaptation, f'{config.activation}, epoch'
        learn = partial(adapt, student, deepcopy(inputs.model), images, config)
        for epoch in kept_epochs(learn, images, keeper, what, config.activation_epochs):
            loss = epoch.loss
            state.times[f'{config.activation} {EPOCH.format(epoch.number)}'] = round(epoch.seconds, 2)
            LOGGER.info(f'{what} {epoch.number}: loss {loss:.4f}')
            keeper.report()
    result = keeper.save(
        finished(student).eval(), f'float_{config.activation}', ADAPTED, scorer if config.eval_ptq else None
    )
    state.adapted, state.training = {'loss': loss, **result}, None
    keeper.keep()
    return keeper.load(state.adapted)


def run_ptq(inputs: Inputs, calibration: CalibrationInputs, scorer: StageScorer, keeper: Keeper) -> None:
    """Run PTQ: score the float model, calibrate a quantized copy of it, save the copy and score it.

    With --activation the copy is made of what the float model becomes with other activation functions. More blocks than
    calibration.float_blocks stay in float if config.max_drop sets a budget for them.
    """
    config, blocks, state = inputs.config, calibration.float_blocks, keeper.state
    budget = None if blocks.ranks_activations else config.max_drop
    if (config.eval_origin or config.max_drop is not None) and not state.origin:
        state.origin = scorer.of_float()
    reference = run_adaptation(inputs, calibration, scorer, keeper) if config.exchanges else inputs.model
    start = time.perf_counter()

    def attempt(tried: FloatBlocks) -> tuple[float, tuple[nn.Module, dict[str, Any]]]:
        model, found = calibrated(reference, calibration.images, config, bar, tried.paths)
        return scorer.points_lost(model, config.max_drop, tried is calibration.float_blocks), (model, found)

    if budget is None:
        model, state.calibration = calibrated(reference, calibration.images, config, bar, blocks.paths)
    else:
        blocks, (model, state.calibration) = within_budget(blocks, budget, attempt)
    state.kept_float = blocks.paths
    state.times['calibrate'] = round(time.perf_counter() - start, 2)
    LOGGER.info(f'calibration took {state.times["calibrate"]:.1f} s')
    state.ptq = keeper.save(model, 'ptq', PTQ, scorer if config.eval_ptq else None)
    if config.epochs:
        keeper.keep()
        keeper.report()
    keeper.copy(state.ptq['file'], DELIVERED)  # after the state: interrupted here it loses no calibration


def run_qat(inputs: Inputs, images: TrainingImages, scorer: StageScorer, keeper: Keeper) -> None:
    """Run QAT: fine-tune the calibrated model, and save, score and report it after each epoch."""
    config, state = inputs.config, keeper.state
    student = keeper.load(state.ptq)
    learn = partial(finetune, student, deepcopy(inputs.model), images, config)
    for epoch in kept_epochs(learn, images, keeper, 'epoch', config.epochs):
        name = EPOCH.format(epoch.number)
        result = keeper.save(student, f'qat_ep_{epoch.number}', name, scorer)
        state.epochs.append({'epoch': epoch.number, 'loss': epoch.loss, **result})
        state.times[f'fine-tune {name}'] = round(epoch.seconds, 2)
        best = state.best
        if best and (best['epoch'] == epoch.number or epoch.number == 1):
            for copy in (state.best_file, DELIVERED):
                keeper.copy(best['file'], copy)
        keeper.report()


def kept_epochs(
    learn: Callable[..., Iterator[Epoch]], images: TrainingImages, keeper: Keeper, what: str, number: int
) -> Iterator[Epoch]:
    """Yield the epochs of a fine-tuning from the last finished one on, each after the state has it.

    `learn` takes the last arguments of loop.finetune; `what` and the `number` of epochs are for the progress bar.
    """
    state = keeper.state
    after = Epoch(**state.training) if state.training else None
    images.epoch = after.number if after else 0

    def shown(batches: Iterable, epoch: int, steps: int) -> Iterable:
        return bar(batches, f'{what} {epoch}/{number}', steps)

    try:
        for epoch in learn(shown, after):
            keeper.clear_up()  # not earlier: only now the resumed state has proved valid
            if epoch is not after:
                state.training = vars(epoch)
                keeper.keep()  # before the score, so that an interrupted score loses no epoch
            yield epoch
    except UnfitState as e:
        raise unfit_state(keeper.folder, str(e)) from e


def score_on_val(scorer: StageScorer, keeper: Keeper) -> None:
    """Score float, PTQ and best on val, after held-out images have chosen the best. Skip models without a score there."""
    state = keeper.state
    scored = {'origin': scorer.of_float()} if state.origin else {}
    report = state.report()
    for key, name in (('ptq', PTQ), ('best', BEST)):
        if is_scored(report[key]):
            scored[key] = scorer.of_quantized(keeper.load(report[key]), name)
    state.val = scored
