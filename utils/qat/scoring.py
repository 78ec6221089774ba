"""`qat.py eval` and `val_trt.py`: score a model on the val images of a data YAML, and leave the figures in a folder."""
from dataclasses import asdict

from utils.general import check_img_size

from utils.qat.backends import FileModel
from utils.qat.data import load_data
from utils.qat.distributed import describe, on_first, rank, world_size
from utils.qat.errors import QatError
from utils.qat.evaluate import evaluate
from utils.qat.files import new_folder
from utils.qat.loaders import val_loader
from utils.qat.log import LOGGER, bar, log_to
from utils.qat.report import class_table, versions, write_json


def score_file(predict, config, device):
    """Score `predict`, the model in config.weights: log the tables, write metrics.json and predictions.json. Returns Metrics.

    predict: see backends.py. config: an EvalConfig. An exported file sees images letterboxed to its own, square, size.
    Raises QatError if file, settings and data do not fit together.
    """
    exported = isinstance(predict, FileModel)
    if exported and predict.classifies:
        raise QatError(f'--weights {config.weights}: a classifier, which has no boxes to score; compare_outputs.py takes it')
    if exported and set(predict.imgsz) != {config.imgsz}:
        raise QatError(f"--imgsz {config.imgsz}: {config.weights} takes {' x '.join(map(str, predict.imgsz))}; "
                       f'give that size, or export again with --imgsz {config.imgsz}')
    config.check_model(predict.segments, predict.kind)
    config.imgsz = check_img_size(config.imgsz, predict.stride)
    data = load_data(config.data, predict.nc, segments=predict.segments)
    loader = val_loader(data, config, predict.stride, square=config.square or exported, shard=(rank(), world_size()))

    folder = new_folder(config)
    on_first(log_to)(folder / 'log.txt')
    LOGGER.info(f'{config.weights} on {describe(device)}')
    metrics = evaluate(predict, loader, data.names, device, config.conf_thres, config.iou_thres, annotations=data.annotations,
                       progress=lambda it: bar(it, 'evaluating'),
                       predictions_file=folder / 'predictions.json' if config.save_json else None)
    on_first(write_json)(folder / 'metrics.json', {
        'settings': asdict(config), 'versions': versions(), 'device': describe(device), **metrics.plain(),
        'times': {'ms_per_image': metrics.ms_per_image}})
    LOGGER.info(f'{class_table(metrics.plain())}\n')
    if metrics.coco:
        LOGGER.info('pycocotools: ' + '  '.join(f'{k} {v:.4f}' for k, v in metrics.coco.items()))
    LOGGER.info('  '.join(f'{k} {v} ms' for k, v in metrics.ms_per_image.items()) + f' per image\nresults {folder}')
    return metrics
