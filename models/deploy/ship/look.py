"""`look` reads the model, its data and the engine before the work begins, and times one image."""

from __future__ import annotations

import hashlib
import os

import torch

from models.deploy.ship.plan import Plan
from models.quantize.checkpoint import CheckpointFile
from models.quantize.convert import find_twins
from models.quantize.run.duration import seconds_per_image
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.ship import EPOCHS, ShipConfig
from utils.qat.config.tables import TARGETS
from utils.qat.core.errors import QatError
from utils.qat.core.files import TREE
from utils.qat.core.log import LOGGER, quiet_upstream
from utils.qat.core.machine import describe, select_device
from utils.qat.core.text import pixels
from utils.qat.data.loaders import Loaders
from utils.qat.vendors.load import measured_by
from utils.qat.vendors.tensorrt.engine.api import reads

GUESSES = 'tensorrt', 'openvino', 'onnxruntime'  # the first that runs here


def engine_for(wanted: str | None, device: torch.device) -> tuple[str, str]:
    """Choose the engine, and the --device that it runs on. Raises QatError if it does not run here."""
    reasons = []
    for name in [wanted] if wanted else GUESSES:
        measured = measured_by(name)
        where = device if device.type in measured.runs_on else torch.device('cpu')
        why = measured.missing(name, where)
        if not why:
            return name, str(where.index if where.type == 'cuda' else where)
        reasons.append(why)
    raise QatError(f'--for {wanted or "(none given)"}: {"; ".join(reasons)}')


def look(config: ShipConfig) -> Plan:
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
    config = config.for_model(model).decide(for_=engine, epochs=EPOCHS if device.type == 'cuda' else 0)
    data = model.task.load_data(config.data, model, names_from=config.names_from)
    loaders = Loaders(data, config, model.stride, device)
    scored, chosen = loaders.scored(square=True).dataset, loaders.calibration().loader.dataset
    numbers = {'val': len(scored), 'calibration': len(chosen), 'train': len(chosen.dataset)}
    guessed = ', which runs here; --for takes another' * ('for_' in config.decided)
    LOGGER.info(
        f'{config.weights}: {model.task.title}, {model.kind}, {model.nc} classes, {pixels(config.imgsz)}\n'
        f'{config.data}: {numbers["val"]} images of val, {numbers["train"]} of train\n'
        f'{TARGETS[engine].title} on {where}{guessed}, PyTorch on {describe(device)}'
    )
    seconds = seconds_per_image(model.model, config.imgsz, device)
    files = [f for images in (scored, chosen.dataset) for f in (*images.im_files, *getattr(images, 'label_files', ()))]
    trt = reads() if TARGETS[engine].engine else 0
    return Plan(config, model.task, numbers, seconds, where, trt, _digest(file.sha256, files))


def _digest(weights: str, files: list[str]) -> str:
    """Digest the weights, this toolkit, and the names, sizes and times of all images and labels."""
    patched = TREE / '.yolov9-qat.manifest'  # the versions of our files
    known = [
        (file, os.path.exists(file) and os.stat(file)[6:9:2]) for file in files
    ]  # size, and time of the last change
    content = repr((weights, patched.read_text() if patched.is_file() else '', known))
    return hashlib.sha256(content.encode(errors='surrogateescape')).hexdigest()
