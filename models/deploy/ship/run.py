"""`qat.py ship`: run the plan, and decide."""

from __future__ import annotations

from dataclasses import replace

from models.deploy.ship.look import Facts, look
from models.deploy.ship.plan import LEARNT, SCORED, Plan
from models.deploy.ship.results import Results, conclude, read
from models.deploy.ship.steps import STAMPS, Failed, Runner, in_words
from models.deploy.ship.verdict import against_int8
from utils.qat.config.common import FolderConfig
from utils.qat.config.settings import typed_words
from utils.qat.config.ship import ShipConfig
from utils.qat.core.command import command, resumable
from utils.qat.core.distributed import world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, log_to
from utils.qat.core.run_folder import own_folder
from utils.qat.evaluation.metrics import finds_nothing, from_json

ALL, PARTLY = 'quantize', 'quantize-partly'  # runs of `quantize`: all blocks, and some given back to float
NO_CHIP = 'Times are those of {} on the CPU, not of a chip, and decide nothing: a chip computes only integers.'


def work(plan: Plan, runner: Runner) -> None:
    """Run the steps, and conclude. Raises QatError for a model that finds nothing in the images."""
    config, runner.ahead = plan.config, [*plan.first(), *plan.quantized(ALL)]
    scored, *rest = runner.ahead
    LOGGER.info(
        f'{len(runner.ahead)} steps, which take about {runner.expect(runner.ahead)}{without_epochs(plan.facts)}'
    )
    runner.run([scored])
    if nothing := finds_nothing(from_json(read(scored.result))):
        raise QatError(f'--weights {config.weights}, --data {config.data}: the float model {nothing}')
    runner.run(rest)
    found, chip = Results(plan, ALL), plan.target.integers
    least = 0.0 if chip else config.min_speedup
    reasons = against_int8(found.outcome, config.max_drop, least)
    tried = [NO_CHIP.format(plan.shown.title)] * chip
    if [*reasons] == ['accuracy'] and not chip:
        tried = [f'With all blocks in INT8: {found.outcome.speed}, and AP changes by {found.outcome.cost}.']
        LOGGER.info(f'{reasons["accuracy"]}: blocks return to float')
        sensitive = plan.sensitive()
        runner.ahead = [sensitive, *plan.quantized(PARTLY, sensitive=sensitive.result, max_drop=config.max_drop)]
        runner.run([*runner.ahead])
        found = Results(plan, PARTLY)
        reasons = against_int8(found.outcome, config.max_drop, least)
    conclude(plan, runner, found, reasons, tried)


def without_epochs(facts: Facts) -> str:
    """Say what fine-tuning would take where it is left out by default; else ''."""
    if 'epochs' not in facts.config.decided or facts.config.epochs:
        return ''
    steps = LEARNT * min(200 * facts.config.batch_size, facts.numbers['train']) + SCORED * facts.numbers['val']
    return f'. On a CPU nothing is fine-tuned: each epoch would take about {in_words(facts.seconds * steps)}'


def ship(config: ShipConfig) -> int:
    """Run `qat.py ship`. Returns the exit code: 0 for both verdicts, or that of the step that failed."""
    if world_size() > 1:
        raise QatError('qat.py ship: one process; start it without torchrun')
    facts = look(config)
    place = FolderConfig(project=config.project, name=config.name, exist_ok=config.exist_ok or config.resume)
    with own_folder(place) as folder:
        settings = vars(replace(facts.config, name=folder.name))
        again = command('qat.py', 'ship', *typed_words(settings, ShipConfig), '--resume')
        log_to(folder / 'log.txt')
        runner = Runner(folder, facts.digest, config.resume)
        with resumable(folder / STAMPS, again):
            try:
                work(Plan(facts, folder), runner)
            except Failed as e:
                [code] = e.args
                if code < 0:
                    raise QatError(
                        f'{runner.ahead[0].title}: ended by signal {-code}, which is 9 if memory ran out; go on with: {again}'
                    ) from e
                LOGGER.info(f'go on with: {again}')
                return code
    return 0
