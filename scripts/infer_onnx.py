"""Detect objects in images with a model of any kind, as it is evaluated: print them and, with --save, draw them.

    python scripts/infer_onnx.py MODEL.onnx [MODEL ...] IMAGE|FOLDER [--backend onnxruntime|openvino] [--save]

    image, BGR uint8 [h, w, 3] → letterbox → RGB FP32 [1, 3, H, W] in 0..1 → MODEL → NMS → detections → pixels of the image

A line for each detection: class, score, x1 y1 x2 y2 in pixels of the image and, for a segmentation model, the number of pixels
of its mask. docs/client.md has a client of 30 lines for you to copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the patched tree; Python starts in scripts/
from utils.qat.config.deploy import InferConfig
from utils.qat.config.settings import image_size, read
from utils.qat.config.tables import CHECKPOINTS, EXPORTED
from utils.qat.core.command import command, run_command
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic, distinct_names, require_file
from utils.qat.core.log import LOGGER, RESULT, finish
from utils.qat.core.run_folder import own_folder
from utils.qat.core.text import counted, pixels

if TYPE_CHECKING:
    import numpy as np
    import torch

    from utils.qat.backends.detections import Detections, Placement
    from utils.qat.vendors.session import Session


def image_files(path: Path) -> dict[Path, str]:
    """List the images at `path`, a file or a folder with folders: file → its name in there."""
    from utils.dataloaders import IMG_FORMATS

    if path.is_dir():
        found, folder = sorted(path.rglob('*')), path
    else:
        found, folder = [path] if path.is_file() else [], path.parent
    files = {f: str(f.relative_to(folder)) for f in found if f.suffix[1:].lower() in IMG_FORMATS}
    if not files:
        raise QatError(
            f'{path}: no image, nor a folder with images ({", ".join(IMG_FORMATS)}); give one as the last word'
        )
    return files


def read_image(file: Path) -> np.ndarray | None:
    """Read an image as BGR uint8 [h, w, 3]; None if OpenCV cannot."""
    import cv2

    try:
        return cv2.imread(str(file)) if file.is_file() else None  # reading a pipe blocks for ever
    except (cv2.error, UnicodeEncodeError):  # too many pixels for OpenCV; a name that is not valid text
        return None


def letterbox(image: np.ndarray, size: tuple[int, int]) -> tuple[torch.Tensor, Placement]:
    """Fit a BGR image into `size`, height and width, as the evaluation does: [1, 3, H, W], RGB in 0..1, and its place there."""
    import cv2
    import numpy as np
    import torch
    from utils.augmentations import letterbox as padded

    h, w = image.shape[:2]
    gain = min(size[0] / h, size[1] / w)
    if gain != 1:
        fit = max(1, int(w * gain)), max(1, int(h * gain))
        image = cv2.resize(image, fit, interpolation=cv2.INTER_AREA if gain < 1 else cv2.INTER_LINEAR)
    ratio = image.shape[0] / h, image.shape[1] / w
    image, _, border = padded(image, size, auto=False, scaleup=False)
    pixels = np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1))
    return torch.from_numpy(pixels)[None].float() / 255, ((h, w), (ratio, border))


class DeepStreamFile:
    """A file of export_yoloV9.py, [B, N, 6]: x1, y1, x2, y2, score and class of the best class of each box.

    Its predictions are those of a plain file, with a score of 0 for each other class.
    """

    def __init__(self, session: Session) -> None:
        from utils.qat.backends.file_model import stride_and_names
        from utils.qat.config.tasks import load_task

        signature = session.signature()
        ((self.input, image),) = signature.inputs.items()
        self.session, self.imgsz, self.task = session, tuple(image[2:]), load_task('detect')
        self.batch = image[0] if isinstance(image[0], int) else 1
        self.stride, names = stride_and_names(session.file, signature.metadata)
        self.names, self.notes, self.device = names or {}, session.notes, session.device
        self.path, self.quantized_for = session.file, None  # for `image_size`

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Predict for an image FP32 [1, 3, H, W] in 0..1: [1, 4 + nc, N]."""
        import torch
        from utils.general import xyxy2xywh

        (rows,) = self.session.run({self.input: images.repeat(self.batch, 1, 1, 1)}).values()
        boxes, scores, classes = rows[0].float().split((4, 1, 1), 1)
        nc = max([*self.names, int(classes.max())]) + 1
        each = torch.zeros(len(rows[0]), nc).scatter_(1, classes.long(), scores)
        return torch.cat((xyxy2xywh(boxes), each), 1).T[None]


def open_model(file: Path, backend: str | None, device: torch.device) -> Any:
    """Open a detector or a segmentation model, see file_model.py."""
    from models.deploy.load import load_model
    from utils.qat.vendors.load import open_session

    if file.suffix not in CHECKPOINTS:
        session = open_session(file, device, backend)
        if [list(shape)[2:] for shape in session.signature().outputs.values()] == [[6]]:
            return DeepStreamFile(session)
    predict = load_model(file, device, backend)
    if not predict.task.boxes:
        raise QatError(f'{file}: {predict.task.title}, which finds no boxes; use: python qat.py eval')
    return predict


