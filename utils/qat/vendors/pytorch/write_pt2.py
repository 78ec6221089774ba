"""Model → exported program of torch.export (.pt2): traced, saved, loaded, compared with PyTorch, and renamed into place.

A quantized model becomes a graph with PyTorch's quantize and dequantize operators and INT8 weights (decomposed.py), a float model a
float graph. Inputs, outputs and metadata are those of the ONNX file.
"""

import json
from pathlib import Path

import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.agreement import Reference, metadata_of
from models.deploy.decomposed import on_integers
from models.deploy.formats.format import Export, Format, Written
from models.quantize.network import head_of
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import atomic
from utils.qat.core.upstream import Network
from utils.qat.vendors.load import open_file
from utils.qat.vendors.pytorch.pt2 import require_pt2

LOADED = 'a program that loads it imports torch.ao.quantization.fx._decomposed first, which has its operators'


class AnyBatch:
    """Value of `head.shape` that equals every shape: anchors from images of the traced size fit every batch."""

    def __ne__(self, other: object) -> bool:
        return False


class Deployed(nn.Module):
    """A model as it is deployed: images in FP32, outputs in FP32, and between them the type of its weights."""

    def __init__(self, model: Network, half: bool) -> None:
        super().__init__()
        # otherwise the head compares the batch with the last one, and the trace holds for this batch alone
        vars(head_of(model))['shape'] = AnyBatch()
        self.model, self.dtype = model.half() if half else model, torch.float16 if half else torch.float32

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Predict for images FP32 [B, 3, H, W]: output0, and of a segmentation model output1; see onnx.export_onnx."""
        result = self.model(images.to(self.dtype))
        return tuple(part.float() for part in (result if isinstance(result, (tuple, list)) else (result,)))


def trace(
    model: Network, images: torch.Tensor, half: bool = False, dynamic: bool = False
) -> torch.export.ExportedProgram:
    """Trace a model in the form of `traceable_copy`, which has run on such images. It is changed.

    `images` are FP32 [B, 3, H, W], two or more with `dynamic`, which leaves the batch axis open. half: FP16 between images and outputs.
    """
    batch = torch.export.Dim('batch', min=1, max=4096) if dynamic else None
    program = torch.export.export(
        Deployed(model, half).eval(),
        (images,),
        dynamic_shapes={'images': {0: batch}} if dynamic else None,
        strict=False,
    )
    for node in program.graph.nodes:  # their metadata names source files of this machine
        for key in ('stack_trace', 'nn_module_stack', 'source_fn_stack', 'torch_fn', 'custom'):
            node.meta.pop(key, None)
    return program


def package_metadata(export: Export, images: torch.Tensor, **more: object) -> dict[str, str]:
    """Return the metadata of a .pt2 file, as texts: the ONNX file's (see `metadata_of`), how to run the file, and `more`.

    images: FP32 [B, 3, H, W], of the size that the file takes.
    """
    config, (height, width) = export.config, images.shape[2:]
    own = {
        'imgsz': f'{height},{width}',
        'batch': 'dynamic' if config.dynamic else len(images),
        'precision': 'INT8 and FP32' if export.int8 else 'FP16' if config.half else 'FP32',
        'torch': torch.__version__,
        'input': 'images',
        'input_dtype': 'float32',
    }
    metadata = {**metadata_of(export.predict.model, export.kept_float, export.target.name), **own, **more}
    return {key: str(value) for key, value in metadata.items()}


def reference_of(export: Export) -> Reference:
    """Make the reference of a file, whose images are for the trace too: two with --dynamic, where the batch axis will be open."""
    config = export.config
    return Reference(export.predict.model, 2 if config.dynamic else config.batch_size, config.imgsz)


class Pt2Format(Format):
    """MODEL.pt2, an exported program."""

    name = runs_in = 'pt2'

    @override
    def require(self, export: Export) -> None:
        require_pt2(f'--include {self.name}')
        if export.config.half and export.int8:
            raise QatError(
                f'--half: not with --include {self.name} and an INT8 checkpoint, whose float parts are FP32 there; leave it out'
            )

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        config = export.config
        reference = reference_of(export)
        images = reference.images
        with reporting('torch.export cannot trace the model', torch._dynamo.exc.UserError):
            program = trace(on_integers(reference.traced), images, config.half, config.dynamic)
        with atomic(path) as tmp:
            metadata = json.dumps(package_metadata(export, images))
            torch.export.save(program, tmp, extra_files={'metadata.json': metadata})
            computed, typing = open_file(tmp, images.device, 'pt2')(images), 'FP16' if config.half else 'FP32'
            agreement = reference.require_agreement(computed, 'torch.export', typing)
        return self.report(export, path, 'exported program', agreement, *[LOADED] * export.int8)


FORMAT = Pt2Format()
