"""An interrupted `quantize` run → its settings, or the one line that says why it cannot be gone on with."""
import json
from dataclasses import fields, replace
from pathlib import Path

from utils.qat.config import QuantizeConfig
from utils.qat.errors import QatError

STATE = 'weights/resume.pt'  # in the folder of a run until it is complete: what fine-tuning goes on from
NONE, NUMBER = type(None), (int, float)
PARTS = {  # of report.json, see `fits`
    'settings': dict, 'versions': {str: str}, 'device': str, 'images': {str: int}, 'chosen_on': str, 'kept_float': [str], 'times': {str: NUMBER},
    'calibration': (NONE, {'method': str, 'divergence': {str: NUMBER}}), 'origin': (NONE, dict), 'ptq': (NONE, {'file': str}),
    'epochs': [{'epoch': int, 'loss': NUMBER, 'file': str}], 'best': (NONE, {'epoch': int, 'file': str})}
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


def fits(value, kind):
    """Whether `value`, read from JSON, is of a `kind`: a type; one of (several, kinds); a list [of one]; a mapping {str: of one}; or a
    mapping with {'certain': kinds, 'under': names} at least."""
    if isinstance(kind, tuple):
        return any(fits(value, k) for k in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(v, *kind) for v in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(name in value and fits(value[name], k) for name, k in
                                               ({name: kind[str] for name in value} if str in kind else kind).items())
    return isinstance(value, kind)


def read_report(folder):
    """The content of report.json of the run in `folder`."""
    try:
        report = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
        if not fits(report, PARTS) or report['chosen_on'] not in report['images']:
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
