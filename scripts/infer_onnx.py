"""Detect objects in images with an exported ONNX file: a reference client, to copy from. It needs ONNX Runtime, NumPy and OpenCV.

    python scripts/infer_onnx.py MODEL.onnx IMAGE|FOLDER [--save]

    image, BGR uint8 [h, w, 3] → letterbox → RGB FP32 [1, 3, H, W] in 0..1 → the file → its outputs → detections [n, 6] → the image

It prints a line for each detection: class, score, x1 y1 x2 y2 in pixels of the image, and of a segmentation model the pixels of its mask.
Pre-processing and NMS are those that the model was evaluated with. All three layouts of outputs are read:
    plain       output0 [B, 4 + nc, N]: x, y (centre), width, height and the scores of all classes; NMS is done here. Of a segmentation
                model [B, 4 + nc + nm, N], and output1 [B, nm, h, w]: coefficients, and the prototypes whose sums the masks are
    DeepStream  output [B, N, 6]: x1, y1, x2, y2, score and class of the best class; NMS is done here
    end2end     num_dets [B, 1], det_boxes [B, K, 4] (x1, y1, x2, y2), det_scores [B, K], det_classes [B, K]; NMS is in the file. Of a
                segmentation model det_masks [B, K, R * R] besides: R x R cells, row by row, that divide the box
Boxes are in pixels of the letterboxed image. The same for a TensorRT engine: examples/infer_engine.py.
"""

import argparse
import ast
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

IMAGES = {'.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp'}
PICTURES = Path('runs/infer')  # where --save puts them
MOST = 300  # detections in an image


def visible(text):
    """A name from a file with escapes for what would not show but move the cursor or colour the terminal."""
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in str(text))


def fail(message):
    """End the program with one line and exit code 2."""
    print(f'{Path(sys.argv[0]).name}: error: {visible(message)}', file=sys.stderr)
    sys.exit(2)


def missing(error, packages):
    """End the program because of an ImportError, unless it was asked for help, which works before `packages` are installed."""
    if not {'-h', '--help'} & set(sys.argv):
        fail(f'{error}; it needs {packages}')


try:
    import cv2
    import numpy as np
except ImportError as e:
    missing(e, 'NumPy and OpenCV: pip install numpy opencv-python-headless')


