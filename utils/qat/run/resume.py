"""An interrupted `quantize` run → its settings, or the one line that says why it cannot be gone on with.

report.json and resume.pt are checked whole before anything in them is used: a folder may come from anybody.
"""

import re
from dataclasses import fields, replace
from pathlib import Path

from utils.qat.config.qat import QuantizeConfig
from utils.qat.core.errors import QatError
from utils.qat.core.run_folder import writing
from utils.qat.core.versions import PACKAGES
from utils.qat.evaluation.figures import merit
from utils.qat.untrusted.json_schema import (
    AGAINST,
    CALIBRATION,
    CHANCE,
    COUNT,
    INDEX,
    METRICS,
    NONE,
    POSITIVE,
    SECONDS,
    SQNR,
    anything,
    misfit,
    read_json,
    settings_kind,
)

STATE = 'weights/resume.pt'  # in the folder of a run until it is complete: what fine-tuning goes on from
RESAMPLED = 'weights/resampled.json'  # likewise: AP of each model on the resamples of the images, which later ones are compared with
FREE = ('device', 'workers')  # options that change no result
NAMED = re.compile(r'weights/[^/\0]*\.pt')


def _file(value):
    """The kind of a file of the run: its path in the folder."""
    return type(value) is str and NAMED.fullmatch(value) is not None and not value.startswith('weights/.')


COMPARED = {**METRICS, 'sqnr': SQNR, 'against_float?': AGAINST}
SCORED = {**COMPARED, 'file': _file}
REPORT = {  # report.json but for its settings, see json_schema.misfit
    'settings': {str: anything},
    'versions': dict.fromkeys(('python', *PACKAGES), str),
    'device': str,
    'classes': {str: str},
    'images': {'val': COUNT, 'held out?': COUNT, 'train?': COUNT},
    'chosen_on': str,
    'origin': (NONE, METRICS),
    'calibration': (NONE, CALIBRATION),
    'kept_float': [str],
    'ptq': (NONE, {'file': _file}, SCORED),
    'epochs': [{'epoch': COUNT, 'loss': POSITIVE, **SCORED}],
    'best': (NONE, {'epoch': INDEX, 'loss?': POSITIVE, **SCORED}),
    'times': {str: SECONDS},
    'changed?': {str: {str: str}},
    'gain': (NONE, CHANCE),
    'last_epochs': (NONE, AGAINST),
    'val': (NONE, {'origin?': METRICS, 'ptq?': COMPARED, 'best?': COMPARED}),
}
EPOCH = {  # resume.pt but for its tensors, which training_step.TrainingStep compares with its own
    'number': COUNT,
    'loss': POSITIVE,
    'steps': COUNT,
    'seconds': SECONDS,
    'state': {'tensors': dict, 'optimizer': dict},
}


def resumed(folder, given):
    """QuantizeConfig, with `resume` set, of the interrupted run in `folder` (PROJECT/NAME).

    given: setting → value, of the options typed beside --resume. Raises QatError if one contradicts the run, and if the folder
    holds no run, one that is at work, a finished one, or one whose calibrated model was not saved yet.
    """
    folder = Path(folder)
    if not (folder / 'report.json').is_file():
        raise _no_run(folder, 'not there')
    with writing(folder, '--resume'):  # a run that is at work is told of before it is looked at
        report = interrupted(folder)
    config = _settings(folder, report['settings'])
    contradictions = [
        f'--{"no-" * (v is False)}{k.replace("_", "-")} contradicts the run, whose {k} is {getattr(config, k)}'
        for k, v in given.items()
        if k not in FREE and v != getattr(config, k)
    ]
    if contradictions:
        raise QatError(
            f'--resume {folder}: {"; ".join(contradictions)}; besides it only --device and --workers may be given'
        )
    for path in filter(None, (config.weights, config.data, config.hyp)):
        if not path.is_file():
            raise QatError(
                f'--resume {folder}: the run was started with {path}, which is not there; put it back, or run this '
                'command in the folder where the run was started'
            )
    return replace(config, resume=folder, **{k: v for k, v in given.items() if k in FREE})


def _no_run(folder, why):
    return QatError(
        f'--resume {folder}: no report of a run there ({folder / "report.json"}: {why}); give the folder that '
        '`qat.py quantize` named, such as runs/qat/exp'
    )


