"""Model → ONNX file: trace, passes, checks. The file appears only when everything held.

Targets. TensorRT 8.6 and 10: FP32 graph with Q/DQ, opset 13 to 17, the builder chooses FP16 (--int8 --fp16). TensorRT 11 has
no such choice, so the graph itself is typed (`half`): FP16 outside Q/DQ, opset 19 or more, with scales in FP16 or, on request,
in FP32 (opset 23); see utils/qat/graph/half.py.
"""

import inspect
import logging
import warnings
from copy import deepcopy
from dataclasses import dataclass

import onnx
import torch
import torch.nn.functional as F

from models.quantize.quantizers import named_quantizers
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.graph import half as onnx_half
from utils.qat.graph import onnx_graph
from utils.qat.graph import passes as onnx_passes
from utils.qat.prediction.onnxruntime import OnnxModel
from utils.qat.prediction.outputs import parts

OUTPUTS = 'output0', 'output1'  # predictions, and of a segmentation model prototypes

# How far ONNX Runtime may be from PyTorch, as |difference| / |PyTorch| (2-norms) over all boxes, over all scores as
# logits (most scores are near 0, where their own ratio says nothing), and over coefficients and prototypes, which masks are
# made of. Float graphs differ by the order of summation only, or by FP16 (seen: 0.05 %). With INT8, a value between two
# steps rounds either way, and each such flip is one whole step to the next layer. How much that makes depends on the model
# (trained ones: up to 2.5 %, with FP16 4.2 %; random weights: 20 %), so it is measured: PyTorch against PyTorch with other
# last bits behind each convolution, and MARGIN times that is allowed as well. One such measurement may be far too small where few
# flips make much, so that a file is refused only after SAMPLES of them. The scales themselves must agree bit for bit.
LIMITS = {('float', 'FP32'): 1e-3, ('float', 'FP16'): 5e-3, ('INT8', 'FP32'): 0.05, ('INT8', 'FP16'): 0.08}
MARGIN, SAMPLES = 3, 8
LAST_BITS = {'FP32': 2.0**-22, 'FP16': 2.0**-12}  # of the largest value that a convolution returns
RELATIVE = 'boxes', 'scores', 'coefficients', 'prototypes'  # the errors that must keep the limit
MIN_SCORE = 1e-4  # scores below count as this: their logits magnify float rounding, and no threshold is lower


@dataclass
class Exported:
    """What was written, and how far ONNX Runtime is from PyTorch on the test images."""

    opset: int
    qdq: tuple  # numbers of Q and of DQ nodes
    boxes: float  # relative error of the boxes
    scores: float  # relative error of the class scores, as logits
    boxes_max: float  # largest absolute difference, pixels
    scores_max: float  # largest absolute difference, 0..1
    noise: float  # largest relative error of PyTorch against itself; 0 for a float model
    limit: float  # the relative error allowed
    coefficients: float = None  # relative error of the mask coefficients, of a segmentation model
    prototypes: float = None


def prepare(model, inplace=False):
    """A copy of `model` in the form that is traced: eval mode, the head returning only the decoded predictions, and prototypes."""
    model = deepcopy(model).float().eval().requires_grad_(False)
    head = model.model[-1]
    head.export, head.inplace = True, inplace
    head.shape = None  # compute the anchors anew, inside the trace
    return model


def _trace(model, images, path, opset, dynamic):
    """torch.onnx.export through TorchScript: the exporter that knows fake-quantize operators at every opset we need."""
    options = {'dynamo': False} if 'dynamo' in inspect.signature(torch.onnx.export).parameters else {}
    outputs = OUTPUTS[: 1 + hasattr(model.model[-1], 'nm')]
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*legacy TorchScript-based ONNX export.*')
        warnings.filterwarnings('ignore', category=torch.jit.TracerWarning)  # the head compares shapes, which are fixed
        torch.onnx.export(
            model,
            (images,),
            str(path),
            opset_version=opset,
            input_names=['images'],
            output_names=list(outputs),
            do_constant_folding=True,
            dynamic_axes={name: {0: 'batch'} for name in ('images', *outputs)} if dynamic else None,
            **options,
        )


