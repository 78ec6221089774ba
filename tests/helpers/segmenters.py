"""Small segmentation models with random weights and realistic outputs: some scores, coefficients of both signs."""

import pytest
import torch

from helpers.zoo import build, calibrated, fuse
from models.deploy.agreement import made_images

CLASSES, NM = 3, 8
BACKBONE = [
    [-1, 1, 'Conv', [16, 3, 2]],
    [-1, 1, 'Conv', [16, 3, 2]],
    [-1, 1, 'RepNCSPELAN4', [16, 16, 8, 1]],  # 2: P2
    [-1, 1, 'ADown', [32]],
    [-1, 1, 'RepNCSPELAN4', [32, 32, 16, 1]],  # 4: P3
    [-1, 1, 'AConv', [32]],
    [-1, 1, 'ADown', [32]],
    [-1, 1, 'SPPELAN', [32, 16]],
]  # 5: P4, 7: P5
HEADS = {
    'Segment': [[[4, 5, 7], 1, 'Segment', ['nc', NM, 16]]],
    'DSegment': [[[4, 5, 7, 2], 1, 'DSegment', ['nc', NM, 16]]],
}
SEGMENTERS = ['Segment', pytest.param('DSegment', marks=pytest.mark.full_tree)]


def segmenter(head='Segment', quantized=False):
    """A fused model with one of HEADS, in eval mode; calibrated if `quantized`."""
    model = fuse(tamed(build('demo-seg', backbone=BACKBONE, head=HEADS[head], nc=CLASSES)))
    if quantized:
        calibrated(model, [made_images(4, (96, 96))], calib_method='max')
    return model


@torch.no_grad()
def tamed(model):
    """Change the head of `model` in place: boxes smaller than the image, scores around 0.3."""
    for branch, size, bias in (
        ('cv2', 0.2, -torch.arange(16.0) / 2),
        ('cv3', 0.3, torch.tensor([-1.0])),
        ('cv4', 0.3, torch.tensor([1.0, -1])),
    ):
        for sequence in getattr(model.model[-1], branch):
            sequence[-1].weight *= size
            sequence[-1].bias.copy_(bias.repeat(len(sequence[-1].bias) // len(bias)))
    return model
