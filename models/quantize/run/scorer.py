"""Scores of the models of a `quantize` run, each compared with the float model, on the same images."""

import time
from typing import Any

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from models.quantize.calibration.divergence import HeadOutputs, decibels, energies
from models.quantize.quantizers import RoundedOnce
from models.quantize.run.inputs import Inputs
from utils.qat.backends.pytorch import TorchModel
from utils.qat.core.distributed import all_reduce
from utils.qat.core.log import LOGGER, bar
from utils.qat.data.loaders import channels_last
from utils.qat.evaluation.chance import boxes_and_masks, difference, in_words, points_lost
from utils.qat.evaluation.classes import agreement, divergence
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.score_tables import finds_nothing, merit_title, score_cells, score_titles
from utils.qat.run.state import FLOAT, State

COMPARED = 64  # images of a process, at least; batches are whole. Chance moves SQNR far less than AP


class ComparedModel(TorchModel):
    """A quantized model that compares the outputs of its head with the float model's while it predicts.

    With a detector it compares only the first COMPARED images, because the float model would otherwise take a large part of
    every evaluation. With a classifier it compares all images.
    """

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__(model, context=RoundedOnce(model))
        self.reference = reference.eval()
        self.seen = 0  # images that were compared
        self.sums = torch.zeros(len(self.task.parts), 2, dtype=torch.float64, device=self.device)
        self.apart = torch.zeros(3, dtype=torch.float64, device=self.device)  # agreeing images, divergence, images

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Predict as a TorchModel does, and add up the energies. `images`: FP32 [B, 3, H, W] in 0..1."""
        output = self.outputs(images)
        if self.seen >= COMPARED and self.task.boxes:
            return self.task.predictions(output)
        self.seen += len(images)
        wanted = self.reference(channels_last(images))
        self.sums += energies(HeadOutputs.of(output), HeadOutputs.of(wanted), self.nc)
        if not self.task.boxes:
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


class StageScorer:
    """Scores models as plain metrics, with 'against_float' once the float model is scored.

    It scores on the images `split`, a key of state.resampled, in the batches of `loader` (loaders.Loaders.scored). `state` gets the
    times, and the AP on resamples of each model.
    """

    def __init__(self, inputs: Inputs, state: State, split: str, loader: DataLoader) -> None:
        self.inputs, self.loader = inputs, loader
        self.annotations = inputs.images.data.annotations if split == 'val' else None
        self.suffix = '' if split == state.chosen_on else f', {split}'  # of names in the log
        self.resampled, self.times = state.resampled[split], state.times

    def of_float(self) -> dict[str, Any]:
        """Score the float model."""
        metrics = self._score(TorchModel(self.inputs.model), FLOAT)
        if nothing := finds_nothing(metrics):
            LOGGER.warning(f'the float model {nothing}')
        return metrics

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

    def points_lost(self, trial: nn.Module, budget: float, first: bool) -> float:
        """Score a trial model: the points that it loses beyond chance. Warn at the `first` one if `budget` is below chance."""
        against = self._score(TorchModel(trial), 'trial')['against_float']
        chance = 100 * max(part['chance'] for part in boxes_and_masks(against))
        if chance > budget and first:
            LOGGER.warning(
                f'--max-drop {budget}: less than chance, which is {chance:.2f} points on these '
                f'{len(self.loader.dataset)} images: no layer is left in float for a loss within chance; to keep '
                'so small a budget use more images (val in --data)'
            )
        LOGGER.info(f'{points_lost(against):.2f} points lost beyond chance, at most {budget} allowed')
        return points_lost(against)

    def _score(self, predict: TorchModel, name: str) -> dict[str, Any]:
        start, text = time.perf_counter(), f'{name}{self.suffix}'
        metrics = evaluate(
            predict,
            self.loader,
            self.inputs.images.data.names,
            self.inputs.device,
            annotations=self.annotations,
            progress=lambda it: bar(it, f'evaluating {text}'),
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
