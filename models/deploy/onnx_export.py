"""Model → ONNX file: trace, passes, checks. The file appears only when everything held."""
import inspect
import logging
import warnings
from copy import deepcopy
from dataclasses import dataclass

import onnx
import torch
import torch.nn.functional as F

from models.quantize.quantizers import named_quantizers
from utils.qat import onnx_graph, onnx_passes
from utils.qat.backends import OnnxModel
from utils.qat.errors import QatError, atomic

# How far ONNX Runtime may be from PyTorch, as |difference| / |PyTorch| (2-norms) over all boxes, and over all scores as
# logits: most scores are near 0, where their own ratio says nothing. Float graphs differ by the order of summation only.
# With INT8, a value between two steps rounds either way, and each such flip is one whole step to the next layer;
# PyTorch in FP64 is about as far from PyTorch in FP32. The scales themselves must agree bit for bit.
FLOAT_LIMIT, INT8_LIMIT = 1e-3, 0.05
MIN_SCORE = 1e-4  # scores below count as this: their logits magnify float rounding, and no threshold is lower


@dataclass
class Exported:
    """What was written, and how far ONNX Runtime is from PyTorch on the test images."""
    qdq: tuple  # numbers of Q and of DQ nodes
    boxes: float  # relative error of the boxes
    scores: float  # relative error of the class scores, as logits
    boxes_max: float  # largest absolute difference, pixels
    scores_max: float  # largest absolute difference, 0..1
    limit: float  # the relative error allowed


def prepare(model, inplace=False):
    """A copy of `model` in the form that is traced: eval mode, the head returning only the decoded predictions."""
    model = deepcopy(model).float().eval().requires_grad_(False)
    head = model.model[-1]
    head.export, head.inplace = True, inplace
    head.shape = None  # compute the anchors anew, inside the trace
    return model


def _trace(model, images, path, opset, dynamic):
    """torch.onnx.export through TorchScript: the exporter that knows fake-quantize operators at every opset we need."""
    options = {'dynamo': False} if 'dynamo' in inspect.signature(torch.onnx.export).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*legacy TorchScript-based ONNX export.*')
        warnings.filterwarnings('ignore', category=torch.jit.TracerWarning)  # the head compares shapes, which are fixed
        torch.onnx.export(model, (images,), str(path), opset_version=opset, input_names=['images'],
                          output_names=['output0'], do_constant_folding=True,
                          dynamic_axes={'images': {0: 'batch'}, 'output0': {0: 'batch'}} if dynamic else None, **options)


def test_images(batch, imgsz):
    """Images with structure at many scales, FP32 [batch, 3, H, W] in 0..1, the same every time."""
    generator = torch.Generator().manual_seed(0)
    layers = [F.interpolate(torch.rand(batch, 3, n, n, generator=generator), size=tuple(imgsz), mode='bilinear')
              for n in (3, 10, 40)]
    return sum(layers) / len(layers)


def _relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def compare(path, images, theirs):
    """Run the ONNX file on `images` and compare with `theirs`, what PyTorch makes of them; the figures of Exported."""
    ours = OnnxModel(path)(images)
    if ours.shape != theirs.shape:
        raise QatError(f'ONNX Runtime returns {tuple(ours.shape)}, PyTorch {tuple(theirs.shape)}')
    difference = (ours - theirs).abs()
    return {'boxes': _relative(ours[:, :4], theirs[:, :4]),
            'scores': _relative(ours[:, 4:].logit(MIN_SCORE), theirs[:, 4:].logit(MIN_SCORE)),
            'boxes_max': difference[:, :4].max().item(), 'scores_max': difference[:, 4:].max().item()}


def export_onnx(model, path, imgsz=(640, 640), batch=1, dynamic=False, simplify=False, opset=17, inplace=False):
    """Write `model` (fused; float or quantized) to `path`: images [B, 3, H, W] → output0 [B, 4 + nc, N].

    imgsz: height, width, multiples of the stride. dynamic: leave the batch axis open. Returns Exported. Raises QatError,
    and leaves no file, if ONNX's checker rejects the graph or ONNX Runtime does not agree with PyTorch.
    """
    traced = prepare(model, inplace)
    device = next(traced.parameters()).device
    quantizers = [q for _, q in named_quantizers(traced)]
    with atomic(path) as tmp:
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)
        _trace(traced, torch.zeros(batch, 3, *imgsz, device=device), tmp, opset, dynamic)
        graph = onnx.load(tmp)
        # onnxslim would drop Q/DQ of equal nodes, so they are merged first; what it drops besides shall get no Q/DQ
        passes = [onnx_passes.remove_identities, onnx_passes.constants_to_initializers, onnx_passes.write_axis,
                  onnx_passes.merge_duplicates, *[onnx_passes.simplify] * simplify, onnx_passes.quantize_moves,
                  onnx_passes.merge_duplicates]
        for apply in passes:
            graph = apply(graph)
        onnx_passes.check_scales(graph, [q.scale.cpu().numpy() for q in quantizers])
        images = test_images(2 if dynamic else batch, imgsz)
        with torch.no_grad():
            theirs = traced(images.to(device)).cpu()
        onnx_passes.set_output_shape(graph, 'batch' if dynamic else batch, *theirs.shape[1:])
        onnx_passes.set_metadata(graph, stride=int(max(model.stride)), names=model.names)
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, tmp)
        figures = compare(tmp, images, theirs)
        exported = Exported(onnx_graph.count_qdq(graph), limit=INT8_LIMIT if quantizers else FLOAT_LIMIT, **figures)
        if not (exported.boxes <= exported.limit and exported.scores <= exported.limit):
            raise QatError(f'ONNX Runtime differs from PyTorch by {exported.boxes:.2%} (boxes) and {exported.scores:.2%} '
                           f'(scores), more than {exported.limit:.1%}; no file was written')
    return exported
