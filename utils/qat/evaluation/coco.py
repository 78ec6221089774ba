"""COCO's result format, and its own scorer."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from utils.general import coco80_to_coco91_class, xyxy2xywh
from utils.segment.general import scale_image

from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER
from utils.qat.data.coco_file import MASK, SCORED, SIZE, read_coco
from utils.qat.data.dataset import Data
from utils.qat.data.image_folders import ImageFolders
from utils.qat.data.masks import Masks

AT_ONCE = 32  # masks at the size of the image in memory


def image_id(path: str | Path) -> int | str:
    """Return COCO's id of an image: the stem of its file name, as a number if it is one."""
    stem = Path(path).stem
    return int(stem) if stem.isnumeric() else stem


def result_rows(native: torch.Tensor, path: str | Path, categories: Sequence[int]) -> list[dict[str, Any]]:
    """Convert the detections of an image to rows of COCO's result format.

    `native` is [n, 6]: xyxy in pixels of the original image, score, class.
    """
    box = xyxy2xywh(native[:, :4])
    box[:, :2] -= box[:, 2:] / 2  # centre to corner
    image = image_id(path)
    return [
        {
            'image_id': image,
            'category_id': categories[int(p[5])],
            'bbox': [round(x, 3) for x in b],
            'score': round(p[4], 5),
        }
        for p, b in zip(native.tolist(), box.tolist())
    ]


def add_masks(rows: list[dict[str, Any]], masks: Masks, shape: Sequence[Any]) -> None:
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
    annotations: Path, detections: Sequence[Mapping[str, Any]], files: Sequence[str], of: str = 'bbox'
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
