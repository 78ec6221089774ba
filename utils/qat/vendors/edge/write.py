"""Checkpoint → files for edge chips, in the layout `coral` (MODEL-coral.tflite) or `heads` (MODEL-heads.tflite and MODEL-heads.onnx).

Beside them stands MODEL-LAYOUT.json with all that a reader needs: names, shapes, scales and zero points.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.agreement import Reference, metadata_of, traceable_copy
from models.deploy.decomposed import GriddedWeight, RoundedActivation, on_integers
from models.deploy.formats.format import Export, Format, Written, size_of
from models.deploy.formats.onnx import export_onnx
from models.quantize.blocks import QuantConv2d
from models.quantize.quantizers import QMIN, UNIT_SCALE, rounded_unit
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic, write_json
from utils.qat.vendors.edge.graph import raw_heads
from utils.qat.vendors.edge.integers import tensors_of, with_integer_ends
from utils.qat.vendors.edge.session import BINS, LAYOUTS, STRIDES, Edge
from utils.qat.vendors.litert.session import METADATA, load_litert
from utils.qat.vendors.litert.write import CPU, PoolsAsConvolutions, load_converter, write_module
from utils.qat.vendors.load import open_file

NO_CLASS = -24.0  # bias, the logit of a class that never scores: below all ranges
LIKE_BOXES = 1, 4 * BINS  # numbers of classes with which Frigate takes scores for boxes, or boxes for scores

LAST_OPSET = 17


def without_groups(model: nn.Module) -> nn.Module:
    """Write convolutions with groups as convolutions whose weights for other groups are 0, in place, and return the model.

    The compilers for these chips do not take groups. Those with a group for each channel stay, they are a kind of their own.
    """
    for conv in model.modules():
        if isinstance(conv, QuantConv2d) and 1 < conv.groups < conv.in_channels:
            outputs, inputs = (n // conv.groups for n in (conv.out_channels, conv.in_channels))
            weight = conv.weight.new_zeros(conv.out_channels, conv.in_channels, *conv.kernel_size)
            for i in range(conv.groups):
                rows = slice(i * outputs, (i + 1) * outputs)
                weight[rows, i * inputs : (i + 1) * inputs] = conv.weight[rows]
            conv.weight, conv.groups = nn.Parameter(weight, requires_grad=False), 1
    return model


def add_class(head: nn.Module) -> None:
    """Add a class that never scores to a quantized head, in place."""
    for *_, conv, _ in head.cv3:
        conv.weight = nn.Parameter(torch.cat((conv.weight, torch.zeros_like(conv.weight[:1]))), requires_grad=False)
        conv.bias = nn.Parameter(torch.cat((conv.bias, conv.bias.new_tensor([NO_CLASS]))), requires_grad=False)
        conv.out_channels, amax = conv.out_channels + 1, conv.weight_quantizer._amax
        conv.weight_quantizer.set_amax(torch.cat((amax, amax.amax()[None])))


class RawHead(nn.Module):
    """A head that returns what its convolutions compute: boxes [B, 64, h, w] and classes [B, nc, h, w] of each stride."""

    def __init__(self, head: nn.Module, sigmoid: bool) -> None:
        super().__init__()
        self.cv2, self.cv3 = head.cv2, head.cv3
        self.i, self.f, self.type = head.i, head.f, head.type  # upstream's model reads them
        self.sigmoid = RoundedActivation(UNIT_SCALE, QMIN, False) if sigmoid else None

    def forward(self, maps: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (boxes, classes) of each map [B, C, h, w]."""
        found = [(box(x), classes(x)) for box, classes, x in zip(self.cv2, self.cv3, maps)]
        return [(box, self.sigmoid(scores.sigmoid())) for box, scores in found] if self.sigmoid else found


