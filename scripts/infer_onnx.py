"""Detect objects in images with an exported file, by ONNX Runtime, OpenVINO or LiteRT: a reference client for you to copy.

It needs ONNX Runtime, OpenVINO or ai-edge-litert, NumPy and OpenCV, and nothing of this toolkit.

    python scripts/infer_onnx.py MODEL.onnx IMAGE|FOLDER [--backend onnxruntime|openvino] [--save]
    python scripts/infer_onnx.py MODEL.xml|MODEL.tflite IMAGE|FOLDER [--save]

    image, BGR uint8 [h, w, 3] → letterbox → RGB FP32 [1, 3, H, W] in 0..1 → the file → its outputs → detections [n, 6] → the image

It prints a line for each detection: class, score, x1 y1 x2 y2 in pixels of the image and, for a segmentation model, the number of
pixels of its mask. Pre-processing and NMS are the same as in the evaluation of the model. It reads three layouts of outputs:
    plain       output0 [B, 4 + nc, N]: x, y (centre), width, height and the scores of all classes; NMS is done here. A segmentation
                model has output0 [B, 4 + nc + nm, N], which ends with the coefficients of the masks, and output1 [B, nm, h, w],
                the prototypes. A mask is the sigmoid of the sum of the prototypes, each times its coefficient
    DeepStream  output [B, N, 6]: x1, y1, x2, y2, score and class of the best class; NMS is done here
    end2end     num_dets [B, 1], det_boxes [B, K, 4] (x1, y1, x2, y2), det_scores [B, K], det_classes [B, K]; NMS is in the file. A
                segmentation model also has det_masks [B, K, R * R]: R x R cells, row by row, that divide the box
Boxes are in pixels of the letterboxed image. The client for a TensorRT engine is examples/infer_engine.py.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

IMAGES = {'.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp'}
PICTURES = Path('runs/infer')  # folder for --save; of a second run runs/infer2
MOST = 300  # detections in an image


def visible(text: object) -> str:
    """Escape the characters of a text that are not printable: they could move the cursor or colour the terminal."""
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in str(text))


def fail(message: object) -> NoReturn:
    """End the program with one line and exit code 2."""
    print(f'{Path(sys.argv[0]).name}: error: {visible(message)}', file=sys.stderr)
    sys.exit(2)


def missing(error: ImportError, packages: str) -> None:
    """End the program because `packages` are not installed, unless the user asks for help, which needs none."""
    if not {'-h', '--help'} & set(sys.argv):
        fail(f'{error}; it needs {packages}')


try:
    import cv2
    import numpy as np
except ImportError as e:
    missing(e, 'NumPy and OpenCV: pip install numpy opencv-python-headless')


def letterbox(image: np.ndarray, height: int, width: int) -> tuple[np.ndarray, float, tuple[float, float]]:
    """Fit a BGR uint8 image [h, w, 3] into height x width pixels, with its sides in proportion and equal grey borders.

    Returns:
        RGB FP32 [3, height, width] in 0..1, the gain, and the border (left, top). A point (x, y) of the image is at
        (x * gain + left, y * gain + top).
    """
    h, w = image.shape[:2]
    gain = min(height / h, width / w)
    if gain != 1:
        image = cv2.resize(
            image,
            (max(1, int(w * gain)), max(1, int(h * gain))),
            interpolation=cv2.INTER_AREA if gain < 1 else cv2.INTER_LINEAR,
        )
    top, left = (height - image.shape[0]) / 2, (width - image.shape[1]) / 2
    gain = image.shape[0] / h  # after the rounding
    # an odd border has one pixel more at the right or bottom
    image = cv2.copyMakeBorder(
        image,
        round(top - 0.1),
        round(top + 0.1),
        round(left - 0.1),
        round(left + 0.1),
        cv2.BORDER_CONSTANT,
        value=(114, 114, 114),
    )
    return np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1), np.float32) / 255, gain, (left, top)


def nms(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, iou_thres: float) -> list[int]:
    """Drop each box (x1, y1, x2, y2) that overlaps a better one of its class; return the indices of the others, best first.

    iou_thres: largest allowed overlap of two boxes: area of the intersection / area of the union.
    """
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    left = np.argsort(-scores, kind='stable')
    while len(left) and len(kept) < MOST:
        best, left = left[0], left[1:]
        kept.append(best)
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        shared = sides.clip(0).prod(1)
        iou = shared / (areas[best] + areas[left] - shared)
        left = left[(iou <= iou_thres) | (classes[left] != classes[best])]
    return kept


def above_threshold(found: np.ndarray, conf_thres: float) -> tuple[np.ndarray, int]:
    """Select the detections [n, 6] with a score above conf_thres: bool [n].

    The second value is the number of detections that are left out because a value is NaN or infinite.
    """
    above = (found[:, 4] > conf_thres) | ~np.isfinite(found[:, 4])
    finite = np.isfinite(found).all(1)
    return above & finite, int((above & ~finite).sum())


def read_outputs(
    outputs: dict[str, np.ndarray], size: Sequence[int], conf_thres: float, iou_thres: float
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None, int]:
    """Read the detections in an image from the outputs of the file: name → array with a batch axis.

    `size` is height and width of the letterboxed image.

    Returns:
        detections: FP32 [n, 6], highest score first: x1, y1, x2, y2 in pixels of the letterboxed image, score, class.
        masks: None, or FP32 [n, rows, columns] in 0..1, and their areas [n, 4] in the letterboxed image as x1, y1, x2,
            y2. The cells of a mask divide its area.
        skipped: number of detections that are left out, see `above_threshold`.
    """
    if 'num_dets' in outputs:
        n = int(outputs['num_dets'][0, 0])
        boxes, scores, classes = (outputs[name][0, :n] for name in ('det_boxes', 'det_scores', 'det_classes'))
        found = np.column_stack((boxes, scores, classes)).astype(np.float32)
        kept, skipped = above_threshold(found, conf_thres)
        if 'det_masks' not in outputs:
            return found[kept], None, skipped
        masks = outputs['det_masks'][0, :n]
        side = round(masks.shape[1] ** 0.5)
        return found[kept], (masks.reshape(n, side, side)[kept], boxes[kept]), skipped
    output, *prototypes = sorted(outputs.values(), key=np.ndim)
    if output.shape[2] == 6:
        found, at = output[0], np.arange(output.shape[1])
    else:
        # [N, 4 + nc], [N, nm]
        rows, coefficients = np.split(output[0].T, [output.shape[1] - sum(p.shape[1] for p in prototypes)], 1)
        # NaN is not dropped here; a box may have several classes, as in the evaluation
        at, classes = np.nonzero(~(rows[:, 4:] <= conf_thres))
        centre, half = rows[at, :2], rows[at, 2:4] / 2
        found = np.column_stack((centre - half, centre + half, rows[at, 4 + classes], classes)).astype(np.float32)
    chosen, skipped = above_threshold(found, conf_thres)
    found, at = found[chosen], at[chosen]
    kept = nms(found[:, :4], found[:, 4], found[:, 5], iou_thres)
    if not prototypes:
        return found[kept], None, skipped
    logits = np.tensordot(coefficients[at[kept]], prototypes[0][0], 1)
    masks = np.tanh(logits / 2) / 2 + 0.5  # the sigmoid, in a form that does not overflow
    return found[kept], (masks, np.tile(np.float32([0, 0, size[1], size[0]]), (len(kept), 1))), skipped


def unscaled(boxes: np.ndarray, gain: float, border: tuple[float, float]) -> np.ndarray:
    """Convert boxes [n, 4] from pixels of the letterboxed image to pixels of the original; see `letterbox`."""
    return (boxes - np.float32([*border, *border])) / np.float32(gain)


def to_image(found: np.ndarray, gain: float, border: tuple[float, float], shape: Sequence[int]) -> np.ndarray:
    """Convert detections [n, 6] of a letterboxed image to pixels of the original, and clip their boxes to it."""
    found = found.copy()
    found[:, :4] = unscaled(found[:, :4], gain, border).clip(0, [shape[1], shape[0], shape[1], shape[0]])
    return found


def paste(mask: np.ndarray, area: np.ndarray, box: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Find the pixels of an image that belong to a mask: their centres are in the box, and the mask is above 0.5 there.

    The mask, FP32 [rows, columns] in 0..1, is linear between the centres of its cells, which divide `area`. Boxes are
    x1, y1, x2, y2 in pixels of the image.
    """
    (x1, y1, x2, y2), (rows, columns) = area, mask.shape
    if x2 <= x1 or y2 <= y1:
        return np.zeros(shape, bool)
    x, y = columns / (x2 - x1), rows / (y2 - y1)  # cells per pixel
    cells = np.float64([[x, 0, (0.5 - x1) * x - 0.5], [0, y, (0.5 - y1) * y - 0.5]])  # of the centre of pixel (x, y)
    whole = cv2.warpAffine(
        mask, cells, shape[::-1], flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE
    )
    down, across = (np.arange(side) + 0.5 for side in shape)
    return (whole > 0.5) & ((box[1] <= down) & (down < box[3]))[:, None] & (box[0] <= across) & (across < box[2])


