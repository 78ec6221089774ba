"""The ends inside a finished ONNX file: a detector's NMS, checked against torchvision's; a classifier's normalization and softmax.

The detector itself was compared with PyTorch at its export. Here the rest is checked in ONNX Runtime: the detections
must be equal to `torch_nms` of the predictions bit for bit, and the masks to `torch_masks` within MASK_TOLERANCE. A
file with the plugin cannot run there: only ONNX's checker sees it before TensorRT does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import onnx
import torch
from torchvision.ops import nms as torchvision_nms
from torchvision.ops import roi_align
from typing_extensions import override
from utils.general import xywh2xyxy

from models.deploy.agreement import made_images
from models.deploy.formats.format import Export, Format, Written
from models.deploy.formats.onnx import FORMAT as ONNX
from models.deploy.formats.onnx import lines_of
from utils.qat.backends.detections import Detections
from utils.qat.config.export import PLUGIN, Nms, Pooling
from utils.qat.config.tables import NMS
from utils.qat.core.errors import QatError
from utils.qat.core.files import MADE_BY, atomic, write_text
from utils.qat.data.image_folders import MEAN, STD, normalized
from utils.qat.data.masks import BoxMasks
from utils.qat.graph import passes
from utils.qat.graph.ends import add_class_ends, add_nms
from utils.qat.graph.onnx_graph import shape_of
from utils.qat.graph.triton_config import triton_config
from utils.qat.vendors.onnxruntime.session import run_graph

MASK_TOLERANCE = 1e-3  # of values in 0..1: a sum of nm products has another order
LOW_SCORE = 0.001  # from which on an evaluation counts detections
PROBABILITY_TOLERANCE = 1e-4  # of values in 0..1: another order of sums in the network and the softmax


def torch_nms(predictions: Iterable[torch.Tensor], nms: Nms, nm: int = 0) -> list[torch.Tensor]:
    """Compute the detections that a file with NMS inside must return.

    NMS runs class by class on the boxes as they are. Upstream's NMS shifts each class by 7680 px to treat all classes at
    once; with many classes the shift costs the last bits of the boxes. Of equal scores the earlier box comes first, and
    of one box the earlier class.

    Args:
        predictions: [B, 4 + nc + nm, N].
        nms: settings.
        nm: number of mask coefficients.

    Returns:
        Rows [n, 6 + nm] per image: see detections.Detections, and the mask coefficients behind them.
    """
    detections = []
    for p in predictions:
        boxes, scores, coefficients = p.T.split((4, len(p) - 4 - nm, nm), 1)
        boxes = xywh2xyxy(boxes)
        if nms.class_agnostic:
            scores, best = scores.max(1, keepdim=True)
        kept = []
        for c, of_class in enumerate(scores.T):
            candidates = (of_class > nms.conf_thres).nonzero().flatten()
            kept.append(
                candidates[torchvision_nms(boxes[candidates], of_class[candidates], nms.iou_thres)] * scores.shape[1]
                + c
            )
        order = torch.cat(kept).sort().values
        order = order[scores.flatten()[order].sort(descending=True, stable=True).indices[: nms.topk_all]]
        box = order // scores.shape[1]
        label = best[box, 0] if nms.class_agnostic else order % scores.shape[1]
        detections.append(torch.cat((boxes[box], scores.flatten()[order, None], label[:, None], coefficients[box]), 1))
    return detections


def torch_masks(rows: Iterable[torch.Tensor], prototypes: torch.Tensor, pooling: Pooling) -> list[torch.Tensor]:
    """Compute the masks that a file with NMS inside must return, of `rows` of `torch_nms`: [n, R * R] per image, in 0..1.

    `prototypes` are [B, nm, h, w]; R is pooling.mask_resolution.
    """
    masks = []
    for each, p in zip(rows, prototypes):
        maps = (each[:, 6:] @ p.flatten(1)).view(-1, 1, *p.shape[1:])
        boxes = torch.cat((torch.arange(len(each), device=each.device)[:, None], each[:, :4]), 1)
        cut = roi_align(
            maps, boxes, pooling.mask_resolution, pooling.pooler_scale, pooling.sampling_ratio, aligned=True
        )
        masks.append(cut.sigmoid().flatten(1))
    return masks


def torch_detections(outputs: object, shape: tuple[int, int], nms: Nms, pooling: Pooling) -> list[Detections]:
    """Compute detections of each image from the outputs of a model or file without NMS, as a file with NMS inside does.

    shape: height and width of the images.
    """
    predictions, *prototypes = outputs if isinstance(outputs, tuple) else (outputs,)
    detections = torch_nms(predictions, nms, sum(p.shape[1] for p in prototypes))
    if not prototypes:
        return [Detections(rows) for rows in detections]
    sides = (pooling.mask_resolution,) * 2
    return [
        Detections(rows[:, :6], BoxMasks(masks.unflatten(1, sides), rows[:, :4], shape))
        for rows, masks in zip(detections, torch_masks(detections, prototypes[0], pooling))
    ]


def export_end2end(source: Path, path: Path, nms: Nms, pooling: Pooling = Pooling()) -> None:
    """Append NMS to the file `source` of export_onnx, check it, and write it to `path`, which may be `source`.

    Raises:
        QatError: ONNX's checker rejects the graph, or its detections or masks are not equal to `torch_nms` and
            `torch_masks`. Nothing is written.
    """
    model = onnx.load(source)
    [given], outputs = model.graph.input, list(model.graph.output)
    add_nms(model, nms, pooling)
    passes.set_metadata(
        model,
        nms=nms.kind,
        topk_all=nms.topk_all,
        iou_thres=nms.iou_thres,
        conf_thres=nms.conf_thres,
        class_agnostic=nms.class_agnostic,
        **asdict(pooling) if outputs[1:] else {},
    )
    onnx.checker.check_model(model, full_check=True)
    if nms.kind == 'standard':
        part = nms_part(model, [o.name for o in outputs])
        batch, _, *imgsz = shape_of(given)
        made = made_predictions(nms, max(imgsz), *map(shape_of, outputs))
        computed = run_graph(part, dict(zip((o.name for o in outputs), made)))
        require_detections(computed, made, nms, pooling, 'ONNX Runtime')
        whole = onnx.ModelProto()
        whole.CopyFrom(model)
        whole.graph.output.extend(outputs)
        returned = run_graph(whole, {given.name: made_images(batch, imgsz)})
        require_detections(returned[: -len(outputs)], returned[-len(outputs) :], nms, pooling, 'ONNX Runtime')
    with atomic(path) as tmp:
        onnx.save(model, tmp)


def nms_part(model: onnx.ModelProto, predictions: Sequence[str]) -> onnx.ModelProto:
    """Cut the NMS out of a graph: everything that follows the tensors `predictions`."""
    return onnx.utils.Extractor(model).extract_model(list(predictions), [o.name for o in model.graph.output])


def made_predictions(nms: Nms, side: int, shape: Sequence[int], *prototypes: Sequence[int]) -> list[torch.Tensor]:
    """Make predictions of `shape` [batch, rows, number], and `prototypes` of that shape for masks, deterministically.

    Every second image (`side` px) has more boxes than nms.topk_all, some of several classes; the other images are empty.
    """
    batch, rows, number = shape
    nm = sum(p[1] for p in prototypes)
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    boxes = torch.cat((rand(batch, 2, number), 0.02 + 0.15 * rand(batch, 2, number)), 1)
    made = torch.cat((side * boxes, torch.zeros(batch, rows - 4, number)), 1)
    made[:, rows - nm :] = 2 * rand(batch, nm, number) - 1
    for image in made[::2]:
        some = 3 * nms.topk_all
        image[4 + (rand(some) * (rows - 4 - nm)).long(), (rand(some) * number).long()] = rand(some)
    return [made, *(2 * rand(*p) - 1 for p in prototypes)]


def require_detections(
    outputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor], nms: Nms, pooling: Pooling, engine: str
) -> None:
    """Raise QatError unless a file's outputs are those of `torch_nms` and `torch_masks`.

    `outputs` are END2END, and MASKS of a segmentation model. They follow from `made`, the outputs of the file without NMS.
    `engine` computed them.
    """
    predictions, *prototypes = made
    rows = torch_nms(predictions, nms, sum(p.shape[1] for p in prototypes))
    for number, boxes, scores, classes, wanted in zip(*outputs[:4], rows):
        returned = torch.cat((boxes, scores[:, None], classes[:, None]), 1)
        if not torch.equal(returned[:number], wanted[:, :6]) or returned[number:].any():
            raise QatError(
                f'NMS in {engine} finds {number.item()} detections, torchvision {len(wanted)}, and they are not the same; '
                'please report this model. No file was written'
            )
    for p in prototypes:
        for number, masks, wanted in zip(outputs[0], outputs[4], torch_masks(rows, p, pooling)):
            if not torch.allclose(masks[:number], wanted, rtol=0, atol=MASK_TOLERANCE) or masks[number:].any():
                raise QatError(
                    f'masks in {engine} are not those of torchvision; please report this model. No file was written'
                )


def export_class_ends(source: Path, path: Path) -> None:
    """Put normalization and softmax into the classifier `source` of export_onnx, check it, and write it to `path`.

    Raises QatError, and writes nothing, if ONNX Runtime's probabilities are not those of the normalized images.
    """
    model = onnx.load(source)
    [given] = model.graph.input
    batch, _, *imgsz = shape_of(given)
    images = made_images(batch, imgsz)
    [logits] = run_graph(model, {given.name: normalized(images)})
    passes.set_metadata(add_class_ends(model, MEAN, STD), normalizes=True)
    onnx.checker.check_model(model, full_check=True)
    [computed] = run_graph(model, {given.name: images})
    if not torch.allclose(computed, logits.softmax(1), rtol=0, atol=PROBABILITY_TOLERANCE):
        raise QatError(
            'ONNX Runtime finds other probabilities with the normalization inside; please report this model. No file was written'
        )
    with atomic(path) as tmp:
        onnx.save(model, tmp)


class OnnxEnd2end(Format):
    """MODEL-end2end.onnx, which returns detections or probabilities, and MODEL-end2end.pbtxt, by which a Triton server serves it."""

    name = 'onnx_end2end'
    source = ONNX

    @override
    def require(self, export: Export) -> None:
        if not export.predict.task.boxes:
            if given := export.config.given(NMS):
                raise QatError(
                    f'{given}: only for detectors, and {export.config.weights} is {export.predict.task.title}'
                )
            return
        nms, _ = export.nms
        if nms.kind == 'plugin':
            export.target.require_tensorrt('--nms plugin', export.zero_points)
        if export.config.verify and not any(each.backend(export) for each in export.formats):
            raise QatError(
                f'--verify: ONNX Runtime has no {PLUGIN}; verify the file without NMS (--include onnx onnx_end2end), or give --nms standard'
            )

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        return [path, path.with_suffix('.pbtxt')]

    @override
    def write(self, export: Export, path: Path) -> Written:
        config, source, serving = export.config, export.written['onnx'].path, path.with_suffix('.pbtxt')
        if export.predict.task.boxes:
            nms, pooling = export.nms
            export_end2end(source, path, nms, pooling)
            plugin = nms.kind == 'plugin'
            checked = 'not run here, only TensorRT has it' if plugin else 'in ONNX Runtime as by torchvision'
            inside = f' of up to {nms.topk_all} detections; NMS {nms.kind}, {checked}'
        else:
            export_class_ends(source, path)
            plugin, inside = False, ' of images in 0..1, which the file normalizes'
        write_text(serving, f'# {MADE_BY}\n{triton_config(onnx.load(path), path.stem, config.batch_size)}')
        return Written(
            {self.name: path, 'triton': serving},
            [
                *lines_of(path, export, inside),
                f'-> {serving}: copy it to MODELS/{path.stem}/config.pbtxt of a Triton server, docs/deploy.md',
            ],
            [
                f'{PLUGIN} is deprecated since TensorRT 10.12 and will be removed; --nms standard has the same outputs and needs no plugin'
            ]
            * (plugin and config.trt == 11),
            low_scores=config.conf_thres <= LOW_SCORE,
        )

    @override
    def backend(self, export: Export) -> str | None:
        return None if export.nms[0].kind == 'plugin' else export.config.backend

    @override
    def reference(self, export: Export) -> Callable[[torch.Tensor], object]:
        if not export.predict.task.boxes:
            return lambda images: torch.log_softmax(torch.as_tensor(export.predict(images)), 1)
        nms, pooling = export.nms
        return lambda images: torch_detections(export.predict(images), (images.shape[2], images.shape[3]), nms, pooling)


FORMAT = OnnxEnd2end()
