"""The work of `qat.py eval` and `val_trt.py`: a model is scored on the val images of a data YAML, with a report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from utils.general import check_img_size

from utils.qat.config.qat import EvalConfig
from utils.qat.core.device import describe
from utils.qat.core.distributed import from_first, on_first, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, RESULT, bar, finish, log_to
from utils.qat.core.next_command import after_scoring
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import val_loader
from utils.qat.evaluation.evaluate import Metrics, evaluate
from utils.qat.evaluation.score_report import tables, write_scores
from utils.qat.prediction.file_model import FileModel


def score_file(
    predict: Any, config: EvalConfig, device: torch.device, folder: Path | None, baseline: Any = None
) -> Metrics:
    """Score the model in config.weights, log the tables, and write the report and predictions.json.

    An exported file gets images letterboxed to its own size.

    Args:
        predict: the model, see file_model.py.
        config: settings of the command.
        device: where the images are given to the model.
        folder: folder of the run, see run_folder.run_folder; only the first process of torchrun needs it.
        baseline: the model in config.baseline, which is scored on the same images; None without it.

    Raises:
        QatError: file, settings and data do not fit together.
    """
    exported = isinstance(predict, FileModel)
    if exported and predict.classifies:
        raise QatError(
            f'--weights {config.weights}: a classifier, which has no boxes to score; compare_outputs.py takes it'
        )
    if exported and set(predict.imgsz) != {config.imgsz}:
        raise QatError(
            f'--imgsz {config.imgsz}: {config.weights} takes {" x ".join(map(str, predict.imgsz))}; '
            f'give that size, or export again with --imgsz {config.imgsz}'
        )
    config.check_model(predict.segments, predict.kind)
    if baseline:
        _require_alike(predict, baseline, config)
    config = replace(config, imgsz=check_img_size(config.imgsz, predict.stride))
    data = load_data(config.data, predict.nc, segments=predict.segments)
    loader = val_loader(data, config, predict.stride, square=config.square or exported, shard=(rank(), world_size()))

    folder = from_first(folder)
    on_first(log_to)(folder / 'log.txt')
    LOGGER.info(f'{config.weights} on {describe(device)}')
    metrics = evaluate(
        predict,
        loader,
        data.names,
        device,
        config.conf_thres,
        config.iou_thres,
        annotations=data.annotations,
        progress=lambda it: bar(it, 'evaluating'),
        predictions_file=folder / 'predictions.json' if config.save_json else None,
        resample=bool(baseline),
    )
    before = None
    if baseline:
        before = evaluate(
            baseline,
            loader,
            data.names,
            device,
            config.conf_thres,
            config.iou_thres,
            progress=lambda it: bar(it, 'evaluating the baseline'),
            resample=True,
        )
    following = after_scoring(config.weights, config.imgsz, config.backend)
    on_first(write_scores)(folder, config, metrics, device, following, before)
    LOGGER.info('  '.join(f'{k} {v} ms' for k, v in metrics.ms_per_image.items()) + ' per image')
    for line in predict.notes if exported else ():
        LOGGER.log(RESULT, line)
    LOGGER.log(RESULT, '\n' + '\n\n'.join(tables(config, metrics, before)) + '\n')
    finish(following, results=folder, report=folder / 'report.md')
    return metrics


def _require_alike(predict: Any, baseline: Any, config: EvalConfig) -> None:
    """Require that a baseline takes the same images and finds the same kind of objects as the model."""
    why = ''
    if getattr(baseline, 'classifies', False):
        why = 'a classifier'
    elif isinstance(baseline, FileModel) and set(baseline.imgsz) != {config.imgsz}:
        why = (
            f'takes images of {" x ".join(map(str, baseline.imgsz))}, and they are {config.imgsz} x {config.imgsz} here'
        )
    elif (baseline.nc or predict.nc) != (predict.nc or baseline.nc):
        why = f'has {baseline.nc} classes, and {config.weights} has {predict.nc}'
    elif baseline.segments != predict.segments:
        why = f'has {"masks" if baseline.segments else "no masks"}, unlike {config.weights}'
    if why:
        raise QatError(f'--baseline {config.baseline}: {why}; give the model that {config.weights} was made of')
