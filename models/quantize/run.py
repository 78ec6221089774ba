"""A run of `quantize`: its folder, its report, and models that are scored as they were saved.

Every file of a run except its log is written here, and each file is whole at any moment. After each step the report
lists the finished work. Until the run is complete, `resume.STATE` has the state that the next epoch of fine-tuning
begins with, and `resume.RESAMPLED` the values that its score is compared with. All processes of a torchrun call the
same methods, and the first one writes.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn

from models.quantize import checkpoint
from models.quantize.analysis.sqnr import ComparedModel
from models.quantize.finetuning.loop import Epoch
from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.device import describe
from utils.qat.core.distributed import from_first, on_first
from utils.qat.core.errors import QatError
from utils.qat.core.files import HALF, atomic, write_torch
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import machine, versions
from utils.qat.data.dataset import Data
from utils.qat.data.image_folders import ImageFolders
from utils.qat.evaluation.chance import in_words
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.figures import CLASS_KEYS, KEYS, columns, figures, is_scored, merit, title_of
from utils.qat.prediction.pytorch import TorchModel, classifies
from utils.qat.run.report import write_report
from utils.qat.run.resampled import BEST, EPOCH, FLOAT, PTQ, Resampled
from utils.qat.run.resume import RESAMPLED, STATE, interrupted, require_epoch
from utils.qat.untrusted.plain_values import read_values

UNSCORED = '.unscored.pt'  # in weights/: a model before its name is known


def copy(source: Path, path: Path) -> None:
    """Copy the file `source` to `path`, where it appears whole."""
    with atomic(path) as tmp:
        shutil.copyfile(source, tmp)


class Run:
    """A run of `quantize` in its folder.

    The models of all stages are scored on the same images, and these scores choose the best model. The candidates are
    the epochs and, as epoch 0, the calibrated model.

    Args:
        folder: PROJECT/NAME.
        config: settings of the run; with `resume`, of the run to resume.
        model: the float model.
        sha256: of its file as it was read, hex digits.
        data: the checked data YAML, or the image folder of a classifier.
        loaders: 'val', 'held out' if images are held out, and 'train' if there is fine-tuning → loader.
        say: takes a line about finished work.
        progress: wraps an iterable, with a text, such as log.bar.

    Attributes:
        report: content of report.json.
        source: path of the float checkpoint.
        chosen_on: the images that choose the best model: 'held out' if images are held out, else 'val'.
        resampled: images → AP of the models on their resamples.

    Raises:
        QatError: the run to resume cannot be resumed, or was started on other data.
    """

    def __init__(
        self,
        folder: Path,
        config: QuantizeConfig,
        model: nn.Module,
        sha256: str,
        data: Data | ImageFolders,
        loaders: Mapping[str, Any],
        say: Callable[[str], None],
        progress: Callable[..., Iterable],
    ) -> None:
        self.folder, self.source, self.model, self.sha256, self.data, self.loaders = (
            folder,
            config.weights,
            model,
            sha256,
            data,
            loaders,
        )
        self.device, self.say, self.progress = next(model.parameters()).device, say, progress
        self.weights, self.state = folder / 'weights', folder / STATE
        self.chosen_on = 'held out' if 'held out' in loaders else 'val'
        self.resampled = {name: Resampled() for name in loaders}
        images = {name: len(loader.dataset) for name, loader in loaders.items()}
        if config.resume:
            self.report = interrupted(folder)  # read again, because now no other process writes it
            self._check_unchanged(images)
            self.resampled[self.chosen_on] = Resampled.read(folder, self.report)
            return
        self.report = {
            'settings': config.plain(),
            'versions': versions(),
            'device': describe(self.device),
            'machine': machine(self.device),
            'classes': data.names,
            'images': images,
            'chosen_on': self.chosen_on,
            'origin': None,
            'calibration': None,
            'kept_float': [],
            'ptq': None,
            'epochs': [],
            'best': None,
            'gain': None,
            'last_epochs': None,
            'val': None,
            'times': {},
        }
        on_first(self.weights.mkdir)(exist_ok=True)
        on_first(self._clear_up)()
        self.write()
        self._forget()  # an earlier run in this folder

    def _forget(self) -> None:
        """Delete the files that a resumed run starts from."""
        for file in (STATE, RESAMPLED):
            on_first((self.folder / file).unlink)(missing_ok=True)

    def _clear_up(self) -> None:
        """Delete the unfinished files of a killed process; links and folders stay."""
        for path in (*self.folder.iterdir(), *self.weights.iterdir()):
            if (path.name == UNSCORED or HALF.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                path.unlink()

    def _check_unchanged(self, images: Mapping[str, int]) -> None:
        """Refuse data that changed since the start of the run.

        Other versions and another device change figures a little: they are logged and noted in the report.
        """
        if images != self.report['images']:
            raise QatError(
                f'--resume {self.folder}: {self.data.file} had {self.report["images"]} images when the run was '
                f'started, and has {images}; put the old ones back, or start a new run'
            )
        now = {**versions(), 'device': describe(self.device)}
        before = {**self.report['versions'], 'device': self.report['device']}
        changed = {k: v for k, v in now.items() if v != before[k]}
        if changed:
            LOGGER.warning(
                'not what the run was started with, so figures may differ a little from those of a run that was not '
                'interrupted: ' + ', '.join(f'{k} {before[k]}, now {v}' for k, v in changed.items())
            )
            self.report.setdefault('changed', {})[f'after epoch {len(self.report["epochs"])}'] = changed

    def write(self, pictures: bool = False) -> None:
        """Write the report, and with fine-tuning the AP on resamples. `pictures`: draw them, too; they take a while."""
        if self.report['settings']['epochs']:
            on_first(self.resampled[self.chosen_on].write)(self.folder)
        on_first(write_report)(self.folder, self.report, pictures)

    def timed(self, work: str, start: float) -> float:
        """Note the seconds since `start` (time.perf_counter) as the time of `work` in the report, and return them."""
        self.report['times'][work] = round(time.perf_counter() - start, 2)
        return self.report['times'][work]

    def score_float(self, images: str | None = None) -> dict[str, Any]:
        """Score the float model.

        Args:
            images: 'val' or 'held out'; None = `chosen_on`.

        Returns:
            Metrics as plain values.
        """
        return self._score(TorchModel(self.model), FLOAT, images)

    def score_now(self, model: nn.Module, name: str) -> dict[str, Any]:
        """Score a quantized model as it is, without a file, for a trial; see `score_float`. `name`: in the log."""
        return self._score(TorchModel(model), name)

    def score(self, file: Path, name: str, images: str | None = None) -> dict[str, Any]:
        """Score the quantized model in a file.

        Args:
            file: of the model.
            name: of the model, in the log and in `resampled`.
            images: see `score_float`.

        Returns:
            Metrics as plain values, with 'sqnr', the SQNR of the head's outputs in dB.
        """
        compared = ComparedModel(self._load(file)[0], self.model)
        metrics = self._score(compared, name, images)
        metrics.update(compared.distance())
        metrics['sqnr'] = {part: round(value, 3) for part, value in compared.sqnr().items()}
        if 'divergence' in metrics:
            same, apart = metrics['agreement'], metrics['divergence']
            self.say(
                f'{"":<14} the same class as float for {same:.2%} of the images, divergence of the scores {apart:.5f}'
            )
        self.say(
            '{:<14} SQNR of the head: '.format('') + ', '.join(f'{k} {v:.2f} dB' for k, v in metrics['sqnr'].items())
        )
        return metrics

    def _score(self, predict: TorchModel, name: str, images: str | None = None) -> dict[str, Any]:
        """Compute metrics as plain values, with 'against_float' if the float model was scored on these images."""
        images, start = images or self.chosen_on, time.perf_counter()
        text = name if images == self.chosen_on else f'{name}, {images}'
        metrics = evaluate(
            predict,
            self.loaders[images],
            self.data.names,
            self.device,
            annotations=self.data.annotations if images == 'val' else None,
            progress=lambda it: self.progress(it, f'evaluating {text}'),
            resample=True,
        )
        plain, masks = metrics.plain(), f'  mask AP {metrics.mask["ap"]:.4f}' if metrics.mask else ''
        shown = [f'{title} {value}' for title, value in zip(columns(plain)[0], figures(plain)) if value != '-']
        self.say(f'{text:<14} {"  ".join(shown)}{masks}  ({self.timed(f"evaluate {text}", start):.1f} s)')
        self.resampled[images][name] = metrics.resampled
        against = self.resampled[images].against_float(name)
        if name == FLOAT or not against:
            return plain
        self.say(f'{"":<14} against float: {in_words(against, title_of(plain))}')
        return {**plain, 'against_float': against}

    def _load(self, file: Path) -> tuple[nn.Module, dict[str, Any]]:
        """Load a quantized model from a file that the first process wrote; see checkpoint.load_quantized."""
        from_first()  # the others wait until it is there
        return checkpoint.load_quantized(file, self.device)

    def save_and_score(self, model: nn.Module, name: str, stage: str, evaluating: bool = True) -> dict[str, Any]:
        """Save a model, load the file and score it: the figures are the figures of the file.

        Args:
            model: quantized, calibrated.
            name: of the model, in the log and in `resampled`.
            stage: start of the file's name. The name has the score too, so the file is hidden until the score is known.
            evaluating: score it.

        Returns:
            The metrics (none without `evaluating`), and 'file', the path in the run's folder.
        """
        unscored = self.weights / UNSCORED
        recipe = {**self.report['settings'], 'kept_float': self.report['kept_float']}
        try:
            on_first(checkpoint.save_quantized)(unscored, model, recipe, self.sha256)
            metrics = self.score(unscored, name) if evaluating else None
            merit_key = (CLASS_KEYS if classifies(model) else KEYS)[0]
            score = figures(metrics)[0] if metrics else 'unknown'
            final = self.weights / f'{stage}_{merit_key}_{score}_{self.source.stem}.pt'
            on_first(os.replace)(unscored, final)
        finally:
            on_first(unscored.unlink)(missing_ok=True)
        return {**(metrics or {}), 'file': f'weights/{final.name}'}

    def calibrated(self, model: nn.Module, evaluating: bool) -> None:
        """Save and report the calibrated model, and score it if `evaluating`."""
        self.report['ptq'] = self.save_and_score(model, PTQ, 'ptq', evaluating)
        self.write(pictures=not self.report['settings']['epochs'])

    def load_calibrated(self) -> nn.Module:
        """Load the calibrated model from its file.

        Raises:
            QatError: it was made from another float checkpoint.
        """
        model, quant = self._load(self.folder / self.report['ptq']['file'])
        if quant['source_sha256'] != self.sha256:
            raise QatError(
                f'--resume {self.folder}: {self.source} is another file than the run was started with (its SHA-256 '
                'differs); put the old one back, or start a new run'
            )
        return model

    def last_epoch(self) -> Epoch | None:
        """Read the epoch that fine-tuning continues from; None if there is none.

        Raises:
            QatError: resume.pt does not fit this run.
        """
        if not self.state.exists():
            return None
        return Epoch(**require_epoch(read_values(self.state, '--resume'), self.folder, self.report))

    def learned(self, model: nn.Module, epoch: Epoch) -> None:
        """Save, score and report the model after an epoch, unless this was done before an interruption.

        Args:
            model: as the epoch left it.
            epoch: that is over.
        """
        on_first(self._clear_up)()  # not earlier: only now the resumed state has proved right
        if epoch.number <= len(self.report['epochs']):
            return
        on_first(write_torch)(self.state, vars(epoch))  # before the score, so that an interrupted score loses no epoch
        result = self.save_and_score(model, EPOCH.format(epoch.number), f'qat_ep_{epoch.number}')
        result = {'epoch': epoch.number, 'loss': epoch.loss, **result}
        self.report['epochs'].append(result)
        self.report['times'][f'fine-tune epoch {epoch.number}'] = round(epoch.seconds, 2)
        if not self.report['best'] and is_scored(self.report['ptq']):
            self._keep_best({'epoch': 0, **self.report['ptq']})  # fine-tuning may gain nothing
        self._keep_best(result)
        resampled, best = self.resampled[self.chosen_on], self.report['best']['epoch']
        self.report['gain'] = resampled.gain(EPOCH.format(best) if best else PTQ)
        self.report['last_epochs'] = resampled.last_epochs(epoch.number)
        self.write()

    def _keep_best(self, result: dict[str, Any]) -> None:
        """Copy the model of `result` to qat_best_*.pt if it is the best so far (figures.merit)."""
        if not self.report['best'] or merit(result) > merit(self.report['best']):
            best = self.weights / f'qat_best_{self.source.stem}.pt'
            on_first(copy)(self.folder / result['file'], best)
            self.report['best'] = {**result, 'file': f'weights/{best.name}'}

    def finish(self) -> None:
        """Finish the run. If held-out images chose the epoch, score float, PTQ and best on val too.

        A model without a score on the held-out images gets none on val.
        """
        if self.chosen_on != 'val':
            scored = {'origin': self.score_float('val')} if self.report['origin'] else {}
            for key, name in (('ptq', PTQ), ('best', BEST)):
                if is_scored(self.report[key]):
                    scored[key] = self.score(self.folder / self.report[key]['file'], name, 'val')
            self.report['val'], self.report['gain'] = scored, self.resampled['val'].gain(BEST)
        self.write(pictures=True)
        self._forget()
