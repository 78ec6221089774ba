"""Plan a sweep: files, backends, precisions and batches in; measurements out, and a line for each that is left out.

An impossible combination is left out with its reason. It is an error only if nothing is left to measure.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from utils.qat.benchmark.model_files import shapes_of
from utils.qat.config.deploy import BenchmarkConfig
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError
from utils.qat.vendors.load import measured_by, require_named
from utils.qat.vendors.measured import Measurement, ModelFile


def measurements_of(
    models: Sequence[ModelFile], config: BenchmarkConfig, device: torch.device
) -> tuple[list[Measurement], list[str]]:
    """List the measurements of a sweep, and the reasons why others are left out.

    Raises:
        QatError: no measurement is left, or a file is native code whose backend was not named.
    """
    measurements: list[Measurement] = []
    absent: dict[str, bool] = {}  # a dict keeps the order, and each reason once
    refused: dict[str, bool] = {}
    for model in models:
        suffix = model.file.suffix.lower()
        able = (
            [model.backend] if model.backend else [name for name, line in BACKENDS.items() if suffix in line.measures]
        )
        if not config.backend:
            require_named(model.file, able[0])
        for backend in config.backend or able:
            if backend not in able:
                refused[
                    f'{model.file}: {BACKENDS[backend].title} does not run {suffix}; here it is {" or ".join(BACKENDS[b].title for b in able)}'
                ] = True
            elif why := measured_by(backend).missing(backend, device) or _without_checkpoint(model, backend):
                (refused if config.backend else absent)[why] = True
            else:
                measurements += _of_backend(model, backend, config, device, refused)
    if not measurements:
        raise QatError('; '.join(refused or absent))
    return measurements, [*absent, *refused]


def _of_backend(
    model: ModelFile, backend: str, config: BenchmarkConfig, device: torch.device, refused: dict[str, bool]
) -> Iterator[Measurement]:
    """Yield the measurements of one file and backend; add the reasons why others are left out to `refused`."""
    possible = measured_by(backend).precisions(model, device)
    asked = config.precision or possible
    if impossible := [p for p in asked if p not in possible]:
        refused[f'--precision {",".join(impossible)}: {_not_possible(model, backend, impossible, device)}'] = True
    accepted = model.inputs
    if backend == 'pytorch':  # a checkpoint takes any batch
        accepted = {name: (dtype, (None, *shape[1:])) for name, (dtype, shape) in accepted.items()}
    for precision in [p for p in asked if p in possible]:
        for imgsz, batch in product(config.sizes or model.sizes, config.batch or model.batches):
            try:
                inputs = shapes_of(accepted, batch, imgsz, model.file)
            except QatError as e:
                refused[str(e)] = True
            else:
                yield Measurement(model, backend, precision, imgsz, batch, inputs)


def _without_checkpoint(model: ModelFile, backend: str) -> str:
    """Return why PyTorch cannot run `model`; '' if it can, and for other backends."""
    if backend != 'pytorch' or model.checkpoint:
        return ''
    return f'{model.file}: PyTorch runs the checkpoint that a file was exported from, and {model.unpaired}'


def _not_possible(model: ModelFile, backend: str, impossible: Sequence[str], device: torch.device) -> str:
    """Return why the backend cannot run a file in the precisions `impossible`."""
    if not model.precision:
        return f'{model.file} does not tell its own, for lack of {model.file.name}.json; leave the flag out'
    if model.file.suffix.lower() == '.engine':
        return f'{model.file} was built as {model.types}'
    if model.precision != 'int8' and 'int8' in impossible:
        return f'{model.file} has no Q/DQ, so nothing in it can be INT8; give the export of the quantized checkpoint (qat.py quantize)'
    if model.precision == 'int8':
        return f'{model.file} is INT8; give the float model for {", ".join(p.upper() for p in impossible)}'
    if backend == 'openvino':
        return f'this CPU has no instructions for it; what it has: {", ".join(measured_by(backend).precisions(model, device))}'
    if 'bf16' in impossible:
        return 'BF16 is measured in OpenVINO only; leave it out, or give --backend openvino'
    if backend == 'pytorch':
        return f'PyTorch is measured in FP32 on --device {device}: FP16 is for GPUs'
    return f'{model.file} is {model.types}, and {BACKENDS[backend].title} computes in the types of the file; export_qat.py --trt 11 --half writes FP16'
