"""Reference decoder of MODEL-coral.tflite in NumPy: integers in, detections out. Copy it; docs/edge.md tells what the tensors mean.

python examples/edge/decode.py best-coral.tflite image.jpg
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def letterbox(image: np.ndarray, height: int, width: int) -> tuple[np.ndarray, float, np.ndarray]:
    """Fit an image, UINT8 [h, w, 3], into the middle of grey. Returns it, and scale and shift [4] of its boxes."""
    import cv2

    ratio = min(height / image.shape[0], width / image.shape[1])
    h, w = round(image.shape[0] * ratio), round(image.shape[1] * ratio)
    top, left = (height - h) // 2, (width - w) // 2
    framed = np.full((height, width, 3), 114, np.uint8)
    framed[top : top + h, left : left + w] = cv2.resize(image, (w, h))
    return framed, ratio, np.array([left, top, left, top])


def decode(boxes: Any, scores: Any, box_numbers: Any, score_numbers: Any, size: Any, least: float, iou: float) -> Any:
    """Decode INT8 boxes [N, 64] and scores [N, nc] of images of a size (height, width), by pairs of scale and zero point.

    Returns boxes as xyxy in pixels [n, 4], scores [n] above `least`, the best first, and classes [n].
    """
    (box_scale, box_zero), (scale, zero) = box_numbers, score_numbers
    kept = np.flatnonzero(scores.max(1) >= np.log(least / (1 - least)) / scale + zero)  # as integers
    kinds = scores[kept].argmax(1)
    scored = 1 / (1 + np.exp((zero - scores[kept, kinds].astype(np.float32)) * scale))
    logits = ((boxes[kept].astype(np.float32) - box_zero) * box_scale).reshape(-1, 4, 16)
    weights = np.exp(logits - logits.max(2, keepdims=True))
    sides = (weights / weights.sum(2, keepdims=True)) @ np.arange(16)  # left, top, right, bottom, in cells
    grids = [(s, *np.divmod(np.arange(size[0] // s * (size[1] // s)), size[1] // s)) for s in (8, 16, 32)]
    cells = np.concatenate([np.stack((x + 0.5, y + 0.5, np.full(x.shape, s)), 1) for s, y, x in grids])[kept]
    xyxy = np.concatenate((cells[:, :2] - sides[:, :2], cells[:, :2] + sides[:, 2:]), 1) * cells[:, 2:]
    areas, chosen = (xyxy[:, 2:] - xyxy[:, :2]).prod(1), list[int]()
    for i in np.argsort(-scored, kind='stable'):  # NMS of each class
        first, last = np.maximum(xyxy[i, :2], xyxy[chosen, :2]), np.minimum(xyxy[i, 2:], xyxy[chosen, 2:])
        both = (last - first).clip(0).prod(1)
        if not ((both > iou * (areas[i] + areas[chosen] - both)) & (kinds[chosen] == kinds[i])).any():
            chosen.append(i)
    return xyxy[chosen], scored[chosen], kinds[chosen]


if __name__ == '__main__':
    import cv2
    from ai_edge_litert.interpreter import Interpreter

    picture = cv2.imread(sys.argv[2]) if len(sys.argv) == 3 else None
    if picture is None:
        sys.exit('decode.py FILE.tflite IMAGE: a file of --layout coral, and a picture that OpenCV reads')
    model = Interpreter(sys.argv[1])
    model.allocate_tensors()
    (given,), returned = model.get_input_details(), {each['name']: each for each in model.get_output_details()}
    size = given['shape'][1:3]
    image, ratio, shift = letterbox(picture[..., ::-1], size[0], size[1])
    model.set_tensor(given['index'], image[None])
    model.invoke()
    outputs = [returned[name] for name in ('boxes', 'scores')]
    (boxes, scores), (of_boxes, of_scores) = zip(
        *((model.get_tensor(each['index'])[0], each['quantization']) for each in outputs)
    )
    for box, score, kind in zip(*decode(boxes, scores, of_boxes, of_scores, size, 0.25, 0.45)):
        print(kind, f'{score:.3f}', *((box - shift) / ratio).round(1))
