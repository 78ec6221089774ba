"""Detections → AP, AP50, precision and recall of boxes and masks; COCO's result format, and its own scorer.

Matching and AP are upstream's, of val.py and segment/val.py.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from utils.general import coco80_to_coco91_class, scale_boxes, xywh2xyxy, xyxy2xywh
from utils.metrics import ap_per_class, box_iou
from utils.segment.general import mask_iou, scale_image

from utils.qat.backends.detections import Detections, Placement, Truth
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.data.dataset import Data
from utils.qat.data.image_folders import ImageFolders
from utils.qat.data.masks import Masks, resized
from utils.qat.evaluation.interval import half_widths, resampled_ap
from utils.qat.evaluation.metrics import DetectionMetrics

AT_ONCE = 32  # masks at the size of the image in memory
IOUS = torch.linspace(0.5, 0.95, 10)  # AP is the mean over these IoU
TIED = 1e-12  # between two equal scores


def image_id(path: str | Path) -> int | str:
    """Return COCO's id of an image: the stem of its file name, as a number if it is one."""
    stem = Path(path).stem
    return int(stem) if stem.isnumeric() else stem


def result_rows(native: torch.Tensor, path: str | Path, categories: Sequence[int]) -> list[dict[str, object]]:
    """Convert the detections of an image to rows of COCO's result format.

    `native` is [n, 6]: xyxy in pixels of the original image, score, class.
    """
    box = xyxy2xywh(native[:, :4])
    box[:, :2] -= box[:, 2:] / 2  # centre to corner
    image = image_id(path)
    keys = 'image_id', 'category_id', 'bbox', 'score'
    return [
        dict(zip(keys, (image, categories[int(p[5])], [round(x, 3) for x in b], round(p[4], 5))))
        for p, b in zip(native.tolist(), box.tolist())
    ]


# The matches of an image: its path; correct, score and class of each detection; the true classes
Matches = tuple[str, tuple[np.ndarray, ...]]


