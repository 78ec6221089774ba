"""A run of `quantize`, from its inputs to its report: calibrate, fine-tune, and score each model as it was saved."""

import time
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch.nn as nn

from models.quantize.calibration.ptq import FloatBlocks, calibrated, within_budget
from models.quantize.finetuning.loop import Epoch, UnfitState, finetune
from models.quantize.run.inputs import CalibrationInputs, Inputs, RunInputs
from models.quantize.run.keeper import Keeper
from models.quantize.run.scorer import StageScorer
from utils.qat.core.command import repeated, resumable
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.machine import describe, machine, versions
from utils.qat.core.run_folder import DELIVERED
from utils.qat.data.loaders import TrainingImages
from utils.qat.evaluation.score_tables import is_scored
from utils.qat.run.state import BEST, EPOCH, PTQ, STATE, State, unfit_state


def run(inputs: Inputs, of_run: RunInputs, folder: Path) -> dict[str, Any]:
    """Calibrate and fine-tune a float model, score each stage, and return the content of report.json.

    Results of finished stages stay in `folder`, PROJECT/NAME. With config.resume only the rest of the interrupted run is computed.
    """
    config = inputs.config
    keeper = Keeper(folder, config.weights, inputs.sha256, inputs.device)
    learnt_from = of_run.training or (of_run.calibration and of_run.calibration.adaptation)
    loaders = {**of_run.scored, **({'train': learnt_from.loader} if learnt_from else {})}
    images = {name: len(loader.dataset) for name, loader in loaders.items()}
    if config.resume:
        state = keeper.resume(images, inputs.images.data.file, describe(inputs.device))
    else:
        state = new_state(inputs, images)
        keeper.start(state)
    scorers = {split: StageScorer(inputs, state, split, loader, bar) for split, loader in of_run.scored.items()}
    scorer = scorers[state.chosen_on]

    with resumable(folder / STATE, repeated('qat.py', 'quantize', '--resume', folder)):
        if of_run.calibration and not state.ptq:
            run_ptq(inputs, of_run.calibration, state, scorer, keeper)
        of_run.calibration = None  # ends the processes that load its images
        if of_run.training:
            run_qat(inputs, of_run.training, state, scorer, keeper)
        if state.chosen_on != 'val':
            state.val = scored_on_val(state, scorers['val'], keeper)
        keeper.finish(state)
    return state.report()


def new_state(inputs: Inputs, images: dict[str, int]) -> State:
    """Describe a run that begins. images: 'val', 'held out' and 'train' → number of images."""
    return State(
        settings=inputs.config.plain(),
        versions=versions(),
        device=describe(inputs.device),
        machine=machine(inputs.device),
        classes={str(i): name for i, name in inputs.images.data.names.items()},
        images=images,
        resampled={name: {} for name in images if name != 'train'},
    )


def run_ptq(inputs: Inputs, calibration: CalibrationInputs, state: State, scorer: StageScorer, keeper: Keeper) -> None:
    """Run PTQ: score the float model, calibrate a quantized copy of it, save the copy and score it.

    With --activation the copy is made of what the float model becomes with other activation functions. More blocks than
    calibration.float_blocks stay in float if config.max_drop sets a budget for them.
    """
    config, blocks = inputs.config, calibration.float_blocks
    budget = None if blocks.ranks_activations else config.max_drop
    if (config.eval_origin or config.max_drop is not None) and not state.origin:
        state.origin = scorer.of_float()
    reference = inputs.model
    if config.exchanges:
        from models.quantize.run.adaptation import run_adaptation  # here, because few runs need it

        reference = run_adaptation(inputs, calibration, state, scorer, keeper)
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
    score = (lambda saved: scorer.of_quantized(saved, PTQ)) if config.eval_ptq else None
    state.ptq = keeper.save(model, 'ptq', state, score)
    if config.epochs:
        keeper.keep(state)
        keeper.report(state)
    keeper.copy(state.ptq['file'], DELIVERED)  # after the state: interrupted here it loses no calibration


def run_qat(inputs: Inputs, images: TrainingImages, state: State, scorer: StageScorer, keeper: Keeper) -> None:
    """Run QAT: fine-tune the calibrated model from the last finished epoch on, and save and score it after each epoch."""
    config = inputs.config
    student, teacher = keeper.load(state.ptq), deepcopy(inputs.model)
    after = Epoch(**state.training) if state.training else None
    images.epoch = after.number if after else 0

    def shown(batches: Iterable, epoch: int, steps: int) -> Iterable:
        return bar(batches, f'epoch {epoch}/{config.epochs}', steps)

    try:
        for epoch in finetune(student, teacher, images, config, shown, after):
            keeper.clear_up()  # not earlier: only now the resumed state has proved valid
            if epoch is not after:
                state.training = vars(epoch)
                keeper.keep(state)  # before the score, so that an interrupted score loses no epoch
            finish_epoch(student, epoch, state, scorer, keeper)
    except UnfitState as e:
        raise unfit_state(keeper.folder, str(e)) from e


def finish_epoch(student: nn.Module, epoch: Epoch, state: State, scorer: StageScorer, keeper: Keeper) -> None:
    """Save, score and report the model as an epoch left it."""
    name = EPOCH.format(epoch.number)
    result = keeper.save(student, f'qat_ep_{epoch.number}', state, lambda saved: scorer.of_quantized(saved, name))
    state.epochs.append({'epoch': epoch.number, 'loss': epoch.loss, **result})
    state.times[f'fine-tune {name}'] = round(epoch.seconds, 2)
    best = state.best
    if best and (best['epoch'] == epoch.number or epoch.number == 1):
        for copy in (state.best_file, DELIVERED):
            keeper.copy(best['file'], copy)
    keeper.report(state)


def scored_on_val(state: State, scorer: StageScorer, keeper: Keeper) -> dict[str, Any]:
    """Score float, PTQ and best on val, after held-out images have chosen the best. Skip models without a score there."""
    scored = {'origin': scorer.of_float()} if state.origin else {}
    report = state.report()
    for key, name in (('ptq', PTQ), ('best', BEST)):
        if is_scored(report[key]):
            scored[key] = scorer.of_quantized(keeper.load(report[key]), name)
    return scored
