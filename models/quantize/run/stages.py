"""The stages of a run of `quantize`, in a straight line: score the float model, exchange its activation functions, calibrate, fine-tune.

Each model is saved, scored as it was saved, and gets the name that carries its score.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

from models.quantize.activations import exchanged, exchanges, finish_exchange, is_exchanged, restore
from models.quantize.adapt import RATE, adapt
from models.quantize.calibration.ptq import calibrated
from models.quantize.finetuning.loop import Epoch, Learning, finetune
from models.quantize.finetuning.training_step import UnfitState
from models.quantize.kept import Kept, within_budget
from models.quantize.run.run import UNSCORED, Run, Work
from models.quantize.run.scorer import change_by, score, score_float
from utils.qat.config.qat import LEARNT, QuantizeConfig
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import in_words
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Images, TrainingImages
from utils.qat.evaluation.interval import Change, boxes_and_masks
from utils.qat.run.state import ADAPTED, BEST, EPOCH, PTQ, Calibration, Stage, unfit_state


def run_stages(run: Run, plan: QuantizeConfig, work: Work) -> None:
    """Do what is left of a run, and write its last report."""
    state = run.state
    if work.calibration and not state.ptq:
        if (plan.eval_origin or plan.max_drop is not None) and not state.origin:
            state.origin = score_float(run, state.chosen_on)
        reference = adapted(run, plan, work) if plan.exchanges else run.model
        calibrate(run, reference, work.calibration, plan, work.float_blocks)
    work.calibration = work.adaptation = None  # ends the processes that load their images
    if work.training:
        fine_tune(run, work.training, fine_tuning(plan))
    if state.chosen_on != 'val':
        score_on_val(run)
    run.finish()


def fine_tuning(plan: QuantizeConfig) -> Learning:
    """Return how the calibrated model learns; one with ReLUs cannot reproduce every layer, so its boxes count too."""
    assert plan.lr and plan.task_loss is not None and plan.amp and plan.compile is not None
    rest = plan.task_loss, plan.amp, plan.compile, plan.supervision_stride, plan.activation in LEARNT, plan.reduce_range
    return Learning(plan.epochs, plan.iters, plan.lr, *rest)


def adaptation(plan: QuantizeConfig) -> Learning:
    """Return how the float model learns its new activation functions."""
    return replace(fine_tuning(plan), epochs=plan.activation_epochs, rate=RATE, label_weight=0.0)


def keep_model(run: Run, model: Network, start: str, name: str, scoring: bool = True) -> Stage:
    """Save a model, score it unless `scoring` is off, and name its file: `start`, its score, and the name of the float model."""
    with run.saved(model):
        stage = score(run, run.load(UNSCORED), name, run.state.chosen_on) if scoring else Stage()
        stage.file = run.named(start, stage.metrics)
    return stage


def adapted(run: Run, plan: QuantizeConfig, work: Work) -> Network:
    """Exchange activation functions, teach the float model those that it has to learn, save and score it, and return it.

    With a summary that ranks them as many stay as plan.max_drop needs before the model learns; without one it learns until plan.max_drop
    is kept.
    """
    kept, state, activation = work.float_functions, run.state, plan.activation
    budget = None if plan.sensitive else plan.max_drop
    if state.adapted:
        return run.load(state.adapted.file)
    student = exchanged(run.model, activation, kept.exchanged)

    def trial(tried: Kept) -> Network:
        return finish_exchange(restore(deepcopy(student), tried.paths))

    if not state.training:
        if kept.summary and plan.max_drop is not None:
            images = state.images[state.chosen_on]
            kept, _ = within_budget(kept, plan.max_drop, images, trial, partial(change_by, run))
        state.kept_activations = kept.paths
    student = restore(student, state.kept_activations)
    LOGGER.info(f'{len(exchanges(student))} activation functions become {activation}')
    loss = None
    if work.adaptation:
        what, how = f'{activation}, epoch', adaptation(plan)
        learn = partial(adapt, student, deepcopy(run.model), work.adaptation, how)
        for epoch in kept_epochs(learn, work.adaptation, run, what, how.epochs):
            loss = epoch.loss
            state.times[f'{activation} {EPOCH.format(epoch.number)}'] = round(epoch.seconds, 2)
            left = how.epochs - epoch.number
            time_left = f'; {left} more take about {in_words(left * epoch.seconds)}' * bool(left)
            LOGGER.info(f'{what} {epoch.number}: loss {loss:.4f}{time_left}')
            run.report()
            if (
                left
                and budget is not None
                and is_exchanged(student)
                and keeps(change_by(run, finish_exchange(deepcopy(student)).eval()), budget)
            ):
                LOGGER.info(f'--max-drop {budget:g}: kept, so {left} epochs are left out')
                break
    stage = keep_model(run, finish_exchange(student).eval(), f'float_{activation}', ADAPTED, plan.eval_ptq)
    if budget is not None and stage.against_float and not keeps(stage.against_float, budget):
        LOGGER.warning(
            f'--max-drop {budget:g}: not kept; give more --activation-epochs, or let some layers keep SiLU: docs/activations.md'
        )
    stage.loss, state.adapted, state.training = loss, stage, None
    run.keep()
    return run.load(stage.file)


def keeps(change: Change, budget: float) -> bool:
    """Tell whether a change loses at most `budget` points of AP, of boxes and of masks."""
    return all(-100 * part['difference'] <= budget for part in boxes_and_masks(change))


def calibrate(run: Run, reference: Network, images: Images, plan: QuantizeConfig, kept: Kept) -> None:
    """Run PTQ: calibrate a quantized copy of a float model on images, save and score it.

    More blocks than `kept` stay in float if plan.max_drop sets a budget for them.
    """
    state, start = run.state, time.perf_counter()

    def quantized(tried: Kept) -> tuple[Network, Calibration]:
        return calibrated(reference, images, plan, bar, tried.paths)

    if kept.summary and plan.max_drop is not None:
        number = state.images[state.chosen_on]
        kept, made = within_budget(kept, plan.max_drop, number, quantized, lambda made: change_by(run, made[0]))
    else:
        made = quantized(kept)
    model, state.calibration = made
    state.kept_float = kept.paths
    state.times['calibrate'] = round(time.perf_counter() - start, 2)
    LOGGER.info(f'calibration took {state.times["calibrate"]:.1f} s')
    state.ptq = keep_model(run, model, 'ptq', PTQ, plan.eval_ptq)
    if plan.epochs:
        run.keep()
        run.report()
    run.copy(state.ptq.file, DELIVERED)  # after the state: interrupted here it loses no calibration


def fine_tune(run: Run, images: TrainingImages, how: Learning) -> None:
    """Run QAT: fine-tune the calibrated model, and save, score and report it after each epoch."""
    state = run.state
    assert state.ptq  # the calibrated model
    student = run.load(state.ptq.file)
    learn = partial(finetune, student, deepcopy(run.model), images, how)
    for epoch in kept_epochs(learn, images, run, 'epoch', how.epochs):
        name = EPOCH.format(epoch.number)
        stage = keep_model(run, student, f'qat_ep_{epoch.number}', name)
        stage.epoch, stage.loss = epoch.number, epoch.loss
        state.epochs.append(stage)
        state.times[f'fine-tune {name}'] = round(epoch.seconds, 2)
        best = state.best
        if best and (best.epoch == epoch.number or epoch.number == 1):
            run.copy(best.file, state.best_file, DELIVERED)
        run.report()


def kept_epochs(
    learn: Callable[..., Iterator[Epoch]], images: TrainingImages, run: Run, what: str, number: int
) -> Iterator[Epoch]:
    """Yield the epochs of a fine-tuning from the last finished one on, each after the state has it.

    `learn` takes the last arguments of loop.finetune; `what` and the `number` of epochs are for the progress bar.
    """
    state = run.state
    after = Epoch(**state.training) if state.training else None
    images.epoch = after.number if after else 0

    def shown(batches: Iterable, epoch: int, steps: int) -> Iterable:
        return bar(batches, f'{what} {epoch}/{number}', steps)

    try:
        for epoch in learn(shown, after):
            run.clear_up()  # not earlier: only now the resumed state has proved valid
            if epoch is not after:
                state.training = vars(epoch)
                run.keep()  # before the score, so that an interrupted score loses no epoch
            yield epoch
    except UnfitState as e:
        raise unfit_state(run.folder, str(e)) from e


def score_on_val(run: Run) -> None:
    """Score each kind of model on val, after held-out images have chosen the best. Skip models without a score there."""
    state = run.state
    scored = {'origin': score_float(run, 'val')} if state.origin else {}
    for key, stage, name in (('adapted', state.adapted, ADAPTED), ('ptq', state.ptq, PTQ), ('best', state.best, BEST)):
        if stage and stage.metrics:
            scored[key] = score(run, run.load(stage.file), name, 'val')
    state.val = scored
