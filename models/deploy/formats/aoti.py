"""Model → package of AOTInductor (.pt2): compiled code for the CPU or GPU at hand, which a C++ program runs without Python.

On a CPU a quantized model computes in INT8. Three things are needed for that: unsigned activations, weights stored as integers
(decomposed.py), and `freezing`, which folds them into oneDNN's convolutions and linear layers; torchao has the patterns for that. If one of them is
missing, everything runs in FP32 without a warning, so this module counts the INT8 layers in the compiled code. Inductor has no
INT8 convolution for GPUs.

The compiler writes to a temporary folder, which is removed when the process ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.agreement import Agreement, require_agreement
from models.deploy.decomposed import StoredWeight, on_integers
from models.deploy.formats.format import Export, Written
from models.deploy.formats.pt2 import Pt2Format, package_metadata, trace, with_example
from models.quantize.quantizers import named_quantizers
from utils.qat.backends.aoti import AotPackage, compiled_layers
from utils.qat.backends.file_model import FileModel
from utils.qat.backends.pt2 import require_pt2
from utils.qat.config.tables import DEFAULT_TARGET
from utils.qat.core.command import run_apart
from utils.qat.core.errors import QatError
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import instruction_flags

CACHE = 'TORCHINDUCTOR_CACHE_DIR'
PATTERNS = 'torchao.quantization.pt2e.quantizer.x86_inductor_quantizer'  # its import registers the patterns


@cache
def _scratch() -> TemporaryDirectory:
    """Make the compiler's temporary folder, one per process, because the compiler keeps paths in it."""
    return TemporaryDirectory(prefix='yolov9-qat-inductor-')


def _silence() -> None:
    """Silence the start-up messages of torchao and the compiler."""
    for name in ('torch.utils._pytree', 'torch.utils.cpp_extension'):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Let the compiler write to a temporary folder, unless the user's environment names another."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = before or _scratch().name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CACHE, None)


def require_compiler(device: torch.device, quantized: bool, half: bool) -> None:
    """Raise QatError if a package of such a model cannot be compiled here. half: FP16 between images and outputs."""
    require_pt2('--include aoti')
    _silence()
    if device.type not in ('cpu', 'cuda'):
        raise QatError(f'--include aoti: for --device cpu or a GPU of NVIDIA, and this is --device {device}')
    if half and device.type == 'cpu':
        raise QatError('--half: with --include aoti for GPUs only; leave it out, or give --device 0')
    if quantized and device.type == 'cuda':
        raise QatError(
            '--include aoti: AOTInductor has no INT8 convolutions for GPUs; give the float checkpoint (and --half), --device cpu, or '
            'build a TensorRT engine'
        )
    if not any(shutil.which(name) for name in (os.environ.get('CXX', ''), 'g++', 'clang++') if name):
        raise QatError('--include aoti: no C++ compiler, which AOTInductor needs (apt install g++; or set CXX)')
    if quantized:
        try:
            importlib.import_module(PATTERNS)
        except Exception as e:  # an extension of torchao for another PyTorch raises whatever it met
            raise QatError(
                f'--include aoti: INT8 needs torchao, which cannot be loaded here ({str(e)[:100]}); pip install torchao'
            ) from e


def _require_loading(package: Path, device: torch.device) -> None:
    """Load a new package in a subprocess; raise QatError if it crashes, as code of a compiler with its own C++ library may."""
    load = 'import torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", True, 1, int(sys.argv[2]))'
    index = (device.index or 0) if device.type == 'cuda' else -1
    ended = run_apart(load, package, index)
    if ended.returncode < 0:
        raise QatError(
            f'--include aoti: the compiled code crashes when it is loaded (signal {-ended.returncode}), so no file was written; the C++ '
            f'compiler {os.environ.get("CXX") or "g++"} does not fit this PyTorch: set CXX to the one of the system, such as CXX=/usr/bin/g++'
        )


@torch.no_grad()
def export_aoti(
    model: nn.Module,
    path: Path,
    imgsz: Sequence[int] = (640, 640),
    batch: int = 1,
    dynamic: bool = False,
    half: bool = False,
    kept_float: Sequence[str] = (),
    target: str = DEFAULT_TARGET,
) -> tuple[Agreement, str]:
    """Compile a model to a package for the device that it is on.

    half: FP16 between images and outputs; of a float model on a GPU only. The other arguments are those of onnx.export_onnx.

    Returns:
        The agreement with PyTorch, and a text with the number of INT8 layers ('' for a float model).

    Raises:
        QatError: it cannot be compiled here, a quantized layer is not in INT8, or the package cannot be loaded or does not agree
            with PyTorch. No file is left.
    """
    quantized, device = bool(named_quantizers(model)), next(model.parameters()).device
    require_compiler(device, quantized, half)
    traced, images, theirs = with_example(model, imgsz, batch, dynamic)
    integers = on_integers(traced, unsigned=True)
    wanted = sum(isinstance(m, StoredWeight) for m in integers.modules())
    convs, linear = (sum(isinstance(m, kind) for m in integers.modules()) for kind in (nn.Conv2d, nn.Linear))
    layers = f'{convs + linear} convolutions{" and linear layers" * bool(linear)}'
    said = f'INT8: {wanted} of {layers} ({convs + linear - wanted} float by design)' if quantized else ''
    kind = (
        {'gpu': '.'.join(map(str, torch.cuda.get_device_capability(device)))}
        if device.type == 'cuda'
        else {'cpu': ' '.join(instruction_flags())}
    )
    metadata = package_metadata(
        model,
        quantized,
        half,
        dynamic,
        images,
        kept_float,
        target,
        device=device.type,
        **kind,
        **({'int8': said} if said else {}),
    )
    with atomic(path) as tmp, _own_cache():
        try:
            torch._inductor.aoti_compile_and_package(
                trace(integers, images, half, dynamic),
                package_path=str(tmp),
                inductor_configs={'freezing': True, 'aot_inductor.metadata': metadata},
            )
        except (RuntimeError, torch._dynamo.exc.UserError) as e:
            raise QatError(
                f'--include aoti: AOTInductor cannot compile the model: {" ".join(str(e).split())[:300]}'
            ) from e
        made, _ = compiled_layers(tmp)
        if made != wanted:
            raise QatError(
                f'--include aoti: {wanted - made} of {wanted} quantized layers are in float in the compiled code, which is no '
                'INT8 package; no file was written'
            )
        _require_loading(tmp, device)
        ours = FileModel(AotPackage(tmp, device))(images)
        return (
            require_agreement(traced, images, ours, theirs, 'AOTInductor', 'FP16' if half else 'FP32', quantized),
            said,
        )


class AotiFormat(Pt2Format):
    """MODEL-aoti.pt2, a package of AOTInductor."""

    name = 'aoti'

    @override
    def require_model(self, export: Export) -> None:
        super().require_model(export)
        require_compiler(export.predict.device, export.int8, export.config.half)

    @override
    def write(self, export: Export, path: Path) -> Written:
        LOGGER.info('compiling with AOTInductor: half a minute to some minutes')
        agreement, int8 = export_aoti(export.predict.model, path, **self.options(export))
        kind = f'AOTInductor package for {export.predict.device.type}'
        written = self.report(export, path, kind, agreement, *[int8] * bool(int8))
        written.warnings = [
            f'{path}: native code for this kind of machine and this PyTorch, which runs when it is loaded; each command '
            'that shall load it takes --backend aoti'
        ]
        return written


FORMAT = AotiFormat()
