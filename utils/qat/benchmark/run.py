"""A Measurement → its Result: open the file, time it, close it."""

import gc

import torch

from utils.qat.benchmark.engine_cache import file_to_run
from utils.qat.benchmark.measured_backends import measured_by
from utils.qat.benchmark.measurement import Conditions, Measurement
from utils.qat.benchmark.model_files import fixed_batch, shapes_of
from utils.qat.benchmark.timing import Result, measure
from utils.qat.benchmark.usage import Usage
from utils.qat.config.tables import BACKENDS
from utils.qat.core.errors import QatError


def run(measurement: Measurement, conditions: Conditions, usage: Usage) -> Result:
    """Load the file, measure it, and free its memory on the device.

    Raises:
        QatError: the file does not run under these conditions.
    """
    model, config, batch = measurement.model, conditions.config, measurement.batch
    file = file_to_run(measurement, conditions)
    begun = usage.begin()
    try:
        with measured_by(measurement.backend)(measurement, file, conditions) as measured:
            accepts = measured.accepts
            inputs = shapes_of(accepts, batch, measurement.imgsz, file) if accepts else measurement.inputs
            measured.prepare(inputs)
            busy = usage.now()
            figures = measure(measured, config.warmup, config.duration)
            return Result(
                model=str(measurement.file),
                given=str(model.file),
                backend=BACKENDS[measurement.backend].title,
                types=measured.types,
                precision=measurement.precision,
                imgsz=next((shape[2:] for _, shape in inputs.values() if len(shape) == 4), None),
                batch=batch,
                open_batch=measurement.backend == 'pytorch' or fixed_batch(accepts or model.inputs) is None,
                images_per_s=figures['qps'] * batch,
                **figures,
                size_bytes=measured.size,
                parameters=measured.parameters or model.parameters,
                layers=measured.layers or model.layers,
                streams=measured.streams,
                notes=list(measured.notes),
                usage=usage.since(begun, busy),
            )
    except torch.cuda.OutOfMemoryError as e:
        raise QatError(f'{measurement}: out of GPU memory; give a smaller --batch or --imgsz') from e
    finally:
        gc.collect()  # before the memory of the next one is measured
        torch.cuda.empty_cache()
