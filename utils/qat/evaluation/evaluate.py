"""Images → predictions → metrics, by one evaluator for every backend and task."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from utils.general import coco80_to_coco91_class

from utils.qat.backends.detections import prepared
from utils.qat.config.tasks import load_task
from utils.qat.core.distributed import from_first, is_first, merged
from utils.qat.core.files import write_text
from utils.qat.core.log import unshown
from utils.qat.data.loaders import Loader
from utils.qat.evaluation.detection_scores import coco_figures
from utils.qat.evaluation.metrics import Metrics


@contextmanager
def timed(seconds: dict[str, float], step: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of the block to seconds[step], with the work that it queues on a GPU."""
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    wait()
    start = time.perf_counter()
    yield
    wait()
    seconds[step] += time.perf_counter() - start


@torch.inference_mode()
def evaluate(
    predict: Callable[[torch.Tensor], object],
    loader: Loader | Iterable[tuple],
    names: Mapping[int, str],
    device: torch.device,
    conf_thres: float = 0.001,
    iou_thres: float = 0.7,
    max_det: int = 300,
    progress: Callable[..., Iterable[tuple]] = unshown,
    annotations: Path | None = None,
    predictions_file: Path | None = None,
    resample: bool = False,
) -> Metrics:
    """Score a model on the images of `loader`; return its metrics, ClassMetrics for a classifier.

    Under torchrun every process calls this with its shard of the images, and all get the same metrics.

    The model takes images FP32 [B, 3, H, W] in 0..1, see file_model.py. With NMS inside it has its own conf_thres,
    iou_thres and max_det. The batches are those of loaders.Loaders.scored; `progress` wraps the loader.

    COCO's `annotations` add pycocotools' figures, `resample` adds Metrics.resampled, and `predictions_file` gets the
    detections as COCO JSON.
    """
    task = getattr(predict, 'task', load_task('detect'))  # a plain function is a detector
    seconds = dict.fromkeys(('pre', 'inference', 'nms'), 0.0)
    categories = coco80_to_coco91_class() if annotations else list(range(len(names)))
    scorer = task.scorer(names, categories if annotations or predictions_file else None)
    for batch in progress(loader):
        with timed(seconds, 'pre', device):
            images, truth = prepared(batch, device)
        with timed(seconds, 'inference', device):
            outputs = predict(images)
        with timed(seconds, 'nms', device):
            results = task.postprocess(outputs, truth.shape, conf_thres, iou_thres, max_det)
        scorer.update(results, truth)

    scorer.batches = merged(scorer.batches)
    of_all = merged([seconds])  # from each process
    metrics = None
    if is_first():
        metrics = scorer.metrics(resample)
        metrics.ms_per_image = {k: round(sum(s[k] for s in of_all) / metrics.images * 1e3, 2) for k in task.steps}
        rows = scorer.rows
        if predictions_file and rows is not None:
            write_text(predictions_file, json.dumps(rows))
        if annotations:
            assert isinstance(loader, Loader) and rows is not None  # of a detector; it knows the files of its images
            files = loader.dataset.im_files
            metrics.coco = coco_figures(annotations, rows, files)
            if metrics.mask:
                metrics.mask['coco'] = coco_figures(annotations, rows, files, 'segm')
    return from_first(metrics)
