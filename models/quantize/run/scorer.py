"""Scores of the models of a `quantize` run, each compared with the float model, on the same images."""

import time

import torch

from models.quantize.calibration.divergence import HeadOutputs, decibels, energies
from models.quantize.quantizers import RoundedOnce
from models.quantize.run.run import Run
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.distributed import all_reduce
from utils.qat.core.log import LOGGER, bar
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import channels_last
from utils.qat.evaluation.classes import agreement, divergence
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.interval import Change, difference, in_words
from utils.qat.evaluation.metrics import finds_nothing
from utils.qat.evaluation.score_tables import Columns
from utils.qat.run.state import ADAPTED, FLOAT, Stage

COMPARED = 64  # images of a process, at least; batches are whole. Chance moves SQNR far less than AP


class ComparedModel(TorchModel):
    """A quantized model that compares the outputs of its head with the float model's while it predicts.

    With a detector it compares only the first COMPARED images, because the float model would otherwise take a large part of
    every evaluation. With a classifier it compares all images.
    """

    def __init__(self, model: Network, reference: Network) -> None:
        super().__init__(model, context=RoundedOnce(model))
        self.reference = reference.eval()
        self.compared = 0  # images that were compared
        self.sums = torch.zeros(len(self.task.parts), 2, dtype=torch.float64, device=self.device)
        self.apart = torch.zeros(3, dtype=torch.float64, device=self.device)  # agreeing images, divergence, images

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict as a TorchModel does, and add up the energies. `images`: FP32 [B, 3, H, W] in 0..1."""
        output = self.outputs(images)
        if self.compared >= COMPARED and self.task.boxes:
            return self.task.predictions(output)
        self.compared += len(images)
        wanted = self.reference(channels_last(images))
        self.sums += energies(HeadOutputs.of(output), HeadOutputs.of(wanted), self.nc)
        if isinstance(output, torch.Tensor):  # of a classifier
            both = torch.stack((agreement(output, wanted), divergence(output, wanted)))
            self.apart += torch.cat((both.sum(1), both.new_tensor([len(images)])))
        return self.task.predictions(output)

    def distance(self) -> dict[str, float]:
        """Compute classes.distance of a classifier from the float model over all images so far; {} for a detector."""
        if self.task.boxes:
            return {}
        same, apart, images = all_reduce(self.apart.clone()).tolist()
        return {'agreement': same / images, 'divergence': apart / images}

    def sqnr(self) -> dict[str, float]:
        """Compute the SQNR of each part in dB, over all images compared so far, by all processes of a torchrun."""
        return decibels(all_reduce(self.sums.clone()), self.task.parts)


def score_float(run: Run, split: str) -> Stage:
    """Score the float model on the images `split`, a key of run.scored."""
    stage = _scored(run, TorchModel(run.model), FLOAT, split)
    if nothing := finds_nothing(stage.metrics):
        LOGGER.warning(f'the float model {nothing}')
    return stage


def score(run: Run, model: Network, name: str, split: str) -> Stage:
    """Score a model that was made of the float model: also its distance from it, in the outputs of the head."""
    compared = ComparedModel(model, run.model)
    stage = _scored(run, compared, name, split)
    stage.sqnr = {part: round(value, 3) for part, value in compared.sqnr().items()}
    if distance := compared.distance():
        vars(stage.metrics).update(distance)
        LOGGER.info(
            f'{"":<14} the same class as float for {distance["agreement"]:.2%} of the images, '
            f'divergence of the scores {distance["divergence"]:.5f}'
        )
    sqnr = ', '.join(f'{part} {value:.2f} dB' for part, value in stage.sqnr.items())
    LOGGER.debug(f'{"":<14} SQNR of the head: {sqnr}')
    return stage


def change_by(run: Run, trial: Network) -> Change:
    """Score a trial model: INT8 against what it quantizes, or a float model with other activation functions against the float model."""
    _scored(run, TorchModel(trial), 'trial', run.state.chosen_on)
    resampled = run.state.resampled[run.state.chosen_on]
    return difference(resampled.get(ADAPTED, resampled[FLOAT]), resampled['trial'])


def _scored(run: Run, predict: TorchModel, name: str, split: str) -> Stage:
    """Score a model, and compare it with the float model on resamples of the images; the state gets the times and the resamples."""
    state, data = run.state, run.data
    start, text = time.perf_counter(), name if split == state.chosen_on else f'{name}, {split}'
    metrics = evaluate(
        predict,
        run.scored[split],
        data.names,
        run.device,
        annotations=data.annotations if split == 'val' else None,
        progress=lambda it: bar(it, f'evaluating {text}'),
        resample=True,
    )
    columns = Columns(metrics)
    cells = [f'{title} {value}' for title, value in zip(columns.titles, columns.cells(metrics)) if value != '-']
    masks = f'  mask AP {metrics.mask["ap"]:.4f}' if metrics.mask else ''
    state.times[f'evaluate {text}'] = seconds = round(time.perf_counter() - start, 2)
    LOGGER.info(f'{text:<14} {"  ".join(cells[: len(columns.names)])}{masks}  ({seconds:.1f} s)')
    resampled = state.resampled[split]
    assert metrics.resampled is not None  # as asked for
    resampled[name] = metrics.resampled
    if name == FLOAT or FLOAT not in resampled:
        return Stage(metrics)
    against = difference(resampled[FLOAT], metrics.resampled)
    LOGGER.info(f'{"":<14} against float: {in_words(against, columns.title)}')
    return Stage(metrics, against_float=against)
