"""Open the inputs of `quantize` and `sensitive`, before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from models.quantize.activations import chosen_activations, with_activation
from models.quantize.calibration.ptq import FloatBlocks
from models.quantize.checkpoint import CheckpointFile
from models.quantize.network import require_known_head
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import CalibrationConfig, QuantizeConfig
from utils.qat.config.tasks import Task
from utils.qat.core.distributed import join, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import LOGGER, quiet_upstream
from utils.qat.core.machine import select_device
from utils.qat.data.dataset import MILD, VARIED, is_numbered, load_hyp
from utils.qat.data.loaders import Images, Loaders, TrainingImages
from utils.qat.evaluation.detection_scores import require_annotations


@dataclass(frozen=True)
class Inputs:
    """A float model, its data, and the resolved settings."""

    config: Any  # CalibrationConfig
    device: torch.device
    model: nn.Module  # float, fused, on `device`
    sha256: str  # of the file of `model`, hex digits
    task: Task
    images: Loaders


@dataclass
class CalibrationInputs:
    """Images and float blocks of a calibration, and images of the adaptation to other activation functions before it."""

    images: Images
    float_blocks: FloatBlocks
    adaptation: TrainingImages | None  # None if no activation function has to be learnt


@dataclass
class RunInputs:
    """The images of a `quantize` run, and its float blocks, which `sensitive` does not need."""

    numbers: dict[str, int]  # of images of 'val', 'held out' and 'train'
    scored: dict[str, DataLoader]  # 'val', and 'held out' if images are held out
    # None for a resumed run; but one with --activation may have been interrupted before the calibration
    calibration: CalibrationInputs | None
    training: TrainingImages | None  # None without fine-tuning


def open_inputs(config: CalibrationConfig) -> Inputs:
    """Load the float model and check its data."""
    device = select_device(config.device)
    if isinstance(config, QuantizeConfig):
        config = config.on(device.type)
    join(device)
    with quiet_upstream():
        file = CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device))
    config = with_activation(model.model, config.for_model(model))
    data = model.task.load_data(config.data, model, names_from=config.names_from)
    if config.names_from == 'data' or is_numbered(model.names):
        model.model.names = data.names
    if isinstance(config, QuantizeConfig):
        data = replace(data, val_split=config.val_split)
        needed = config.epochs or config.max_drop is not None or config.exchanges
        if not needed and (config.eval_origin or config.eval_ptq) and not data.labelled:
            LOGGER.warning(f'{data.flag} {data.file}: no image has a label, so nothing is scored')
            config = replace(config, eval_origin=False, eval_ptq=False)
    images = Loaders(data, config, model.stride, device, (rank(), world_size()))
    return Inputs(config, device, model.model, file.sha256, model.task, images)


def open_run(inputs: Inputs) -> RunInputs:
    """Open the images of a run of `quantize`, and choose the blocks that stay in float."""
    config, images = inputs.config, inputs.images
    if config.hyp and not inputs.task.augments:
        raise QatError(f'--hyp {config.hyp}: images of {inputs.task.title} are not augmented, leave it out')
    if config.epochs and config.label_weight:
        require_known_head(inputs.model, f'--task-loss {config.label_weight}', 'give --task-loss 0')
    if config.exchanges:
        chosen_activations(inputs.model, config)  # --activation-only is refused before anything is written
    calibrates = config.exchanges or not config.resume
    float_blocks = FloatBlocks.of(inputs.model, config, inputs.sha256) if calibrates else None
    hyp = load_hyp(config.hyp) if config.hyp else None
    is_scored = bool(config.epochs or config.eval_origin or config.eval_ptq or config.max_drop is not None)
    scored = {'val': images.scored(need_labels=is_scored)}
    if is_scored:
        require_annotations(images.data, scored['val'].dataset.im_files)
    if config.val_split:
        scored['held out'] = images.scored(split='held out')
    augments = config.learns_activations and inputs.task.augments and len(set(config.imgsz)) == 1
    varied, mild = (VARIED, MILD) if augments else (None, None)
    calibration = None
    if float_blocks:
        adaptation = images.training(hyp or varied) if config.learns_activations else None
        calibration = CalibrationInputs(images.calibration(), float_blocks, adaptation)
    training = images.training(hyp or mild, labels=config.label_weight > 0) if config.epochs else None
    if training and config.learns_activations:
        training.fill(config.iters)
    loaders = dict(scored)
    learnt = training or (calibration and calibration.adaptation)
    if learnt:
        loaders['train'] = learnt.loader
    return RunInputs({name: len(loader.dataset) for name, loader in loaders.items()}, scored, calibration, training)
