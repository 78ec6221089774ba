"""Open the inputs of `quantize` and `sensitive`, before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn

from models.quantize.checkpoint import CheckpointFile
from models.quantize.plan import resolve
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import CalibrationConfig, QuantizeConfig
from utils.qat.config.tasks import Task
from utils.qat.core.distributed import join, rank, world_size
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import select_device
from utils.qat.data.dataset import is_numbered
from utils.qat.data.loaders import Loaders


@dataclass
class Inputs:
    """A float model, its data, and the resolved settings."""

    config: Any  # CalibrationConfig
    device: torch.device
    model: nn.Module  # float, fused, on `device`
    sha256: str  # of the file of `model`, hex digits
    task: Task
    images: Loaders


def open_inputs(config: CalibrationConfig) -> Inputs:
    """Load the float model and check its data."""
    device = select_device(config.device)
    join(device)
    with quiet_upstream():
        file = CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device))
    config = config.for_model(model)
    data = model.task.load_data(config.data, model, names_from=config.names_from)
    if config.names_from == 'data' or is_numbered(model.names):
        model.model.names = data.names
    config = resolve(config, model.model, device.type, data)
    if isinstance(config, QuantizeConfig):
        data = replace(data, val_split=config.val_split)
    images = Loaders(data, config, model.stride, device, (rank(), world_size()))
    return Inputs(config, device, model.model, file.sha256, model.task, images)
