"""Checkpoint → files for edge chips, in the layout `coral` (MODEL-coral.tflite) or `heads` (MODEL-heads.tflite and MODEL-heads.onnx).

Beside them stands MODEL-LAYOUT.json with all that a reader needs: names, shapes, scales and zero points.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.agreement import Reference, metadata_of, traceable_copy
from models.deploy.decomposed import GriddedWeight, on_integers
from models.deploy.formats.format import Export, Written, size_of
from models.deploy.formats.onnx import checked, traced_graph
from models.quantize.blocks import QuantConv2d, without_groups
from models.quantize.quantizers import QMAX, OutputQuantizer, Quantizer, UnitQuantizer, rounded_unit
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic, write_json
from utils.qat.core.upstream import Layer, Network
from utils.qat.graph.passes import set_metadata
from utils.qat.vendors.edge.integers import IntegerTensor, with_integer_ends
from utils.qat.vendors.edge.session import BINS, JOINED, LAYOUTS, STRIDES, Edge, decode
from utils.qat.vendors.litert.write import CPU, LiteRTFormat, PoolsAsConvolutions, append_metadata, write_module
from utils.qat.vendors.load import open_file, open_session
from utils.qat.vendors.vendor import Target

NO_CLASS = -24.0  # bias, the logit of a class that never scores: below all ranges
LIKE_BOXES = 1, 4 * BINS  # numbers of classes with which Frigate takes scores for boxes, or boxes for scores

LAST_OPSET = 17


def add_class(head: Layer) -> None:
    """Add a class that never scores to a quantized head, in place."""
    for *_, conv, _ in head.cv3:
        conv.weight = nn.Parameter(torch.cat((conv.weight, torch.zeros_like(conv.weight[:1]))), requires_grad=False)
        conv.bias = nn.Parameter(torch.cat((conv.bias, conv.bias.new_tensor([NO_CLASS]))), requires_grad=False)
        conv.out_channels, amax = conv.out_channels + 1, conv.weight_quantizer._amax
        conv.weight_quantizer.set_amax(torch.cat((amax, amax.amax()[None])))


class RawHead(nn.Module):
    """A head that returns what its convolutions compute: boxes [B, 64, h, w] and classes [B, nc, h, w] of each stride."""

    def __init__(self, head: Layer, sigmoid: bool) -> None:
        super().__init__()
        self.cv2, self.cv3 = head.cv2, head.cv3
        vars(self).update({name: getattr(head, name) for name in ('i', 'f', 'type')})  # upstream's model reads them
        self.scores = nn.Sequential(nn.Sigmoid(), UnitQuantizer()) if sigmoid else nn.Identity()

    def forward(self, maps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return boxes and classes of each map [B, C, h, w], in the order of LAYOUTS['heads']."""
        return [part for box, cls, x in zip(self.cv2, self.cv3, maps) for part in (box(x), self.scores(cls(x)))]


