"""The work of `qat.py eval` and `val_trt.py`: score each model on the val images of a data YAML, and write a report."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig, FileEvalConfig
from utils.qat.config.settings import closing, command_words
from utils.qat.config.tables import CHECKPOINTS, backends_for
from utils.qat.core.command import command, explain_out_of_memory, repeated, sides_words
from utils.qat.core.distributed import from_first, join, on_first, rank, world_size
from utils.qat.core.errors import QatError, naming
from utils.qat.core.files import distinct_names, write_document, write_json
from utils.qat.core.log import LOGGER, RESULT, bar, finish, log_to
from utils.qat.core.machine import describe, machine, machine_table, select_device, versions
from utils.qat.core.run_folder import run_folder
from utils.qat.core.text import code, escaped, image, link, markdown_table
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.classes import distance
from utils.qat.evaluation.detection_scores import require_annotations
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.evaluation.interval import EXPLAINED, in_words
from utils.qat.evaluation.metrics import ClassMetrics, DetectionMetrics, Metrics, finds_nothing
from utils.qat.evaluation.score_tables import class_table, models_table, plot_classes
from utils.qat.vendors.next_step import after_scoring

FAIR_CONF = 0.01  # AP hardly changes without the detections up to this score
Model = FileModel | TorchModel
Load = Callable[[Path, torch.device, str | None], Model]  # file, device and backend → its model


@dataclass
class Score:
    """The metrics of a file, and of its baseline on the same images; with a baseline both have resamples."""

    config: EvalConfig
    folder: Path  # of its report
    device: torch.device
    seen: str  # preparation of the images, in words
    metrics: Metrics
    baseline: Metrics | None
    note: str = ''  # why its AP does not compare with others, see `note_of_threshold`

    def record(self) -> dict[str, object]:
        """Return the scores with the preparation of the images and the times, as JSON has them."""
        times = {'times': {'ms_per_image': self.metrics.ms_per_image}}
        return {'seen': self.seen, **self.metrics.to_json(), **times, **({'note': self.note} if self.note else {})}

    def beside_baseline(self) -> dict[str, Metrics]:
        """Return the metrics by the names of their files, those of the baseline first."""
        if not (self.config.baseline and self.baseline):
            return {self.config.weights.name: self.metrics}
        names = distinct_names([self.config.baseline, self.config.weights])
        return dict(zip(names, (self.baseline, self.metrics)))


def seen_by_all(scores: Sequence[Score]) -> str:
    """Return the preparation of the images that all files have seen; '' if it differs."""
    first, *others = {score.seen for score in scores}
    return '' if others else first


def names_of(scores: Sequence[Score]) -> list[str]:
    """Name the files of scores, with the preparation of their images where it differs."""
    names = distinct_names([score.config.weights for score in scores])
    return names if seen_by_all(scores) else [f'{name}, {score.seen}' for name, score in zip(names, scores)]


def tables(score: Score) -> list[str]:
    """Format all metrics as Markdown tables."""
    metrics, compared, of_coco = score.metrics, [], []
    if score.baseline:
        models, against = score.beside_baseline(), metrics.against(score.baseline)
        compared.append(models_table([*models], [*models.values()], [against]))
        _, title = metrics.choosing()
        compared.append(finds_nothing(score.baseline) or f'{in_words(against, title)} ({EXPLAINED})')
    if metrics.coco:
        parts = {'boxes': metrics.coco, **({'masks': metrics.mask['coco']} if metrics.mask else {})}
        titles = 'pycocotools', *(key.upper() for key in metrics.coco)
        rows = [(part, *(f'{v:.4f}' for v in figures.values())) for part, figures in parts.items()]
        of_coco.append(markdown_table(titles, rows))
    return [*compared, class_table(metrics), *of_coco]


def write_scores(score: Score, following: str) -> None:
    """Write the report of a file, see `_write_report`. following: the next command."""
    content = score.record()
    if score.baseline:
        content |= {'baseline': score.baseline.to_json(), 'against_baseline': score.metrics.against(score.baseline)}
    settings, models = asdict(score.config), score.beside_baseline()
    _write_report(score.folder, [score], settings, content, models, tables(score), following)


def write_several(folder: Path, scores: Sequence[Score], config: EvalConfig) -> str:
    """Write the report of several files on the same images, see `_write_report`, and return its table.

    The table has the metrics of each file, and the differences from the baseline, if all have seen alike images, or else from
    the first. config: of the first, as typed.
    """
    names, models = names_of(scores), {s.folder.name.removeprefix(f'{folder.name}-'): s.metrics for s in scores}
    against = [score.metrics.against(scores[0].metrics) for score in scores[1:]]
    records = [{'model': s.config.weights, **s.record(), 'against_first': d} for s, d in zip(scores, (None, *against))]
    if config.baseline and (baseline := scores[0].baseline) and seen_by_all(scores):
        name = f'{config.baseline.name} (baseline)'  # a file may be called so too
        names, models = [name, *names], {name: baseline, **models}
        against = [score.metrics.against(baseline) for score in scores]
    table = models_table(names, [*models.values()], against)
    settings = {**asdict(config), 'weights': [score.config.weights for score in scores]}
    links = ', '.join(link(f'../{score.folder.name}/report.md') for score in scores)
    parts = table, f'({EXPLAINED}.)', f'By class: {links}'
    _write_report(folder, scores, settings, {'models': records}, models, parts)
    return table


def _write_report(
    folder: Path,
    scores: Sequence[Score],
    settings: dict[str, object],
    content: dict[str, object],
    models: dict[str, Metrics],
    parts: Sequence[str],
    following: str | None = None,
) -> None:
    """Write metrics.json with `content`, report.md with `parts`, and classes.png of the metrics in `models` into `folder`."""
    first, kind, metrics = scores[0], type(scores[0].config), scores[0].metrics
    here, device = machine(first.device), describe(first.device)
    head = {'settings': settings, 'versions': versions(), 'device': device, 'machine': here}
    write_json(folder / 'metrics.json', {**head, **content})
    images = f'{metrics.images} images {seen_by_all(scores)}'.rstrip()
    objects = f', with {metrics.instances} objects' if isinstance(metrics, DetectionMetrics) else ''
    pictures = []
    if any(each.per_class for each in models.values()):  # else no detection is correct
        plot_classes(folder / 'classes.png', models)
        pictures.append(image(f'{metrics.choosing()[1]} of each class', 'classes.png'))
    times = [(name, *score.metrics.ms_per_image.values()) for name, score in zip(names_of(scores), scores)]
    program = ('val_trt.py',) if kind is FileEvalConfig else ('qat.py', 'eval')
    write_document(
        folder / 'report.md',
        f'{", ".join(score.config.weights.name for score in scores)} on {first.config.data.name}',
        [
            escaped(f'{images}{objects}. Computed on {device}.'),
            *[escaped(score.note) for score in scores if score.note],
            *parts,
            *pictures,
            '## Times',
            markdown_table(('ms per image', *first.metrics.ms_per_image), times),
            '## Machine',
            machine_table(here),
            '## Made by',
            code(repeated(*program, *command_words(settings, kind))),
            *closing(settings, kind, versions(), following),
        ],
    )


def score_files(configs: Sequence[EvalConfig], load_model: Load) -> None:
    """Score files one after the other, each in its own folder; a report of all compares several with the first.

    `load_model` makes a model, see file_model.py, from file, device and backend. A file that does not fit the settings is refused
    before any is scored. If one does not fit the data, the scores of the files before it stay.
    """
    if len(configs) == 1:
        score_file(configs[0], load_model, bool(configs[0].baseline), {})
        return
    scores: list[Score] = []
    baselines: dict[object, Metrics] = {}
    with run_folder(configs[0]) as folder:
        try:
            for config in _on_alike_images(_apart(configs, folder), load_model):
                scores.append(score_file(config, load_model, True, baselines))
        finally:  # also for the files before one that does not fit
            if folder and len(scores) > 1:
                LOGGER.log(RESULT, f'\n{write_several(folder, scores, configs[0])}\n')
                finish(report=folder / 'report.md')


def _on_alike_images(configs: Sequence[EvalConfig], load_model: Load) -> Sequence[EvalConfig]:
    """Let all files see the same images, because another shape changes AP more than INT8 does.

    They are squares if one of the files was exported, and without --imgsz they have the size for which some were exported or
    quantized. Raises QatError for a file that cannot be loaded or does not take --imgsz.
    """
    files = [config.weights for config in configs] + [config.baseline for config in configs if config.baseline]
    if any(file.suffix.lower() not in CHECKPOINTS for file in files):
        configs = [replace(config, square=True) for config in configs]
    made_for: dict[object, Path] = {}
    for config in configs:
        model = load_model(config.weights, select_device(config.device), config.backend)
        config.for_model(model)
        made_for[model.imgsz or model.quantized_for] = config.weights
    if configs[0].imgsz:
        return configs
    sizes = sorted(size for size in made_for if size)
    texts = [f'{height} x {width} ({made_for[height, width]})' for height, width in sizes]
    if len(sizes) > 1:
        LOGGER.warning(f'scored at different image sizes, which changes AP: {", ".join(texts)}; --imgsz gives one')
    elif sizes and None in made_for:
        LOGGER.info(f'all are scored at {texts[0]}; --imgsz takes another size')
    return [replace(config, imgsz=sizes[0]) for config in configs] if len(sizes) == 1 else configs


def _apart(configs: Sequence[EvalConfig], folder: Path | None) -> Sequence[EvalConfig]:
    """Assign a folder to each of several files: NAME-FILE, or NAME-RUN-FILE where several runs have a file of this name.

    NAME is that of their common folder; only the first process has it, and makes folders.
    """
    names = [config.weights.name for config in configs]
    paths = [config.weights.absolute() for config in configs]
    runs = [path.parent.parent.name if path.parent.name == 'weights' else path.parent.name for path in paths]
    names = [f'{run}-{name}' if names.count(name) > 1 and run else name for run, name in zip(runs, names)]
    twice = [name for name in names if names.count(name) > 1]
    if twice and configs[0].exist_ok:
        raise QatError(f'--weights: several files are called {twice[0]}, which share a folder; leave --exist-ok out')
    common = folder.name if folder else configs[0].name
    return [replace(config, name=f'{common}-{name}') for config, name in zip(configs, names)]


def score_file(config: EvalConfig, load_model: Load, resample: bool, baselines: dict[object, Metrics]) -> Score:
    """Score the model in config.weights and its baseline, log the tables, and write the report and predictions.json.

    An exported file gets images letterboxed to its own size. baselines: gets the metrics of the baseline by backend and
    preparation of the images, and spares scoring it again.
    """
    device = select_device(config.device)
    join(device)
    with run_folder(config) as folder, explain_out_of_memory(config.batch_size):
        predict, baseline, backend = load_model(config.weights, device, config.backend), None, None
        if config.baseline:
            given = (config.backend,) if config.backend else None
            _, backend = backends_for((config.weights, config.baseline), given)
            baseline = load_model(config.baseline, device, backend)
            _require_alike(predict, baseline, config)
        exported = isinstance(predict, FileModel)
        config = config.for_model(predict, *([baseline] if baseline else []))
        data = predict.task.load_data(config.data, predict, names_from=config.names_from)
        if baseline:
            with naming(f'--baseline {config.baseline}'):
                baseline.task.load_data(config.data, baseline, names_from=config.names_from)
        square = config.square or exported or isinstance(baseline, FileModel)
        loader = Loaders(data, config, predict.stride, shard=(rank(), world_size())).scored(square)
        require_annotations(data, loader.dataset.im_files)

        folder = from_first(folder)
        on_first(log_to)(folder / 'log.txt')
        seen = predict.task.seen_as(config.imgsz, square)
        LOGGER.info(f'{config.weights} on {describe(device)}, images {seen}')
        if note := note_of_threshold(predict, config.weights, config.conf_thres):
            LOGGER.warning(note)

        how, shown = (loader, data.names, device, config.conf_thres, config.iou_thres), partial(bar, text='evaluating')
        predictions = folder / 'predictions.json' if config.save_json else None
        metrics = evaluate(
            predict, *how, progress=shown, annotations=data.annotations, predictions_file=predictions, resample=resample
        )
        if nothing := finds_nothing(metrics):
            LOGGER.warning(f'{config.weights}: {nothing}')
        key = backend, seen
        if baseline and key not in baselines:
            shown = partial(bar, text='evaluating the baseline')
            baselines[key] = evaluate(baseline, *how, progress=shown, resample=resample)
        before = baselines[key] if baseline else None
        if isinstance(before, ClassMetrics) and isinstance(metrics, ClassMetrics):
            vars(metrics).update(distance(metrics.scores, before.scores))
        score = Score(config, folder, device, seen, metrics, before, note)
        if isinstance(predict, FileModel) or predict.recipe:
            following = after_scoring(config.weights, config.imgsz, predict.target, config.backend)
        else:
            size, names = sides_words(config.imgsz), ['--names-from', config.names_from] * bool(config.names_from)
            following = command(
                'qat.py', 'quantize', '--weights', config.weights, '--data', config.data, *names, '--imgsz', *size
            )
        on_first(write_scores)(score, following)
    LOGGER.info('  '.join(f'{k} {v} ms' for k, v in metrics.ms_per_image.items()) + ' per image')
    for line in predict.notes:
        LOGGER.log(RESULT, line)
    LOGGER.log(RESULT, f'\n{metrics.images} images {seen}\n\n' + '\n\n'.join(tables(score)) + '\n')
    finish(following, results=folder, report=folder / 'report.md')
    return score


def note_of_threshold(predict: Model, file: Path, conf_thres: float) -> str:
    """Say that low-scored detections are left out, by --conf-thres or inside the file; '' if none are.

    The precision-recall curve then ends early. The definition of AP continues it by a straight line to recall 1 and
    precision 0, as if the missing detections existed.
    """
    whose, fair = '--conf-thres', 'leave --conf-thres out'
    conf: float | None = conf_thres
    if predict.end2end:
        conf, whose = predict.conf_thres, 'inside the file'
        fair = 'export it with --conf-thres 0.001 --iou-thres 0.7 --topk-all 300'
    if not predict.task.boxes or conf is None or conf <= FAIR_CONF:
        return ''
    return (
        f'{file}: scores up to {conf:g} are left out ({whose}), and AP continues the curve that ends there: it '
        f'comes out too high. For a figure that compares with others {fair}'
    )


def _require_alike(predict: Model, baseline: Model, config: EvalConfig) -> None:
    """Raise QatError unless a baseline has the same task and classes as the model."""
    why = ''
    if baseline.task is not predict.task:
        why = f'{baseline.task.title}, unlike {config.weights}'
    elif (baseline.nc or predict.nc) != (predict.nc or baseline.nc):
        why = f'has {baseline.nc} classes, and {config.weights} has {predict.nc}'
    if why:
        raise QatError(f'--baseline {config.baseline}: {why}; give the model that {config.weights} was made of')
