"""Export of a model to ONNX: trace, passes, checks. The file appears only if every check passes.

TensorRT 8.6 and 10 take an FP32 graph with Q/DQ, opset 13 to 17; their builder chooses FP16 (--int8 --fp16). TensorRT
11 has no such choice, so the graph itself is typed (`half`): FP16 outside Q/DQ, opset 19 or more, with scales in FP16
or, on request, in FP32 (opset 23); see utils/qat/vendors/tensorrt/half.py.
"""

import inspect
import logging
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from typing_extensions import override

from models.deploy.agreement import Agreement, Reference, metadata_of, traceable_copy
from models.deploy.first_convs import split_first
from models.deploy.formats.format import Export, Format, Written, size_of
from models.quantize.blocks import float_groups, without_groups
from models.quantize.convert import float_inside_blocks
from models.quantize.network import head_of
from models.quantize.quantizers import UNIT_SCALE, SiLUQuantizer, named_quantizers
from utils.qat.config.tables import DEFAULT_TARGET, load_target
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import bar
from utils.qat.core.upstream import Network
from utils.qat.graph import onnx_graph
from utils.qat.graph import passes as onnx_passes
from utils.qat.graph.decoding import boxes_by_matrix
from utils.qat.graph.padding import Padding, pad
from utils.qat.graph.parts import read_whole
from utils.qat.vendors.graphs import graph_of
from utils.qat.vendors.onnxruntime.session import run_graph
from utils.qat.vendors.session import IMAGES, OUTPUTS
from utils.qat.vendors.tensorrt import half as onnx_half
from utils.qat.vendors.tensorrt.sums import split_sums
from utils.qat.vendors.vendor import Target


@dataclass(kw_only=True)
class Exported(Agreement):
    """The facts of a written ONNX file, and how far ONNX Runtime is from PyTorch."""

    opset: int
    qdq: tuple[int, int]  # numbers of Q and of DQ nodes
    padding: Padding | None  # what padded widths added


def _trace(model: Network, images: torch.Tensor, path: Path, opset: int, dynamic: bool, outputs: Sequence[str]) -> None:
    """Write the traced graph with the TorchScript exporter, which supports fake-quantize operators in every opset needed here."""
    export: Callable[..., object] = torch.onnx.export
    if 'dynamo' in inspect.signature(export).parameters:
        export = partial(export, dynamo=False)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*legacy TorchScript-based ONNX export.*')
        warnings.filterwarnings('ignore', category=torch.jit.TracerWarning)  # the head compares shapes, which are fixed
        export(
            model,
            (images,),
            str(path),
            opset_version=opset,
            input_names=[IMAGES],
            output_names=list(outputs),
            do_constant_folding=True,
            dynamic_axes={name: {0: 'batch'} for name in (IMAGES, *outputs)} if dynamic else None,
        )


def input_metadata(batch: int, imgsz: Sequence[int], dynamic: bool) -> dict[str, object]:
    """Return the metadata of an input, as Ultralytics' package reads them; see `export_onnx`."""
    return {'batch': batch, 'channels': 3, 'imgsz': list(imgsz), 'dynamic': dynamic}


