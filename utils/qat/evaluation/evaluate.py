"""Predictions → metrics. One evaluator for every backend and for boxes and masks: a model is a callable images → predictions.

The figures are those of upstream's val.py and segment/val.py: same NMS, same matching, same AP.
"""

import json
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from utils.general import coco80_to_coco91_class, scale_boxes, xywh2xyxy
from utils.metrics import ap_per_class, box_iou
from utils.segment.general import mask_iou

from utils.qat.core.distributed import from_first, is_first, merged
from utils.qat.core.errors import QatError
from utils.qat.core.files import write_text
from utils.qat.data.masks import resized
from utils.qat.evaluation.chance import resampled_ap
from utils.qat.evaluation.coco import add_masks, coco_figures, result_rows
from utils.qat.prediction.detections import detect, prepared

IOUS = torch.linspace(0.5, 0.95, 10)  # AP is the mean over these


@dataclass
class Metrics:
    """Metrics of boxes, and of masks, all in 0..1. AP is the mean over IoU 0.50:0.95, P and R are taken at the best F1."""

    ap: float
    ap50: float
    precision: float
    recall: float
    images: int
    instances: int
    per_class: list = field(
        default_factory=list
    )  # of {class, name, instances, ap, ap50, precision, recall}, and mask as below
    mask: dict = None  # ap, ap50, precision, recall of masks; and coco as below
    coco: dict = None  # pycocotools' figures, where the data is COCO
    ms_per_image: dict = field(default_factory=dict)  # pre-processing, inference, NMS, of the process that computed it
    resampled: np.ndarray = None  # AP on resamples of the images, if asked for: see chance.resampled_ap

    def plain(self):
        """As plain values, without the times, which differ from run to run, and the resamples."""
        return {k: v for k, v in asdict(self).items() if k not in ('ms_per_image', 'resampled') and v is not None}


class Stopwatch:
    """Adds up wall time in seconds; waits for the GPU, so that work is booked where it was ordered."""

    def __init__(self, device):
        self.cuda, self.total = device.type == 'cuda', 0.0

    def _now(self):
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __enter__(self):
        self.start = self._now()

    def __exit__(self, *_):
        self.total += self._now() - self.start


class Scorer:
    """Collects detections and the truth, batch by batch; `metrics()` scores all of them."""

    def __init__(self, names, categories=None):
        """names: class index → name. categories: class index → COCO's category; `rows` then collects COCO's result format."""
        self.names, self.categories = names, categories
        self.batches = []  # (path and matches of each image, rows), in order

    def update(self, detections, truth):
        """detections: of each image, see detections.detect. truth: a detections.Truth."""
        stats, rows = [], []
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
    def rows(self):
        """Detections in COCO's result format."""
        return [row for _, rows in self.batches for row in rows]

    def metrics(self, resample=False):
        """Metrics of everything so far. resample: with AP on resamples of the images, whatever their order. Raises QatError if there is
        no label among the truth."""
        images = [image for images, _ in self.batches for image in images]
        metrics = _score(
            *(np.concatenate(x) for x in zip(*(matches for _, matches in images))), self.names, len(images)
        )
        if resample:
            metrics.resampled = resampled_ap([matches for _, matches in sorted(images, key=lambda image: image[0])])
        return metrics


def _box_iou(boxes, labels, truth, image):
    """IoU [m, n] of the labels of an image with boxes [n, 4], both in pixels of the original."""
    true = scale_boxes(truth.shape, xywh2xyxy(labels[:, 1:]), *truth.shapes[image])
    return box_iou(true, boxes)


def _mask_iou(masks, labels, truth, image):
    """IoU [m, n] of the masks of the labels of an image with those found, in the size of the prototypes."""
    if not len(labels) or not len(masks.boxes):
        return masks.boxes.new_zeros(len(labels), len(masks.boxes))
    found = masks.coarse()
    return mask_iou(resized(truth.masks_of(image), found.shape[1:]).flatten(1), found.flatten(1))


def _correct(found, labels, iou):
    """Which detections are correct at each of IOUS, bool [n, 10]; iou [m, n] of the labels with them.

    A detection is of the label of its class that it overlaps most, and of several of one label the first is the correct one.
    """
    if not len(labels):
        return torch.zeros(len(found), len(IOUS), dtype=torch.bool)
    best, label = (iou * (labels[:, :1] == found.rows[:, 5])).max(0)
    hit = best[:, None] >= IOUS.to(iou.device)
    before = (label[:, None] == label).tril(-1).float() @ hit.float()  # how many of the same label have a higher score
    return hit & (before == 0)


@torch.inference_mode()
def evaluate(
    predict,
    loader,
    names,
    device,
    conf_thres=0.001,
    iou_thres=0.7,
    max_det=300,
    progress=None,
    annotations=None,
    predictions_file=None,
    resample=False,
):
    """Run `predict` over `loader` and score it. Under torchrun all processes call this, each with a shard, and get the same.

    predict: images FP32 [B, 3, H, W] in 0..1 → predictions, see file_model.py; with NMS inside, conf_thres, iou_thres and max_det are
    the model's own.
    loader: see loaders.val_loader. names: class index → name. annotations: COCO's file; adds pycocotools' figures.
    predictions_file: where to write the detections as COCO JSON. resample: with Metrics.resampled.
    """
    clocks = {k: Stopwatch(device) for k in ('pre', 'inference', 'nms')}
    categories = coco80_to_coco91_class() if annotations else list(range(len(names)))
    scorer = Scorer(names, categories if annotations or predictions_file else None)
    for batch in progress(loader) if progress else loader:
        with clocks['pre']:
            images, truth = prepared(batch, device)
        with clocks['inference']:
            outputs = predict(images)
        with clocks['nms']:
            detections = detect(outputs, truth.shape, conf_thres, iou_thres, max_det)
        scorer.update(detections, truth)

    scorer.batches = merged(scorer.batches)
    seconds = merged([{k: c.total for k, c in clocks.items()}])  # of each process
    metrics = None
    if is_first():
        metrics = scorer.metrics(resample)
        metrics.ms_per_image = {k: round(sum(s[k] for s in seconds) / metrics.images * 1e3, 2) for k in clocks}
        if predictions_file:
            write_text(predictions_file, json.dumps(scorer.rows))
        if annotations:
            metrics.coco = coco_figures(annotations, scorer.rows, loader.dataset.im_files)
            if metrics.mask:
                metrics.mask['coco'] = coco_figures(annotations, scorer.rows, loader.dataset.im_files, 'segm')
    return from_first(metrics)


def _score(correct, conf, predicted, true, names, seen):
    """Metrics. correct: [n, 1 or 2, 10], of boxes and masks. true: classes of the labels."""
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


def _figures(correct, conf, predicted, true, names):
    """({ap, ap50, precision, recall} over all classes that the truth has, and {class: the same}; none of these if nothing is correct)."""
    keys = 'ap', 'ap50', 'precision', 'recall'
    if not correct.any():
        return dict.fromkeys(keys, 0.0), {}
    _, _, p, r, _, ap, classes = ap_per_class(correct, conf, predicted, true, names=names)
    columns = ap.mean(1), ap[:, 0], p, r
    return (
        {k: float(x.mean()) for k, x in zip(keys, columns)},
        {int(c): {k: float(x[i]) for k, x in zip(keys, columns)} for i, c in enumerate(classes)},
    )
