"""The work of `qat.py eval` and `val_trt.py`: score each model on the val images of a data YAML, and write a report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.qat.backends.file_model import FileModel
from utils.qat.config.qat import EvalConfig
from utils.qat.config.settings import closing
from utils.qat.config.tables import TARGETS, backends_for
from utils.qat.core.command import command, explain_out_of_memory, export_command, typed_sides
from utils.qat.core.distributed import from_first, join, on_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.files import distinct_names, write_document, write_json
from utils.qat.core.log import LOGGER, RESULT, bar, finish, log_to
from utils.qat.core.machine import describe, machine, machine_table, select_device, versions
from utils.qat.core.run_folder import run_folder
from utils.qat.core.text import escaped, image, markdown_table
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.chance import EXPLAINED, difference, in_words, plus_minus
from utils.qat.evaluation.classes import ClassMetrics, distance
from utils.qat.evaluation.detection_scores import Metrics, require_annotations
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.plots import plot_classes
from utils.qat.evaluation.score_tables import class_table, merit_title, models_table
from utils.qat.targets.target import target_of_recipe

FAIR_CONF = 0.01  # AP hardly changes without the detections up to this score


class Score(NamedTuple):
    """A file and its metrics."""

    file: Path
    seen: str  # preparation of the images, in words
    metrics: Metrics


def several_table(scores: Sequence[Score]) -> str:
    """Format the metrics of several files on the same images as a Markdown table, with differences from the first."""
    names, first = distinct_names([score.file for score in scores]), scores[0].metrics
    if len({score.seen for score in scores}) > 1:
        names = [f'{name}, {score.seen}' for name, score in zip(names, scores)]
    chances = [plus_minus(difference(first.resampled, score.metrics.resampled)) for score in scores[1:]]
    return models_table(names, [score.metrics.plain() for score in scores], chances)


def coco_table(metrics: Metrics) -> str:
    """Format pycocotools' figures of boxes and, if there are any, of masks as a Markdown table."""
    parts: dict[str, Any] = {'boxes': metrics.coco, **({'masks': metrics.mask['coco']} if metrics.mask else {})}
    return markdown_table(
        ('pycocotools', *(key.upper() for key in parts['boxes'])),
        [(part, *(f'{v:.4f}' for v in found.values())) for part, found in parts.items()],
    )


def with_distance(metrics: Any, baseline: Any) -> dict[str, Any]:
    """Return plain metrics; for a classifier with classes.distance from a baseline on the same images, if there is one."""
    if not isinstance(metrics, ClassMetrics) or not isinstance(baseline, ClassMetrics):
        return metrics.plain()
    return {**metrics.plain(), **distance(metrics.scores, baseline.scores)}


def tables(config: EvalConfig, metrics: Metrics, baseline: Metrics | None) -> list[str]:
    """Format all metrics as Markdown tables; with a baseline both need resamples."""
    compared, plain = [], metrics.plain()
    if baseline and config.baseline:
        against, plain = difference(baseline.resampled, metrics.resampled), with_distance(metrics, baseline)
        names, models = distinct_names([config.baseline, config.weights]), (baseline.plain(), plain)
        words = in_words(against, merit_title(plain))
        compared = [models_table(names, models, [plus_minus(against)]), f'{words} ({EXPLAINED})']
    return [*compared, class_table(plain), *([coco_table(metrics)] if metrics.coco else [])]


def write_scores(
    folder: Path,
    config: EvalConfig,
    metrics: Metrics,
    device: torch.device,
    seen: str,
    following: str,
    baseline: Metrics | None,
) -> None:
    """Write metrics.json, report.md and classes.png into `folder`; `seen`: preparation of the images, in words."""
    here, against = machine(device), {}
    if baseline:
        against = {
            'baseline': baseline.plain(),
            'against_baseline': difference(baseline.resampled, metrics.resampled),
        }
    write_json(
        folder / 'metrics.json',
        {
            'settings': asdict(config),
            'versions': versions(),
            'device': describe(device),
            'seen': seen,
            'machine': here,
            **with_distance(metrics, baseline),
            **against,
            'times': {'ms_per_image': metrics.ms_per_image},
        },
    )
    objects = f', with {metrics.instances} objects' if hasattr(metrics, 'instances') else ''
    pictures = []
    if metrics.per_class:  # empty if no detection is correct
        models = {config.baseline: baseline, config.weights: metrics} if config.baseline else {config.weights: metrics}
        names = distinct_names(list(models))
        plot_classes(folder / 'classes.png', {name: m.plain() for name, m in zip(names, models.values()) if m})
        pictures.append(image(f'{merit_title(metrics.plain())} of each class', 'classes.png'))
    write_document(
        folder / 'report.md',
        f'{config.weights.name} on {config.data.name}',
        [
            escaped(f'{metrics.images} images {seen}{objects}. Computed on {describe(device)}.'),
            *tables(config, metrics, baseline),
            *pictures,
            '## Times',
            markdown_table(('step', 'ms per image'), metrics.ms_per_image.items()),
            '## Machine',
            machine_table(here),
            *closing(asdict(config), type(config), versions(), following),
        ],
    )