def add_masks(rows: list[dict[str, object]], masks: Masks, shape: Placement) -> None:
    """Add the mask to each row of an image, in place, as run lengths at the size of the original image.

    `shape` is the image's element of Truth.shapes.
    """
    from pycocotools.mask import encode

    for start in range(0, len(rows), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        fine = masks[part].fine().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        native = scale_image(fine.shape[:2], np.ascontiguousarray(fine), shape[0], shape[1])
        for row, lengths in zip(rows[part], encode(np.asfortranarray(native))):
            row['segmentation'] = {**lengths, 'counts': lengths['counts'].decode()}


def _read(annotations: Path, masks: bool) -> dict[str, Any]:
    from utils.qat.data.coco_file import MASK, SCORED, SIZE, read_coco  # here, because only COCO has such a file

    extra = {'image': SIZE, 'thing': {**SCORED, **MASK}} if masks else {'thing': SCORED}
    return read_coco(annotations, str(annotations), **extra)


def require_annotations(data: Data | ImageFolders, files: Sequence[str]) -> None:
    """Raise QatError early unless COCO's annotations can score detections in the images."""
    if isinstance(data, ImageFolders) or not data.annotations:
        return
    content, categories = _read(data.annotations, data.masks), coco80_to_coco91_class()
    images, known = ({entry['id'] for entry in content[key]} for key in ('images', 'categories'))
    other = 'put the file of these images there, or call the list of images otherwise than val2017.txt'
    missing = [file for file in files if image_id(file) not in images]
    if missing:
        raise QatError(
            f'{data.annotations}: does not have {len(missing)} of the {len(files)} images, the first is {missing[0]}; {other}'
        )
    if data.nc > len(categories) or not known.issuperset(categories[: data.nc]):
        raise QatError(f"{data.annotations}: does not have COCO's categories of the {data.nc} classes; {other}")


def coco_figures(
    annotations: Path, detections: Sequence[Mapping[str, object]], files: Sequence[str], of: str = 'bbox'
) -> dict[str, float]:
    """Score rows of COCO's result format by pycocotools, boxes ('bbox') or masks ('segm'); AP is in 0..1."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    said = io.StringIO()  # pycocotools prints its progress
    truth = COCO()
    truth.dataset = _read(annotations, of == 'segm')
    with contextlib.redirect_stdout(said):
        truth.createIndex()
    if not detections:  # loadRes rejects an empty list
        return {'ap': 0.0, 'ap50': 0.0, 'ap75': 0.0}
    # drop the boxes to score masks: otherwise loadRes takes the areas of the boxes
    rows = [{k: v for k, v in row.items() if k != ('bbox' if of == 'segm' else 'segmentation')} for row in detections]
    with contextlib.redirect_stdout(said):
        scorer = COCOeval(truth, truth.loadRes(rows), of)
        scorer.params.imgIds = [image_id(f) for f in files]
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    LOGGER.debug(said.getvalue().rstrip())
    return dict(zip(('ap', 'ap50', 'ap75'), map(float, scorer.stats[:3])))


class Scorer:
    """Matches of detections with labels, collected batch by batch, their metrics and, with `categories`, COCO rows."""

    def __init__(self, names: Mapping[int, str], categories: Sequence[int] | None = None) -> None:
        self.names, self.categories = names, categories
        # (path and matches of each image, rows) of each batch, in order
        self.batches: list[tuple[list[Matches], list[dict[str, object]]]] = []

    def update(self, detections: Sequence[Detections], truth: Truth) -> None:
        """Add a batch: the detections of each image, see detections.detect, and the labels."""
        stats: list[Matches] = []
        rows: list[dict[str, object]] = []
        for i, result in enumerate(detections):
            labels = truth.labels(i)
            boxes, true = (
                scale_boxes(truth.shape, xyxy, *truth.shapes[i])  # in pixels of the original
                for xyxy in (result.rows[:, :4].clone(), xywh2xyxy(labels[:, 1:]))
            )
            correct = [_correct(result, labels, box_iou(true, boxes))]
            if result.masks is not None:
                correct.append(_correct(result, labels, _mask_iou(result.masks, labels, truth, i)))
            matches = tuple(x.cpu().numpy() for x in (torch.stack(correct, 1), *result.rows[:, 4:].t(), labels[:, 0]))
            stats.append((truth.paths[i], matches))
            if self.categories:
                of_image = result_rows(torch.cat((boxes, result.rows[:, 4:]), 1), truth.paths[i], self.categories)
                if result.masks is not None:
                    add_masks(of_image, result.masks, truth.shapes[i])
                rows += of_image
        self.batches.append((stats, rows))

    @property
    def rows(self) -> list[dict[str, object]]:
        """Return the detections in COCO's result format."""
        return [row for _, rows in self.batches for row in rows]

    def metrics(self, resample: bool = False) -> DetectionMetrics:
        """Score all images so far, in any order; `resample` computes AP on resamples of the images as well."""
        by_path = sorted((image for images, _ in self.batches for image in images), key=lambda image: image[0])
        images = [matches for _, matches in by_path]
        correct, score, predicted, true = map(np.concatenate, zip(*images))
        counts = np.bincount(true.astype(int), minlength=len(self.names))
        if not counts.sum():
            raise QatError('the validation images have no labels, so nothing can be scored; check val: in --data')
        (boxes, boxes_by_class), *masks = (
            _scores(part, score, predicted, true, self.names) for part in np.swapaxes(correct, 0, 1)
        )
        metrics = DetectionMetrics(**boxes, images=len(images), instances=int(counts.sum()))
        for c, of_class in boxes_by_class.items():
            metrics.per_class.append({'class': c, 'name': self.names[c], 'instances': int(counts[c]), **of_class})
        if masks:
            [(metrics.mask, masks_by_class)] = masks
            for row in metrics.per_class:
                row['mask'] = masks_by_class.get(row['class'])
        if resample:
            by_class: dict[int, np.ndarray] = {}
            metrics.resampled = resampled_ap(images, by_class)
            for row in metrics.per_class:
                for part, half_width in zip((row, row.get('mask')), half_widths(by_class[row['class']])):
                    if part:
                        part['chance'] = half_width
        return metrics


def _mask_iou(masks: Masks, labels: torch.Tensor, truth: Truth, image: int) -> torch.Tensor:
    """Compute the IoU [m, n] of the true masks of an image with `masks`, in the size of the prototypes."""
    if not len(labels) or not len(masks.boxes):
        return masks.boxes.new_zeros(len(labels), len(masks.boxes))
    coarse = masks.coarse()
    return mask_iou(resized(truth.masks_of(image), coarse.shape[1:]).flatten(1), coarse.flatten(1))


def _correct(detections: Detections, labels: torch.Tensor, iou: torch.Tensor) -> torch.Tensor:
    """Tell which detections are correct at each of IOUS: bool [n, 10], from labels [m, 5] and their IoU [m, n].

    A detection belongs to the label of its class that it overlaps most. If several belong to one label, the one with
    the highest score is correct.
    """
    if not len(labels):
        return torch.zeros(len(detections), len(IOUS), dtype=torch.bool)
    best, label = (iou * (labels[:, :1] == detections.rows[:, 5])).max(0)
    hit = best[:, None] >= IOUS.to(iou.device)
    # number of hits of the same label with a higher score
    before = (label[:, None] == label).tril(-1).float() @ hit.float()
    return hit & (before == 0)


def _scores(
    correct: np.ndarray, score: np.ndarray, predicted: np.ndarray, true: np.ndarray, names: Mapping[int, str]
) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    """Compute {ap, ap50, precision, recall} as the mean over all true classes, and of each class.

    `correct` is bool [n, 10]: whether each detection is correct at each of IOUS. If none is, there is nothing of classes.
    """
    keys = tuple(DetectionMetrics.columns)
    if not correct.any():
        return dict.fromkeys(keys, 0.0), {}
    # Equal scores, of which INT8 has many, keep the order of the images; upstream's sort keeps none
    distinct = score.astype(np.float64)
    distinct[np.argsort(-score, kind='stable')] -= TIED * np.arange(len(score))
    _, _, p, r, _, ap, classes = ap_per_class(correct, distinct, predicted, true, names=names)
    columns = ap.mean(1), ap[:, 0], p, r
    return (
        {k: float(x.mean()) for k, x in zip(keys, columns)},
        {int(c): {k: float(x[i]) for k, x in zip(keys, columns)} for i, c in enumerate(classes)},
    )