def _settings(folder, settings):
    """QuantizeConfig of the settings in a report, checked as options that are typed."""
    paths = {f.name for f in fields(QuantizeConfig) if f.type is Path}
    try:
        return QuantizeConfig(**{k: Path(v) if v and k in paths else v for k, v in settings.items()})
    except QatError as e:
        raise QatError(f'--resume {folder}: settings in report.json: {e}') from e


def interrupted(folder):
    """The content of report.json of the run in `folder`. Raises QatError if that is none, or none to go on with."""
    try:
        report = read_json(folder / 'report.json')
        wrong = misfit(report, REPORT) or _contradiction(report)
    except ValueError as e:
        raise _no_run(folder, 'not JSON') from e
    kinds = settings_kind(QuantizeConfig)
    del kinds['resume']
    if not wrong and report['settings'].keys() != kinds.keys():
        other = ', '.join(sorted(report['settings'].keys() ^ kinds.keys()))
        raise QatError(
            f'--resume {folder}: started by another version of this toolkit (settings that differ: {other}); start the run again'
        )
    wrong = wrong or misfit(report['settings'], kinds, 'settings') or _beyond_settings(report)
    if wrong:
        raise _no_run(folder, f'{wrong} is not what a run writes')
    _check_progress(folder, report)
    return report


def _contradiction(report):
    """The place in a report of the right kind that contradicts another, None if there is none."""
    epochs, ptq, best, images = (report[key] for key in ('epochs', 'ptq', 'best', 'images'))
    stages = [*([{'epoch': 0, **ptq}] if ptq and 'ap' in ptq else []), *epochs]
    expected = max(stages, key=merit) if epochs else None  # the first of the highest
    names = [str(i) for i in range(len(report['classes']))]
    return next(
        (
            place
            for place, wrong in (
                ('chosen_on', report['chosen_on'] != ('held out' if 'held out' in images else 'val')),
                ('classes', list(report['classes']) != names),
                ('epochs', [e['epoch'] for e in epochs] != list(range(1, len(epochs) + 1)) or (epochs and not ptq)),
                ('epochs', len({'mask' in stage for stage in stages}) > 1),
                ('calibration', ptq and not report['calibration']),
                ('best', (best and {**best, 'file': ''}) != (expected and {**expected, 'file': ''})),
            )
            if wrong
        ),
        None,
    )


def _beyond_settings(report):
    """Likewise, of what the settings allow."""
    settings, images = report['settings'], report['images']
    return next(
        (
            place
            for place, wrong in (
                ('settings.dry_run', settings['dry_run']),
                ('epochs', len(report['epochs']) > settings['epochs']),
                (
                    'images',
                    ('held out' in images, 'train' in images) != (settings['val_split'] > 0, settings['epochs'] > 0),
                ),
            )
            if wrong
        ),
        None,
    )


def _check_progress(folder, report):
    """Refuse a run that is finished, or that cannot be gone on with."""
    if not report['ptq']:
        raise QatError(
            f'--resume {folder}: interrupted before the calibrated model was saved, so there is nothing to go on from; '
            'start it again without --resume'
        )
    files = [*(c['file'] for c in (report['ptq'], report['best'], *report['epochs']) if c), STATE, RESAMPLED]
    links = [file for file in files if (folder / file).is_symlink()]
    if links:
        raise QatError(
            f'--resume {folder}: {links[0]} is a link, and a run reads and writes only its own files; put the file itself there'
        )
    if (folder / STATE).is_file():
        return
    if len(report['epochs']) == report['settings']['epochs']:
        raise QatError(
            f'--resume {folder}: this run is finished, see {folder / "report.md"}; for more epochs start a new one'
        )
    if report['epochs']:
        raise QatError(
            f'--resume {folder}: {folder / STATE} is gone, and fine-tuning cannot go on without it; start the run again'
        )


def require_epoch(content, folder, report):
    """`content` of resume.pt, checked but for its tensors. Raises QatError if it is none, or not of this run."""
    wrong = misfit(content, EPOCH)
    done = len(report['epochs'])
    if (not wrong and content['number'] not in (done, done + 1)) or (
        not wrong and content['number'] > report['settings']['epochs']
    ):
        wrong = 'number'
    if wrong:
        raise unfit_state(folder, wrong)
    return content


def unfit_state(folder, wrong, file=STATE):
    """The error of a resume.pt, or a resampled.json, that cannot be gone on from."""
    return QatError(
        f'--resume {folder}: {file} does not fit the run ({wrong}), so fine-tuning cannot go on from it; start the run again'
    )