def draw(
    image: np.ndarray, found: np.ndarray, names: dict[int, str], masks: Sequence[np.ndarray] | None = None
) -> None:
    """Draw detections [n, 6] and their masks (see `paste`) into a BGR uint8 image, in place, one colour per class."""
    thick, font = max(1, round(sum(image.shape[:2]) / 800)), cv2.FONT_HERSHEY_SIMPLEX
    labels: list[tuple[int, int, int, int]] = []  # left, top, right, bottom of those that are placed
    drawn = []
    for i, (x1, y1, x2, y2, score, number) in enumerate(found.tolist()):
        colour = cv2.cvtColor(np.uint8([[[int(number) * 67 % 180, 200, 255]]]), cv2.COLOR_HSV2BGR)[0, 0].tolist()
        if masks:
            image[masks[i]] = image[masks[i]] // 2 + np.uint8(colour) // 2
        cv2.rectangle(image, (round(x1), round(y1)), (round(x2), round(y2)), colour, thick)
        text = f'{names.get(int(number), int(number))} {score:.2f}'
        (w, h), _ = cv2.getTextSize(text, font, 0.4 * thick, thick)
        drawn.append((text, colour, place((x1, y1, x2, y2), w, h + 4, image.shape[:2], labels)))
    for text, colour, (left, top, right, bottom) in drawn:
        cv2.rectangle(image, (left, top), (right, bottom), colour, -1)
        cv2.putText(image, text, (left, bottom - 3), font, 0.4 * thick, (0, 0, 0), thick, cv2.LINE_AA)