def detections(
    predict: Any, image: np.ndarray, size: tuple[int, int], config: InferConfig
) -> tuple[list[list[float]], list[np.ndarray], int]:
    """Detect the objects in a BGR image, whose letterboxed form has height and width `size`.

    Returns:
        rows: x1, y1, x2, y2 in pixels of the image, score, class; highest score first.
        masks: of each, bool [h, w]; none of a detector.
        skipped: number of detections that are left out because a value is NaN or infinite.
    """
    from utils.general import scale_boxes

    from utils.qat.backends.detections import detect

    pixels, placement = letterbox(image, size)
    [kept] = detect(predict(pixels.to(predict.device)), size, config.conf_thres, config.iou_thres)
    finite = kept.rows.isfinite().all(1)
    skipped = int((~finite).sum())
    kept = kept[finite & (kept.rows[:, 4] > config.conf_thres)]
    masks = list(masks_of(kept, placement))
    scale_boxes(size, kept.rows[:, :4], *placement)
    return kept.rows.tolist(), masks, skipped


def masks_of(detections: Detections, placement: Placement) -> Iterator[np.ndarray]:
    """Yield the mask of each detection at the size of the image, bool [h, w]; nothing for a detector."""
    import numpy as np
    from utils.segment.general import scale_image

    for i in range(len(detections)) if detections.masks else ():
        fine = detections.masks[i : i + 1].fine()[0].byte().cpu().numpy()  # type: ignore[index]
        yield scale_image(fine.shape, np.ascontiguousarray(fine[..., None]), placement[0], placement[1])[..., 0] > 0


def drawn(image: np.ndarray, rows: Sequence[Sequence[float]], masks: Sequence[np.ndarray], names: dict) -> np.ndarray:
    """Draw detections (x1, y1, x2, y2, score, class) into a BGR image, a colour for each class; with masks a colour for each mask.

    The names come last, that of the highest score above the others, so that no box of a neighbour crosses them.
    """
    import numpy as np
    from utils.plots import Annotator, colors

    image = image.copy()
    tones = [colors(i if masks else int(number), True) for i, (*_, number) in enumerate(rows)]
    for tone, mask in zip(tones, masks):
        image[mask] = image[mask] // 2 + np.uint8(tone) // 2
    picture = Annotator(image, example=''.join(map(str, names.values())))
    for (*box, _, _), tone in zip(rows, tones):
        picture.box_label(box, '', tone)
    for (left, top, *_, score, number), tone in reversed([*zip(rows, tones)]):
        picture.box_label((left, top, left, top), f'{names.get(int(number), int(number))} {score:.2f}', tone)
    return picture.result()


def save(image: np.ndarray, path: Path) -> None:
    """Write an image, complete at any moment."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        written, content = cv2.imencode(path.suffix, image)
    except cv2.error:
        written = False
    if not written:
        raise QatError(f'{path}: OpenCV writes no {path.suffix} of {image.shape[1]} x {image.shape[0]} pixels')
    with atomic(path) as tmp:
        tmp.write_bytes(content.tobytes())


def infer(predict: Any, files: dict[Path, str], config: InferConfig, folder: Path | None) -> int:
    """Detect objects in files (file → its name), print them, and draw them into `folder`; return how many cannot be read."""
    import cv2

    size = image_size(config.imgsz, predict)
    names = predict.names or {}
    unread = total = skipped = 0
    for file, name in files.items():
        image = read_image(file)
        if image is None:
            LOGGER.warning(f'{file}: OpenCV cannot read it')
            unread += 1
            continue
        rows, masks, left_out = detections(predict, image, size, config)
        skipped += left_out
        for i, (*box, score, number) in enumerate(rows):
            of_mask = f'  {masks[i].sum()} px' if masks else ''
            what = f'{names.get(int(number), int(number))} {score:.3f}'
            LOGGER.info(f'{name}: {what}  {" ".join(f"{x:.1f}" for x in box)}{of_mask}')
        if not rows:
            LOGGER.info(f'{name}: nothing found')
        if folder:
            save(drawn(image, rows, masks, names), folder / (name if cv2.haveImageWriter(name) else f'{name}.png'))
        total += len(rows)
    if unread == len(files):
        raise QatError(f'{config.images}: OpenCV can read no image of it; give others')
    broken = f' ({skipped} more left out: NaN or infinite)' if skipped else ''
    saved = f', pictures in {folder}' if folder else ''
    for line in predict.notes:
        LOGGER.info(line)
    LOGGER.log(
        RESULT,
        f'{counted(total, "detection")}{broken} in {counted(len(files) - unread, "image")} at {pixels(size)}{saved}',
    )
    return unread


def main(argv: Sequence[str] | None = None) -> int:
    """Detect objects in all images with each model; return 1 if an image could not be read, else 0."""
    config = read(InferConfig, argv, __doc__.partition('\n')[0])
    for model in config.models:
        require_file(model, 'MODEL', CHECKPOINTS + EXPORTED)
    files, unread = image_files(config.images), 0

    from utils.qat.core.machine import select_device

    device = select_device(config.device)
    with own_folder(config) if config.save else nullcontext() as folder:
        for model, name in zip(config.models, distinct_names(config.models)):
            own = folder
            if len(config.models) > 1:
                LOGGER.log(RESULT, f'\n{name}')
                own = folder and folder / name.strip('./').replace('/', '_')
            unread += infer(open_model(model, config.backend, device), files, config, own)
    finish(*([] if folder else [command('scripts/infer_onnx.py', *(sys.argv[1:] if argv is None else argv), '--save')]))
    return 1 if unread else 0


if __name__ == '__main__':
    sys.exit(run_command(main))
