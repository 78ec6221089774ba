"""Predictions → metrics, by one evaluator for every backend, for boxes and masks.

A model is a callable images → predictions. NMS, matching and AP are the same as in upstream's val.py and segment/val.py.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from utils.general import coco80_to_coco91_class, scale_boxes, xywh2xyxy
from utils.metrics import ap_per_class, box_iou
from utils.segment.general import mask_iou

from utils.qat.core.distributed import from_first, is_first, merged
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_text
from utils.qat.data.images import ClassTruth
from utils.qat.data.masks import resized
from utils.qat.evaluation.chance import resampled_ap
from utils.qat.evaluation.classes import ClassScorer
from utils.qat.evaluation.coco import add_masks, coco_figures, result_rows
from utils.qat.prediction.detections import Detections, Truth, detect, prepared

IOUS = torch.linspace(0.5, 0.95, 10)  # AP is the mean over these IoU


@dataclass
class Metrics:
    """Metrics of boxes and masks, in 0..1.

    AP is the mean over IoU 0.50:0.95. Precision and recall are at the best F1.
    """

    ap: float
    ap50: float
    precision: float
    recall: float
    images: int
    instances: int
    # {class, name, instances, ap, ap50, precision, recall} of each class, and `mask` as below
    per_class: list[dict[str, Any]] = field(default_factory=list)
    mask: dict[str, Any] | None = None  # ap, ap50, precision, recall of masks, and `coco` as below; None without masks
    coco: dict[str, float] | None = None  # pycocotools' figures; None if the data is not COCO
    ms_per_image: dict[str, float] = field(default_factory=dict)  # of each step: pre-processing, inference, NMS
    resampled: np.ndarray | None = None  # AP on resamples of the images, see chance.resampled_ap; None if not asked for

    def plain(self) -> dict[str, Any]:
        """Convert to plain values, without the times, which differ from run to run, and without the resamples."""
        return {k: v for k, v in asdict(self).items() if k not in ('ms_per_image', 'resampled') and v is not None}


class Stopwatch:
    """A sum of wall times in seconds.

    It waits for the GPU at both ends of a block, so that the block which starts work gets the time of this work.
    """

    def __init__(self, device: torch.device) -> None:
        """Start at 0."""
        self.cuda, self.total = device.type == 'cuda', 0.0

    def _now(self) -> float:
        """Return the time after the work of the GPU is done."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __enter__(self) -> None:
        """Start a block."""
        self.start = self._now()

    def __exit__(self, *_: object) -> None:
        """Add the time of the block."""
        self.total += self._now() - self.start


