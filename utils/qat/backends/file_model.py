"""The model in a file that a backend has opened.

Models predict: each takes images FP32 [B, 3, H, W] in 0..1 and returns predictions [B, 4 + nc, N], boxes as xywh in pixels.
A segmentation model returns two: predictions [B, 4 + nc + nm, N], whose last nm rows are mask coefficients, and prototypes
[B, nm, H / 4, W / 4]. Files with NMS inside return detections instead: a list of Detections, one for each image.
"""

import ast
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from utils.qat.backends.detections import Detections
from utils.qat.backends.pytorch import SMALLEST_STRIDE
from utils.qat.config.export import END2END, MASKS
from utils.qat.config.tables import DEFAULT_TARGET, TARGETS
from utils.qat.config.tasks import load_task
from utils.qat.core.errors import QatError, one_line
from utils.qat.data.masks import BoxMasks
from utils.qat.untrusted.names import class_names, fitting, require_colours
from utils.qat.vendors.session import Session

LARGEST_NAMES = 1_000_000  # characters of all names of classes in the metadata of an export


def stride_and_names(path: Path, metadata: dict[str, str]) -> tuple[int, dict[int, str] | None]:
    """Read the stride and the class names (by index) from the metadata of an export, which is untrusted."""
    text = metadata.get('names', 'None')
    try:
        stride, names = (
            int(float(metadata.get('stride', 32))),
            ast.literal_eval(text if len(text) < LARGEST_NAMES else ''),
        )
        if not 1 <= stride <= 1024:
            raise ValueError('a stride from 1 to 1024 was expected')
    except (ValueError, TypeError, SyntaxError, OverflowError, MemoryError, RecursionError) as e:
        raise QatError(
            f'--weights {path}: its metadata, stride {metadata.get("stride")!r:.40} and names {text!r:.40}, cannot be read '
            f'({one_line(e, 100)}); export it with export_qat.py'
        ) from e
    return max(stride, SMALLEST_STRIDE), None if names is None else class_names(names, f'--weights {path}')


def _threshold(text: str | None) -> float | None:
    """Read a score in 0..1 from the metadata of an export, which is untrusted; None if there is none."""
    try:
        value = float(text or 'nan')
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None


