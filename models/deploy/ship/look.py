"""`look` reads the model, its data and the engine before the work begins, and times one image."""

import hashlib
import os
from dataclasses import fields

import torch

from models.deploy.ship.plan import Plan
from models.quantize.activations import exchangeable
from models.quantize.adapt import expected_loss, most_lost
from models.quantize.run.duration import seconds_per_image
from models.quantize.run.run import Inputs, open_inputs, open_work
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import AUTO, FloatConfig, QuantizeConfig
from utils.qat.config.ship import ShipConfig
from utils.qat.config.tables import TARGETS
from utils.qat.core.errors import QatError
from utils.qat.core.files import TREE
from utils.qat.core.log import LOGGER
from utils.qat.core.machine import describe, select_device
from utils.qat.core.text import pixels
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


def choose_activation(config: ShipConfig, inputs: Inputs, device: str) -> str:
    """Choose the activation function: that of `quantize`, or where it leaves SiLU ReLU, if a GPU and labels teach it for less than --max-drop."""
    chosen, images, task = inputs.config.activation, inputs.images.data, inputs.task
    learnt = config.activation == AUTO and chosen == 'keep' and 'relu' in inputs.config.made_for.gains_by
    teaches = device == 'cuda' and bool(config.epochs) and images.labelled and task.boxes and not task.masks
    affordable = most_lost('relu', len(images.names)) <= config.max_drop
    return 'relu' if learnt and teaches and affordable and exchangeable(inputs.model, 'relu') else chosen


def look(config: ShipConfig) -> Plan:
    """Open all that `quantize` will, and time an image. Raises QatError for all that would stop a later step."""
    device = select_device(config.device)
    engine, where = engine_for(config.for_, device)
    target, guessed = TARGETS[engine], ', which runs here; --for takes another' * (config.for_ is None)
    if target.integers and config.batch > 1:
        raise QatError(f'--batch {config.batch}: a file for {target.title} takes one image; leave it out')
    config = config.decide(for_=engine, epochs=QuantizeConfig.epochs if device.type == 'cuda' else 0)
    asked = {f.name: getattr(config, f.name) for f in fields(FloatConfig)}
    asked |= {'epochs': config.epochs, 'activation': config.activation, 'eval_origin': False, 'eval_ptq': False}
    inputs = open_inputs(QuantizeConfig(**asked, target=engine))
    work = open_work(inputs)
    config = config.decide(imgsz=inputs.config.imgsz, activation=choose_activation(config, inputs, device.type))
    assert work.calibration  # it is a new run
    scored, chosen = inputs.images.scored(square=True).dataset, work.calibration.loader.dataset
    numbers = {'val': len(scored), 'calibration': len(chosen), 'train': len(chosen.dataset)}
    LOGGER.info(
        f'{config.weights}: {inputs.task.title}, {TorchModel(inputs.model).kind}, {len(inputs.images.data.names)} classes, '
        f'{pixels(config.imgsz)}\n{config.data}: {numbers["val"]} images of val, {numbers["train"]} of train\n'
        f'{target.title} on {where}{guessed}, PyTorch on {describe(device)}'
    )
    if config.activation == 'relu' and 'activation' in config.decided:
        steps = QuantizeConfig.activation_epochs * QuantizeConfig.iters
        price = expected_loss('relu', len(inputs.images.data.names), numbers['train'], steps)
        LOGGER.info(f'--activation relu, faster than SiLU: {price}; keep leaves SiLU')
    files = [f for images in (scored, chosen.dataset) for f in (*images.im_files, *getattr(images, 'label_files', ()))]
    seconds, trt = seconds_per_image(inputs.model, config.imgsz, device), reads() if target.engine else 0
    digest = _digest(engine, inputs.sha256, inputs.images.data.names, files)
    reduced = measured_by(engine).overflows()
    return Plan(config, inputs.task, numbers, seconds, where, trt, digest, reduce_range=reduced)


def _digest(engine: str, weights: str, names: dict[int, str], files: list[str]) -> str:
    """Digest the engine, the weights, this toolkit, the names of the classes, and names, sizes and times of all images and labels."""
    patched = TREE / '.yolov9-qat.manifest'  # the versions of our files
    known = [(file, os.path.exists(file) and os.stat(file)[6:9:2]) for file in files]  # size, and time of last change
    content = repr((engine, weights, names, patched.read_text() if patched.is_file() else '', known))
    return hashlib.sha256(content.encode(errors='surrogateescape')).hexdigest()
