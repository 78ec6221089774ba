"""`qat.py ship`: run the plan, and decide."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from models.deploy.ship.look import look
from models.deploy.ship.plan import Plan, Step
from models.deploy.ship.results import Results, conclude
from models.deploy.ship.steps import STAMPS, Runner, last_run
from utils.qat.config.settings import command_words
from utils.qat.config.ship import ShipConfig
from utils.qat.core.command import command, resumable
from utils.qat.core.distributed import world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, log_to
from utils.qat.core.run_folder import own_folder
from utils.qat.core.text import in_words
from utils.qat.evaluation.interval import within_interval
from utils.qat.evaluation.metrics import finds_nothing, from_json
from utils.qat.untrusted.json_schema import read_json

# Runs of `quantize`: the first, one without other activation functions, and one with some blocks in float
ALL, SILU, PARTLY = 'quantize', 'quantize-silu', 'quantize-partly'
NO_CHIP = 'Times are those of {} on the CPU, not of a chip, and decide nothing: a chip computes only integers.'


def work(plan: Plan, runner: Runner) -> None:
    """Run the steps, and conclude. Raises QatError for a model that finds nothing in the images."""
    config, chip = plan.config, plan.target.integers
    scored, *rest = steps = [*plan.first(), *plan.quantized(ALL)]
    left = sum(not runner.has(step) for step in steps)
    LOGGER.info(f'{len(steps)} steps; {left} to do' + f', about {runner.expect(steps)}' * bool(left))
    if 'epochs' in config.decided and not config.epochs:
        LOGGER.info(f'without fine-tuning, of which an epoch would take about {in_words(plan.epoch())} on this CPU')
    runner.run([scored], rest)
    if nothing := finds_nothing(from_json(read_json(scored.files[0]))):
        raise QatError(f'--weights {config.weights}, --data {config.data}: the float model {nothing}')
    runner.run(rest)
    first = Results(plan, ALL)
    runs = [first]

    def once_more(plan: Plan, run: str, *before: Step, **how: Any) -> None:
        runner.run([*before, *plan.quantized(run, **how)])
        runs.append(Results(plan, run))

    tried = [NO_CHIP.format(plan.shown.title)] * chip
    loses = [*first.reasons] == ['accuracy'] and not chip
    if loses and within_interval(first.outcome.against_float):
        tried = ['No block returns to float for it: the loss lies within its confidence interval.']
    elif loses:
        how = 'all blocks in INT8' + f' and --activation {config.activation}' * (config.activation != 'keep')
        tried = [f'With {how} it {first.outcome}.']
        if 'activation' in config.decided and config.activation != 'keep':
            LOGGER.info(f'{first.reasons["accuracy"]}: once more with SiLU')
            once_more(replace(plan, config=replace(config, activation='keep')), SILU)
            tried += [f'With SiLU it {runs[-1].outcome}.'] * bool(runs[-1].reasons)
        if runs[-1].reasons:
            LOGGER.info(f'{tried[-1]} Blocks return to float.')
            blocks = plan.sensitive(first.taught)
            once_more(plan, PARTLY, blocks, taught=first.taught, sensitive=blocks.files[0], max_drop=config.max_drop)
    conclude(runs, runner, tried)


def ship(config: ShipConfig) -> None:
    """Run `qat.py ship`, whose exit code is 0 for both verdicts."""
    if world_size() > 1:
        raise QatError('qat.py ship: one process; start it without torchrun')
    plan = look(config)
    path = config.project / config.name
    last, taken = last_run(path, plan.digest) if config.resume else (None, {})
    if config.resume and not last and path.exists():
        LOGGER.info(
            f'--resume: no run of these weights, images and labels for this engine in {path}, so a new one begins'
        )
    with own_folder(SimpleNamespace(**{**vars(config), 'resume': last})) as folder:
        settings = {**vars(plan.config), 'name': folder.name}
        again = command('qat.py', 'ship', *command_words(settings, ShipConfig), '--resume')
        log_to(folder / 'log.txt')
        with resumable(folder / STAMPS, again):
            work(replace(plan, folder=folder), Runner(folder, plan.digest, taken, again))