class EdgeProgram(nn.Module):
    """What a .tflite file computes: images [B, H, W, 3] in 0..1 → the outputs of its layout."""

    def __init__(self, model: Network, joined: bool) -> None:
        super().__init__()
        self.model, self.joined = model, joined

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, in the order of LAYOUTS."""
        # The largest weights: kernels that round a sum twice, first to a unit of it, lose half a step where 4 units are one.
        # The clamp: see OnChannelsLast
        with PoolsAsConvolutions(QMAX):
            maps = [part.permute(0, 2, 3, 1) for part in self.model(images.clamp(0, 1).permute(0, 3, 1, 2))]
        if not self.joined:
            return tuple(maps)
        return tuple(torch.cat([part.flatten(1, 2) for part in parts], 1) for parts in (maps[::2], maps[1::2]))


def for_layout(model: Network, layout: str, per_tensor: bool = False) -> Network:
    """Copy a quantized model, with the weights, the biases and the scales of the outputs that a file of a layout has."""
    model = without_groups(traceable_copy(model))
    for module in model.modules():
        if layout == 'heads' and isinstance(module, OutputQuantizer):
            module.separate()
        if per_tensor and isinstance(module, QuantConv2d):
            amax, module.weight_quantizer = module.weight_quantizer._amax.amax(), Quantizer()
            module.weight_quantizer.set_amax(amax)
        # a bias is an INT32 in steps of a product of two integers
        if isinstance(module, QuantConv2d) and module.bias is not None:
            step = module.input_quantizer.scale * module.weight_quantizer.scale
            module.bias.copy_((module.bias / step).round() * step)
    return model


def raw_model(model: Network, sigmoid: bool = False, spare: bool = False) -> Network:
    """Copy a model with a head that returns what its convolutions compute. spare: with a class more, that never scores."""
    model = traceable_copy(model)
    if spare:
        add_class(model.model[-1])
    model.model[-1] = RawHead(model.model[-1], sigmoid)
    return model.eval()


def within_a_step(
    integers: dict[str, torch.Tensor], wanted: Sequence[torch.Tensor], tensors: dict[str, IntegerTensor]
) -> float:
    """Compute the share of integers that are at most one step from those that PyTorch simulates."""
    near = [
        (values - simulated / tensors[name]['scale'] - tensors[name]['zero_point']).abs() < 1.5
        for (name, values), simulated in zip(integers.items(), wanted)
    ]
    return torch.cat([each.flatten() for each in near]).float().mean().item()


def write_heads(
    raw: Network, file: Path, reference: Reference, target: Target, opset: int, metadata: Mapping[str, object]
) -> None:
    """Write a `raw_model` as an ONNX file with Q/DQ. Raises QatError if its predictions are not those of the reference."""
    names, images = LAYOUTS['heads'], reference.images
    with atomic(file) as tmp:
        graph = traced_graph(raw, images, tmp, names, target, opset=opset)
        checked(set_metadata(graph, **metadata), tmp)
        computed = open_session(tmp, CPU, 'onnxruntime').run({'images': images})
        maps = {name: computed[name].permute(0, 2, 3, 1) for name in names}
        predictions = decode(maps, images.shape[2:], bool(metadata['sigmoid']))
        reference.require_agreement(predictions, 'ONNX Runtime', 'FP32')


class EdgeFormat(LiteRTFormat):
    """MODEL-coral.tflite, or MODEL-heads.tflite and MODEL-heads.onnx; see the head of this file."""

    name = runs_in = 'edge'

    @override
    def paths(self, export: Export, path: Path) -> list[Path]:
        if export.config.layout == 'coral':
            return [path, path.with_suffix('.json')]
        file = path.with_name(path.name.replace('-coral.', '-heads.'))
        return [file, file.with_suffix('.json'), file.with_suffix('.onnx')]

    @override
    def require(self, export: Export) -> None:
        config, model = export.config, export.predict.model
        if config.batch_size > 1:
            raise QatError('--batch-size: not with --include edge, whose files take one image; leave it out')
        if config.sigmoid and config.layout == 'coral':
            raise QatError('--sigmoid: only with --layout heads; programs for coral compute it themselves')
        if config.layout == 'coral' and (opset := config.given(['opset'])):
            raise QatError(f'{opset}: only with --layout heads, which has an ONNX file too; leave it out')
        if config.layout == 'heads' and config.opset > LAST_OPSET:
            raise QatError(f'--opset {config.opset}: compilers for these chips read up to {LAST_OPSET}; leave it out')
        if not export.int8:
            raise QatError(
                f'{config.weights}: is in float; --include edge takes detectors of: python qat.py quantize --target edge'
            )
        if tuple(map(int, model.stride)) != STRIDES:
            raise QatError(
                f'{config.weights}: its strides are {model.stride.tolist()}; programs for these files know {STRIDES}'
            )
        super().require(export)

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        config, names = export.config, LAYOUTS[export.config.layout]
        joined = names == JOINED
        file, beside, *onnx = self.paths(export, path)
        model = for_layout(export.predict.model.cpu(), config.layout, config.per_tensor)
        spare = joined and len(model.names) in LIKE_BOXES
        raw, reference = raw_model(model, config.sigmoid, spare), Reference(model, 1, config.imgsz)
        if config.sigmoid:
            reference.outputs[:, 4:] = rounded_unit(reference.outputs[:, 4:])
        about = metadata_of(model, export.kept_float, export.target.name)
        about |= {'imgsz': list(config.imgsz), 'batch': 1, 'layout': config.layout, 'sigmoid': config.sigmoid}
        about['spare'] = int(spare)
        with atomic(file) as tmp:
            integer = EdgeProgram(on_integers(raw, stored=GriddedWeight), joined)
            write_module(integer, (1, *config.imgsz, 3), tmp, True, '--include edge')
            about['tensors'] = tensors = with_integer_ends(tmp, names)
            metadata = {**about, 'tensors': json.dumps(tensors)}
            append_metadata(tmp, metadata)
            opened = open_file(tmp, CPU, 'edge')
            agreement = reference.require_agreement(opened(reference.images), 'LiteRT', 'FP32')
            simulated = EdgeProgram(raw, joined)(reference.images.permute(0, 2, 3, 1))
            assert isinstance(opened.session, Edge)
            near = within_a_step(opened.session.integers(), simulated, tensors)
        for onnx_file in onnx:
            write_heads(raw, onnx_file, reference, export.target, config.opset, metadata)
        write_json(beside, about)
        lines = [
            f'-> {file}, {size_of(file)}: {", ".join(names)}, images UINT8 of {" x ".join(map(str, config.imgsz))}',
            f'LiteRT against PyTorch: {agreement}; {near:.2%} of the integers within one step',
            *['one class was added that never scores: Frigate tells boxes and scores apart by their last dimension']
            * spare,
        ]
        return Written({self.name: file, **dict(zip(['edge onnx'], onnx)), 'edge json': beside}, lines)


FORMAT = EdgeFormat()
