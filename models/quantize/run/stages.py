"""A run of `quantize`, from its inputs to its report: calibrate, fine-tune, and score each model as it was saved."""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.utils.data import DataLoader

from models.quantize.activations import chosen_activations, exchanged, exchanges, finished, restored
from models.quantize.calibration.ptq import FloatBlocks, calibrated, within_budget
from models.quantize.finetuning.adapt import adapt
from models.quantize.finetuning.loop import Epoch, UnfitState, finetune
from models.quantize.head_outputs import ComparedModel
from models.quantize.run.inputs import Inputs, RunInputs
from models.quantize.run.keeper import Keeper
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.command import repeated, resumable
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.machine import describe, machine, versions
from utils.qat.core.run_folder import DELIVERED
from utils.qat.data.loaders import Images, TrainingImages
from utils.qat.evaluation.chance import boxes_and_masks, difference, in_words, points_lost
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.score_tables import is_scored, merit_title, score_cells, score_titles
from utils.qat.run.state import ADAPTED, BEST, EPOCH, FLOAT, PTQ, State, unfit_state


class StageScorer:
    """Scores models as plain metrics, with 'against_float' once the float model is scored.

    It scores on the images `split`, a key of state.resampled, in the batches of `loader` (loaders.val_loader). `state` gets the
    times, and the AP on resamples of each model. `progress` wraps an iterable, with a text, such as log.bar.
    """

    def __init__(
        self, inputs: Inputs, state: State, split: str, loader: DataLoader, progress: Callable[..., Iterable]
    ) -> None:
        self.inputs, self.loader, self.progress = inputs, loader, progress
        self.annotations = inputs.data.annotations if split == 'val' else None
        self.suffix = '' if split == state.chosen_on else f', {split}'  # of names in the log
        self.resampled, self.times = state.resampled[split], state.times

    def of_float(self) -> dict[str, Any]:
        """Score the float model."""
        return self._score(TorchModel(self.inputs.model), FLOAT)

    def of_trial(self, model: nn.Module) -> dict[str, Any]:
        """Score a quantized model that may not be kept."""
        return self._score(TorchModel(model), 'trial')

    def of_quantized(self, model: nn.Module, name: str) -> dict[str, Any]:
        """Score a quantized model; 'sqnr' is the SQNR of each part of the head's outputs in dB."""
        compared = ComparedModel(model, self.inputs.model)
        metrics = self._score(compared, name)
        metrics.update(compared.distance())
        metrics['sqnr'] = {part: round(value, 3) for part, value in compared.sqnr().items()}
        if 'divergence' in metrics:
            same, apart = metrics['agreement'], metrics['divergence']
            LOGGER.info(
                f'{"":<14} the same class as float for {same:.2%} of the images, divergence of the scores {apart:.5f}'
            )
        sqnr = ', '.join(f'{part} {value:.2f} dB' for part, value in metrics['sqnr'].items())
        LOGGER.debug(f'{"":<14} SQNR of the head: {sqnr}')
        return metrics

    def _score(self, predict: TorchModel, name: str) -> dict[str, Any]:
        start, text = time.perf_counter(), f'{name}{self.suffix}'
        metrics = evaluate(
            predict,
            self.loader,
            self.inputs.data.names,
            self.inputs.device,
            annotations=self.annotations,
            progress=lambda it: self.progress(it, f'evaluating {text}'),
            resample=True,
        )
        plain, masks = metrics.plain(), f'  mask AP {metrics.mask["ap"]:.4f}' if metrics.mask else ''
        shown = '  '.join(
            f'{title} {value}' for title, value in zip(score_titles(plain)[0], score_cells(plain)) if value != '-'
        )
        self.times[f'evaluate {text}'] = seconds = round(time.perf_counter() - start, 2)
        LOGGER.info(f'{text:<14} {shown}{masks}  ({seconds:.1f} s)')
        self.resampled[name] = metrics.resampled
        if name == FLOAT or FLOAT not in self.resampled:
            return plain
        against = difference(self.resampled[FLOAT], metrics.resampled)
        LOGGER.info(f'{"":<14} against float: {in_words(against, merit_title(plain))}')
        return {**plain, 'against_float': against}


