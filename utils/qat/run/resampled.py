"""AP of the models of a run on the same resamples of its images: what they are compared by, see chance.py.

The file in the run's folder is what a run that is gone on with compares its next models with. It may come from anybody.
"""

import json

import numpy as np

from utils.qat.core.files import write_text
from utils.qat.evaluation.chance import RESAMPLES, difference, difference_of_merit
from utils.qat.run.resume import RESAMPLED, unfit_state
from utils.qat.untrusted.json_schema import SHARE, misfit, read_json

FLOAT, PTQ, BEST, EPOCH = 'float', 'PTQ', 'best', 'epoch {}'  # models that are scored
LAST = 3  # epochs, of whose AP the mean is told: it is not the highest of many


class Resampled(dict):
    """Model → chance.resampled_ap of it. All of the same images."""

    def against_float(self, what):
        """chance.difference of a model to the float one; None if that was not scored."""
        return difference(self[FLOAT], self[what]) if FLOAT in self else None

    def gain(self, best):
        """The same of `best` to PTQ, of figures.merit; None if PTQ was not scored."""
        return difference_of_merit(self[PTQ], self[best]) if PTQ in self else None

    def last_epochs(self, number):
        """The same of the mean of the LAST epochs, up to `number`, to the float model; None if there are fewer or it was not scored."""
        if FLOAT not in self or number < LAST:
            return None
        return difference(self[FLOAT], sum(self[EPOCH.format(n)] for n in range(number - LAST + 1, number + 1)) / LAST)

    def write(self, folder):
        write_text(folder / RESAMPLED, json.dumps({what: values.tolist() for what, values in self.items()}))

    @classmethod
    def read(cls, folder, report):
        """What the run in `folder` wrote. Raises QatError if it is not of that run. report: its report, checked."""
        scored = {
            FLOAT: report['origin'],
            PTQ: report['ptq'],
            **{EPOCH.format(e['epoch']): e for e in report['epochs']},
        }
        needed = [what for what, metrics in scored.items() if metrics and 'ap' in metrics]
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