def place(
    box: Sequence[float], width: int, height: int, shape: Sequence[int], labels: list[tuple[int, int, int, int]]
) -> tuple[int, int, int, int]:
    """Find a free place for a label: above, in, below or beside its box, in this order; else above it.

    `labels` has left, top, right and bottom of the labels so far; this one is appended. All are inside the image.
    """
    x1, y1, x2, y2 = map(round, box)
    places = []
    for x, y in (
        (x1, y1 - height),
        (x1, y1),
        (x1, y2),
        (x1, y2 - height),
        (x2, y1),
        (x1 - width, y1),
        (x2 - width, y1 - height),
    ):
        left, top = max(0, min(x, shape[1] - width)), max(0, min(y, shape[0] - height))
        places.append((left, top, left + width, top + height))
    free = (p for p in places if not any(p[0] < q[2] and q[0] < p[2] and p[1] < q[3] and q[1] < p[3] for q in labels))
    labels.append(next(free, places[0]))
    return labels[-1]


def save(image: np.ndarray, path: Path) -> None:
    """Write an image under a hidden name, then rename it, so that no picture is incomplete."""
    try:
        written, content = cv2.imencode(path.suffix, image)
    except cv2.error:
        written = False
    if not written:
        raise ValueError(f'OpenCV writes no {path.suffix} of {image.shape[1]} x {image.shape[0]} pixels')
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f'.{os.getpid()}.tmp')
    try:
        hidden.write_bytes(content.tobytes())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


