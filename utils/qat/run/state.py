"""The finished work of a `quantize` run, for its report and for a resumed run (resume.py).

The models of all stages are scored on the same images, and these scores choose the best one. The candidates are the epochs and, as
epoch 0, the calibrated model. They are compared by their AP on the same resamples of the images: see chance.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.qat.core.errors import QatError
from utils.qat.evaluation.chance import difference, difference_of_merit
from utils.qat.evaluation.score_tables import is_scored, merit

FLOAT, ADAPTED, PTQ, BEST, EPOCH = 'float', 'adapted', 'PTQ', 'best', 'epoch {}'  # names of the scored models
LAST = 3  # last epochs whose mean AP is reported: unlike the best epoch, their mean is not the maximum of many
STATE = 'weights/resume.pt'  # in the run's folder
FORMAT = 3  # of the file; in format 1 a part of it was in report.json, format 2 had no adaptation


@dataclass
class State:
    """The settings of a run, and the results of its stages so far. All but `resampled` and `training` are plain values."""

    settings: dict[str, Any]  # see QuantizeConfig.plain
    versions: dict[str, str]
    device: str
    machine: dict[str, Any]
    classes: dict[str, str]  # class index → name
    images: dict[str, int]  # 'val', 'held out' and 'train' → number of images
    origin: dict[str, Any] | None = None  # plain metrics of the float model
    # Plain metrics of the float model with other activation functions, 'file' and 'loss'; None without --activation
    adapted: dict[str, Any] | None = None
    kept_activations: list[str] = field(default_factory=list)  # paths of functions that a summary left as they were
    calibration: dict[str, Any] | None = None  # see ptq.calibrated
    kept_float: list[str] = field(default_factory=list)  # paths of blocks
    ptq: Any = None  # plain metrics of the calibrated model, and 'file'
    epochs: list[dict[str, Any]] = field(
        default_factory=list
    )  # the same of each scored epoch, 'epoch' from 1 and 'loss'
    val: dict[str, Any] | None = None  # plain metrics on val, if held-out images chose
    times: dict[str, float] = field(default_factory=dict)  # work → seconds
    changed: dict[str, dict[str, str]] = field(default_factory=dict)  # changed versions in a resumed run, by time
    resampled: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # images → model → chance.resampled_ap
    training: dict[str, Any] | None = (
        None  # the last finished epoch of the adaptation or the fine-tuning, see loop.Epoch
    )

    @property
    def chosen_on(self) -> str:
        """The images that choose the best model: those held out, or else val."""
        return 'held out' if 'held out' in self.images else 'val'

    @property
    def best(self) -> dict[str, Any] | None:
        """The best stage by score_tables.merit, the first of equals; None before the first epoch."""
        if not self.epochs:
            return None
        ptq = [{'epoch': 0, **self.ptq}] if is_scored(self.ptq) else []  # fine-tuning may gain nothing
        return max([*ptq, *self.epochs], key=merit)

    @property
    def best_file(self) -> str:
        """Name the copy of the best model as levipereira/yolov9-qat does."""
        return f'weights/qat_best_{Path(self.settings["weights"]).stem}.pt'

    @property
    def gain(self) -> dict[str, Any] | None:
        """Compare the best model with PTQ; None if one of the two is not scored."""
        best, of = self.best, self.resampled['val' if self.val else self.chosen_on]
        name = BEST if self.val else EPOCH.format(best['epoch']) if best and best['epoch'] else PTQ
        return difference_of_merit(of[PTQ], of[name]) if best and PTQ in of else None

    @property
    def last_epochs(self) -> dict[str, Any] | None:
        """Compare the mean AP of the last epochs with the float model; None if there are fewer than LAST."""
        of, number = self.resampled[self.chosen_on], len(self.epochs)
        if FLOAT not in of or number < LAST:
            return None
        return difference(of[FLOAT], sum(of[EPOCH.format(n)] for n in range(number - LAST + 1, number + 1)) / LAST)

    def report(self) -> dict[str, Any]:
        """Return the content of report.json."""
        beside = {'resampled', 'training', *(() if self.changed else ('changed',))}
        best = self.best
        return {
            **{name: value for name, value in vars(self).items() if name not in beside},
            'chosen_on': self.chosen_on,
            'best': {**best, 'file': self.best_file} if best else None,
            'gain': self.gain,
            'last_epochs': self.last_epochs,
        }


def unfit_state(folder: Path, wrong: str) -> QatError:
    """Make the error for a file that does not fit the run. wrong: the place in the file."""
    return QatError(
        f'--resume {folder}: {STATE} does not fit the run ({wrong}), so fine-tuning cannot go on from it; start the run again'
    )
