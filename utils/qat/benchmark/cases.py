"""What a sweep measures: files, backends, precisions and batches in, cases out, and a line for each that is left out.

A combination that cannot be is left out with the reason; it is the user's mistake only if nothing is left to measure.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from utils.qat.backends.session import require_named
from utils.qat.benchmark.case import Case, Load
from utils.qat.benchmark.engine_cache import engine_for
from utils.qat.benchmark.measured_backends import measured_by
from utils.qat.benchmark.model_files import Inputs, Network, fixed_batch, shapes_of
from utils.qat.benchmark.timing import Result, measure
from utils.qat.benchmark.usage import Usage
from utils.qat.config.backends import BACKENDS, ENGINES
from utils.qat.config.engine import BenchmarkConfig
from utils.qat.config.settings import Sides
from utils.qat.core.errors import QatError


def cases_of(
    networks: Sequence[Network], config: BenchmarkConfig, device: torch.device
) -> tuple[list[Case], list[str]]:
    """List the cases of a sweep as `config` says, and the reasons why others are left out.

    Raises:
        QatError: no case is left, or a file is native code whose backend was not named.
    """
    cases: list[Case] = []
    absent: dict[str, bool] = {}  # dicts keep the order, and a reason once
    refused: dict[str, bool] = {}
    for network in networks:
        suffix = network.file.suffix.lower()
        able = (
            [network.backend]
            if network.backend
            else [name for name, line in BACKENDS.items() if suffix in line.measures]
        )
        if not config.backend:
            require_named(network.file, able[0])
        for backend in config.backend or able:
            if backend not in able:
                refused[
                    f'{network.file}: {BACKENDS[backend].title} does not run {suffix}; here it is {" or ".join(BACKENDS[b].title for b in able)}'
                ] = True
            elif why := measured_by(backend).missing(backend, device) or _without_checkpoint(network, backend):
                (refused if config.backend else absent)[why] = True
            else:
                cases += _cases(network, backend, config, device, refused)
    if not cases:
        raise QatError('; '.join(refused or absent))
    return cases, [*absent, *refused]


def _cases(
    network: Network, backend: str, config: BenchmarkConfig, device: torch.device, refused: dict[str, bool]
) -> Iterator[Case]:
    """Yield the cases of one file and backend; add the reasons why others are left out to `refused`."""
    possible = measured_by(backend).precisions(network, device)
    asked = config.precision or possible
    if impossible := [p for p in asked if p not in possible]:
        refused[f'--precision {",".join(impossible)}: {_not_possible(network, backend, impossible, device)}'] = True
    for precision in [p for p in asked if p in possible]:
        for imgsz, batch in product(config.sizes or network.sizes, config.batch or network.batches):
            try:
                inputs = inputs_of(network, backend, batch, imgsz)
            except QatError as e:
                refused[str(e)] = True
            else:
                yield Case(network, backend, precision, imgsz, batch, inputs)


def inputs_of(network: Network, backend: str, batch: int, imgsz: Sides | None) -> Inputs:
    """Return the inputs of a case; a checkpoint takes any batch. imgsz: None = height and width of the file.

    Raises:
        QatError: the file does not take such inputs.
    """
    inputs = network.inputs
    if backend == 'pytorch':
        inputs = {name: (dtype, (None, *shape[1:])) for name, (dtype, shape) in inputs.items()}
    return shapes_of(inputs, batch, imgsz, network.file)


def _without_checkpoint(network: Network, backend: str) -> str:
    """Say why PyTorch has nothing to run for `network`; '' if it has, and for other backends."""
    if backend != 'pytorch' or network.checkpoint:
        return ''
    return f'{network.file}: PyTorch runs the checkpoint that a file was exported from, and {network.unpaired}'


def _not_possible(network: Network, backend: str, impossible: Sequence[str], device: torch.device) -> str:
    """Say why the backend cannot run a file in the precisions `impossible`."""
    if not network.precision:
        return f'{network.file} does not tell its own, for lack of {network.file.name}.json; leave the flag out'
    if network.file.suffix.lower() == '.engine':
        return f'{network.file} was built as {network.types}'
    if network.precision != 'int8' and 'int8' in impossible:
        return f'{network.file} has no Q/DQ, so nothing in it can be INT8; give the export of the quantized checkpoint (qat.py quantize)'
    if network.precision == 'int8':
        return f'{network.file} is INT8; give the float model for {", ".join(p.upper() for p in impossible)}'
    if backend == 'openvino':
        return f'this CPU has no instructions for it; what it has: {", ".join(measured_by(backend).precisions(network, device))}'
    if 'bf16' in impossible:
        return 'BF16 is measured in OpenVINO only; leave it out, or give --backend openvino'
    if backend == 'pytorch':
        return f'PyTorch is measured in FP32 on --device {device}: FP16 is for GPUs'
    return f'{network.file} is {network.types}, and {BACKENDS[backend].title} computes in the types of the file; export_qat.py --trt 11 --half writes FP16'


def file_of(case: Case, config: BenchmarkConfig, device: torch.device, say: Callable[[str], object]) -> Path:
    """Return the file that runs: the case's own, or an engine of it, which is built unless it is there.

    Raises:
        QatError: the engine cannot be built.
    """
    if case.backend not in ENGINES or case.file.suffix.lower() != '.onnx':
        return case.file
    return engine_for(case.network, case.backend, case.precision, case.batch, case.imgsz, config, device, say)


def run_case(
    case: Case,
    config: BenchmarkConfig,
    device: torch.device,
    load: Load,
    usage: Usage,
    say: Callable[[str], object],
) -> Result:
    """Measure a case from nothing: load it, measure it, and give back what it had on the device.

    Raises:
        QatError: the file does not run so.
    """
    network, file = case.network, file_of(case, config, device, say)
    begun = usage.begin()
    try:
        with measured_by(case.backend).of_case(case, file, device, config, load) as measured:
            inputs = shapes_of(measured.accepts, case.batch, case.imgsz, file) if measured.accepts else case.inputs
            measured.prepare(inputs)
            busy = usage.now()
            figures = measure(measured, config.warmup, config.duration)
            return Result(
                model=str(case.file),
                given=str(network.file),
                backend=BACKENDS[case.backend].title,
                types=measured.types,
                precision=case.precision,
                imgsz=next((shape[2:] for _, shape in inputs.values() if len(shape) == 4), None),
                batch=case.batch,
                open_batch=case.backend == 'pytorch' or fixed_batch(measured.accepts or network.inputs) is None,
                images_per_s=figures['qps'] * case.batch,
                **figures,
                size_bytes=measured.size,
                parameters=measured.parameters or network.parameters,
                layers=measured.layers or network.layers,
                streams=measured.streams,
                notes=list(measured.notes),
                usage=usage.since(begun, busy),
            )
    except torch.cuda.OutOfMemoryError as e:
        raise QatError(f'{case}: out of GPU memory; give a smaller --batch or --imgsz') from e
    finally:
        gc.collect()  # before the next one's memory is looked at
        torch.cuda.empty_cache()