FUNCTIONS = 25  # field of a model in an ONNX file


def has_functions(path: Path) -> bool:
    """Tell whether an ONNX file defines functions: 3 kB of them can be 2^40 nodes for whoever loads it.

    It walks the outermost fields of the protobuf: a number for field and kind, then a number, 8 or 4 bytes, or a length and
    that many bytes.
    """
    with open(path, 'rb') as file:

        def number() -> int:
            value, shift = 0, 0
            while shift < 64 and (byte := file.read(1)):
                value |= (byte[0] & 127) << shift
                shift += 7
                if byte[0] < 128:
                    return value
            return 0  # the end

        while tag := number():
            field, kind = divmod(tag, 8)
            if field == FUNCTIONS:
                return True
            if kind == 0:
                number()
            elif kind in (1, 2, 5):
                file.seek({1: 8, 5: 4}[kind] if kind != 2 else number(), os.SEEK_CUR)
            else:
                return False  # no such file; the library that loads it says so
    return False


def class_names(text: str) -> dict[int, str]:
    """Read the names of the classes, a dict or a list, from the metadata of a file: class index → name."""
    names = ast.literal_eval(text)
    return names if isinstance(names, dict) else dict(enumerate(names))


class OnnxModel:
    """An ONNX file that is loaded in ONNX Runtime; `device` is 'cpu', or the number of a GPU.

    Attributes:
        shape: [B, 3, H, W] of its input.
        names: class index → name.
        slow: whether ONNX Runtime only simulates its INT8.
    """

    def __init__(self, path: Path, device: str) -> None:
        """Load the file; end the program if this is not possible."""
        os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')  # turns its telemetry off
        try:
            import onnxruntime
        except ImportError as e:
            missing(e, 'ONNX Runtime: pip install onnxruntime')
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        # by default waiting threads spin, which slows down other work
        spin = str(int(os.environ.get('OMP_WAIT_POLICY', '').lower() == 'active'))
        for pool in 'intra_op', 'inter_op':
            options.add_session_config_entry(f'session.{pool}.allow_spinning', spin)
        # computes Q and DQ exactly as in the evaluation and in TensorRT; leave this out for speed on a CPU
        options.add_session_config_entry('session.disable_quant_qdq', '1')
        provider = ('CPUExecutionProvider', {}) if device == 'cpu' else ('CUDAExecutionProvider', {'device_id': device})
        if provider[0] not in onnxruntime.get_available_providers():
            fail(
                f'--device {device}: this ONNX Runtime has no {provider[0]}; use --device cpu, or install onnxruntime-gpu'
            )
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
            (self.input,), metadata = self.session.get_inputs(), self.session.get_modelmeta().custom_metadata_map
            self.names = class_names(metadata.get('names', '{}'))
            self.slow = 'onnxruntime' in metadata.get('simulated_in', '').split(',')
        # exceptions of ONNX Runtime share no base class; others: several inputs, names that are no names
        except Exception as e:
            fail(f'{path}: ONNX Runtime cannot load it, or it is no detector: {" ".join(str(e).split())[:300]}')
        # an open batch takes one image
        self.shape = [1 if isinstance(n, str) and not i else n for i, n in enumerate(self.input.shape)]

    def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Run the file on an RGB FP32 image [3, H, W] in 0..1; a larger fixed batch is filled with this image."""
        names = [o.name for o in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, {self.input.name: np.repeat(image[None], self.shape[0], 0)})))


class OpenVINOModel:
    """An .onnx or .xml file in OpenVINO, with the attributes of OnnxModel."""

    def __init__(self, path: Path, device: str) -> None:
        """Load a file. device: 'cpu'."""
        if device != 'cpu':
            fail(f'--device {device}: OpenVINO runs on the CPU here; leave it out')
        sys.modules['openvino_telemetry'] = None  # type: ignore[assignment]  # turns its telemetry off
        try:
            import openvino
        except ImportError as e:
            missing(e, 'OpenVINO: pip install openvino')
        try:
            core = openvino.Core()
            model = core.read_model(path)
            if path.suffix == '.onnx' and any(op.get_type_name() == 'FakeQuantize' for op in model.get_ops()):
                fail(f'{path}: has Q/DQ, which OpenVINO misreads in .onnx files: export_qat.py --include openvino')
            (given,) = model.inputs
            sizes = [None if d.is_dynamic else d.get_length() for d in given.partial_shape]
            self.shape = [1 if n is None and not i else n for i, n in enumerate(sizes)]  # an open batch takes one image
            if None in sizes and None not in self.shape:
                model.reshape(self.shape)
            # FP32 for all that is not INT8: by default a CPU with BF16 computes in BF16
            settings = {'PERFORMANCE_HINT': 'LATENCY', 'INFERENCE_PRECISION_HINT': 'f32'}
            self.compiled = core.compile_model(model, 'CPU', settings)
            self.outputs = [port.any_name for port in model.outputs]
            info = ['framework', 'names']
            self.names = class_names(str(model.get_rt_info(info).value) if model.has_rt_info(info) else '{}')
        # exceptions of OpenVINO share no base class; others: several inputs, names that are no names
        except Exception as e:
            fail(f'{path}: OpenVINO cannot load it, or it is no detector: {" ".join(str(e).split())[:300]}')

    def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Run the file on an image, as OnnxModel does."""
        found = self.compiled(np.repeat(image[None], self.shape[0], 0))
        return {name: found[port] for name, port in zip(self.outputs, self.compiled.outputs)}


