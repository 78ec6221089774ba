"""Check and open the inputs of `quantize` and `sensitive`, before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from models.quantize.calibration.ptq import FloatBlocks
from models.quantize.checkpoint import CheckpointFile
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import CalibrationConfig, QuantizeConfig
from utils.qat.config.settings import require_multiples
from utils.qat.config.tasks import Task
from utils.qat.core.distributed import join, rank, world_size
from utils.qat.core.errors import QatError
from utils.qat.core.log import quiet_upstream
from utils.qat.core.machine import select_device
from utils.qat.data.dataset import VARIED, Data, load_hyp
from utils.qat.data.image_folders import ImageFolders
from utils.qat.data.loaders import Images, TrainingImages, calibration_images, training_images, val_loader
from utils.qat.evaluation.detection_scores import require_annotations


@dataclass(frozen=True)
class Inputs:
    """A float model, its data, and the resolved settings."""

    config: Any  # CalibrationConfig
    device: torch.device
    model: nn.Module  # float, fused, on `device`
    sha256: str  # of the file of `model`, hex digits
    task: Task
    stride: int  # the largest of `model`, in pixels
    data: Data | ImageFolders

    @property
    def shard(self) -> tuple[int, int]:
        """The share of this process in the batches: (rank, world)."""
        return rank(), world_size()

    def scored_images(self, split: str = 'val', **how: Any) -> DataLoader:
        """Open images that models are scored on. how: see loaders.val_loader."""
        return val_loader(self.data, self.config, self.stride, split=split, shard=self.shard, **how)

    def calibration_images(self) -> Images:
        """Open the images of the calibration."""
        return calibration_images(self.data, self.config, self.stride, self.device, self.shard)

    def training_images(self, hyp: dict[str, Any] | None, **changes: Any) -> TrainingImages:
        """Open the images of a fine-tuning. changes: of the settings; hyp: see loaders.training_images."""
        config = replace(self.config, **changes)
        return training_images(self.data, config, self.stride, self.device, hyp, self.shard)


@dataclass
class CalibrationInputs:
    """Images and float blocks of a calibration, and images of the adaptation to other activation functions before it."""

    images: Images
    float_blocks: FloatBlocks
    adaptation: TrainingImages | None  # None if no activation function has to be learnt


@dataclass
class RunInputs:
    """The images of a `quantize` run, and its float blocks, which `sensitive` does not need."""

    scored: dict[str, DataLoader]  # 'val', and 'held out' if images are held out
    # None for a resumed run; but one with --activation may have been interrupted before the calibration
    calibration: CalibrationInputs | None
    training: TrainingImages | None  # None without fine-tuning


def with_precision(config: QuantizeConfig, device: torch.device) -> QuantizeConfig:
    """Resolve the defaults of --amp and, on a GPU, of --compile. Raise QatError for --compile and FP16 without CUDA."""
    cuda = device.type == 'cuda'
    config = replace(config, amp=config.precision(device.type))
    if cuda and config.compile is None:
        config = replace(config, compile=not config.task_loss)
    again = 'leave out' if not config.resume else 'start another run without'
    if not cuda and config.compile:
        raise QatError(f'--compile: records a CUDA graph, and the device is {device.type}; {again} --compile')
    if not cuda and config.amp == 'fp16':
        raise QatError(f'--amp fp16: only on a GPU, and the device is {device.type}; {again} --amp, or use bf16')
    return config


def open_inputs(config: CalibrationConfig) -> Inputs:
    """Load the float model and check its data."""
    device = select_device(config.device)
    if isinstance(config, QuantizeConfig):
        config = with_precision(config, device)
    join(device)
    with quiet_upstream():
        file = CheckpointFile(config.weights)
        model = TorchModel(file.load_float(device))
    config.check_model(model)
    if config.exchanges:
        from models.quantize.activations import require_exchange  # here, because few runs need it

        require_exchange(model.model, config)
    config = replace(config, imgsz=config.imgsz or model.task.imgsz)
    require_multiples(config.imgsz, model.stride)
    data = model.task.load_data(config.data, model)
    if model.names == {i: str(i) for i in model.names}:  # the file has no names of classes
        model.model.names = data.names
    if isinstance(config, QuantizeConfig):
        data = replace(data, val_split=config.val_split)
    return Inputs(config, device, model.model, file.sha256, model.task, model.stride, data)


def open_run(inputs: Inputs) -> RunInputs:
    """Open the images of a run of `quantize`, and choose the blocks that stay in float."""
    config = inputs.config
    if config.hyp and not inputs.task.augments:
        raise QatError(f'--hyp {config.hyp}: images of {inputs.task.title} are not augmented, leave it out')
    if config.exchanges:
        from models.quantize.activations import chosen_activations  # here, because few runs need it

        chosen_activations(inputs.model, config)  # --activation-only is refused before anything is written
    calibrates = config.exchanges or not config.resume
    float_blocks = FloatBlocks.of(inputs.model, config, inputs.sha256) if calibrates else None
    hyp = load_hyp(config.hyp) if config.hyp else None
    is_scored = bool(config.epochs or config.eval_origin or config.eval_ptq or config.max_drop is not None)
    scored = {'val': inputs.scored_images(scored=is_scored)}
    if is_scored:
        require_annotations(inputs.data, scored['val'].dataset.im_files)
    if config.val_split:
        scored['held out'] = inputs.scored_images('held out')
    calibration = None
    if float_blocks:
        varied = VARIED if inputs.task.augments and len(set(config.imgsz)) == 1 else None
        adaptation = inputs.training_images(hyp or varied, task_loss=0.0) if config.learns_activations else None
        calibration = CalibrationInputs(inputs.calibration_images(), float_blocks, adaptation)
    training = inputs.training_images(hyp) if config.epochs else None
    return RunInputs(scored, calibration, training)
