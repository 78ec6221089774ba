"""`look` reads the model, its data and the engine before the work begins, and times one image."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from models.quantize.checkpoint import CheckpointFile
from models.quantize.convert import find_twins
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.export import OPSETS, ExportConfig
from utils.qat.config.ship import EPOCHS, ShipConfig
from utils.qat.config.tables import TARGETS
from utils.qat.core.errors import QatError
from utils.qat.core.files import TREE
from utils.qat.core.log import LOGGER, quiet_upstream
from utils.qat.core.machine import describe, select_device
from utils.qat.data.loaders import Loaders
from utils.qat.vendors.load import measured_by
from utils.qat.vendors.tensorrt.engine.api import load_tensorrt

FEW = 4  # images of a pass that is timed
GUESSES = 'tensorrt', 'openvino', 'onnxruntime'  # the first that runs here


@dataclass(frozen=True)
class Facts:
    """A model, its data and its engine."""

    config: ShipConfig  # with every default resolved
    task: Any
    numbers: dict[str, int]  # of images of 'val', 'calibration' and 'train'
    seconds: float  # that PyTorch takes for an image
    engine_device: str  # --device of the benchmark
    trt: int  # --trt of the installed TensorRT, for its files
    digest: str  # of all files that a result hangs on


def engine_for(wanted: str | None, device: torch.device) -> tuple[str, str]:
    """Choose the engine, and the --device that it runs on. Raises QatError if it does not run here."""
    cpu, reasons = torch.device('cpu'), []
    for name in [wanted] if wanted else GUESSES:
        measured = measured_by(name)
        where = device if device.type in measured.runs_on else cpu
        why = measured.missing(name, where)
        if not why:
            return name, str(where.index if where.type == 'cuda' else where)
        reasons.append(why)
    raise QatError(f'--for {wanted or "(none given)"}: {"; ".join(reasons)}')


def look(config: ShipConfig) -> Facts:
    """Read the model and its data, and time an image. Raises QatError for all that would stop a later step."""
    device = select_device(config.device)
    engine, where = engine_for(config.for_, device)
    with quiet_upstream():
        file = CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device))
    if TARGETS[engine].integers:
        find_twins(model.model, TARGETS[engine])
        if config.batch > 1:
            raise QatError(f'--batch {config.batch}: a file for {TARGETS[engine].title} takes one image; leave it out')
    config = config.for_model(model)
    config = config.decide(for_=engine, epochs=EPOCHS if device.type == 'cuda' else 0)
    data = model.task.load_data(config.data, model, names_from=config.names_from)
    loaders = Loaders(data, config, model.stride, device)
    scored, train = loaders.scored(square=True).dataset, loaders.calibration().loader.dataset
    seconds = _seconds(model, torch.rand(FEW, 3, *config.imgsz, device=device)) / FEW
    numbers = {'val': len(scored), 'calibration': len(train), 'train': len(train.dataset)}
    LOGGER.info(
        f'{config.weights}: {model.task.title}, {model.kind}, {model.nc} classes, {" x ".join(map(str, config.imgsz))} pixels\n'
        f'{config.data}: {numbers["val"]} images of val, {numbers["train"]} of train\n'
        f'{TARGETS[engine].title} on {where}{", which runs here; --for takes another" * ("for_" in config.decided)}, PyTorch '
        f'on {describe(device)}'
    )
    digest = _digest(file.sha256, [scored, train.dataset])
    return Facts(
        config, model.task, numbers, seconds, where, _trt() if engine == 'tensorrt' else ExportConfig.trt, digest
    )


def _trt() -> int:
    """Return the newest version of --trt that the installed TensorRT reads."""
    major = int(load_tensorrt().__version__.split('.')[0])
    return max(version for version in OPSETS if version <= major)


def _seconds(model: TorchModel, images: torch.Tensor) -> float:
    """Time a pass, the fastest of four."""
    taken = []
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            model(images)
            if images.is_cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return min(taken)


def _digest(weights: str, datasets: Iterable[Any]) -> str:
    """Digest the weights, this toolkit, and the names, sizes and times of all images and labels."""
    patched = TREE / '.yolov9-qat.manifest'  # the versions of our files
    found = hashlib.sha256(weights.encode() + (patched.read_bytes() if patched.is_file() else b''))
    for file in (f for d in datasets for f in (*d.im_files, *getattr(d, 'label_files', ()))):
        about = os.stat(file) if os.path.exists(file) else None
        found.update(f'{file} {about and (about.st_size, about.st_mtime_ns)}'.encode(errors='surrogateescape'))
    return found.hexdigest()