class LiteRTModel:
    """A .tflite file of export_qat.py, or of Ultralytics' package, in LiteRT, with the attributes of OnnxModel."""

    def __init__(self, path: Path, device: str) -> None:
        """Load a file. device: 'cpu'."""
        if device != 'cpu':
            fail(f'--device {device}: LiteRT runs on the CPU here; leave it out')
        try:
            from ai_edge_litert.interpreter import Interpreter
        except ImportError as e:
            missing(e, 'LiteRT: pip install ai-edge-litert')
        try:
            self.model = Interpreter(str(path), num_threads=os.cpu_count())
            self.model.allocate_tensors()
            (self.input,), self.outputs = self.model.get_input_details(), self.model.get_output_details()
            shape = self.input['shape'].tolist()
            self.channels_last = shape[-1] == 3
            self.shape = [shape[i] for i in (0, 3, 1, 2)] if self.channels_last else shape
            with zipfile.ZipFile(path) as archive:  # appended to the file
                self.names = class_names(str(json.loads(archive.read('metadata.json')).get('names', '{}')))
        except Exception as e:  # several inputs, another number of dimensions, no metadata, names that are no names
            fail(f'{path}: LiteRT cannot load it, or it is no detector: {" ".join(str(e).split())[:300]}')
        if {t['dtype'] for t in (self.input, *self.outputs)} != {np.float32}:
            fail(f'{path}: takes or returns integers; export it with export_qat.py --include litert')

    def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Run the file on an image, as OnnxModel does. Its boxes are relative to the image."""
        images = np.repeat(image[None], self.shape[0], 0)
        self.model.set_tensor(self.input['index'], images.transpose(0, 2, 3, 1) if self.channels_last else images)
        self.model.invoke()
        found = {each['name']: self.model.get_tensor(each['index']) for each in self.outputs}
        for name, values in found.items():
            if values.ndim == 3:
                values[:, :4] *= np.float32((image.shape[:0:-1]) * 2)[:, None]
            elif self.channels_last:
                found[name] = values.transpose(0, 3, 1, 2)
        return found


# --backend → what opens a file, and the suffixes that it takes
BACKENDS: dict[str, tuple[Callable[[Path, str], Any], tuple[str, ...]]] = {
    'onnxruntime': (OnnxModel, ('.onnx',)),
    'openvino': (OpenVINOModel, ('.onnx', '.xml')),
    'litert': (LiteRTModel, ('.tflite',)),
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        fail(message)


def parse_args(description: str, suffix: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and end the program if it is wrong; `files` of the result has the images."""
    parser = Parser(description=description)
    parser.add_argument('model', type=Path, metavar=f'MODEL{suffix}')
    parser.add_argument(
        'images', type=Path, metavar='IMAGE|FOLDER', help='an image, or a folder: all images in it and in its folders'
    )
    parser.add_argument(
        '--conf-thres', type=float, default=0.25, help='lowest score; a file with NMS inside has one of its own besides'
    )
    parser.add_argument(
        '--iou-thres', type=float, default=0.45, help='IoU above which NMS drops a box; not of a file with NMS inside'
    )
    parser.add_argument(
        '--save',
        action='store_true',
        help=f'draw the detections into copies of the images, in {PICTURES}, or {PICTURES}2, ... if that is there',
    )
    speak = parser.add_mutually_exclusive_group()
    speak.add_argument('--quiet', action='store_true', help='only the last line')
    speak.add_argument('--verbose', action='store_true', help='the time of each image as well')
    parser.add_argument(
        '--device',
        default='cpu' if suffix == '.onnx' else '0',
        help='number of a GPU' + ", or 'cpu'" * (suffix == '.onnx'),
    )
    if suffix == '.onnx':
        parser.add_argument(
            '--backend',
            choices=BACKENDS,
            help='what runs the file; default: onnxruntime, for an .xml openvino, for a .tflite litert',
        )
    args = parser.parse_args(argv)
    takes: Sequence[str] = [suffix]
    if suffix == '.onnx':
        able = (name for name, (_, suffixes) in BACKENDS.items() if args.model.suffix in suffixes)
        args.backend = args.backend or next(able, 'onnxruntime')
        _, takes = BACKENDS[args.backend]
    if not args.model.is_file() or args.model.suffix not in takes:
        fail(f'{args.model}: expected a file ending in {" or ".join(takes)}')
    for flag, value in (('--conf-thres', args.conf_thres), ('--iou-thres', args.iou_thres)):
        if not 0 <= value <= 1:
            fail(f'{flag} {value}: must lie in 0 to 1')
    if not args.device.isdigit() and (args.device != 'cpu' or suffix != '.onnx'):
        fail(f'--device {args.device}: must be the number of a GPU{", or cpu" * (suffix == ".onnx")}')
    args.files = (
        sorted(f for f in args.images.rglob('*') if f.suffix.lower() in IMAGES)
        if args.images.is_dir()
        else [args.images]
    )
    if not args.files or not args.files[0].is_file():
        fail(f'{args.images}: no such image, nor a folder with images ({", ".join(sorted(IMAGES))})')
    numbered = (PICTURES.with_name(f'{PICTURES.name}{n}') for n in itertools.count(2))
    args.pictures = next(folder for folder in itertools.chain([PICTURES], numbered) if not folder.exists())
    return args