def run(inputs: Inputs, of_run: RunInputs, folder: Path) -> dict[str, Any]:
    """Calibrate and fine-tune a float model, score each stage, and return the content of report.json.

    Results of finished stages stay in `folder`, PROJECT/NAME. With config.resume only the rest of the interrupted run is computed.
    """
    config = inputs.config
    keeper = Keeper(folder, config.weights, inputs.sha256, inputs.device)
    learnt_from = of_run.training or of_run.adaptation
    loaders = {**of_run.scored, **({'train': learnt_from.loader} if learnt_from else {})}
    images = {name: len(loader.dataset) for name, loader in loaders.items()}
    if config.resume:
        state = keeper.resume(images, inputs.data.file, describe(inputs.device))
    else:
        state = new_state(inputs, images)
        keeper.start(state)
    scorers = {split: StageScorer(inputs, state, split, loader, bar) for split, loader in of_run.scored.items()}
    scorer = scorers[state.chosen_on]

    again = repeated('qat.py', 'quantize', '--resume', folder)
    calibrates = bool(of_run.calibration and of_run.float_blocks) and not state.ptq
    if calibrates and of_run.calibration and of_run.float_blocks:
        model = inputs.model
        if of_run.adaptation:
            with resumable(again):
                model = adapt_activations(
                    inputs, of_run.calibration, of_run.adaptation, of_run.float_blocks, state, scorer, keeper
                )
        run_ptq(inputs, model, of_run.calibration, of_run.float_blocks, state, scorer, keeper)
    of_run.calibration = of_run.adaptation = None  # ends the processes that load their images
    with resumable(again) if of_run.training else nullcontext():
        if calibrates:
            keeper.copy(state.ptq['file'], DELIVERED)
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
        classes={str(i): name for i, name in inputs.data.names.items()},
        images=images,
        resampled={name: {} for name in images if name != 'train'},
    )


def adapt_activations(
    inputs: Inputs,
    calibration: Images,
    images: TrainingImages,
    float_blocks: FloatBlocks,
    state: State,
    scorer: StageScorer,
    keeper: Keeper,
) -> nn.Module:
    """Exchange activation functions, teach the float model to work with them, save and score it, and return it.

    With a summary that ranks them as many stay as config.max_drop needs before the model learns. Goes on from the last finished
    epoch.
    """
    config, budget = inputs.config, inputs.config.max_drop
    if state.adapted:
        return keeper.load(state.adapted)
    if (config.eval_origin or budget is not None) and not state.origin:
        state.origin = scorer.of_float()
    paths = chosen_activations(inputs.model, config)
    batches = bar(calibration, 'fitting activation functions')
    student = exchanged(inputs.model, config.activation, paths, batches)

    def attempt(blocks: FloatBlocks) -> tuple[float, Any]:
        trial = finished(restored(deepcopy(student), blocks.activations))
        return lost_by(trial, scorer, state, budget or 0.0, blocks is float_blocks), None

    if not state.training:
        if float_blocks.ranks_activations and budget is not None:
            float_blocks, _ = within_budget(float_blocks, budget, attempt)
        state.kept_activations = float_blocks.activations
    student = restored(student, state.kept_activations)
    LOGGER.info(f'{len(exchanges(student))} activation functions become {config.activation}')
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
    score = (lambda saved: scorer.of_quantized(saved, ADAPTED)) if config.eval_ptq else None
    result = keeper.save(finished(student).eval(), f'float_{config.activation}', state, score)
    state.adapted, state.training = {'loss': epoch.loss, **result}, None
    keeper.keep(state)
    return keeper.load(state.adapted)


def lost_by(trial: nn.Module, scorer: StageScorer, state: State, budget: float, first: bool) -> float:
    """Score a trial model: the points that it loses beyond chance. Warn at the `first` one if the budget is below chance."""
    against = scorer.of_trial(trial)['against_float']
    chance = 100 * max(part['chance'] for part in boxes_and_masks(against))
    if chance > budget and first:
        LOGGER.warning(
            f'--max-drop {budget}: less than chance, which is {chance:.2f} points on these '
            f'{state.images[state.chosen_on]} images: no layer is left in float for a loss within chance; to keep '
            'so small a budget use more images (val in --data)'
        )
    LOGGER.info(f'{points_lost(against):.2f} points lost beyond chance, at most {budget} allowed')
    return points_lost(against)


def run_ptq(
    inputs: Inputs,
    reference: nn.Module,
    images: Images,
    float_blocks: FloatBlocks,
    state: State,
    scorer: StageScorer,
    keeper: Keeper,
) -> None:
    """Run PTQ: score the float model, calibrate a quantized copy of `reference`, save the copy and score it.

    reference: the float model, or what it became with other activation functions. float_blocks: stay in float; more blocks do if
    config.max_drop sets a budget for them.
    """
    config, budget = inputs.config, None if float_blocks.ranks_activations else inputs.config.max_drop
    if (config.eval_origin or budget is not None) and not state.origin:
        state.origin = scorer.of_float()
    start = time.perf_counter()

    def attempt(blocks: FloatBlocks) -> tuple[float, tuple[nn.Module, dict[str, Any]]]:
        model, found = calibrated(reference, images, config, bar, blocks.paths)
        return lost_by(model, scorer, state, budget or 0.0, blocks is float_blocks), (model, found)

    if budget is None:
        model, state.calibration = calibrated(reference, images, config, bar, float_blocks.paths)
    else:
        float_blocks, (model, state.calibration) = within_budget(float_blocks, budget, attempt)
    state.kept_float = float_blocks.paths
    state.times['calibrate'] = round(time.perf_counter() - start, 2)
    LOGGER.info(f'calibration took {state.times["calibrate"]:.1f} s')
    score = (lambda saved: scorer.of_quantized(saved, PTQ)) if config.eval_ptq else None
    state.ptq = keeper.save(model, 'ptq', state, score)
    if config.epochs:
        keeper.keep(state)
        keeper.report(state)


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
