"""A run of `quantize`: its folder, its report, and models that are scored as they were saved.

Every file of a run but its log is written here, and each is whole at any moment. After each step of the work the report says
what is done; of fine-tuning, `resume.STATE` keeps what the next epoch begins with, and `resume.RESAMPLED` what its score is compared with,
until the run is complete. Of the processes of a torchrun, all call the same and the first one writes.
"""

import os
import shutil
import time

from models.quantize import checkpoint
from models.quantize.analysis.sqnr import ComparedModel
from models.quantize.finetuning.loop import Epoch
from utils.qat.core.device import describe
from utils.qat.core.distributed import from_first, on_first
from utils.qat.core.errors import QatError
from utils.qat.core.files import HALF, atomic, write_torch
from utils.qat.core.log import LOGGER
from utils.qat.core.versions import versions
from utils.qat.evaluation.chance import in_words
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.figures import merit
from utils.qat.prediction.pytorch import TorchModel
from utils.qat.run.report import write_report
from utils.qat.run.resampled import BEST, EPOCH, FLOAT, PTQ, Resampled
from utils.qat.run.resume import RESAMPLED, STATE, interrupted, require_epoch
from utils.qat.untrusted.plain_values import read_values

UNSCORED = '.unscored.pt'  # in weights/: a model on the way to its name


def copy(source, path):
    """A copy of the file `source`, which appears whole."""
    with atomic(path) as tmp:
        shutil.copyfile(source, tmp)