class Scorer:
    """Matches of detections with labels, collected batch by batch, and their metrics.

    Args:
        names: class index → name.
        categories: COCO's category of each class, to collect `rows` as well; None = no rows.
    """

    def __init__(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> None:
        """Start without images."""
        self.names, self.categories = names, categories
        # (path and matches of each image, rows) of each batch, in order
        self.batches: list[tuple[list[Any], list[dict[str, Any]]]] = []

    def update(self, detections: Sequence[Detections], truth: Truth) -> None:
        """Add a batch.

        Args:
            detections: detections of each image, see detections.detect.
            truth: labels of the images.
        """
        stats: list[Any] = []
        rows: list[dict[str, Any]] = []
        for i, found in enumerate(detections):
            labels = truth.labels(i)
            boxes = scale_boxes(truth.shape, found.rows[:, :4].clone(), *truth.shapes[i])
            correct = [_correct(found, labels, _box_iou(boxes, labels, truth, i))]
            if found.masks is not None:
                correct.append(_correct(found, labels, _mask_iou(found.masks, labels, truth, i)))
            matches = tuple(x.cpu().numpy() for x in (torch.stack(correct, 1), *found.rows[:, 4:].t(), labels[:, 0]))
            stats.append((truth.paths[i], matches))
            if self.categories:
                of_image = result_rows(torch.cat((boxes, found.rows[:, 4:]), 1), truth.paths[i], self.categories)
                if found.masks is not None:
                    add_masks(of_image, found.masks, truth.shapes[i])
                rows += of_image
        self.batches.append((stats, rows))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the detections in COCO's result format."""
        return [row for _, rows in self.batches for row in rows]

    def metrics(self, resample: bool = False) -> Metrics:
        """Score all images so far.

        Args:
            resample: compute AP on resamples of the images as well. The order of the images does not matter.

        Raises:
            QatError: the images have no labels.
        """
        images = [image for images, _ in self.batches for image in images]
        correct, conf, predicted, true = (np.concatenate(x) for x in zip(*(matches for _, matches in images)))
        metrics = _score(correct, conf, predicted, true, self.names, len(images))
        if resample:
            metrics.resampled = resampled_ap([matches for _, matches in sorted(images, key=lambda image: image[0])])
        return metrics


def _box_iou(boxes: torch.Tensor, labels: torch.Tensor, truth: Truth, image: int) -> torch.Tensor:
    """Compute the IoU [m, n] of the labels of an image with boxes [n, 4], both in pixels of the original."""
    true = scale_boxes(truth.shape, xywh2xyxy(labels[:, 1:]), *truth.shapes[image])
    return box_iou(true, boxes)


def _mask_iou(masks: Any, labels: torch.Tensor, truth: Truth, image: int) -> torch.Tensor:
    """Compute the IoU [m, n] of the true masks of an image with `masks` (a Masks), in the size of the prototypes."""
    if not len(labels) or not len(masks.boxes):
        return masks.boxes.new_zeros(len(labels), len(masks.boxes))
    found = masks.coarse()
    return mask_iou(resized(truth.masks_of(image), found.shape[1:]).flatten(1), found.flatten(1))


def _correct(found: Detections, labels: torch.Tensor, iou: torch.Tensor) -> torch.Tensor:
    """Tell which detections are correct at each of IOUS: bool [n, 10].

    A detection belongs to the label of its class that it overlaps most. If several belong to one label, the one with the
    highest score is correct.

    Args:
        found: detections of an image.
        labels: [m, 5], labels of the image.
        iou: [m, n], IoU of the labels with the detections.
    """
    if not len(labels):
        return torch.zeros(len(found), len(IOUS), dtype=torch.bool)
    best, label = (iou * (labels[:, :1] == found.rows[:, 5])).max(0)
    hit = best[:, None] >= IOUS.to(iou.device)
    before = (label[:, None] == label).tril(
        -1
    ).float() @ hit.float()  # number of hits of the same label with a higher score
    return hit & (before == 0)


def scorer_of(predict: Any, names: Mapping[int, str], categories: Sequence[int] | None = None) -> Any:
    """Make the Scorer of a model, or the ClassScorer of a classifier. categories: see Scorer."""
    return ClassScorer(names) if getattr(predict, 'classifies', False) else Scorer(names, categories)


def found_in(outputs: Any, truth: Any, *settings: Any) -> Any:
    """Return what a scorer takes of the outputs of a model: scores, or detections by detections.detect and its `settings`."""
    return outputs if isinstance(truth, ClassTruth) else detect(outputs, truth.shape, *settings)


@torch.inference_mode()
def evaluate(
    predict: Callable[[torch.Tensor], Any],
    loader: Any,
    names: Mapping[int, str],
    device: torch.device,
    conf_thres: float = 0.001,
    iou_thres: float = 0.7,
    max_det: int = 300,
    progress: Callable[..., Iterable[Any]] | None = None,
    annotations: str | Path | None = None,
    predictions_file: Path | None = None,
    resample: bool = False,
) -> Any:
    """Score a model on the images of `loader`; returns Metrics, or ClassMetrics of a classifier.

    Under torchrun every process calls this with its shard of the images, and all get the same metrics.

    Args:
        predict: images FP32 [B, 3, H, W] in 0..1 → predictions, see file_model.py. A model with NMS inside has its own
            conf_thres, iou_thres and max_det.
        loader: batches, see loaders.val_loader.
        names: class index → name.
        device: where the images are given to the model.
        conf_thres: lowest score of a detection.
        iou_thres: IoU above which NMS drops the box with the lower score.
        max_det: most detections of an image.
        progress: wraps the loader, to show progress.
        annotations: COCO's annotation file, to add pycocotools' figures.
        predictions_file: where to write the detections as COCO JSON; None = nowhere.
        resample: compute Metrics.resampled as well.

    Raises:
        QatError: the images have no labels.
    """
    clocks = {k: Stopwatch(device) for k in ('pre', 'inference', 'nms')}
    categories = coco80_to_coco91_class() if annotations else list(range(len(names)))
    scorer = scorer_of(predict, names, categories if annotations or predictions_file else None)
    for batch in progress(loader) if progress else loader:
        with clocks['pre']:
            images, truth = prepared(batch, device)
        with clocks['inference']:
            outputs = predict(images)
        with clocks['nms']:
            found = found_in(outputs, truth, conf_thres, iou_thres, max_det)
        scorer.update(found, truth)

    if isinstance(scorer, ClassScorer):
        del clocks['nms']  # a classifier has none
    scorer.batches = merged(scorer.batches)
    seconds = merged([{k: c.total for k, c in clocks.items()}])  # a dict from each process
    metrics = None
    if is_first():
        metrics = scorer.metrics(resample)
        metrics.ms_per_image = {k: round(sum(s[k] for s in seconds) / metrics.images * 1e3, 2) for k in clocks}
        if predictions_file and isinstance(scorer, Scorer):
            write_text(predictions_file, json.dumps(scorer.rows))
        if annotations:
            metrics.coco = coco_figures(annotations, scorer.rows, loader.dataset.im_files)
            if metrics.mask:
                metrics.mask['coco'] = coco_figures(annotations, scorer.rows, loader.dataset.im_files, 'segm')
    return from_first(metrics)


def _score(
    correct: np.ndarray,
    conf: np.ndarray,
    predicted: np.ndarray,
    true: np.ndarray,
    names: Mapping[int, str],
    seen: int,
) -> Metrics:
    """Score all detections.

    Args:
        correct: bool [n, 1 or 2, 10], whether the boxes and the masks of the detections are correct at each of IOUS.
        conf: [n], scores.
        predicted: [n], classes of the detections.
        true: [m], classes of the labels.
        names: class index → name.
        seen: number of images.
    """
    counts = np.bincount(true.astype(int), minlength=len(names))
    if not counts.sum():
        raise QatError('the validation images have no labels, so nothing can be scored; check val: in --data')
    parts = [_figures(part, conf, predicted, true, names) for part in np.swapaxes(correct, 0, 1)]
    rows = [
        {
            'class': c,
            'name': names[c],
            'instances': int(counts[c]),
            **parts[0][1][c],
            **({'mask': parts[1][1].get(c)} if len(parts) > 1 else {}),
        }
        for c in parts[0][1]
    ]
    return Metrics(
        **parts[0][0],
        images=seen,
        instances=int(counts.sum()),
        per_class=rows,
        mask=parts[1][0] if len(parts) > 1 else None,
    )


def _figures(
    correct: np.ndarray, conf: np.ndarray, predicted: np.ndarray, true: np.ndarray, names: Mapping[int, str]
) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    """Compute {ap, ap50, precision, recall} as the mean over all true classes, and of each class.

    If no detection is correct, there are no figures of classes.
    """
    keys = 'ap', 'ap50', 'precision', 'recall'
    if not correct.any():
        return dict.fromkeys(keys, 0.0), {}
    _, _, p, r, _, ap, classes = ap_per_class(correct, conf, predicted, true, names=names)
    columns = ap.mean(1), ap[:, 0], p, r
    return (
        {k: float(x.mean()) for k, x in zip(keys, columns)},
        {int(c): {k: float(x[i]) for k, x in zip(keys, columns)} for i, c in enumerate(classes)},
    )
