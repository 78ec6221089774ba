"""The stages of a run of `quantize`, in a straight line: score the float model, exchange its activation functions, calibrate, fine-tune.

Each model is saved, scored as it was saved, and gets the name that carries its score.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from utils.qat.core.distributed import on_first
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.run_folder import DELIVERED
from utils.qat.core.text import counted, in_words
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

    It learns until plan.max_drop is kept. If it is not, and a summary ranks the functions, more and more of them stay, and it learns from the start.
    """
    kept, state, activation = work.float_functions, run.state, plan.activation
    budget = plan.max_drop if kept.summary or not plan.sensitive else None
    if state.adapted:
        return run.load(state.adapted.file)

    def student(stay: Sequence[str]) -> Network:
        return restore(exchanged(run.model, activation, kept.exchanged), stay)

    if kept.summary and budget is not None and not work.adaptation:
        images = state.images[state.chosen_on]
        kept, _ = within_budget(
            kept, budget, images, lambda tried: finish_exchange(student(tried.paths)), partial(change_by, run)
        )
        budget = None  # it is kept
    state.kept_activations = state.kept_activations or kept.paths  # a resumed run has some
    order = kept.by_distortion_per_flop()
    while True:
        model = student(state.kept_activations)
        LOGGER.info(f'{len(exchanges(model))} activation functions become {activation}')
        staying = sum(set(unit['twins']) <= set(state.kept_activations) for unit in order)
        what = activation + f' without {counted(staying, "unit")}' * bool(staying)
        loss = learn(run, plan, work.adaptation, model, what, budget) if work.adaptation else None
        scoring = plan.eval_ptq or budget is not None
        stage = keep_model(run, finish_exchange(model).eval(), f'float_{activation}', ADAPTED, scoring)
        stage.loss, state.training = loss, None
        more = max(1, 2 * staying)
        if budget is None or not stage.against_float or keeps(stage.against_float, budget):
            break
        if more >= len(order):
            others = (
                f', or --sensitive with the summary of `sensitive --activation {activation}`: then some keep theirs'
            )
            LOGGER.warning(f'--max-drop {budget:g}: not kept; give more --activation-epochs{others * (not order)}')
            break
        state.kept_activations = kept.adding(order[:more]).paths
        on_first((run.folder / stage.file).unlink)()
        del state.resampled[state.chosen_on][ADAPTED]  # what is learnt anew is compared with the float model too
        run.keep()
    state.adapted = stage
    run.keep()
    return run.load(stage.file)


def learn(
    run: Run, plan: QuantizeConfig, images: TrainingImages, student: Network, what: str, budget: float | None
) -> float:
    """Teach an exchanged float model in place, until it keeps the budget in points of AP; None = all epochs. Returns the last loss.

    `what` it learns is for the log.
    """
    how, state, loss = adaptation(plan), run.state, 0.0
    teach = partial(adapt, student, deepcopy(run.model), images, how)
    for epoch in kept_epochs(teach, images, run, f'{what}, epoch', how.epochs):
        loss = epoch.loss
        state.times[f'{what} {EPOCH.format(epoch.number)}'] = round(epoch.seconds, 2)
        left = how.epochs - epoch.number
        time_left = f'; {left} more take about {in_words(left * epoch.seconds)}' * bool(left)
        LOGGER.info(f'{what}, epoch {epoch.number}: loss {loss:.4f}{time_left}')
        run.report()
        if left and budget is not None and is_exchanged(student):
            trial = finish_exchange(deepcopy(student)).eval()
            if keeps(change_by(run, trial), budget):
                LOGGER.info(f'--max-drop {budget:g}: kept, so the last {counted(left, "epoch")} can be left out')
                break
    return loss


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
