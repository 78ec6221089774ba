"""COCO's result format, and its own scorer."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from utils.general import xyxy2xywh
from utils.segment.general import scale_image

from utils.qat.core.log import LOGGER

AT_ONCE = 32  # masks in the size of the image


def image_id(path):
    """COCO's id of an image: the file's name, as a number where it is one."""
    stem = Path(path).stem
    return int(stem) if stem.isnumeric() else stem


def result_rows(native, path, categories):
    """Detections [n, 6] (xyxy in pixels of the original image, score, class) as rows of COCO's result format.

    categories: class index → category.
    """
    box = xyxy2xywh(native[:, :4])
    box[:, :2] -= box[:, 2:] / 2  # centre to corner
    return [
        {
            'image_id': image_id(path),
            'category_id': categories[int(p[5])],
            'bbox': [round(x, 3) for x in b],
            'score': round(p[4], 5),
        }
        for p, b in zip(native.tolist(), box.tolist())
    ]


def add_masks(rows, masks, shape):
    """Give each of `rows` (see `result_rows`) its mask as run lengths in the size of the original image, in place.

    masks: masks.Masks. shape: the loader's of the image.
    """
    from pycocotools.mask import encode

    for start in range(0, len(rows), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        fine = masks[part].fine().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        native = scale_image(fine.shape[:2], np.ascontiguousarray(fine), shape[0], shape[1])
        for row, lengths in zip(rows[part], encode(np.asfortranarray(native))):
            row['segmentation'] = {**lengths, 'counts': lengths['counts'].decode()}


def coco_figures(annotations, detections, files, of='bbox'):
    """pycocotools' AP, AP50 and AP75 of `detections`, rows of COCO's result format, on the images `files`. of: 'bbox', or 'segm' for
    masks."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    said = io.StringIO()  # it prints as it goes
    with contextlib.redirect_stdout(said):
        truth = COCO(str(annotations))
    if not detections:  # loadRes rejects an empty list
        return {'ap': 0.0, 'ap50': 0.0, 'ap75': 0.0}
    # of masks alone: with boxes too, loadRes would take the areas of these
    rows = [{k: v for k, v in row.items() if k != ('bbox' if of == 'segm' else 'segmentation')} for row in detections]
    with contextlib.redirect_stdout(said):
        scorer = COCOeval(truth, truth.loadRes(rows), of)
        scorer.params.imgIds = [image_id(f) for f in files]
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    LOGGER.debug(said.getvalue().rstrip())
    return dict(zip(('ap', 'ap50', 'ap75'), map(float, scorer.stats[:3])))