def test_images(batch, imgsz):
    """Images with structure at many scales, FP32 [batch, 3, H, W] in 0..1, the same every time."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        F.interpolate(torch.rand(batch, 3, n, n, generator=generator), size=tuple(imgsz), mode='bilinear')
        for n in (3, 10, 40)
    ]
    return sum(layers) / len(layers)


def _relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def differences(ours, theirs):
    """How far two predictions [B, 4 + nc, N] are apart, or those of a segmentation model, pairs ([B, 4 + nc + nm, N], prototypes
    [B, nm, h, w]); the figures of Exported."""
    ours, theirs = ({name: part.cpu() for name, part in parts(outputs).items()} for outputs in (ours, theirs))
    shapes = [[tuple(part.shape) for part in model.values()] for model in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise QatError(f'ONNX Runtime returns {shapes[0]}, PyTorch {shapes[1]}')
    figures = {f'{name}_max': (ours[name] - theirs[name]).abs().max().item() for name in ('boxes', 'scores')}
    for model in (ours, theirs):
        model['scores'] = model['scores'].logit(MIN_SCORE)
    return {**figures, **{name: _relative(ours[name], theirs[name]) for name in theirs}}


def rounding_noise(model, images, theirs, last_bits, seed):
    """How far a change (random, by `seed`) of the last bits of what each convolution returns moves what `model` returns from `theirs`:
    the largest relative error."""
    generator = torch.Generator(images.device).manual_seed(seed)

    def round_otherwise(module, inputs, result):
        noise = 2 * torch.rand(result.shape, generator=generator, device=result.device) - 1
        return result + noise * last_bits * result.abs().max()

    hooks = [m.register_forward_hook(round_otherwise) for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    try:
        moved = differences(model(images), theirs)
    finally:
        for hook in hooks:
            hook.remove()
    return max(moved.get(name, 0) for name in RELATIVE)


@torch.no_grad()
def export_onnx(
    model,
    path,
    imgsz=(640, 640),
    batch=1,
    dynamic=False,
    simplify=False,
    opset=17,
    inplace=False,
    half=False,
    fp32_scales=False,
    kept_float=(),
    layout=None,
    progress=iter,
):
    """Write `model` (fused; float or quantized) to `path`: images [B, 3, H, W] → output0 [B, 4 + nc, N], or of a segmentation model
    output0 [B, 4 + nc + nm, N] and output1 [B, nm, H / 4, W / 4]: mask coefficients behind the scores, and prototypes. All FP32.

    imgsz: height, width, multiples of the stride. dynamic: leave the batch axis open. half: FP16 inside. fp32_scales: with
    `half`, scales in FP32. ONNX Runtime (1.31) cannot run these: what it compares with PyTorch is the graph with FP16 scales,
    and what is written is made of that graph. kept_float: paths of blocks that are float by choice, noted in the metadata. layout:
    function that gives the checked graph (an onnx.ModelProto) other inputs and outputs, such as deepstream_layout. progress: wraps the
    steps. Returns Exported.
    Raises QatError, and leaves no file, if ONNX's checker rejects the graph or ONNX Runtime does not agree with PyTorch.
    """
    traced = prepare(model, inplace)
    device = next(traced.parameters()).device
    quantizers = [q for _, q in named_quantizers(traced)]
    # onnxslim would drop Q/DQ of equal nodes, so they are merged first; what it drops besides shall get no Q/DQ
    passes = [
        onnx_passes.remove_identities,
        onnx_passes.constants_to_initializers,
        onnx_passes.write_axis,
        onnx_passes.merge_duplicates,
        *[onnx_passes.simplify] * simplify,
        onnx_passes.quantize_moves,
        onnx_passes.merge_duplicates,
        *[onnx_half.to_half] * half,
    ]
    with atomic(path) as tmp:
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)

        def trace(_):
            _trace(traced, torch.zeros(batch, 3, *imgsz, device=device), tmp, opset, dynamic)
            return onnx.load(tmp)

        graph = None
        for step in progress([trace, *passes]):
            graph = step(graph)
        onnx_passes.check_scales(graph, [q.scale.cpu().numpy() for q in quantizers])
        images = test_images(2 if dynamic else batch, imgsz)
        theirs = traced(images.to(device))
        returned = [theirs] if isinstance(theirs, torch.Tensor) else theirs
        onnx_passes.set_output_shapes(graph, *(('batch' if dynamic else batch, *out.shape[1:]) for out in returned))
        onnx_passes.set_metadata(
            graph,
            stride=int(max(model.stride)),
            names=model.names,
            task='segment' if returned[1:] else 'detect',
            **({'nm': returned[1].shape[1]} if returned[1:] else {}),
            **{'kept_float': list(kept_float)} if kept_float else {},
        )
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, tmp)

        figures, typing = differences(OnnxModel(tmp)(images), theirs), 'FP16' if half else 'FP32'
        limit, noise = LIMITS['INT8' if quantizers else 'float', typing], 0.0
        errors = {name: figures[name] for name in RELATIVE if name in figures}

        def agree():
            return all(error <= limit for error in errors.values())

        for seed in range(1, 1 + SAMPLES * bool(quantizers)):
            noise = max(noise, rounding_noise(traced, images.to(device), theirs, LAST_BITS[typing], seed))
            limit = max(limit, MARGIN * noise)
            if agree():
                break
        if not agree():
            raise QatError(
                f'ONNX Runtime differs from PyTorch by {", ".join(f"{e:.2%} ({name})" for name, e in errors.items())}, '
                f'more than {limit:.1%}; no file was written'
            )
        for apply in (*[onnx_half.fp32_scales] * fp32_scales, *[layout] * (layout is not None)):
            graph = apply(graph)
            onnx.checker.check_model(graph, full_check=True)
            onnx.save(graph, tmp)
    return Exported(onnx_graph.opset(graph), onnx_graph.count_qdq(graph), noise=noise, limit=limit, **figures)
