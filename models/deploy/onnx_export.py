"""Export of a model to ONNX: trace, passes, checks. The file appears only if every check passes.

TensorRT 8.6 and 10 take an FP32 graph with Q/DQ, opset 13 to 17; their builder chooses FP16 (--int8 --fp16). TensorRT
11 has no such choice, so the graph itself is typed (`half`): FP16 outside Q/DQ, opset 19 or more, with scales in FP16
or, on request, in FP32 (opset 23); see utils/qat/graph/half.py.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn as nn
import torch.nn.functional as F

from models.quantize.head_outputs import head_of
from models.quantize.quantizers import UNIT_SCALE, SiLUQuantizer, named_quantizers
from utils.qat.config.targets import DEFAULT_TARGET
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.data.image_folders import normalized
from utils.qat.graph import half as onnx_half
from utils.qat.graph import onnx_graph
from utils.qat.graph import passes as onnx_passes
from utils.qat.prediction.outputs import parts
from utils.qat.prediction.pytorch import classifies
from utils.qat.prediction.registry import open_file
from utils.qat.targets.target import Target, load_target

OUTPUTS = 'output0', 'output1'  # predictions, and prototypes of a segmentation model

# How far ONNX Runtime may be from PyTorch, as |difference| / |PyTorch| (2-norms): over all boxes, over all scores as
# logits (most scores are near 0, where their own ratio says nothing), and over coefficients and prototypes, the source
# of masks. Float graphs differ only by the order of summation, or by FP16 (seen: 0.05 %). With INT8, a value between
# two steps rounds either way, and each such flip is one whole step for the next layer. The effect of flips depends on
# the model (trained ones: up to 2.5 %, with FP16 4.2 %; random weights: 20 %). So it is measured: PyTorch against
# PyTorch with other last bits behind each convolution, and MARGIN times this difference is allowed too. One such
# measurement may be far too small if a few flips make the difference, so a file is refused only after SAMPLES of them.
# The scales themselves must be equal bit for bit.
LIMITS = {('float', 'FP32'): 1e-3, ('float', 'FP16'): 5e-3, ('INT8', 'FP32'): 0.05, ('INT8', 'FP16'): 0.08}
MARGIN, SAMPLES = 3, 8
LAST_BITS = {'FP32': 2.0**-22, 'FP16': 2.0**-12}  # relative to the largest output of a convolution
RELATIVE = 'boxes', 'scores', 'coefficients', 'prototypes', 'logits'  # the errors that must keep the limit
MIN_SCORE = 1e-4  # a lower score counts as this: its logit magnifies float rounding, and no threshold is lower


@dataclass(kw_only=True)
class Agreement:
    """How far the engine that checked a written file is from PyTorch on the made images."""

    noise: float  # largest relative error of PyTorch against itself; 0 for a float model
    limit: float  # the relative error allowed
    boxes: float = 0.0  # relative error of the boxes; these four are 0 for a classifier
    scores: float = 0.0  # relative error of the class scores, as logits
    boxes_max: float = 0.0  # largest absolute difference, pixels
    scores_max: float = 0.0  # largest absolute difference, 0..1
    coefficients: float | None = None  # relative error of the mask coefficients; None for a detector
    prototypes: float | None = None  # relative error of the prototypes; None for a detector
    logits: float | None = None  # relative error of a classifier's logits; None for other models
    logits_max: float | None = None  # largest absolute difference of them

    def __str__(self) -> str:
        if self.logits is not None:
            return f'logits {self.logits:.3%} (at most {self.logits_max:.3g}); allowed {self.limit:.1%}'
        masks = ''
        if self.prototypes is not None:
            masks = f', mask coefficients {self.coefficients:.3%}, prototypes {self.prototypes:.3%}'
        return (
            f'boxes {self.boxes:.3%} (at most {self.boxes_max:.3g} px), '
            f'scores {self.scores:.3%} (at most {self.scores_max:.3g})'
            f'{masks}; allowed {self.limit:.1%}'
        )


@dataclass(kw_only=True)
class Exported(Agreement):
    """The facts of a written ONNX file, and how far ONNX Runtime is from PyTorch."""

    opset: int
    qdq: tuple[int, int]  # numbers of Q and of DQ nodes


def traceable_copy(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Copy `model` in the form for the trace: eval mode, and a head that returns only predictions and prototypes.

    Args:
        model: fused; float or quantized.
        inplace: the head's own flag: it decodes boxes in place.
    """
    model = deepcopy(model).float().eval().requires_grad_(False)
    if not classifies(model):
        head = model.model[-1]
        head.export, head.inplace = True, inplace
        head.shape = None  # so the anchors are computed anew, inside the trace
    return model


