"""Finished ONNX detector → the same with NMS inside: appended, then checked against torchvision's NMS, box for box, mask for mask.

The detector itself was compared with PyTorch when it was exported. What is checked here is the rest: that in ONNX Runtime the outputs are
bit for bit what `torch_nms` makes of the predictions, and masks, within MASK_TOLERANCE, what `torch_masks` does. A file with the plugin
cannot run there: ONNX's checker takes it, TensorRT has to do the rest.
"""

from dataclasses import asdict

import onnx
import torch
from torchvision.ops import nms as torchvision_nms
from torchvision.ops import roi_align
from utils.general import xywh2xyxy

from models.deploy.onnx_export import test_images
from utils.qat.config.export import Pooling
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.data.masks import BoxMasks
from utils.qat.graph import onnx_graph, passes
from utils.qat.graph.nms import add_nms
from utils.qat.prediction.detections import Detections
from utils.qat.prediction.onnxruntime import onnx_session

MASK_TOLERANCE = 1e-3  # of values in 0..1: a sum of nm products comes in another order
RUNS = 21  # the last opset whose RoiAlign ONNX Runtime (1.31) has; 22 and 23 change nothing but add types


def torch_nms(predictions, nms, nm=0):
    """What a file with NMS inside shall return: predictions [B, 4 + nc + nm, N] → per image rows [n, 6 + nm]: see detections.Detections,
    and mask coefficients.

    Class by class on the boxes as they are. Upstream's NMS moves each class to a place of its own (by 7680 px) to do all at once, which
    costs a large number of classes the last bits of their boxes. Of equal scores the earlier box comes first, of one box the earlier class.
    """
    found = []
    for p in predictions:
        boxes, scores, coefficients = p.T.split((4, len(p) - 4 - nm, nm), 1)
        boxes = xywh2xyxy(boxes)
        if nms.class_agnostic:
            scores, best = scores.max(1, keepdim=True)
        places = []
        for c, of_class in enumerate(scores.T):
            candidates = (of_class > nms.conf_thres).nonzero().flatten()
            places.append(
                candidates[torchvision_nms(boxes[candidates], of_class[candidates], nms.iou_thres)] * scores.shape[1]
                + c
            )
        places = torch.cat(places).sort().values
        places = places[scores.flatten()[places].sort(descending=True, stable=True).indices[: nms.topk_all]]
        box = places // scores.shape[1]
        label = best[box, 0] if nms.class_agnostic else places % scores.shape[1]
        found.append(torch.cat((boxes[box], scores.flatten()[places, None], label[:, None], coefficients[box]), 1))
    return found


def torch_masks(rows, prototypes, pooling):
    """And its masks: rows of `torch_nms`, prototypes [B, nm, h, w] → per image [n, R * R], in 0..1."""
    found = []
    for each, p in zip(rows, prototypes):
        maps = (each[:, 6:] @ p.flatten(1)).view(-1, 1, *p.shape[1:])
        boxes = torch.cat((torch.arange(len(each), device=each.device)[:, None], each[:, :4]), 1)
        cut = roi_align(
            maps, boxes, pooling.mask_resolution, pooling.pooler_scale, pooling.sampling_ratio, aligned=True
        )
        found.append(cut.sigmoid().flatten(1))
    return found


def outside(outputs, shape, nms, pooling):
    """What is done to `outputs` inside a file, done to those of a TorchModel: a list of Detections. shape: height and width of the images."""
    predictions, *prototypes = outputs if isinstance(outputs, tuple) else (outputs,)
    found = torch_nms(predictions, nms, sum(p.shape[1] for p in prototypes))
    if not prototypes:
        return [Detections(rows) for rows in found]
    sides = (pooling.mask_resolution,) * 2
    return [
        Detections(rows[:, :6], BoxMasks(masks.unflatten(1, sides), rows[:, :4], shape))
        for rows, masks in zip(found, torch_masks(found, *prototypes, pooling))
    ]


def export_end2end(source, path, nms, pooling=Pooling(), runnable=True):
    """Write the model in `source`, a file of export_onnx, with NMS behind it to `path`, which may be the same.

    nms, pooling: see config; the second is for a segmentation model. runnable: whether ONNX Runtime can run `source`. Raises QatError,
    and writes nothing, if ONNX's checker rejects the graph, its detections are not those of `torch_nms`, or its masks those of
    `torch_masks`.
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
        part = onnx.utils.Extractor(model).extract_model(
            [o.name for o in outputs], [o.name for o in model.graph.output]
        )
        next(o for o in part.opset_import if not o.domain).version = min(onnx_graph.opset(part), RUNS)
        batch, _, *imgsz = _shape(given)
        made = test_predictions(nms, max(imgsz), *map(_shape, outputs))
        _check(_run(part, dict(zip((o.name for o in outputs), made))), made, nms, pooling)
        if runnable:
            whole = onnx.ModelProto()
            whole.CopyFrom(model)
            whole.graph.output.extend(outputs)
            returned = _run(whole, {given.name: test_images(batch, imgsz)})
            _check(returned[: -len(outputs)], returned[-len(outputs) :], nms, pooling)
    with atomic(path) as tmp:
        onnx.save(model, tmp)


def _shape(value):
    """Shape of a graph input or output; 3 for an open batch axis."""
    return [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]


def test_predictions(nms, side, shape, *prototypes):
    """Predictions of `shape` [batch, rows, number] for images with `side`, the same every time: every second image with more boxes than
    nms.topk_all, some of several classes, the others empty. And prototypes, if their shape is given."""
    batch, rows, number = shape
    nm = sum(p[1] for p in prototypes)
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    boxes = torch.cat((rand(batch, 2, number), 0.02 + 0.15 * rand(batch, 2, number)), 1)
    made = torch.cat((side * boxes, torch.zeros(batch, rows - 4, number)), 1)
    made[:, rows - nm :] = 2 * rand(batch, nm, number) - 1
    for image in made[::2]:
        some = 3 * nms.topk_all
        image[4 + (rand(some) * (rows - 4 - nm)).long(), (rand(some) * number).long()] = rand(some)
    return [made, *(2 * rand(*p) - 1 for p in prototypes)]


def _run(model, values):
    """Outputs of a ModelProto, as tensors. values: name of an input → tensor."""
    return [
        torch.from_numpy(out)
        for out in onnx_session(model.SerializeToString()).run(None, {k: v.numpy() for k, v in values.items()})
    ]


def _check(outputs, made, nms, pooling):
    """Raise QatError unless `outputs`, those of END2END and MASKS, are what torch_nms and torch_masks make of `made`, the plain file's."""
    predictions, *prototypes = made
    rows = torch_nms(predictions, nms, sum(p.shape[1] for p in prototypes))
    for number, boxes, scores, classes, wanted in zip(*outputs[:4], rows):
        found = torch.cat((boxes, scores[:, None], classes[:, None]), 1)
        if not torch.equal(found[:number], wanted[:, :6]) or found[number:].any():
            raise QatError(
                f'NMS in ONNX Runtime finds {number.item()} detections, torchvision {len(wanted)}, and they are not the same; '
                'please report this model. No file was written'
            )
    for p in prototypes:
        for number, found, wanted in zip(outputs[0], outputs[4], torch_masks(rows, p, pooling)):
            if not torch.allclose(found[:number], wanted, rtol=0, atol=MASK_TOLERANCE) or found[number:].any():
                raise QatError(
                    'masks in ONNX Runtime are not those of torchvision; please report this model. No file was written'
                )
