"""The finished work of a `quantize` run, for its report and for a resumed run (resume.py).

The models of all stages are scored on the same images, and these scores choose the best one. The candidates are the epochs and, as
epoch 0, the calibrated model. They are compared by their AP on the same resamples of the images: see interval.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import NotRequired, TypedDict  # typing has both from Python 3.11

from utils.qat.core.errors import QatError
from utils.qat.core.machine import PACKAGES
from utils.qat.evaluation.interval import Change, difference, difference_of_merit
from utils.qat.evaluation.metrics import METRICS, Metrics, from_json
from utils.qat.untrusted.json_schema import AGAINST, CALIBRATION, COUNT, NONE, NUMBER, POSITIVE, SECONDS, SQNR, anything

FLOAT, ADAPTED, PTQ, BEST, EPOCH = 'float', 'adapted', 'PTQ', 'best', 'epoch {}'  # names of the scored models
LAST = 3  # last epochs whose mean AP is reported: unlike the best epoch, their mean is not the maximum of many
STATE = 'weights/resume.pt'  # in the run's folder
NAMED = re.compile(r'weights/[^/\0]*\.pt')
FORMAT = 3  # of the file; in format 1 a part of it was in report.json, format 2 had no adaptation


class Calibration(TypedDict):
    """How ranges were chosen, see ptq.calibrate."""

    images: NotRequired[int]  # their number; older files lack it
    method: str
    biases: str  # 'all' or 'none' were corrected
    divergence: dict[str, float]  # of each calibration that was compared


@dataclass
class Stage:
    """A model of a run, and what was measured of it."""

    metrics: Metrics | None = None  # None if it is not scored
    file: str = ''  # in the folder; '' of the float model
    epoch: int | None = None  # of the fine-tuning, from 1; of the best model 0 = calibrated
    loss: float | None = None  # of the last epoch that it learnt
    against_float: Change | None = None
    sqnr: dict[str, float] | None = None  # of each part of the head's outputs, in dB

    @property
    def scores(self) -> Metrics:
        """The metrics of a model that is scored."""
        assert self.metrics is not None
        return self.metrics

    def to_json(self) -> dict[str, object]:
        """Return plain values, the metrics among them."""
        own = {name: value for name, value in vars(self).items() if name in OWN and value not in (None, '')}
        return {**(self.metrics.to_json() if self.metrics else {}), **own}

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> 'Stage | None':
        """Read what `to_json` returned."""
        own = {name: value for name, value in (values or {}).items() if name in OWN}
        return None if values is None else cls(from_json(values), **own)


OWN = 'file', 'epoch', 'loss', 'against_float', 'sqnr'


def kept(kind: object, **default: Any) -> Any:
    """Make a field of State; `kind` says what its plain values are in the file, which is untrusted, see json_schema."""
    return field(metadata={'kind': kind}, **default)


def _file(value: object) -> bool:
    """Tell whether a value is the path of a checkpoint in the folder."""
    return type(value) is str and NAMED.fullmatch(value) is not None and not value.startswith('weights/.')


def _shares(value: object) -> bool:
    """Tell whether a value is a interval.resampled_ap."""
    if type(value) is not np.ndarray or value.dtype != np.float64 or value.ndim != 2:
        return False
    return bool(((value >= 0) & (value <= 1)).all())


SCORES = tuple(kind.kinds for kind in METRICS)
UNSCORED: dict[str, object] = {'file': _file}
SCORED = tuple({**scores, 'sqnr': SQNR, 'against_float?': AGAINST, 'file': _file} for scores in SCORES)
LOSS = NONE, POSITIVE  # of an adaptation; None if nothing was learnt
EPOCH_KIND = {'number': COUNT, 'loss': POSITIVE, 'steps': COUNT, 'seconds': SECONDS}
IN_STEP = {'tensors': dict, 'optimizer': dict}  # training_step.TrainingStep compares the tensors with its own


@dataclass
class State:
    """The settings of a run, and the results of its stages so far."""

    settings: dict[str, Any] = kept({str: anything})  # see QuantizeConfig.plain; resume.py checks them
    versions: dict[str, str] = kept(dict.fromkeys(('python', *PACKAGES), str))
    device: str = kept(str)
    machine: dict[str, object] = kept({str: (str, bool, NUMBER, {str: str})})
    classes: dict[str, str] = kept({str: str})  # class index → name
    images: dict[str, int] = kept({'val': COUNT, 'held out?': COUNT, 'train?': COUNT})  # their number
    origin: Stage | None = kept((NONE, *SCORES), default=None)  # the float model
    # The float model with other activation functions; None without --activation
    adapted: Stage | None = kept((NONE, *({**kind, 'loss': LOSS} for kind in (UNSCORED, *SCORED))), default=None)
    # paths of functions that a summary left as they were
    kept_activations: list[str] = kept([str], default_factory=list)
    calibration: Calibration | None = kept((NONE, CALIBRATION), default=None)
    kept_float: list[str] = kept([str], default_factory=list)  # paths of blocks
    ptq: Stage | None = kept((NONE, UNSCORED, *SCORED), default=None)  # the calibrated model; None before
    epochs: list[Stage] = kept(
        [tuple({'epoch': COUNT, 'loss': POSITIVE, **kind} for kind in SCORED)], default_factory=list
    )
    # 'origin', 'adapted', 'ptq' and 'best', if held-out images chose
    val: dict[str, Stage] | None = kept(NONE, default=None)
    times: dict[str, float] = kept({str: SECONDS}, default_factory=dict)  # work → seconds
    # by time: versions in a resumed run
    changed: dict[str, dict[str, str]] = kept({str: {str: str}}, default_factory=dict)
    # images → model → interval.resampled_ap
    resampled: dict[str, dict[str, np.ndarray]] = kept(
        {'val': {str: _shares}, 'held out?': {str: _shares}}, default_factory=dict
    )
    # The last finished epoch of the adaptation or the fine-tuning, see loop.Epoch
    training: dict[str, Any] | None = kept((NONE, {**EPOCH_KIND, 'state': IN_STEP}), default=None)

    @property
    def chosen_on(self) -> str:
        """The images that choose the best model: those held out, or else val."""
        return 'held out' if 'held out' in self.images else 'val'

    def models(self) -> Iterator[tuple[str, Stage]]:
        """Yield the models so far, with their names in the tables, in the order of the run."""
        named = (FLOAT, self.origin), (ADAPTED, self.adapted), (PTQ, self.ptq)
        yield from ((name, stage) for name, stage in named if stage)
        yield from ((EPOCH.format(stage.epoch), stage) for stage in self.epochs)

    def scored(self) -> dict[str, Metrics]:
        """Return the metrics of the models that are scored, by their names."""
        return {name: stage.metrics for name, stage in self.models() if stage.metrics}

    @property
    def best(self) -> Stage | None:
        """The best stage by Metrics.merit, the first of equals; None before the first epoch. Its file is not the copy."""
        if not self.epochs:
            return None
        ptq = [replace(self.ptq, epoch=0)] if self.ptq and self.ptq.metrics else []  # fine-tuning may gain nothing
        return max([*ptq, *self.epochs], key=lambda stage: stage.scores.merit)

    @property
    def best_file(self) -> str:
        """Name the copy of the best model as levipereira/yolov9-qat does."""
        return f'weights/qat_best_{Path(self.settings["weights"]).stem}.pt'

    def delivered(self) -> tuple[str, Stage, str]:
        """Return the model that the run delivers, as it was scored last: its name, what was measured, and the images of the score."""
        if on_val := (self.val or {}).get('best'):
            return BEST, on_val, 'val'
        best = self.best or self.ptq or Stage()
        return EPOCH.format(best.epoch) if best.epoch else PTQ, best, self.chosen_on

    @property
    def gain(self) -> Change | None:
        """Compare the best model with PTQ; None if one of the two is not scored."""
        name, _, images = self.delivered()
        of = self.resampled[images]
        return difference_of_merit(of[PTQ], of[name]) if self.best and PTQ in of else None

    @property
    def against_adapted(self) -> Change | None:
        """Compare the delivered model with the adapted one, of which it was quantized; None if one of the two is not scored."""
        name, _, images = self.delivered()
        of = self.resampled[images]
        return difference(of[ADAPTED], of[name]) if ADAPTED in of and name in of else None

    @property
    def last_epochs(self) -> Change | None:
        """Compare the mean AP of the last epochs with the float model; None if there are fewer than LAST."""
        of, number = self.resampled[self.chosen_on], len(self.epochs)
        if FLOAT not in of or number < LAST:
            return None
        last = [of[EPOCH.format(n)] for n in range(number - LAST + 1, number + 1)]
        return difference(of[FLOAT], np.mean(last, 0))

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain values, but for the arrays and tensors of `resampled` and `training`."""
        content = {name: _plain(value) for name, value in vars(self).items()}
        if self.adapted:
            loss = {'loss': self.adapted.loss}  # None of functions that need no learning
            content['adapted'] = self.adapted.to_json() | loss
        return content

    @classmethod
    def of(cls, values: dict[str, Any]) -> 'State':
        """Read what `to_json` returned."""
        stages: dict[str, object] = {name: Stage.of(values[name]) for name in ('origin', 'adapted', 'ptq')}
        return cls(**{**values, **stages, 'epochs': [Stage.of(values) for values in values['epochs']]})

    def report(self) -> dict[str, object]:
        """Return the content of report.json."""
        beside = {'resampled', 'training', *(() if self.changed else ('changed',))}
        return {
            **{name: value for name, value in self.to_json().items() if name not in beside},
            'chosen_on': self.chosen_on,
            'best': {**self.best.to_json(), 'file': self.best_file} if self.best else None,
            'gain': self.gain,
            'last_epochs': self.last_epochs,
            **({'against_adapted': self.against_adapted} if self.adapted else {}),
        }


def _plain(value: object) -> object:
    """Make plain values of a stage, of stages in a list and of stages in a dict."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.to_json() if isinstance(value, Stage) else value


def unfit_state(folder: Path, wrong: str) -> QatError:
    """Make the error for a file that does not fit the run. wrong: the place in the file."""
    return QatError(
        f'--resume {folder}: {STATE} does not fit the run ({wrong}), so fine-tuning cannot go on from it; start the run again'
    )
