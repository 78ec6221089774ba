"""An interrupted `quantize` run → its settings, or one line that says why it cannot be resumed.

report.json and resume.pt are checked completely before anything in them is used: a folder may come from anybody.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import flag_of, json_kinds, kind_of, plain
from utils.qat.core.errors import QatError
from utils.qat.core.machine import PACKAGES
from utils.qat.core.run_folder import writing
from utils.qat.evaluation.figures import is_scored, merit
from utils.qat.untrusted.json_schema import (
    AGAINST,
    CALIBRATION,
    CHANCE,
    CLASS_METRICS,
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
)

# files in the folder of a run until it is complete
STATE = 'weights/resume.pt'  # state of fine-tuning
RESAMPLED = 'weights/resampled.json'  # AP of each model on the resamples of the images, see resampled.py
FREE = ('device', 'workers')  # options that change no result
NAMED = re.compile(r'weights/[^/\0]*\.pt')


def _file(value: Any) -> bool:
    """Check a file of the run, a kind of json_schema: the path of a checkpoint in the folder."""
    return type(value) is str and NAMED.fullmatch(value) is not None and not value.startswith('weights/.')


# of a stage: with detections, or of a classifier
STAGES = METRICS, CLASS_METRICS
COMPARED = tuple({**metrics, 'sqnr': SQNR, 'against_float?': AGAINST} for metrics in STAGES)
SCORED = tuple({**compared, 'file': _file} for compared in COMPARED)
REPORT = {  # report.json; its settings are checked later. For the form see json_schema.misfit
    'settings': {str: anything},
    'versions': dict.fromkeys(('python', *PACKAGES), str),
    'device': str,
    'machine?': {str: anything},
    'classes': {str: str},
    'images': {'val': COUNT, 'held out?': COUNT, 'train?': COUNT},
    'chosen_on': str,
    'origin': (NONE, *STAGES),
    'calibration': (NONE, CALIBRATION),
    'kept_float': [str],
    'ptq': (NONE, {'file': _file}, *SCORED),
    'epochs': [tuple({'epoch': COUNT, 'loss': POSITIVE, **scored} for scored in SCORED)],
    'best': (NONE, *({'epoch': INDEX, 'loss?': POSITIVE, **scored} for scored in SCORED)),
    'times': {str: SECONDS},
    'changed?': {str: {str: str}},
    'gain': (NONE, CHANCE),
    'last_epochs': (NONE, AGAINST),
    'val': (NONE, {'origin?': STAGES, 'ptq?': COMPARED, 'best?': COMPARED}),
}
EPOCH = {  # resume.pt, except its tensors: training_step.TrainingStep compares them with its own
    'number': COUNT,
    'loss': POSITIVE,
    'steps': COUNT,
    'seconds': SECONDS,
    'state': {'tensors': dict, 'optimizer': dict},
}


def resumed(folder: str | Path, given: Mapping[str, Any]) -> QuantizeConfig:
    """Read the settings of an interrupted run, with `resume` set.

    Args:
        folder: folder of the run, PROJECT/NAME.
        given: setting → value, of the options that are given with --resume.

    Raises:
        QatError: an option contradicts the run; or the folder has no run, or a run that is still active, finished, or was
            interrupted before its calibrated model was saved.
    """
    folder = Path(folder)
    if not (folder / 'report.json').is_file():
        raise _no_run(folder, 'not there')
    with writing(folder, '--resume'):  # first of all, whether the run is still active
        report = interrupted(folder)
    config = _settings(folder, report['settings'])
    contradictions = [
        f'{flag_of(k, v)} contradicts the run, whose {k} is {getattr(config, k)}'
        for k, v in given.items()
        if k not in FREE and plain(v) != plain(getattr(config, k))
    ]
    if contradictions:
        raise QatError(
            f'--resume {folder}: {"; ".join(contradictions)}; besides it only --device and --workers may be given'
        )
    for path in filter(None, (config.weights, config.data, config.hyp)):
        if not path.exists():
            raise QatError(
                f'--resume {folder}: the run was started with {path}, which is not there; put it back, or run this '
                'command in the folder where the run was started'
            )
    return replace(config, resume=folder, **{k: v for k, v in given.items() if k in FREE})


def _no_run(folder: Path, why: str) -> QatError:
    """Make the error for a folder without a report of a run."""
    return QatError(
        f'--resume {folder}: no report of a run there ({folder / "report.json"}: {why}); give the folder that '
        '`qat.py quantize` named, such as runs/qat/exp'
    )


def _settings(folder: Path, settings: dict[str, Any]) -> QuantizeConfig:
    """Make the QuantizeConfig of the settings in a report, with the same checks as for typed options."""
    paths = {f.name for f in fields(QuantizeConfig) if kind_of(f.type)[0] is Path}
    values: dict[str, Any] = {k: Path(v) if v and k in paths else v for k, v in settings.items()}
    try:
        return QuantizeConfig(**values)
    except QatError as e:
        raise QatError(f'--resume {folder}: settings in report.json: {e}') from e


def interrupted(folder: Path) -> dict[str, Any]:
    """Read and check report.json of an interrupted run.

    Raises:
        QatError: it is no report of a run, or the run cannot be resumed.
    """
    try:
        report = read_json(folder / 'report.json')
        wrong = misfit(report, REPORT) or _contradiction(report)
    except ValueError as e:
        raise _no_run(folder, 'not JSON') from e
    kinds = json_kinds(QuantizeConfig)
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


def _contradiction(report: dict[str, Any]) -> str | None:
    """Find a place in a report of the right kind that contradicts another place; None if there is none."""
    epochs, ptq, best, images = (report[key] for key in ('epochs', 'ptq', 'best', 'images'))
    stages = [*([{'epoch': 0, **ptq}] if ptq and is_scored(ptq) else []), *epochs]
    expected = max(stages, key=merit) if epochs else None  # the first of the highest
    names = [str(i) for i in range(len(report['classes']))]
    return next(
        (
            place
            for place, wrong in (
                ('chosen_on', report['chosen_on'] != ('held out' if 'held out' in images else 'val')),
                ('classes', list(report['classes']) != names),
                ('epochs', [e['epoch'] for e in epochs] != list(range(1, len(epochs) + 1)) or (epochs and not ptq)),
                ('epochs', len({('mask' in stage, 'top1' in stage) for stage in stages}) > 1),
                ('calibration', ptq and not report['calibration']),
                ('best', (best and {**best, 'file': ''}) != (expected and {**expected, 'file': ''})),
            )
            if wrong
        ),
        None,
    )


def _beyond_settings(report: dict[str, Any]) -> str | None:
    """Find a place in a report of the right kind that contradicts the settings; None if there is none."""
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


def _check_progress(folder: Path, report: dict[str, Any]) -> None:
    """Refuse a run that is finished or cannot be resumed."""
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


def require_epoch(content: Any, folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Check the content of resume.pt, except its tensors.

    Args:
        content: content of the file.
        folder: folder of the run.
        report: report of the run, already checked.

    Returns:
        `content`, see EPOCH.

    Raises:
        QatError: it has another form, or is of another run.
    """
    wrong = misfit(content, EPOCH)
    done = len(report['epochs'])
    if (not wrong and content['number'] not in (done, done + 1)) or (
        not wrong and content['number'] > report['settings']['epochs']
    ):
        wrong = 'number'
    if wrong:
        raise unfit_state(folder, wrong)
    return content


def unfit_state(folder: Path | None, wrong: str, file: str = STATE) -> QatError:
    """Make the error for a resume.pt or a resampled.json that does not fit the run.

    Args:
        folder: folder of the run, as QuantizeConfig.resume has it.
        wrong: the place in the file that is wrong.
        file: path of the file in the folder.
    """
    return QatError(
        f'--resume {folder}: {file} does not fit the run ({wrong}), so fine-tuning cannot go on from it; start the run again'
    )