def main(
    open_model: Callable[[Path, str], Any] | None = None,
    suffix: str = '.onnx',
    description: str = (__doc__ or '').partition('\n')[0],  # python -OO has no texts
    argv: Sequence[str] | None = None,
) -> int:
    """Detect objects in all images, and print or draw them; return 1 if an image could not be read, else 0.

    open_model: file and device → the model, with the attributes and the call of OnnxModel; None = the choice of --backend.
    """
    args = parse_args(description, suffix, argv)
    if args.model.suffix == '.onnx' and has_functions(args.model):
        fail(f'{args.model}: defines functions, which no export of export_qat.py does; export it again')
    model = (open_model or BACKENDS[args.backend][0])(args.model, args.device)
    if len(model.shape) != 4 or not all(isinstance(n, int) and n > 0 for n in model.shape):
        fail(f'{args.model}: takes {model.shape}; expected images [B, 3, height, width] of a fixed size')
    unread = total = skipped = saved = 0
    for file in args.files:
        name = file.relative_to(args.images) if args.images.is_dir() else Path(file.name)
        try:
            image = cv2.imread(str(file)) if file.is_file() else None  # reading a pipe blocks for ever
        except (cv2.error, UnicodeEncodeError):  # too many pixels for OpenCV; a name that is not valid text
            image = None
        if image is None:
            print(f'{visible(file)}: OpenCV cannot read it', file=sys.stderr)
            unread += 1
            continue
        pixels, gain, border = letterbox(image, *model.shape[2:])
        start = time.perf_counter()
        try:
            with np.errstate(all='ignore'):  # values that are not finite are counted
                found, cells, left_out = read_outputs(model(pixels), model.shape[2:], args.conf_thres, args.iou_thres)
        except Exception as e:  # as above; or outputs of another layout
            fail(
                f'{args.model}: cannot be run, or its outputs are of none of the layouts above: {" ".join(str(e).split())[:300]}'
            )
        if args.verbose:
            print(
                f'{visible(name)}: {image.shape[1]} x {image.shape[0]} pixels, {(time.perf_counter() - start) * 1e3:.1f} ms'
            )
        total += len(found)
        skipped += left_out
        found = to_image(found, gain, border, image.shape[:2])
        masks = None
        if cells:
            masks = [
                paste(*each, image.shape[:2]) for each in zip(cells[0], unscaled(cells[1], gain, border), found[:, :4])
            ]
        for i, (*box, score, number) in enumerate([] if args.quiet else found.tolist()):
            print(
                f'{visible(name)}: {visible(model.names.get(int(number), int(number)))} {score:.3f}  {" ".join(f"{x:.1f}" for x in box)}'
                + (f'  {masks[i].sum()} px' if masks else '')
            )
        if not len(found) and not args.quiet:
            print(f'{visible(name)}: nothing found')
        if args.save:
            draw(image, found, model.names, masks)
            try:
                save(image, args.pictures / name)
            except (OSError, ValueError) as e:
                reason = (
                    f'{e.strerror}, {shutil.disk_usage(".").free / 1e6:.1f} MB are free'
                    if isinstance(e, OSError)
                    else e
                )
                fail(
                    f'{args.pictures / name} could not be written ({reason}), nor what follows; {saved} pictures are whole'
                )
            saved += 1
    broken = f' ({skipped} more left out: NaN or infinite)' if skipped else ''
    print(
        f'{total} detections{broken} in {len(args.files) - unread} images{f", pictures in {args.pictures}" if args.save else ""}'
    )
    if getattr(model, 'slow', False) and not args.quiet:
        print(
            'ONNX Runtime computes the INT8 of this file in float, slower than the float model; '
            'for speed there: qat.py quantize --target onnxruntime'
        )
    if not args.save and not args.quiet:
        print('next: ' + visible(shlex.join(['python', sys.argv[0], str(args.model), str(args.images), '--save'])))
    return 1 if unread else 0


def run(*arguments: Any) -> int:
    """Run `main` as a program: end quietly if nobody reads its output any more (`| head`), and with one line on a full disk."""
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = main(*arguments)
        sys.stdout.flush()
        return code
    except OSError as e:
        sys.stdout = open(os.devnull, 'w')  # Python flushes the rest at its end
        fail(f'{e.filename or "output"}: {e.strerror}')


if __name__ == '__main__':
    sys.exit(run())