def checked(graph: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Check a graph, save it, and return it."""
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, path)
    return graph


@torch.no_grad()
def traced_graph(
    traced: Network,
    images: torch.Tensor,
    path: Path,
    outputs: Sequence[str],
    target: Target,
    dynamic: bool = False,
    simplify: bool = False,
    opset: int = 17,
    half: bool = False,
    int8_weights: bool = True,
    progress: Callable[[Iterable], Iterable] = iter,
) -> onnx.ModelProto:
    """Trace a model, in the form of `traceable_copy`, and make its graph that of its target. path: of a scratch file. Other arguments: see `export_onnx`."""
    # onnxslim would drop the Q/DQ of duplicate nodes, so merge duplicates first; other nodes that it drops must get no Q/DQ
    passes = [
        onnx_passes.remove_identities,
        onnx_passes.constants_to_initializers,
        onnx_passes.write_axis,
        boxes_by_matrix,
        onnx_passes.merge_duplicates,
        *[onnx_passes.simplify] * simplify,
        onnx_passes.quantize_moves,
        onnx_passes.merge_duplicates,
        *[onnx_passes.store_int8_weights] * int8_weights,
        *[partial(split_sums, widths=target.split_sums)] * math.isfinite(target.split_sums),
        *[onnx_half.to_half] * half,
    ]
    logging.getLogger('torch.onnx').setLevel(logging.ERROR)

    def trace(_: onnx.ModelProto) -> onnx.ModelProto:
        _trace(traced, images, path, opset, dynamic, outputs)
        return onnx.load(path)

    graph = onnx.ModelProto()
    for step in progress([trace, *passes]):
        graph = step(graph)
    quantizers = [q for _, q in named_quantizers(traced)]
    units = [np.float32(UNIT_SCALE)] * any(isinstance(q, SiLUQuantizer) for q in quantizers)
    onnx_passes.require_scales(graph, [*(q.scale.cpu().numpy() for q in quantizers), *units])
    return graph_of(target.name).finish(graph)


@torch.no_grad()
def export_onnx(
    model: Network,
    path: Path,
    imgsz: Sequence[int] = (640, 640),
    batch: int = 1,
    dynamic: bool = False,
    simplify: bool = False,
    opset: int = 17,
    inplace: bool = False,
    half: bool = False,
    int8_weights: bool = True,
    kept_float: Sequence[str] = (),
    target: Target = load_target(DEFAULT_TARGET),
    widths: int = 1,
    dense: bool = True,
    layout: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Exported:
    """Write a model to an ONNX file, and compare ONNX Runtime with PyTorch.

    The graph takes images [B, 3, H, W] and returns output0 [B, 4 + nc, N]. A segmentation model returns output0 [B, 4 +
    nc + nm, N], with mask coefficients behind the scores, and the prototypes output1 [B, nm, H / 4, W / 4]. A classifier
    takes normalized images and returns the logits output0 [B, nc]. All of them are FP32.

    model: fused; float or quantized. imgsz: multiples of the stride. dynamic: leave the batch axis open. simplify: run onnxslim.
    half: FP16 outside Q/DQ. int8_weights: store weights with Q/DQ as integers. kept_float: blocks that are float by choice, for
    the metadata. widths: the multiple to which widths are padded, and the most outputs of a convolution of images; 1 changes
    nothing. layout: gives the checked graph the inputs and outputs of a DeepStream parser. dense: write INT8 convolutions with
    groups as dense ones if the target, or TensorRT for `half` and `layout`, takes no groups. progress: wraps the steps.

    Raises:
        QatError: ONNX's checker rejects the graph, or ONNX Runtime does not agree with PyTorch. No file is left.
    """
    for_tensorrt = half or layout is not None  # whatever the checkpoint was quantized for
    if dense and (for_tensorrt or not target.groups):
        model = without_groups(deepcopy(model))
        if half:  # those with a group for each channel are left
            kept_float = [*kept_float, *float_groups(model)]
    traced = traceable_copy(model, inplace)
    if widths > 1:
        split_first(traced, widths)
    device = next(traced.parameters()).device
    quantizers = named_quantizers(traced)
    outputs = OUTPUTS[: 1 + hasattr(head_of(traced), 'nm')]
    with atomic(path) as tmp:
        images = torch.zeros(batch, 3, *imgsz, device=device)
        graph = traced_graph(
            traced, images, tmp, outputs, target, dynamic, simplify, opset, half, int8_weights, progress
        )
        read_whole(graph, widths)
        padding = pad(graph, widths) if widths > 1 else None
        reference = Reference(model, 2 if dynamic else batch, imgsz)
        returned = [reference.outputs] if isinstance(reference.outputs, torch.Tensor) else reference.outputs
        onnx_passes.set_output_shapes(graph, *(('batch' if dynamic else batch, *out.shape[1:]) for out in returned))
        simulated = {'simulated_in': ','.join(target.simulated_in)} if quantizers and target.simulated_in else {}
        made_for = target.name if quantizers else DEFAULT_TARGET
        read = input_metadata(batch, imgsz, dynamic)
        onnx_passes.set_metadata(graph, **metadata_of(model, kept_float, made_for), **simulated, **read)
        checked(graph, tmp)

        computed = run_graph(graph, {IMAGES: reference.images})
        agreement = reference.require_agreement(computed, 'ONNX Runtime', 'FP16' if half else 'FP32')
        if layout:
            graph = checked(layout(graph), tmp)
    return Exported(opset=onnx_graph.opset(graph), qdq=onnx_graph.count_qdq(graph), padding=padding, **vars(agreement))


def write_onnx(
    export: Export, path: Path, half: bool, layout: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None
) -> Exported:
    """Write the ONNX file of a checkpoint by the options of its export; see `export_onnx`."""
    config, model = export.config, export.predict.model
    return export_onnx(
        model,
        path,
        imgsz=config.imgsz,
        batch=config.batch_size,
        dynamic=config.dynamic,
        simplify=config.simplify,
        opset=config.opset,
        inplace=config.inplace,
        half=half,
        int8_weights=config.trt != 8,  # the parser of 8.6 takes integers only from a Q
        kept_float=[*export.kept_float, *(float_inside_blocks(model) if export.int8 else ())],
        # TensorRT alone gains by split sums, and the files for it are those with padded widths
        target=export.target if export.widths > 1 else replace(export.target, split_sums=math.inf),
        widths=export.widths,
        dense=export.reshapes,
        layout=layout,
        progress=lambda steps: bar(steps, 'exporting', unit='steps'),
    )


def typed_half(export: Export) -> bool:
    """Tell whether the graph is FP16 outside of Q/DQ."""
    return export.config.half or (export.config.trt == 11 and export.int8)


def shapes(export: Export) -> list[str]:
    """Return trtexec's smallest, best and largest shape of the images, for a file with an open batch."""
    config = export.config
    if not config.dynamic:
        return []
    batches = (1, config.batch_size, config.batch_size) if config.batch_size > 1 else (1, 8, 16)
    height, width = config.imgsz
    return [f'--{name}Shapes=images:{n}x3x{height}x{width}' for name, n in zip(('min', 'opt', 'max'), batches)]


def build_command(path: Path, export: Export) -> str:
    """Return the trtexec command for a file, with the precisions of its engine."""
    trt, int8, trtexec = export.config.trt, export.int8, shlex.join(['trtexec', f'--onnx={path}', *shapes(export)])
    if export.zero_points:
        return f'{export.target.title}; {export.target.only_here} (--target tensorrt)'
    if trt == 11:
        types = f'{"INT8 and " * int8}{"FP16" if typed_half(export) else "FP32: --half exports FP16"}'
        return f'{trtexec}  (TensorRT 11, and with --stronglyTyped 10; {types})'
    return f'{trtexec} --fp16{" --int8" * int8}  (TensorRT {"8.6" if trt == 8 else 10})'


def lines_of(path: Path, export: Export, more: str = '') -> list[str]:
    """Describe an ONNX file: its outputs, then `more`, and the engine to build from it."""
    outputs = ', '.join(o.name for o in onnx.load(path).graph.output)
    return [f'-> {path}, {size_of(path)}: {outputs}{more}', f'engine: {build_command(path, export)}']


class Onnx(Format):
    """MODEL.onnx, which returns predictions."""

    name = 'onnx'

    @override
    def require(self, export: Export) -> None:
        config = export.config
        if config.half and config.trt != 11:
            raise QatError(
                f'--half: only with --trt 11; TensorRT {config.trt} takes the FP32 file and chooses FP16 '
                'when it builds (trtexec --fp16)'
            )
        for flag, given in (('--half', config.half), ('--trt 11', config.trt == 11)):
            if given:
                export.target.require_tensorrt(flag, export.zero_points)

    @override
    def write(self, export: Export, path: Path) -> Written:
        config, half = export.config, typed_half(export)
        done = write_onnx(export, path, half)
        height, width = config.imgsz
        about = (
            f'{config.weights} ({"INT8" if export.int8 else "float"}{", FP16" * half}), '
            f'images [{"batch" if config.dynamic else config.batch_size}, 3, {height}, {width}], '
            f'opset {done.opset}, Q/DQ nodes {done.qdq[0]}/{done.qdq[1]}\n'
            f'ONNX Runtime against PyTorch: {done}' + (f'\n{done.padding}' if done.padding else '')
        )
        return Written({self.name: path}, lines_of(path, export), about=about)

    @override
    def backend(self, export: Export) -> str | None:
        return export.config.backend


FORMAT = Onnx()