class FileModel:
    """An exported file that predicts, in any backend.

    Predictions are one output, [B, 4 + nc, N], or two, [B, 4 + nc + nm, N] and prototypes [B, nm, H / 4, W / 4]. With NMS inside
    (end2end) they are `num_dets` [B, 1], `det_boxes` [B, K, 4] (xyxy in pixels), `det_scores` and `det_classes` [B, K], of which the
    first num_dets count, and for masks `det_masks` [B, K, R * R] in 0..1, each of the area of its box. A classifier has logits
    [B, nc], or with its ends inside probabilities, of images that it normalizes.

    Attributes:
        imgsz: height and width in pixels; None = any.
        batch: smallest and largest batch; None = any.
        stride: of the model that was exported, in pixels.
        nc: number of classes; None if it follows from the names only, and there are none.
        names: class index → name.
        end2end: whether NMS is inside.
        normalizes: whether a classifier has its ends inside.
        task: see config.tasks.
        conf_thres: score up to which the NMS inside drops boxes; None without NMS inside, or if unknown.
        kind: how the task was recognized, in words.
        target: the engine that the file was made for.
        by_toolkit: whether the metadata of the export name a task: then images are prepared as in `qat.py eval`.
        quantized_for: None; see pytorch.TorchModel.
    """

    quantized_for = None

    def __init__(self, session: Session) -> None:
        """Wrap a session. Raises QatError if its file has none of the layouts above, or its metadata cannot be read."""
        path, signature = session.file, session.signature()
        inputs, outputs = signature.inputs, signature.outputs
        if len(inputs) != 1:
            raise QatError(f'--weights {path}: expected one input, the images, found {", ".join(inputs) or "none"}')
        ((self.input_name, image),) = inputs.items()
        self.session, self.path, self.device = session, path, session.device
        self.end2end = set(END2END) <= set(outputs)
        shapes = list(outputs.values())
        dimensions = [len(shape) for shape in shapes]
        if dimensions == [3] and shapes[0][2] == 6:  # no grid has 6 cells
            raise QatError(
                f'--weights {path}: has the outputs of export_yoloV9.py, the best class of each box only; use the file that '
                'export_qat.py writes of the same checkpoint'
            )
        if len(image) != 4 or not (self.end2end or dimensions in ([2], [3], [3, 4])):
            raise QatError(
                f'--weights {path}: expected images [B, 3, H, W] -> output0 [B, 4 + classes, N], of a segmentation model '
                f'output1 [B, coefficients, H / 4, W / 4] as well, or with NMS inside {", ".join(END2END)}; found '
                f'{list(image)} -> {", ".join(f"{n} {list(s)}" for n, s in outputs.items())}; export it with export_qat.py'
            )
        require_colours(image[1], f'--weights {path}')
        own = (image[0],) * 2 if isinstance(image[0], int) else None  # a static graph wants full batches
        self.imgsz = tuple(image[2:]) if all(isinstance(n, int) for n in image[2:]) else None
        self.batch = signature.batch or own
        self.stride, names = stride_and_names(path, signature.metadata)
        masks = MASKS in outputs or dimensions == [3, 4]
        self.task = load_task('classify' if dimensions == [2] else 'segment' if masks else 'detect')
        self.by_toolkit, self.kind = (
            signature.metadata.get('task') == self.task.name,
            f'its outputs are {", ".join(outputs)}',
        )
        self.target = TARGETS.get(signature.metadata.get('target', ''), TARGETS[DEFAULT_TARGET])
        self.normalizes = 'normalizes' in signature.metadata and not self.task.boxes
        self.conf_thres = _threshold(signature.metadata.get('conf_thres')) if self.end2end else None
        if self.end2end:  # the shapes do not show the number of classes
            self.nc, self.names = len(names) if names else None, names
        else:
            if not all(isinstance(shape[1], int) for shape in shapes):
                raise QatError(
                    f'--weights {path}: leaves the number of classes open, {list(shapes[0])}; export it with export_qat.py'
                )
            self.nc = self.task.classes_in(shapes)
            self.names = fitting(names or {i: str(i) for i in range(self.nc)}, self.nc, f'--weights {path}')

    @property
    def notes(self) -> Sequence[str]:
        """Return notes on how the engine runs the file, known after the first images."""
        return self.session.notes

    def __call__(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...] | list[Detections]:
        """Predict for images FP32 [B, 3, H, W] in 0..1: see above; a classifier takes normalized images and returns logits [B, nc]."""
        if self.normalizes:
            images = self.task.pixels(images)
        smallest, largest = self.batch or (1, len(images))
        parts = []
        for part in images.split(largest):
            padding = part.new_zeros(max(0, smallest - len(part)), *part.shape[1:])
            computed = self.session.run({self.input_name: torch.cat((part, padding))})
            parts.append({name: out[: len(part)].clone() for name, out in computed.items()})  # a session reuses buffers
        outputs = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        if self.end2end:
            return self._detections(outputs, images.shape[2:])
        floats = tuple(out.float() for out in outputs.values())
        if self.normalizes:
            return floats[0].clamp_min(torch.finfo(torch.float32).tiny).log()
        return floats if len(floats) > 1 else floats[0]

    def _detections(self, outputs: dict[str, torch.Tensor], shape: Sequence[int]) -> list[Detections]:
        """Read the detections of each image from the outputs of NMS."""
        number, boxes, scores, classes = (outputs[name] for name in END2END)
        rows = torch.cat((boxes.float(), scores.float()[..., None], classes.float()[..., None]), 2)
        detections = []
        for i, n in enumerate(number.flatten().int().tolist()):
            masks = None
            if MASKS in outputs:
                side = math.isqrt(outputs[MASKS].shape[2])
                masks = BoxMasks(
                    outputs[MASKS][i, :n].float().unflatten(1, (side, side)), rows[i, :n, :4], tuple(shape)
                )
            detections.append(Detections(rows[i, :n], masks))
        return detections
