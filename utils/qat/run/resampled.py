"""AP of the models of a run on the same resamples of its images, by which they are compared: see chance.py.

A resumed run compares its next models with the AP in the file in the run's folder. The file may come from anybody.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from utils.qat.core.files import write_text
from utils.qat.evaluation.chance import RESAMPLES, difference, difference_of_merit
from utils.qat.evaluation.figures import is_scored
from utils.qat.run.resume import RESAMPLED, unfit_state
from utils.qat.untrusted.json_schema import SHARE, misfit, read_json

FLOAT, PTQ, BEST, EPOCH = 'float', 'PTQ', 'best', 'epoch {}'  # names of the scored models
LAST = 3  # last epochs whose mean AP is reported: unlike the best epoch, it is not the highest of many


class Resampled(dict[str, np.ndarray]):
    """Name of a model → its chance.resampled_ap, for all models on the same images."""

    def against_float(self, what: str) -> dict[str, Any] | None:
        """Compare a model with the float model by chance.difference; None if the float model was not scored."""
        return difference(self[FLOAT], self[what]) if FLOAT in self else None

    def gain(self, best: str) -> dict[str, Any] | None:
        """Compare the model `best` with PTQ by chance.difference_of_merit; None if PTQ was not scored."""
        return difference_of_merit(self[PTQ], self[best]) if PTQ in self else None

    def last_epochs(self, number: int) -> dict[str, Any] | None:
        """Compare the mean AP of the last epochs with the float model by chance.difference.

        Args:
            number: the last epoch, from 1.

        Returns:
            The difference; None if there are fewer than LAST epochs, or the float model was not scored.
        """
        if FLOAT not in self or number < LAST:
            return None
        return difference(self[FLOAT], sum(self[EPOCH.format(n)] for n in range(number - LAST + 1, number + 1)) / LAST)

    def write(self, folder: Path) -> None:
        """Write the file in the run's folder."""
        write_text(folder / RESAMPLED, json.dumps({what: values.tolist() for what, values in self.items()}))

    @classmethod
    def read(cls, folder: Path, report: dict[str, Any]) -> 'Resampled':
        """Read and check the file in the run's folder.

        Args:
            folder: folder of the run.
            report: report of the run, already checked.

        Raises:
            QatError: the file is missing, damaged, or of another run.
        """
        scored = {
            FLOAT: report['origin'],
            PTQ: report['ptq'],
            **{EPOCH.format(e['epoch']): e for e in report['epochs']},
        }
        needed = [what for what, metrics in scored.items() if is_scored(metrics)]
        parts = 1 + any('mask' in scored[what] for what in needed)
        rows = 1 + RESAMPLES * (report['images'][report['chosen_on']] > 1)
        try:
            content = read_json(folder / RESAMPLED)
            wrong = misfit(content, {**{key: [[SHARE]] for key in needed}, str: [[SHARE]]})
        except (ValueError, OSError) as e:
            raise unfit_state(folder, 'not JSON' if isinstance(e, ValueError) else 'not there', RESAMPLED) from e
        wrong = wrong or next(
            (ascii(what)[1:61] for what, values in content.items() if [*map(len, values)] != [parts] * rows), None
        )
        if wrong:
            raise unfit_state(folder, wrong, RESAMPLED)
        return cls({what: np.array(values, float) for what, values in content.items()})
