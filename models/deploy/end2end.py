"""Finished ONNX detector → the same with NMS inside: appended, then checked against torchvision's NMS, box for box.

The detector itself was compared with PyTorch when it was exported. What is checked here is the rest: that in ONNX Runtime the outputs are
bit for bit what `torch_nms` makes of the predictions. A file with the plugin cannot run there: ONNX's checker takes it, TensorRT has to do the rest.
"""
import onnx
import torch
from torchvision.ops import nms as torchvision_nms
from utils.general import xywh2xyxy

from models.deploy.onnx_export import test_images
from utils.qat import onnx_passes
from utils.qat.backends import onnx_session
from utils.qat.config import END2END
from utils.qat.errors import QatError, atomic
from utils.qat.onnx_nms import add_nms


def torch_nms(predictions, nms):
    """What a file with NMS inside shall return: predictions [B, 4 + nc, N] → per image detections [n, 6], see evaluate.detect.

    Class by class on the boxes as they are. Upstream's NMS moves each class to a place of its own (by 7680 px) to do all at once, which
    costs a large number of classes the last bits of their boxes. Of equal scores the earlier box comes first, of one box the earlier class.
    """
    found = []
    for p in predictions:
        boxes, scores = xywh2xyxy(p[:4].T), p[4:].T
        if nms.class_agnostic:
            scores, best = scores.max(1, keepdim=True)
        places = []
        for c, of_class in enumerate(scores.T):
            candidates = (of_class > nms.conf_thres).nonzero().flatten()
            places.append(candidates[torchvision_nms(boxes[candidates], of_class[candidates], nms.iou_thres)] * scores.shape[1] + c)
        places = torch.cat(places).sort().values
        places = places[scores.flatten()[places].sort(descending=True, stable=True).indices[:nms.topk_all]]
        box = places // scores.shape[1]
        label = best[box, 0] if nms.class_agnostic else places % scores.shape[1]
        found.append(torch.cat((boxes[box], scores.flatten()[places, None], label[:, None]), 1))
    return found


def export_end2end(source, path, nms, runnable=True):
    """Write the detector in `source`, a file of export_onnx, with NMS behind it to `path`, which may be the same.

    nms: see config.Nms. runnable: whether ONNX Runtime can run `source`. Raises QatError, and writes nothing, if ONNX's checker rejects
    the graph or its detections are not those of `torch_nms`.
    """
    model = onnx.load(source)
    [given], [predictions] = model.graph.input, list(model.graph.output)
    add_nms(model, nms)
    onnx_passes.set_metadata(model, nms=nms.kind, topk_all=nms.topk_all, iou_thres=nms.iou_thres, conf_thres=nms.conf_thres,
                             class_agnostic=nms.class_agnostic)
    onnx.checker.check_model(model, full_check=True)
    if nms.kind == 'standard':
        part = onnx.utils.Extractor(model).extract_model([predictions.name], list(END2END))
        made = test_predictions(*_shape(predictions), nms)
        _check(_run(part, predictions.name, made), made, nms)
        if runnable:
            whole = onnx.ModelProto()
            whole.CopyFrom(model)
            whole.graph.output.append(predictions)
            batch, _, *imgsz = _shape(given)
            *found, made = _run(whole, given.name, test_images(batch, imgsz))
            _check(found, made, nms)
    with atomic(path) as tmp:
        onnx.save(model, tmp)


def _shape(value):
    """Shape of a graph input or output; 3 for an open batch axis."""
    return [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]


def test_predictions(batch, rows, number, nms):
    """Predictions [batch, rows, number], the same every time: every second image with more boxes than nms.topk_all, some of several classes,
    the others empty."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    made = torch.cat((640 * rand(batch, 2, number), 10 + 100 * rand(batch, 2, number), torch.zeros(batch, rows - 4, number)), 1)
    for image in made[::2]:
        some = 3 * nms.topk_all
        image[4 + (rand(some) * (rows - 4)).long(), (rand(some) * number).long()] = rand(some)
    return made


def _run(model, name, values):
    """Outputs of a ModelProto for one input, as tensors."""
    return [torch.from_numpy(out) for out in onnx_session(model.SerializeToString()).run(None, {name: values.numpy()})]


def _check(outputs, predictions, nms):
    """Raise QatError unless `outputs`, those of END2END, are what torch_nms makes of `predictions`."""
    for number, boxes, scores, classes, wanted in zip(*outputs, torch_nms(predictions, nms)):
        found = torch.cat((boxes, scores[:, None], classes[:, None]), 1)
        if not torch.equal(found[:number], wanted) or found[number:].any():
            raise QatError(f'NMS in ONNX Runtime finds {number.item()} detections, torchvision {len(wanted)}, and they are not the same; '
                           'please report this model. No file was written')
