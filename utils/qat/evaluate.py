"""Predictions → metrics. One evaluator for every backend: a model is a callable images → predictions.

The figures are those of upstream's val.py: same NMS, same matching, same AP, taken from upstream itself.
"""
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from utils.general import coco80_to_coco91_class, non_max_suppression, scale_boxes, xywh2xyxy, xyxy2xywh
from utils.metrics import ap_per_class

from utils.qat.distributed import from_first, is_first, merged
from utils.qat.errors import QatError
from utils.qat.report import write_text

IOUS = torch.linspace(0.5, 0.95, 10)  # AP is the mean over these


@dataclass
class Metrics:
    """Detection metrics, all in 0..1. AP is the mean over IoU 0.50:0.95, P and R are taken at the best F1."""
    ap: float
    ap50: float
    precision: float
    recall: float
    images: int
    instances: int
    per_class: list = field(default_factory=list)  # of {class, name, instances, ap, ap50, precision, recall}
    coco: dict = None  # pycocotools' figures, where the data is COCO
    ms_per_image: dict = field(default_factory=dict)  # pre-processing, inference, NMS, of the process that computed it

    def plain(self):
        """As plain values, without the times, which differ from run to run."""
        return {k: v for k, v in asdict(self).items() if k != 'ms_per_image' and v is not None}


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


def prepared(images, targets, device):
    """A loader's batch as models take it: images FP32 [B, 3, H, W] in 0..1, and targets [n, 6] (image, class, xywh in pixels)."""
    images = images.to(device, non_blocking=True).float() / 255
    height, width = images.shape[2:]
    return images, targets.to(device) * torch.tensor((1, 1, width, height, width, height), device=device)


def detect(predictions, conf_thres=0.001, iou_thres=0.7, max_det=300):
    """NMS: predictions [B, 4 + nc, N] → per image detections [n, 6]: xyxy in pixels, score, class; highest score first."""
    # Image by image: upstream's NMS gives up on the rest of a batch when a time limit is over.
    return [non_max_suppression(p[None], conf_thres, iou_thres, multi_label=True, max_det=max_det)[0] for p in predictions]


class Scorer:
    """Collects detections and the truth, batch by batch; `metrics()` scores all of them."""

    def __init__(self, names, categories=None):
        """names: class index → name. categories: class index → COCO's category; `rows` then collects COCO's result format."""
        self.names, self.categories = names, categories
        self.batches = []  # (statistics of each image, rows), in order

    def update(self, detections, targets, image_shape, paths, shapes):
        """detections: see `detect`. targets: see `prepared`. image_shape: height, width. paths, shapes: the loader's."""
        stats, rows = [], []
        for i, pred in enumerate(detections):
            labels = targets[targets[:, 0] == i, 1:]
            native, correct = _matches(pred, labels, image_shape, shapes[i])
            stats.append(tuple(x.cpu().numpy() for x in (correct, pred[:, 4], pred[:, 5], labels[:, 0])))
            if self.categories:
                rows += _coco_rows(native, paths[i], self.categories)
        self.batches.append((stats, rows))

    @property
    def rows(self):
        """Detections in COCO's result format."""
        return [row for _, rows in self.batches for row in rows]

    def metrics(self):
        """Metrics of everything so far. Raises QatError if there is no label among the truth."""
        stats = [image for images, _ in self.batches for image in images]
        return _score([np.concatenate(x) for x in zip(*stats)], self.names, len(stats))


def _matches(pred, labels, image_shape, shape):
    """Predictions in the pixels of the original image [n, 6], and which are correct at each IoU [n, 10]."""
    from val import process_batch  # upstream's script; imported here because val.py pulls in the whole of upstream
    native = pred.clone()
    scale_boxes(image_shape, native[:, :4], shape[0], shape[1])
    if not len(labels):
        return native, torch.zeros(len(pred), len(IOUS), dtype=torch.bool)
    boxes = xywh2xyxy(labels[:, 1:5])
    scale_boxes(image_shape, boxes, shape[0], shape[1])
    return native, process_batch(native, torch.cat((labels[:, :1], boxes), 1), IOUS.to(pred.device)).cpu()


