"""An interrupted `quantize` run → its settings, or the one line that says why it cannot be gone on with."""
import json
from dataclasses import fields, replace
from pathlib import Path

from utils.qat.config import QuantizeConfig
from utils.qat.errors import QatError

STATE = 'weights/resume.pt'  # in the folder of a run until it is complete: what fine-tuning goes on from
PARTS = {'settings': dict, 'versions': dict, 'device': str, 'images': dict, 'chosen_on': str, 'kept_float': list, 'ptq': (dict, type(None)), 'epochs': list,
         'best': (dict, type(None)), 'origin': (dict, type(None)), 'times': dict}  # of report.json
FREE = ('device', 'workers')  # options that change no result


def resumed(folder, given):
    """QuantizeConfig, with `resume` set, of the interrupted run in `folder` (PROJECT/NAME).

    given: setting → value, of the options typed beside --resume. Raises QatError if one contradicts the run, and if the
    folder holds no run, a finished one, or one whose calibrated model was not saved yet.
    """
    folder = Path(folder)
    report = read_report(folder)
    settings = report['settings']
    kinds = {f.name: f.type for f in fields(QuantizeConfig) if f.name != 'resume'}
    if settings.keys() != kinds.keys():
        other = ', '.join(sorted(settings.keys() ^ kinds.keys()))
        raise QatError(f'--resume {folder}: started by another version of this toolkit (settings that differ: {other}); '
                       'start the run again')
    config = QuantizeConfig(**{k: Path(v) if v and kinds[k] is Path else v for k, v in settings.items()})
    contradictions = [f"--{'no-' * (v is False)}{k.replace('_', '-')} contradicts the run, whose {k} is {getattr(config, k)}"
                      for k, v in given.items() if k not in FREE and v != getattr(config, k)]
    if contradictions:
        raise QatError(f"--resume {folder}: {'; '.join(contradictions)}; besides it only --device and --workers may be given")
    _check_progress(folder, report)
    for path in filter(None, (config.weights, config.data, config.hyp)):
        if not path.is_file():
            raise QatError(f'--resume {folder}: the run was started with {path}, which is not there; put it back, or run this '
                           'command in the folder where the run was started')
    return replace(config, resume=folder, **{k: v for k, v in given.items() if k in FREE})


def read_report(folder):
    """The content of report.json of the run in `folder`."""
    try:
        report = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
        kinds = all(isinstance(report[key], kind) for key, kind in PARTS.items())
        if not kinds or report['chosen_on'] not in report['images'] or not all(isinstance(e, dict) for e in report['epochs']):
            raise ValueError('not what a run writes')
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise QatError(f"--resume {folder}: no report of a run there ({folder / 'report.json'}); give the folder that "
                       '`qat.py quantize` named, such as runs/qat/exp') from e
    return report


def _check_progress(folder, report):
    """Refuse a run that is finished, or that cannot be gone on with."""
    if not report['ptq']:
        raise QatError(f'--resume {folder}: interrupted before the calibrated model was saved, so there is nothing to go on from; '
                       'start it again without --resume')
    if (folder / STATE).is_file():
        return
    if len(report['epochs']) == report['settings']['epochs']:
        raise QatError(f"--resume {folder}: this run is finished, see {folder / 'report.md'}; for more epochs start a new one")
    if report['epochs']:
        raise QatError(f'--resume {folder}: {folder / STATE} is gone, and fine-tuning cannot go on without it; start the run again')