def score_files(configs: Sequence[EvalConfig], load_model: Callable[[Path, torch.device, str | None], Any]) -> None:
    """Score files one after the other, each in its own folder; a table compares several with the first.

    `load_model` makes a model, see file_model.py, from file, device and backend. If a file does not fit the settings or the
    data, the scores of the files before it stay.
    """
    scores = []
    try:
        for config in _apart(configs):
            device = select_device(config.device)
            join(device)
            with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
                predict = load_model(config.weights, device, config.backend)
                baseline = None
                if config.baseline:
                    given = (config.backend,) if config.backend else None
                    _, backend = backends_for((config.weights, config.baseline), given)
                    baseline = load_model(config.baseline, device, backend)
                resample = bool(baseline) or len(configs) > 1
                scores.append(score_file(predict, config, device, folder, baseline, resample))
    finally:  # also for the files before one that does not fit
        if len(scores) > 1:
            LOGGER.log(RESULT, f'\n{several_table(scores)}\n')


def _apart(configs: Sequence[EvalConfig]) -> Sequence[EvalConfig]:
    """Assign a folder to each of several files: NAME-FILE, or NAME-RUN-FILE where several runs have a file of this name."""
    if len(configs) == 1:
        return configs
    names = [config.weights.name for config in configs]
    paths = [config.weights.absolute() for config in configs]
    runs = [path.parent.parent.name if path.parent.name == 'weights' else path.parent.name for path in paths]
    names = [f'{run}-{name}' if names.count(name) > 1 and run else name for run, name in zip(runs, names)]
    twice = [name for name in names if names.count(name) > 1]
    if twice and configs[0].exist_ok:
        raise QatError(f'--weights: several files are called {twice[0]}, which share a folder; leave --exist-ok out')
    return [replace(config, name=f'{config.name}-{name}') for config, name in zip(configs, names)]


def warn_of_threshold(predict: Any, config: EvalConfig) -> None:
    """Warn if low-scored detections are left out.

    The precision-recall curve then ends early. The definition of AP continues it by a straight line to recall 1 and
    precision 0, as if the missing detections existed.
    """
    conf, whose, fair = config.conf_thres, '--conf-thres', 'leave --conf-thres out'
    if predict.end2end:
        conf, whose = predict.conf_thres, 'inside the file'
        fair = 'export it with --conf-thres 0.001 --iou-thres 0.7 --topk-all 300'
    if predict.task.boxes and conf is not None and conf > FAIR_CONF:
        LOGGER.warning(
            f'{config.weights}: scores up to {conf:g} are left out ({whose}), and AP continues the curve that ends there: it '
            f'comes out too high. For a figure that compares with others {fair}'
        )


def score_file(
    predict: Any,
    config: EvalConfig,
    device: torch.device,
    folder: Path | None,
    baseline: Any,
    resample: bool,
) -> Score:
    """Score the model in config.weights, log the tables, and write the report and predictions.json.

    An exported file gets images letterboxed to its own size. `baseline`, a model or None, is scored on the same images.
    Only the first process of a torchrun needs the folder.
    """
    exported = isinstance(predict, FileModel)
    config = config.for_model(predict)
    if baseline:
        _require_alike(predict, baseline, config)
    data = predict.task.load_data(config.data, predict)
    square = config.square or exported
    loader = Loaders(data, config, predict.stride, shard=(rank(), world_size())).scored(square=square)
    require_annotations(data, loader.dataset.im_files)

    folder = from_first(folder)
    on_first(log_to)(folder / 'log.txt')
    seen = predict.task.seen_as(config.imgsz, square)
    LOGGER.info(f'{config.weights} on {describe(device)}, images {seen}')
    warn_of_threshold(predict, config)

    def scored(model: Any, text: str, **options: Any) -> Any:
        thresholds = config.conf_thres, config.iou_thres
        options.update(progress=lambda it: bar(it, text), resample=resample)
        return evaluate(model, loader, data.names, device, *thresholds, **options)

    predictions = folder / 'predictions.json' if config.save_json else None
    metrics = scored(predict, 'evaluating', annotations=data.annotations, predictions_file=predictions)
    before = scored(baseline, 'evaluating the baseline') if baseline else None
    if exported:
        from utils.qat.engine.next_step import (
            after_scoring,
        )  # here, because a checkpoint needs nothing of the engine room

        following = after_scoring(config.weights, config.imgsz, config.backend)
    elif predict.recipe:
        include = TARGETS[target_of_recipe(predict.recipe).name].exports
        following = export_command(config.weights, config.imgsz, include)
    else:
        size = typed_sides(config.imgsz)
        following = command('qat.py', 'quantize', '--weights', config.weights, '--data', config.data, '--imgsz', *size)
    on_first(write_scores)(folder, config, metrics, device, seen, following, before)
    LOGGER.info('  '.join(f'{k} {v} ms' for k, v in metrics.ms_per_image.items()) + ' per image')
    for line in predict.notes if exported else ():
        LOGGER.log(RESULT, line)
    LOGGER.log(RESULT, f'\n{metrics.images} images {seen}\n\n' + '\n\n'.join(tables(config, metrics, before)) + '\n')
    finish(following, results=folder, report=folder / 'report.md')
    return Score(config.weights, seen, metrics)


def _require_alike(predict: Any, baseline: Any, config: EvalConfig) -> None:
    """Raise QatError unless a baseline takes the same images and has the same task and classes as the model."""
    why = ''
    if baseline.task is not predict.task:
        why = f'{baseline.task.title}, unlike {config.weights}'
    elif baseline.imgsz not in (None, config.imgsz):
        why = f'takes images of {" x ".join(map(str, baseline.imgsz))}, and they are {config.imgsz[0]} x {config.imgsz[1]} here'
    elif (baseline.nc or predict.nc) != (predict.nc or baseline.nc):
        why = f'has {baseline.nc} classes, and {config.weights} has {predict.nc}'
    if why:
        raise QatError(f'--baseline {config.baseline}: {why}; give the model that {config.weights} was made of')