class EdgeProgram(nn.Module):
    """What a .tflite file computes: images [B, H, W, 3] in 0..1 → the outputs of its layout."""

    def __init__(self, model: nn.Module, joined: bool) -> None:
        super().__init__()
        self.model, self.joined = model, joined

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, in the order of LAYOUTS."""
        with PoolsAsConvolutions():  # the clamp: see OnChannelsLast
            found = self.model(images.clamp(0, 1).permute(0, 3, 1, 2))
        maps = [[part.permute(0, 2, 3, 1) for part in pair] for pair in found]
        if not self.joined:
            return tuple(part for pair in maps for part in pair)
        return tuple(torch.cat([part.flatten(1, 2) for part in parts], 1) for parts in zip(*maps))


def edge_program(model: nn.Module, layout: str, sigmoid: bool = False, spare: bool = False) -> EdgeProgram:
    """Make the program of a layout from a quantized model; it rounds as the file does."""
    model = without_groups(traceable_copy(model))
    if spare:
        add_class(model.model[-1])
    model.model[-1] = RawHead(model.model[-1], sigmoid)
    return EdgeProgram(model, layout == 'coral').eval()


def within_a_step(found: dict[str, torch.Tensor], wanted: Sequence[torch.Tensor], tensors: dict[str, Any]) -> float:
    """Compute the share of integers that are at most one step from those that PyTorch simulates."""
    near = [
        (values - simulated / tensors[name]['scale'] - tensors[name]['zero_point']).abs() < 1.5
        for (name, values), simulated in zip(found.items(), wanted)
    ]
    return torch.cat([each.flatten() for each in near]).float().mean().item()


class EdgeFormat(Format):
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
        config, weights, task = export.config, export.config.weights, export.predict.task
        for flag, given in (
            ('--dynamic', config.dynamic),
            ('--half', config.half),
            ('--batch-size', config.batch_size > 1),
        ):
            if given:
                raise QatError(f'{flag}: not with --include edge, whose files take one image of one size; leave it out')
        if config.sigmoid and config.layout == 'coral':
            raise QatError('--sigmoid: only with --layout heads; programs for coral compute it themselves')
        if config.layout == 'heads' and config.opset > LAST_OPSET:
            raise QatError(f'--opset {config.opset}: compilers for these chips read up to {LAST_OPSET}; leave it out')
        if not (export.int8 and export.target.integers):
            raise QatError(
                f'{weights}: is {task.title} {"quantized for " + export.target.title if export.int8 else "in float"}; --include edge takes '
                'detectors of: python qat.py quantize --target edge'
            )
        if tuple(map(int, export.predict.model.stride)) != STRIDES:
            raise QatError(
                f'{weights}: its strides are {export.predict.model.stride.tolist()}; programs for these files know {STRIDES}'
            )
        load_litert('--include edge')
        load_converter('--include edge')

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        config, model = export.config, export.predict.model.cpu()
        file, beside, *onnx = self.paths(export, path)
        spare = config.layout == 'coral' and len(model.names) in LIKE_BOXES
        program = edge_program(model, config.layout, config.sigmoid, spare)
        reference = Reference(model, 1, config.imgsz)
        if config.sigmoid:
            reference.outputs[:, 4:] = rounded_unit(reference.outputs[:, 4:])
        about = metadata_of(model, export.kept_float, export.target.name)
        about |= {
            'imgsz': list(config.imgsz),
            'batch': 1,
            'layout': config.layout,
            'sigmoid': config.sigmoid,
            'spare': int(spare),
        }
        with atomic(file) as tmp:
            integer = EdgeProgram(on_integers(program.model, stored=GriddedWeight), program.joined)
            write_module(integer, (1, *config.imgsz, 3), tmp, True, '--include edge')
            with_integer_ends(tmp, LAYOUTS[config.layout])
            about['tensors'] = tensors_of(tmp)
            with zipfile.ZipFile(tmp, 'a') as archive:
                metadata = {key: json.dumps(value) if key == 'tensors' else str(value) for key, value in about.items()}
                archive.writestr(METADATA, json.dumps(metadata))
            opened = open_file(tmp, CPU, 'edge')
            agreement = reference.require_agreement(opened(reference.images), 'LiteRT', 'FP32')
            assert isinstance(opened.session, Edge)
            near = within_a_step(
                opened.session.integers(), program(reference.images.permute(0, 2, 3, 1)), about['tensors']
            )
        for onnx_file in onnx:
            export_onnx(
                without_groups(deepcopy(model)),
                onnx_file,
                config.imgsz,
                opset=config.opset,
                kept_float=export.kept_float,
                target=export.target,
                layout=partial(raw_heads, tensors=about['tensors'], sigmoid=config.sigmoid),
            )
        write_json(beside, about)
        lines = [
            f'-> {file}, {size_of(file)}: {", ".join(LAYOUTS[config.layout])}, images UINT8 of {" x ".join(map(str, config.imgsz))}',
            f'LiteRT against PyTorch: {agreement}; {near:.2%} of the integers within one step',
            *['one class was added that never scores: Frigate tells boxes and scores apart by their last dimension']
            * spare,
        ]
        return Written({self.name: file, **dict(zip(['edge onnx'], onnx)), 'edge json': beside}, lines)


FORMAT = EdgeFormat()
