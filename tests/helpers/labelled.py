"""Labelled images for the tests of scores, their labels as a perfect model would find them, and command lines."""

import shutil
from pathlib import Path

import cv2
import torch

from utils.qat.config.qat import EvalConfig
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders

CPU = torch.device('cpu')
PERFECT = 0.995  # what upstream's interpolation makes of a perfect AP


def val_images(data, size=128, square=False, masks=False, limit=None, batch_size=4, **options):
    """The batches of the val images of a data YAML, for a stride of 32; options: of EvalConfig."""
    config = EvalConfig(Path('w.pt'), data, batch_size=batch_size, imgsz=size, workers=0, **options)
    return Loaders(load_data(data, masks=masks), config, 32).scored(square=square, limit=limit)


def moved(data, folder):
    """Write the YAML of a data set whose files are in `folder` now; returns it."""
    new = folder / data.name
    new.write_text(data.read_text().replace(str(data.parent), str(folder)))
    return new


def copied(data, folder):
    """Copy a data set to `folder`, without what upstream has cached of its labels; returns its YAML."""
    shutil.copytree(data.parent, folder, ignore=shutil.ignore_patterns('*.cache'))
    return moved(data, folder)


def labels_of(batches, images):
    """(labels [n, 6] with boxes in 0..1, masks or None) of each image of a batch; `images` is one of the batches."""
    images_of_batch = next(b for b in batches if b[0].shape == images.shape and torch.equal(b[0].float() / 255, images))
    targets, masks = images_of_batch[1], [*images_of_batch[4:], [None] * len(images)][0]
    return [(targets[targets[:, 0] == i], masks[i]) for i in range(len(images))]


def boxes_of(image):
    """(height, width) of an image file, and (class, left, top, width, height) of each of its labels, in pixels."""
    height, width = cv2.imread(str(image)).shape[:2]
    label = image.parents[2] / 'labels' / image.parent.name / f'{image.stem}.txt'
    rows = [map(float, line.split()) for line in label.read_text().splitlines()]
    boxes = [(int(c), (x - w / 2) * width, (y - h / 2) * height, w * width, h * height) for c, x, y, w, h in rows]
    return (height, width), boxes


def coco_labels(images, categories):
    """The labels of image files as a COCO JSON has them: the id of an image is its place in the list, that of a class is in `categories`."""
    sizes, boxes = [], []
    for number, file in enumerate(images):
        (height, width), found = boxes_of(file)
        sizes.append({'id': number, 'file_name': file.name, 'width': width, 'height': height})
        for c, *box in found:
            of_image = {'image_id': number, 'category_id': categories[c], 'iscrowd': 0}
            boxes.append({'id': len(boxes) + 1, **of_image, 'bbox': box, 'area': box[2] * box[3]})
    named = [{'id': category, 'name': str(c)} for c, category in enumerate(categories)]
    return {'images': sizes, 'annotations': boxes, 'categories': named}


def words(line, **values):
    """The words of a command line; a value of one of its {names} stays one word, whatever spaces it has."""
    return [word.format(**values) for word in line.split()]
