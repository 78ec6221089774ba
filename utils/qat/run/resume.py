"""--resume: the settings and the state of an interrupted run, out of its folder.

The file of the state exists from the first finished work until the run is complete. It is untrusted, so it is read as data and checked
completely before use.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from utils.qat.config.qat import QuantizeConfig
from utils.qat.config.settings import Settings, flag_of, kind_of, plain
from utils.qat.core.errors import QatError
from utils.qat.core.run_folder import DELIVERED, writing
from utils.qat.evaluation.interval import RESAMPLES
from utils.qat.run.state import FORMAT, STATE, State, unfit_state
from utils.qat.untrusted.json_schema import INDEX, NONE, anything, between, first_wrong, misfit, read_json
from utils.qat.untrusted.plain_values import read_values

FREE = ('device', 'workers')  # options that change no result


def json_kinds(kind: type[Settings]) -> dict[str, object]:
    """Return the kind of each setting in JSON, see json_schema.misfit. The settings themselves check ranges."""
    one = {Path: str, float: between(-1e9, 1e9), int: between(-(2**32), 2**32, (int,))}
    kinds: dict[str, object] = {}
    for f in fields(kind):
        element, several = kind_of(f.type)
        kind_in_json = one.get(element, element)
        kind_in_json = [kind_in_json] if several else kind_in_json
        kinds[f.name] = (NONE, kind_in_json) if isinstance(f.type, UnionType) else kind_in_json
    return kinds


def resumed(folder: str | Path, given: Mapping[str, Any]) -> QuantizeConfig:
    """Read the settings of an interrupted run in `folder`, with `resume` set; `given` has the options beside --resume.

    Raises QatError if an option contradicts the run; or if the folder has no run, or a run that is still active, is finished, or was
    interrupted before its first model was saved.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _no_run(folder, 'not there')
    with writing(folder, '--resume'):  # first check whether the run is still active
        config = _config(folder, read_state(folder).settings)
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


def read_state(folder: Path) -> State:
    """Read and check the state of an interrupted run. Raises QatError if there is none, or it is not what a run writes."""
    file = folder / STATE
    if not os.path.lexists(file):
        raise _not_interrupted(folder)
    _require_no_link(folder, STATE)
    content = read_values(file, '--resume')
    if type(content) is dict and content.get('format') != FORMAT:
        raise _another_version(folder)
    wrong = misfit(content, {'format': INDEX, **{f.name: f.metadata['kind'] for f in fields(State)}})
    if wrong:
        raise unfit_state(folder, wrong)
    kinds = json_kinds(QuantizeConfig)
    del kinds['resume']
    if content['settings'].keys() != kinds.keys():
        differ = ', '.join(sorted(content['settings'].keys() ^ kinds.keys()))
        raise _another_version(folder, f' (settings that differ: {ascii(differ)[1:200]})')
    del content['format']
    state = State.of(content)
    wrong = misfit(content['settings'], kinds, 'settings') or _contradiction(state) or _unlike_resamples(state)
    if wrong:
        raise unfit_state(folder, wrong)
    for name in (DELIVERED, state.best_file, *(stage.file for _, stage in state.models() if stage.file)):
        _require_no_link(folder, name)
    return state


def _contradiction(state: State) -> str | None:
    """Find an entry of a valid state that contradicts another; None if there is none."""
    settings, images, epochs, training = state.settings, state.images, state.epochs, state.training
    kinds = {(type(metrics), bool(metrics.mask)) for metrics in state.scored().values()}
    planned = settings['epochs' if state.ptq else 'activation_epochs']
    entries = {
        'settings.dry_run': settings['dry_run'],
        'settings.epochs': state.ptq and not settings['epochs'],
        'ptq': not state.ptq and (settings['activation'] == 'keep' or epochs),
        'calibration': (state.calibration is None) != (state.ptq is None),
        'adapted': state.adapted and settings['activation'] == 'keep',
        'epochs': [e.epoch for e in epochs] != [*range(1, len(epochs) + 1)] or len(kinds) > 1,
        'training': training is None and epochs,
        'training.number': training
        and (training['number'] > planned or (state.ptq and training['number'] != len(epochs) + 1)),
        'images': ('held out' in images) != (settings['val_split'] > 0),
        'resampled': state.resampled.keys() != images.keys() - {'train'},
    }
    return first_wrong(entries)


def _unlike_resamples(state: State) -> str | None:
    """Find a scored model without its resampled AP, or values of another shape; None if there is none."""
    images, scored = state.chosen_on, state.scored()
    shape = 1 + RESAMPLES * (state.images[images] > 1), 1 + any(metrics.mask for metrics in scored.values())
    given = state.resampled[images]
    if not scored.keys() <= given.keys() or any(values.shape != shape for values in given.values()):
        return f'resampled.{images}'
    return None


def _config(folder: Path, settings: Mapping[str, Any]) -> QuantizeConfig:
    """Make the QuantizeConfig of a state, with the same checks as for typed options."""
    paths = {f.name for f in fields(QuantizeConfig) if kind_of(f.type)[0] is Path}
    values = {**settings, **{k: Path(settings[k]) for k in paths if settings.get(k) is not None}}
    try:
        return QuantizeConfig(**values)
    except QatError as e:
        raise QatError(f'--resume {folder}: settings in {STATE}: {e}') from e


def _not_interrupted(folder: Path) -> QatError:
    """Make the error for a folder without a state, by its report."""
    kind = {'settings': {'epochs': INDEX, str: anything}, 'ptq': anything, 'epochs': [anything], str: anything}
    try:
        report = read_json(folder / 'report.json', kind)
    except OSError:
        return _no_run(folder, 'not there')
    except ValueError:
        return _no_run(folder, 'not of a run')
    if not report['ptq']:
        return QatError(
            f'--resume {folder}: interrupted before the calibrated model was saved, so there is nothing to go on from; '
            'start it again without --resume'
        )
    if len(report['epochs']) == report['settings']['epochs']:
        return QatError(
            f'--resume {folder}: this run is finished, see {folder / "report.md"}; for more epochs start a new one'
        )
    return _another_version(folder, f', or {STATE} is gone')


def _no_run(folder: Path, why: str) -> QatError:
    """Make the error for a folder without a report of a run."""
    return QatError(
        f'--resume {folder}: no report of a run there ({folder / "report.json"}: {why}); give the folder that '
        '`qat.py quantize` named, such as runs/qat/exp'
    )


def _another_version(folder: Path, how: str = '') -> QatError:
    return QatError(f'--resume {folder}: started by another version of this toolkit{how}; start the run again')


def _require_no_link(folder: Path, file: str) -> None:
    if (folder / file).is_symlink():
        raise QatError(
            f'--resume {folder}: {file} is a link, and a run reads and writes only its own files; put the file itself there'
        )