@torch.inference_mode()
def evaluate(predict, loader, names, device, conf_thres=0.001, iou_thres=0.7, max_det=300, progress=None, annotations=None,
             predictions_file=None):
    """Run `predict` over `loader` and score it. Under torchrun all processes call this, each with a shard, and get the same.

    predict: images FP32 [B, 3, H, W] in 0..1 → [B, 4 + nc, N], boxes as xywh in pixels, then class scores; or, with NMS inside, a list
    of detections, see `detect`; then conf_thres, iou_thres and max_det are the model's own.
    loader: see loaders.val_loader. names: class index → name. annotations: COCO's file; adds pycocotools' figures.
    predictions_file: where to write the detections as COCO JSON.
    """
    clocks = {k: Stopwatch(device) for k in ('pre', 'inference', 'nms')}
    categories = coco80_to_coco91_class() if annotations else list(range(len(names)))
    scorer = Scorer(names, categories if annotations or predictions_file else None)
    for images, targets, paths, shapes in progress(loader) if progress else loader:
        with clocks['pre']:
            images, targets = prepared(images, targets, device)
        with clocks['inference']:
            predictions = predict(images)
        with clocks['nms']:
            inside = isinstance(predictions, list)  # NMS was in the model
            detections = predictions if inside else detect(predictions, conf_thres, iou_thres, max_det)
        scorer.update(detections, targets, images.shape[2:], paths, shapes)

    scorer.batches = merged(scorer.batches)
    seconds = merged([{k: c.total for k, c in clocks.items()}])  # of each process
    metrics = None
    if is_first():
        metrics = scorer.metrics()
        metrics.ms_per_image = {k: round(sum(s[k] for s in seconds) / metrics.images * 1e3, 2) for k in clocks}
        if predictions_file:
            write_text(predictions_file, json.dumps(scorer.rows))
        if annotations:
            metrics.coco = coco_figures(annotations, scorer.rows, loader.dataset.im_files)
    return from_first(metrics)


def _score(stats, names, seen):
    correct, conf, predicted, true = stats
    counts = np.bincount(true.astype(int), minlength=len(names))
    if not counts.sum():
        raise QatError('the validation images have no labels, so nothing can be scored; check val: in --data')
    if not correct.any():
        return Metrics(0.0, 0.0, 0.0, 0.0, seen, int(counts.sum()))
    _, _, p, r, _, ap, classes = ap_per_class(correct, conf, predicted, true, names=names)
    per_class = [{'class': int(c), 'name': names[int(c)], 'instances': int(counts[c]), 'ap': float(ap[i].mean()),
                  'ap50': float(ap[i, 0]), 'precision': float(p[i]), 'recall': float(r[i])}
                 for i, c in enumerate(classes)]
    return Metrics(float(ap.mean()), float(ap[:, 0].mean()), float(p.mean()), float(r.mean()), seen, int(counts.sum()),
                   per_class)


def _image_id(path):
    """COCO's image id: the file's name, as a number where it is one."""
    stem = Path(path).stem
    return int(stem) if stem.isnumeric() else stem


def _coco_rows(native, path, categories):
    """Detections [n, 6] (xyxy, score, class) as rows of COCO's result format."""
    box = xyxy2xywh(native[:, :4])
    box[:, :2] -= box[:, 2:] / 2  # centre to corner
    return [{'image_id': _image_id(path), 'category_id': categories[int(p[5])],
             'bbox': [round(x, 3) for x in b], 'score': round(p[4], 5)} for p, b in zip(native.tolist(), box.tolist())]


def coco_figures(annotations, detections, files):
    """pycocotools' AP, AP50 and AP75 of `detections` on the images `files`."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
    truth = COCO(str(annotations))
    if not detections:  # loadRes rejects an empty list
        return {'ap': 0.0, 'ap50': 0.0, 'ap75': 0.0}
    scorer = COCOeval(truth, truth.loadRes(detections), 'bbox')
    scorer.params.imgIds = [_image_id(f) for f in files]
    scorer.evaluate()
    scorer.accumulate()
    scorer.summarize()
    return dict(zip(('ap', 'ap50', 'ap75'), map(float, scorer.stats[:3])))