def letterbox(image, height, width):
    """Fit an image into height x width, its sides in proportion, with equal grey borders.

    image: BGR uint8 [h, w, 3]. Returns (RGB FP32 [3, height, width] in 0..1, gain, (left, top)): a point (x, y) of the image is at
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
    gain = image.shape[0] / h  # as it came out of the rounding
    # of an odd border, right and bottom get one pixel more
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


def nms(boxes, scores, classes, iou_thres):
    """Indices of the boxes that stay, highest score first: one goes if it overlaps a better one of its class by more than iou_thres.

    boxes: x1, y1, x2, y2 [n, 4]. scores, classes: [n]. iou_thres: area of the intersection / area of the union.
    """
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept, left = [], np.argsort(-scores, kind='stable')
    while len(left) and len(kept) < MOST:
        best, left = left[0], left[1:]
        kept.append(best)
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        shared = sides.clip(0).prod(1)
        iou = shared / (areas[best] + areas[left] - shared)
        left = left[(iou <= iou_thres) | (classes[left] != classes[best])]
    return kept


def wanted(found, conf_thres):
    """Which of the detections [n, 6] score above conf_thres, bool [n], and how many of those are left out: a number of theirs is NaN or infinite."""
    asked, finite = (found[:, 4] > conf_thres) | ~np.isfinite(found[:, 4]), np.isfinite(found).all(1)
    return asked & finite, int((asked & ~finite).sum())


def read_outputs(outputs, size, conf_thres, iou_thres):
    """Outputs of the file for one image, {name: array with a batch axis} → (detections, masks, number of detections left out: see `wanted`).

    size: height, width of the letterboxed image. detections: FP32 [n, 6], highest score first: x1, y1, x2, y2 in pixels of that image, score,
    class. masks: (FP32 [n, rows, columns] in 0..1, areas [n, 4] that these cells divide, as x1, y1, x2, y2); None if there are none.
    """
    if 'num_dets' in outputs:
        n = int(outputs['num_dets'][0, 0])
        boxes, scores, classes = (outputs[name][0, :n] for name in ('det_boxes', 'det_scores', 'det_classes'))
        found = np.column_stack((boxes, scores, classes)).astype(np.float32)
        kept, skipped = wanted(found, conf_thres)
        if 'det_masks' not in outputs:
            return found[kept], None, skipped
        masks = outputs['det_masks'][0, :n]
        side = round(masks.shape[1] ** 0.5)
        return found[kept], (masks.reshape(n, side, side)[kept], boxes[kept]), skipped
    output, *prototypes = sorted(outputs.values(), key=np.ndim)
    if output.shape[2] == 6:
        found, at = output[0], np.arange(output.shape[1])
    else:
        rows, coefficients = np.split(
            output[0].T, [output.shape[1] - sum(p.shape[1] for p in prototypes)], 1
        )  # [N, 4 + nc], [N, nm]
        at, classes = np.nonzero(
            ~(rows[:, 4:] <= conf_thres)
        )  # NaN is not below; a box may be of several classes, as in the evaluation
        centre, half = rows[at, :2], rows[at, 2:4] / 2
        found = np.column_stack((centre - half, centre + half, rows[at, 4 + classes], classes)).astype(np.float32)
    chosen, skipped = wanted(found, conf_thres)
    found, at = found[chosen], at[chosen]
    kept = nms(found[:, :4], found[:, 4], found[:, 5], iou_thres)
    if not prototypes:
        return found[kept], None, skipped
    logits = np.tensordot(coefficients[at[kept]], prototypes[0][0], 1)
    masks = np.tanh(logits / 2) / 2 + 0.5  # the sigmoid, which does not overflow this way
    return found[kept], (masks, np.tile(np.float32([0, 0, size[1], size[0]]), (len(kept), 1))), skipped


def unscaled(boxes, gain, border):
    """Boxes [n, 4] in pixels of the image itself. gain, border: of `letterbox`."""
    return (boxes - np.float32([*border, *border])) / np.float32(gain)


def to_image(found, gain, border, shape):
    """Detections in pixels of the image itself, clipped to it. gain, border: of `letterbox`. shape: height, width."""
    found = found.copy()
    found[:, :4] = unscaled(found[:, :4], gain, border).clip(0, [shape[1], shape[0], shape[1], shape[0]])
    return found


def paste(mask, area, box, shape):
    """A mask [rows, columns] in 0..1 → bool [height, width]: the pixels of an image whose centres are in the box, and where the mask is above 0.5.

    area: x1, y1, x2, y2 in pixels of the image, divided by the cells of the mask; linear between their centres. shape: height, width.
    """
    (x1, y1, x2, y2), (rows, columns) = area, mask.shape
    if x2 <= x1 or y2 <= y1:
        return np.zeros(shape, bool)
    x, y = columns / (x2 - x1), rows / (y2 - y1)  # cells to a pixel
    cells = np.float64([[x, 0, (0.5 - x1) * x - 0.5], [0, y, (0.5 - y1) * y - 0.5]])  # of the centre of pixel (x, y)
    whole = cv2.warpAffine(
        mask, cells, shape[::-1], flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE
    )
    down, across = (np.arange(side) + 0.5 for side in shape)
    return (whole > 0.5) & ((box[1] <= down) & (down < box[3]))[:, None] & (box[0] <= across) & (across < box[2])


def draw(image, found, names, masks=None):
    """Draw the detections, and their masks (see `paste`), into the image, in place: a colour for each class."""
    thick = max(1, round(sum(image.shape[:2]) / 800))
    for i, (x1, y1, x2, y2, score, number) in enumerate(found.tolist()):
        hue = int(number) * 67 % 180
        colour = cv2.cvtColor(np.uint8([[[hue, 200, 255]]]), cv2.COLOR_HSV2BGR)[0, 0].tolist()
        if masks:
            image[masks[i]] = image[masks[i]] // 2 + np.uint8(colour) // 2
        text = f'{names.get(int(number), int(number))} {score:.2f}'
        (w, h), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.4 * thick, thick)
        left, bottom = max(0, min(round(x1), image.shape[1] - w)), max(round(y1), h + 4)  # the label stays inside
        cv2.rectangle(image, (round(x1), round(y1)), (round(x2), round(y2)), colour, thick)
        cv2.rectangle(image, (left, bottom - h - 4), (left + w, bottom), colour, -1)
        cv2.putText(
            image, text, (left, bottom - 3), cv2.FONT_HERSHEY_SIMPLEX, 0.4 * thick, (0, 0, 0), thick, cv2.LINE_AA
        )


def save(image, path):
    """Write an image under a hidden name, then rename it: a picture that is there is whole. Raises OSError, or ValueError if OpenCV cannot."""
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


class OnnxModel:
    """An ONNX file. shape: [B, 3, H, W] of what it takes. names: class index → name."""

    def __init__(self, path, device):
        """device: 'cpu', or the number of a GPU."""
        os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')  # it would report to its maker over the network
        try:
            import onnxruntime
        except ImportError as e:
            missing(e, 'ONNX Runtime: pip install onnxruntime')
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        spin = str(
            int(os.environ.get('OMP_WAIT_POLICY', '').lower() == 'active')
        )  # threads that wait spin otherwise, and slow down other work
        for pool in 'intra_op', 'inter_op':
            options.add_session_config_entry(f'session.{pool}.allow_spinning', spin)
        # Q and DQ as they are written, which is what was evaluated and what TensorRT computes; leave it out for speed on a CPU
        options.add_session_config_entry('session.disable_quant_qdq', '1')
        provider = ('CPUExecutionProvider', {}) if device == 'cpu' else ('CUDAExecutionProvider', {'device_id': device})
        if provider[0] not in onnxruntime.get_available_providers():
            fail(
                f'--device {device}: this ONNX Runtime has no {provider[0]}; use --device cpu, or install onnxruntime-gpu'
            )
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
            (self.input,), metadata = self.session.get_inputs(), self.session.get_modelmeta().custom_metadata_map
            self.names = ast.literal_eval(metadata.get('names', '{}'))
            self.names = self.names if isinstance(self.names, dict) else dict(enumerate(self.names))
        except (
            Exception
        ) as e:  # those of ONNX Runtime share no base class; the rest: several inputs, names that are none
            fail(f'{path}: ONNX Runtime cannot load it, or it is no detector: {" ".join(str(e).split())[:300]}')
        self.shape = [
            1 if isinstance(n, str) and not i else n for i, n in enumerate(self.input.shape)
        ]  # an open batch takes one image

    def __call__(self, image):
        """RGB FP32 [3, H, W] in 0..1 → {name: array}; of a fixed batch of several, all are this image."""
        names = [o.name for o in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, {self.input.name: np.repeat(image[None], self.shape[0], 0)})))


def parse_args(description, suffix, argv):
    parser = argparse.ArgumentParser(description=description)
    parser.error = fail
    parser.add_argument('model', type=Path, metavar=f'MODEL{suffix}')
    parser.add_argument('images', type=Path, metavar='IMAGE|FOLDER', help='an image, or a folder: all images in it')
    parser.add_argument(
        '--conf-thres', type=float, default=0.25, help='lowest score; a file with NMS inside has one of its own besides'
    )
    parser.add_argument(
        '--iou-thres', type=float, default=0.45, help='IoU above which NMS drops a box; not of a file with NMS inside'
    )
    parser.add_argument(
        '--save', action='store_true', help=f'draw the detections into copies of the images, in {PICTURES}/'
    )
    speak = parser.add_mutually_exclusive_group()
    speak.add_argument('--quiet', action='store_true', help='only the last line')
    speak.add_argument('--verbose', action='store_true', help='the time of each image as well')
    parser.add_argument(
        '--device',
        default='cpu' if suffix == '.onnx' else '0',
        help='number of a GPU' + ", or 'cpu'" * (suffix == '.onnx'),
    )
    args = parser.parse_args(argv)
    if not args.model.is_file() or args.model.suffix != suffix:
        fail(f'{args.model}: expected a file ending in {suffix}')
    for flag, value in (('--conf-thres', args.conf_thres), ('--iou-thres', args.iou_thres)):
        if not 0 <= value <= 1:
            fail(f'{flag} {value}: must lie in 0 to 1')
    if not args.device.isdigit() and (args.device != 'cpu' or suffix != '.onnx'):
        fail(f'--device {args.device}: must be the number of a GPU{", or cpu" * (suffix == ".onnx")}')
    args.files = (
        sorted(f for f in args.images.iterdir() if f.suffix.lower() in IMAGES)
        if args.images.is_dir()
        else [args.images]
    )
    if not args.files or not args.files[0].is_file():
        fail(f'{args.images}: no such image, nor a folder with images ({", ".join(sorted(IMAGES))})')
    if args.save and args.files[0].parent.resolve() == PICTURES.resolve():
        fail(f'--save: would write over the images in {PICTURES}; move them, or work in another folder')
    return args


def main(open_model=OnnxModel, suffix='.onnx', description=__doc__.splitlines()[0], argv=None):
    """open_model: takes the file and the device; returns what OnnxModel is. Returns the exit code: 1 if an image could not be read."""
    args = parse_args(description, suffix, argv)
    model = open_model(args.model, args.device)
    if len(model.shape) != 4 or not all(isinstance(n, int) and n > 0 for n in model.shape):
        fail(f'{args.model}: takes {model.shape}; expected images [B, 3, height, width] of a fixed size')
    unread = total = skipped = saved = 0
    for file in args.files:
        try:
            image = cv2.imread(str(file))
        except (cv2.error, UnicodeEncodeError):  # of more pixels than it reads; a name that is no text
            image = None
        if image is None:
            print(f'{visible(file)}: OpenCV cannot read it', file=sys.stderr)
            unread += 1
            continue
        pixels, gain, border = letterbox(image, *model.shape[2:])
        start = time.perf_counter()
        try:
            with np.errstate(all='ignore'):  # what is not finite is counted
                found, masks, left_out = read_outputs(model(pixels), model.shape[2:], args.conf_thres, args.iou_thres)
        except Exception as e:  # as above; and outputs of another layout
            fail(
                f'{args.model}: cannot be run, or its outputs are of none of the layouts above: {" ".join(str(e).split())[:300]}'
            )
        if args.verbose:
            print(
                f'{visible(file.name)}: {image.shape[1]} x {image.shape[0]} pixels, {(time.perf_counter() - start) * 1e3:.1f} ms'
            )
        total += len(found)
        skipped += left_out
        found = to_image(found, gain, border, image.shape[:2])
        if masks:
            masks = [
                paste(*each, image.shape[:2]) for each in zip(masks[0], unscaled(masks[1], gain, border), found[:, :4])
            ]
        for i, (*box, score, number) in enumerate([] if args.quiet else found.tolist()):
            print(
                f'{visible(file.name)}: {visible(model.names.get(int(number), int(number)))} {score:.3f}  {" ".join(f"{x:.1f}" for x in box)}'
                + (f'  {masks[i].sum()} px' if masks else '')
            )
        if not len(found) and not args.quiet:
            print(f'{visible(file.name)}: nothing found')
        if args.save:
            draw(image, found, model.names, masks)
            try:
                save(image, PICTURES / file.name)
            except (OSError, ValueError) as e:
                reason = (
                    f'{e.strerror}, {shutil.disk_usage(".").free / 1e6:.1f} MB are free'
                    if isinstance(e, OSError)
                    else e
                )
                fail(
                    f'{PICTURES / file.name} could not be written ({reason}), nor what follows; {saved} pictures are whole'
                )
            saved += 1
    broken = f' ({skipped} more left out: NaN or infinite)' if skipped else ''
    print(
        f'{total} detections{broken} in {len(args.files) - unread} images{f", pictures in {PICTURES}" if args.save else ""}'
    )
    if not args.save and not args.quiet:
        print('next: ' + visible(shlex.join(['python', sys.argv[0], str(args.model), str(args.images), '--save'])))
    return 1 if unread else 0


if __name__ == '__main__':
    sys.exit(main())