class Run:
    """folder: PROJECT/NAME. report: what report.json holds. source: the float checkpoint. sha256: its hash, as it was read.

    The models of all stages are scored on the same images, `chosen_on`, and by these the best is chosen, of the epochs and,
    as epoch 0, the calibrated model: 'held out' if some are, else 'val'.
    """

    def __init__(self, folder, config, model, sha256, data, loaders, say, progress):
        """model: the float one. sha256: hex digest of its file, as it was read. data: see data.dataset.Data. loaders: 'val', 'held out' if some are, and 'train' if there is
        fine-tuning → a loader.

        say: takes a line about what was done. progress: wraps an iterator, with a text, such as log.bar. Raises QatError if
        the run to resume was started on other files.
        """
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
            self.report = interrupted(folder)  # again, now that no other process writes it
            self._check_unchanged(images)
            self.resampled[self.chosen_on] = Resampled.read(folder, self.report)
            return
        self.report = {
            'settings': config.plain(),
            'versions': versions(),
            'device': describe(self.device),
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

    def _forget(self):
        """Delete what a run is gone on from."""
        for file in (STATE, RESAMPLED):
            on_first((self.folder / file).unlink)(missing_ok=True)

    def _clear_up(self):
        """Delete what a killed process was writing: files, no links and no folders."""
        for path in (*self.folder.iterdir(), *self.weights.iterdir()):
            if (path.name == UNSCORED or HALF.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                path.unlink()

    def _check_unchanged(self, images):
        """The data must be those the run was started with; what may change figures a little is told and noted."""
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

    def write(self):
        if self.report['settings']['epochs']:
            on_first(self.resampled[self.chosen_on].write)(self.folder)
        on_first(write_report)(self.folder, self.report)

    def timed(self, what, start):
        """Seconds since `start` (time.perf_counter), noted in the report as the time of `what`."""
        self.report['times'][what] = round(time.perf_counter() - start, 2)
        return self.report['times'][what]

    def score_float(self, images=None):
        """Metrics of the float model on `images`, 'val' or 'held out' (default: `chosen_on`), as plain values."""
        return self._score(TorchModel(self.model), FLOAT, images)

    def score_now(self, model, what):
        """Metrics of a quantized model as it is, not saved: a trial."""
        return self._score(TorchModel(model), what)

    def score(self, file, what, images=None):
        """Metrics of the quantized model in `file`, as `score_float`, and the SQNR of its head's outputs."""
        compared = ComparedModel(self._load(file)[0], self.model)
        metrics = self._score(compared, what, images)
        metrics['sqnr'] = {part: round(value, 3) for part, value in compared.sqnr().items()}
        self.say(
            '{:<14} SQNR of the head: '.format('') + ', '.join(f'{k} {v:.2f} dB' for k, v in metrics['sqnr'].items())
        )
        return metrics

    def _score(self, predict, what, images=None):
        """Metrics as plain values, with the difference to the float model if that was scored on these images."""
        images, start = images or self.chosen_on, time.perf_counter()
        text = what if images == self.chosen_on else f'{what}, {images}'
        metrics = evaluate(
            predict,
            self.loaders[images],
            self.data.names,
            self.device,
            annotations=self.data.annotations if images == 'val' else None,
            progress=lambda it: self.progress(it, f'evaluating {text}'),
            resample=True,
        )
        masks = f'  mask AP {metrics.mask["ap"]:.4f}' if metrics.mask else ''
        self.say(
            f'{text:<14} AP {metrics.ap:.4f}  AP50 {metrics.ap50:.4f}  P {metrics.precision:.4f}  '
            f'R {metrics.recall:.4f}{masks}  ({self.timed(f"evaluate {text}", start):.1f} s)'
        )
        self.resampled[images][what] = metrics.resampled
        against = self.resampled[images].against_float(what)
        if what == FLOAT or not against:
            return metrics.plain()
        self.say(f'{"":<14} against float: {in_words(against)}')
        return {**metrics.plain(), 'against_float': against}

    def _load(self, file):
        """checkpoint.load_quantized of a file that the first process wrote."""
        from_first()  # the others wait until it is there
        return checkpoint.load_quantized(file, self.device)

    def save_and_score(self, model, what, stage, evaluating=True):
        """Save, reload and score the reload: what is reported is what is on disk. Returns metrics with the file's name.

        stage: what the name begins with; until the score, which is in it, is known the file is hidden.
        """
        unscored = self.weights / UNSCORED
        recipe = {**self.report['settings'], 'kept_float': self.report['kept_float']}
        on_first(checkpoint.save_quantized)(unscored, model, recipe, self.sha256)
        metrics = self.score(unscored, what) if evaluating else None
        score = f'{metrics["ap"]:.4f}' if metrics else 'unknown'
        final = self.weights / f'{stage}_ap_{score}_{self.source.stem}.pt'
        on_first(os.replace)(unscored, final)
        return {**(metrics or {}), 'file': f'weights/{final.name}'}

    def calibrated(self, model, evaluating):
        """The calibrated `model` is there: save, score and report it."""
        self.report['ptq'] = self.save_and_score(model, PTQ, 'ptq', evaluating)
        self.write()

    def load_calibrated(self):
        """The calibrated model, from its file. Raises QatError if it was made of another float checkpoint."""
        model, quant = self._load(self.folder / self.report['ptq']['file'])
        if quant['source_sha256'] != self.sha256:
            raise QatError(
                f'--resume {self.folder}: {self.source} is another file than the run was started with (its SHA-256 '
                'differs); put the old one back, or start a new run'
            )
        return model

    def last_epoch(self):
        """The Epoch that fine-tuning goes on from, None if there is none. Raises QatError if resume.pt is not of this run."""
        if not self.state.exists():
            return None
        return Epoch(**require_epoch(read_values(self.state, '--resume'), self.folder, self.report))

    def learned(self, model, epoch):
        """`epoch` is over and left `model` as it is: keep, score and report it, unless that was done before an interruption."""
        on_first(self._clear_up)()  # not before what is gone on from has turned out to be right
        if epoch.number <= len(self.report['epochs']):
            return
        on_first(write_torch)(self.state, vars(epoch))  # first: nothing learned is lost while it is scored
        result = self.save_and_score(model, EPOCH.format(epoch.number), f'qat_ep_{epoch.number}')
        result = {'epoch': epoch.number, 'loss': epoch.loss, **result}
        self.report['epochs'].append(result)
        self.report['times'][f'fine-tune epoch {epoch.number}'] = round(epoch.seconds, 2)
        if not self.report['best'] and 'ap' in self.report['ptq']:
            self._keep_best({'epoch': 0, **self.report['ptq']})  # fine-tuning may gain nothing
        self._keep_best(result)
        resampled, best = self.resampled[self.chosen_on], self.report['best']['epoch']
        self.report['gain'] = resampled.gain(EPOCH.format(best) if best else PTQ)
        self.report['last_epochs'] = resampled.last_epochs(epoch.number)
        self.write()

    def _keep_best(self, result):
        """Where `result` is the best so far (figures.merit), its model becomes qat_best_*.pt."""
        if not self.report['best'] or merit(result) > merit(self.report['best']):
            best = self.weights / f'qat_best_{self.source.stem}.pt'
            on_first(copy)(self.folder / result['file'], best)
            self.report['best'] = {**result, 'file': f'weights/{best.name}'}

    def finish(self):
        """All stages are done. Where held-out images chose the epoch, score float, PTQ and best on val as well.

        What was not scored on the held-out images is not scored here.
        """
        if self.chosen_on != 'val':
            scored = {'origin': self.score_float('val')} if self.report['origin'] else {}
            for key, what in (('ptq', PTQ), ('best', BEST)):
                if 'ap' in self.report[key]:
                    scored[key] = self.score(self.folder / self.report[key]['file'], what, 'val')
            self.report['val'], self.report['gain'] = scored, self.resampled['val'].gain(BEST)
        self.write()  # whole again, also where the last epoch's was interrupted between one file and the next
        self._forget()