def _trace(model: nn.Module, images: torch.Tensor, path: Path, opset: int, dynamic: bool) -> None:
    """Write the traced graph by the TorchScript exporter: it knows fake-quantize operators at every opset we need."""
    options = {'dynamo': False} if 'dynamo' in inspect.signature(torch.onnx.export).parameters else {}
    outputs = OUTPUTS[: 1 + hasattr(head_of(model), 'nm')]
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


def made_images(batch: int, imgsz: Sequence[int]) -> torch.Tensor:
    """Make images with structure at many scales, the same every time.

    Args:
        batch: number of images.
        imgsz: height and width.

    Returns:
        FP32 [batch, 3, H, W] in 0..1.
    """
    generator = torch.Generator().manual_seed(0)
    layers = [
        F.interpolate(torch.rand(batch, 3, n, n, generator=generator), size=tuple(imgsz), mode='bilinear')
        for n in (3, 10, 40)
    ]
    return sum(layers) / len(layers)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def output_differences(ours: Any, theirs: Any, engine: str = 'ONNX Runtime') -> dict[str, float]:
    """Compare the outputs of two runtimes.

    Args:
        ours: predictions [B, 4 + nc, N]; for a segmentation model the pair of predictions [B, 4 + nc + nm, N] and
            prototypes [B, nm, h, w].
        theirs: of PyTorch, the same form.
        engine: that computed `ours`, for the message.

    Returns:
        Figures of Agreement: 'boxes', 'scores', 'boxes_max', 'scores_max', and for masks 'coefficients' and
        'prototypes'; for a classifier 'logits' and 'logits_max'.

    Raises:
        QatError: the shapes differ.
    """
    ours, theirs = ({name: part.cpu() for name, part in parts(outputs).items()} for outputs in (ours, theirs))
    shapes = [[tuple(part.shape) for part in model.values()] for model in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise QatError(f'{engine} returns {shapes[0]}, PyTorch {shapes[1]}')
    absolute = [name for name in ('boxes', 'scores', 'logits') if name in ours]
    figures = {f'{name}_max': (ours[name] - theirs[name]).abs().max().item() for name in absolute}
    for model in (ours, theirs):
        if 'scores' in model:
            model['scores'] = model['scores'].logit(MIN_SCORE)
    return {**figures, **{name: _relative(ours[name], theirs[name]) for name in theirs}}


def rounding_noise(model: nn.Module, images: torch.Tensor, theirs: Any, last_bits: float, seed: int) -> float:
    """Measure how far random last bits behind each convolution move the outputs of a model.

    Args:
        model: in the form of `traceable_copy`.
        images: FP32 [B, 3, H, W] in 0..1.
        theirs: outputs of `model` without the change.
        last_bits: largest change, relative to the largest output of a convolution.
        seed: of the change.

    Returns:
        The largest relative error of RELATIVE.
    """
    generator = torch.Generator(images.device).manual_seed(seed)

    def round_otherwise(conv: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        noise = 2 * torch.rand(result.shape, generator=generator, device=result.device) - 1
        return result + noise * last_bits * result.abs().max()

    hooks = [m.register_forward_hook(round_otherwise) for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    try:
        moved = output_differences(model(images), theirs)
    finally:
        for hook in hooks:
            hook.remove()
    return max(moved.get(name, 0) for name in RELATIVE)


def require_agreement(
    traced: nn.Module, images: torch.Tensor, ours: Any, theirs: Any, engine: str, typing: str, quantized: bool
) -> Agreement:
    """Compare the outputs of a written file with PyTorch's.

    Args:
        traced: the model, in the form of `traceable_copy`.
        images: FP32 [B, 3, H, W] in 0..1.
        ours: outputs of the file.
        theirs: outputs of `traced`.
        engine: that computed `ours`.
        typing: 'FP32' or 'FP16', of what is not INT8.
        quantized: whether the model is.

    Raises:
        QatError: they differ by more than LIMITS, and by more than MARGIN times the rounding noise of the model.
    """
    figures = output_differences(ours, theirs, engine)
    limit, noise = LIMITS['INT8' if quantized else 'float', typing], 0.0
    errors = {name: figures[name] for name in RELATIVE if name in figures}

    def agree() -> bool:
        return all(error <= limit for error in errors.values())

    for seed in range(1, 1 + SAMPLES * quantized):
        noise = max(noise, rounding_noise(traced, images, theirs, LAST_BITS[typing], seed))
        limit = max(limit, MARGIN * noise)
        if agree():
            break
    if not agree():
        raise QatError(
            f'{engine} differs from PyTorch by {", ".join(f"{e:.2%} ({name})" for name, e in errors.items())}, '
            f'more than {limit:.1%}; no file was written'
        )
    return Agreement(noise=noise, limit=limit, **figures)


def metadata_of(model: nn.Module, kept_float: Sequence[str] = (), target: str = DEFAULT_TARGET) -> dict[str, Any]:
    """Return the metadata of an exported file: stride, names of the classes, task, and what is not by default.

    Args:
        model: fused; float or quantized.
        kept_float: paths of blocks that are float by choice.
        target: the engine of a quantized model, a key of TARGETS.
    """
    masks = getattr(head_of(model), 'nm', None)
    return {
        'stride': int(max(model.stride)),
        'names': model.names,
        'task': 'classify' if classifies(model) else 'detect' if masks is None else 'segment',
        **({} if masks is None else {'nm': masks}),
        **({'kept_float': list(kept_float)} if kept_float else {}),
        **({'target': target} if target != DEFAULT_TARGET else {}),
    }


@torch.no_grad()
def export_onnx(
    model: nn.Module,
    path: Path,
    imgsz: Sequence[int] = (640, 640),
    batch: int = 1,
    dynamic: bool = False,
    simplify: bool = False,
    opset: int = 17,
    inplace: bool = False,
    half: bool = False,
    fp32_scales: bool = False,
    kept_float: Sequence[str] = (),
    target: Target = load_target(DEFAULT_TARGET),
    layout: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Exported:
    """Write a model to an ONNX file, and compare ONNX Runtime with PyTorch.

    The graph takes images [B, 3, H, W] and returns output0 [B, 4 + nc, N]. A segmentation model returns output0 [B, 4 +
    nc + nm, N], with mask coefficients behind the scores, and the prototypes output1 [B, nm, H / 4, W / 4]. A classifier
    takes normalized images and returns the logits output0 [B, nc]. All of them are FP32.

    Args:
        model: fused; float or quantized.
        path: of the new file.
        imgsz: height and width, multiples of the stride.
        batch: number of images.
        dynamic: leave the batch axis open.
        simplify: run onnxslim.
        opset: of the graph.
        inplace: see `traceable_copy`.
        half: FP16 outside Q/DQ.
        fp32_scales: with `half`, write scales in FP32. ONNX Runtime (1.31) cannot run these. So the graph with FP16
            scales is compared with PyTorch, and the written graph is made from it.
        kept_float: paths of blocks that are float by choice, for the metadata.
        target: the engine.
        layout: gives the checked graph other inputs and outputs, such as deepstream_layout.
        progress: wraps the steps.

    Returns:
        The facts of the file.

    Raises:
        QatError: ONNX's checker rejects the graph, or ONNX Runtime does not agree with PyTorch. No file is left.
    """
    traced = traceable_copy(model, inplace)
    device = next(traced.parameters()).device
    quantizers = [q for _, q in named_quantizers(traced)]
    # onnxslim would drop Q/DQ of equal nodes, so these are merged first; other nodes that it drops shall get no Q/DQ
    passes = [
        onnx_passes.remove_identities,
        onnx_passes.constants_to_initializers,
        onnx_passes.write_axis,
        onnx_passes.merge_duplicates,
        *[onnx_passes.simplify] * simplify,
        onnx_passes.quantize_moves,
        onnx_passes.merge_duplicates,
        *[onnx_half.to_half] * half,
        target.finish,
    ]
    with atomic(path) as tmp:
        logging.getLogger('torch.onnx').setLevel(logging.ERROR)

        def trace(_: None) -> onnx.ModelProto:
            _trace(traced, torch.zeros(batch, 3, *imgsz, device=device), tmp, opset, dynamic)
            return onnx.load(tmp)

        graph = None
        for step in progress([trace, *passes]):
            graph = step(graph)
        scales = [q.scale.cpu().numpy() for q in quantizers]
        units = [np.float32(UNIT_SCALE)] * any(isinstance(q, SiLUQuantizer) for q in quantizers)
        onnx_passes.check_scales(graph, [*scales, *units])
        images = made_images(2 if dynamic else batch, imgsz)
        images = normalized(images) if classifies(model) else images
        theirs = traced(images.to(device))
        returned = [theirs] if isinstance(theirs, torch.Tensor) else theirs
        onnx_passes.set_output_shapes(graph, *(('batch' if dynamic else batch, *out.shape[1:]) for out in returned))
        onnx_passes.set_metadata(graph, **metadata_of(model, kept_float, target.name if quantizers else DEFAULT_TARGET))
        onnx.checker.check_model(graph, full_check=True)
        onnx.save(graph, tmp)

        agreement = require_agreement(
            traced,
            images.to(device),
            open_file(tmp)(images),
            theirs,
            'ONNX Runtime',
            'FP16' if half else 'FP32',
            bool(quantizers),
        )
        for apply in (*[onnx_half.fp32_scales] * fp32_scales, *([layout] if layout else [])):
            graph = apply(graph)
            onnx.checker.check_model(graph, full_check=True)
            onnx.save(graph, tmp)
    return Exported(opset=onnx_graph.opset(graph), qdq=onnx_graph.count_qdq(graph), **vars(agreement))
