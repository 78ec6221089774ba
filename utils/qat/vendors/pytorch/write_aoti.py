"""Model → package of AOTInductor (.pt2): compiled code for the CPU or GPU at hand, which a C++ program runs without Python.

On a CPU a quantized model computes in INT8. Three things are needed for that: unsigned activations, weights stored as integers
(decomposed.py), and `freezing`, which folds them into oneDNN's convolutions and linear layers; torchao has the patterns for that. If one of them is
missing, everything runs in FP32 without a warning, so this module counts the INT8 layers in the compiled code. Inductor has no
INT8 convolution for GPUs.

The compiler writes to a temporary folder, which is removed when the process ends.
"""

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn as nn
from typing_extensions import override

from models.deploy.decomposed import StoredWeight, on_integers
from models.deploy.formats.format import Export, Written
from models.quantize.calibration.calibrate import weights_of
from utils.qat.backends.file_model import FileModel
from utils.qat.config.export import ExportConfig
from utils.qat.core.command import run_apart
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.files import atomic
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import instruction_flags, int8_sums_overflow
from utils.qat.core.upstream import Network
from utils.qat.vendors.pytorch.aoti import AotPackage, compiled_layers
from utils.qat.vendors.pytorch.write_pt2 import Pt2Format, package_metadata, reference_of, trace

CACHE = 'TORCHINDUCTOR_CACHE_DIR'
PATTERNS = 'torchao.quantization.pt2e.quantizer.x86_inductor_quantizer'  # its import registers the patterns


@cache
def _scratch() -> TemporaryDirectory:
    """Make the compiler's temporary folder, one per process, because the compiler keeps paths in it."""
    return TemporaryDirectory(prefix='yolov9-qat-inductor-')


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Let the compiler write to a temporary folder, unless the user's environment names another, and run nothing of the current folder.

    It tries the CPU's instructions in processes of Python, which look for modules there, unless PYTHONSAFEPATH (Python 3.11) says not to.
    """
    own = {CACHE: os.environ.get(CACHE) or _scratch().name, 'PYTHONSAFEPATH': '1'}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def sums_fit(model: Network) -> bool:
    """Tell whether no sum of two products with weights of INT8 leaves 16 bits, as with --reduce-range: 255 * (64 + 64) < 2^15."""
    stored = (StoredWeight(quantizer, weight).int8 for quantizer, weight in weights_of(model) if quantizer.rounds)
    return all(int(weight.short().abs().max()) <= 64 for weight in stored)


def require_compiler(device: torch.device, quantized: bool, half: bool, fits: bool = False) -> None:
    """Raise QatError if a package of such a model cannot be compiled here. half: FP16 between images and outputs. fits: see `sums_fit`."""
    for name in ('torch.utils._pytree', 'torch.utils.cpp_extension'):  # torchao and the compiler start with messages
        logging.getLogger(name).setLevel(logging.ERROR)
    if device.type not in ('cpu', 'cuda'):
        raise QatError(f'--include aoti: for --device cpu or a GPU of NVIDIA, and this is --device {device}')
    if half and device.type == 'cpu':
        raise QatError('--half: with --include aoti for GPUs only; leave it out, or give --device 0')
    if quantized and device.type == 'cuda':
        raise QatError(
            '--include aoti: AOTInductor has no INT8 convolutions for GPUs; give the float checkpoint (and --half), --device cpu, or '
            'build a TensorRT engine'
        )
    if quantized and not fits and int8_sums_overflow():
        raise QatError(
            '--include aoti: sums of two INT8 products overflow 16 bits in AOTInductor here, because this CPU has no VNNI; quantize '
            'with --reduce-range, export on a CPU that has it, or write a file for ONNX Runtime (--include onnx)'
        )
    if not any(shutil.which(name) for name in (os.environ.get('CXX', ''), 'g++', 'clang++') if name):
        raise QatError('--include aoti: no C++ compiler, which AOTInductor needs (apt install g++; or set CXX)')
    if quantized:
        problem = '--include aoti: INT8 needs torchao, which cannot be loaded here'
        # an extension of torchao for another PyTorch raises whatever it met
        with reporting(problem, Exception, remedy='pip install torchao', most=100):
            importlib.import_module(PATTERNS)


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


def _int8_layers(integers: nn.Module) -> tuple[str, int]:
    """Count the layers of a model of `on_integers` that are to run in INT8: a text about them, and their number."""
    wanted = sum(isinstance(m, StoredWeight) for m in integers.modules())
    convs, linear = (sum(isinstance(m, kind) for m in integers.modules()) for kind in (nn.Conv2d, nn.Linear))
    layers = f'{convs + linear} convolutions{" and linear layers" * bool(linear)}'
    return f'INT8: {wanted} of {layers} ({convs + linear - wanted} float by design)', wanted


def _compile(model: Network, images: torch.Tensor, config: ExportConfig, metadata: dict[str, str], path: Path) -> None:
    """Compile a model of `on_integers` to a package. Raises QatError if the compiler refuses it."""
    problem, errors = (
        '--include aoti: AOTInductor cannot compile the model',
        (RuntimeError, torch._dynamo.exc.UserError),
    )
    with _own_environment(), reporting(problem, *errors, most=300):
        torch._inductor.aoti_compile_and_package(
            trace(model, images, config.half, config.dynamic),
            package_path=str(path),
            inductor_configs={'freezing': True, 'aot_inductor.metadata': metadata},
        )


class AotiFormat(Pt2Format):
    """MODEL-aoti.pt2, a package of AOTInductor."""

    name = runs_in = 'aoti'

    @override
    def require(self, export: Export) -> None:
        super().require(export)
        fits = export.int8 and sums_fit(export.predict.model)
        require_compiler(export.predict.device, export.int8, export.config.half, fits)

    @override
    @torch.no_grad()
    def write(self, export: Export, path: Path) -> Written:
        LOGGER.info('compiling with AOTInductor: half a minute to some minutes')
        config, device = export.config, export.predict.device
        reference = reference_of(export)
        images, integers = reference.images, on_integers(reference.traced, unsigned=True)
        int8, wanted = _int8_layers(integers) if export.int8 else ('', 0)
        kind = (
            {'gpu': '.'.join(map(str, torch.cuda.get_device_capability(device)))}
            if device.type == 'cuda'
            else {'cpu': ' '.join(instruction_flags())}
        )
        metadata = package_metadata(export, images, device=device.type, **kind, **({'int8': int8} if int8 else {}))
        with atomic(path) as tmp:
            _compile(integers, images, config, metadata, tmp)
            made, _ = compiled_layers(tmp)
            if made != wanted:
                raise QatError(
                    f'--include aoti: {wanted - made} of {wanted} quantized layers are in float in the compiled code, which is no '
                    'INT8 package; no file was written'
                )
            _require_loading(tmp, device)
            computed, typing = FileModel(AotPackage(tmp, device))(images), 'FP16' if config.half else 'FP32'
            agreement = reference.require_agreement(computed, 'AOTInductor', typing)
        written = self.report(export, path, f'AOTInductor package for {device.type}', agreement, *[int8] * bool(int8))
        written.warnings = [
            f'{path}: native code for this kind of machine and this PyTorch, which runs when it is loaded; each command '
            'that shall load it takes --backend aoti'
        ]
        return written


FORMAT = AotiFormat()
