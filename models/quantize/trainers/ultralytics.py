"""The Python package `ultralytics`: a checkpoint is the pickled model, in FP16, whose keys are upstream's.

The package is not needed. Its licence and that of its weights is AGPL-3.0 (docs/licences.md).
"""

from collections.abc import Mapping

import torch
from models.common import Conv, DWConv
from torch import nn
from typing_extensions import override

from models.quantize.trainers.trainer import Trainer, Weights
from utils.qat.core.text import visible
from utils.qat.core.upstream import Layer
from utils.qat.untrusted.plain_values import Values
from utils.qat.untrusted.torch_archive import Archive, Call, Refused

DETECTOR = 'ultralytics.nn.tasks.DetectionModel'
SEGMENTER = 'ultralytics.nn.tasks.SegmentationModel'


class ModuleTensors(Values):
    """A builder of plain values and of the tensors of modules of any class, by their names in the state dict. No module is built."""

    @override
    def other(self, record: Call) -> dict[str, torch.Tensor]:
        if not record.new or type(record.state) is not dict:
            return super().other(record)
        parameters, buffers, modules = (self._parts(record, part) for part in ('_parameters', '_buffers', '_modules'))
        tensors = {**parameters, **buffers}
        for name, inner in modules.items():
            if type(inner) is not dict:
                raise Refused('it has a module whose parts are damaged')
            tensors |= {f'{name}.{key}': tensor for key, tensor in inner.items()}
        whole = {name: part for name, part in tensors.items() if type(name) is str and isinstance(part, torch.Tensor)}
        if len(whole) < len(tensors):
            raise Refused('it has a module whose parts are damaged')
        return whole

    def _parts(self, record: Call, kind: str) -> dict[str, object]:
        """Build the parts of a kind that a module has; None stands for a part that it lacks."""
        parts = self.value(record.state.get(kind))
        if not isinstance(parts, dict):
            raise Refused('it has a module whose parts are damaged')
        return {name: part for name, part in parts.items() if part is not None}


class Ultralytics(Trainer):
    """Ultralytics' package."""

    title = 'Ultralytics'
    head = 'Detect'

    @override
    def wrote(self, archive: Archive) -> bool:
        return any(name.startswith('ultralytics.') for name in archive.names)

    @override
    def weights(self, archive: Archive) -> Weights:
        content = archive.content if type(archive.content) is dict else {}
        model = content.get('ema') or content.get('model')
        if type(model) is not Call or type(model.state) is not dict:
            raise Refused('made by Ultralytics, and holds no model (neither "ema" nor "model")')
        kind = model.function.text
        if kind == SEGMENTER:
            raise Refused(
                'a segmentation model of Ultralytics, whose prototypes come from another layer (Proto has a transposed convolution) '
                'than upstream has; train a segmentation model with segment/train_dual.py of WongKinYiu/yolov9'
            )
        if kind != DETECTOR:
            raise Refused(
                f'made by Ultralytics, a {visible(kind.rpartition(".")[2][:60])}; only its YOLOv9 detectors can be read'
            )
        values = ModuleTensors(archive.members)
        network = values.value(model.state.get('yaml'))
        called = network.get('yaml_file') if isinstance(network, dict) else None
        return Weights(
            values.value(model),
            values.value(model.state.get('names')),
            visible(called[:60]) if type(called) is str else '',
        )

    @override
    def fit_head(self, head: Layer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Build the class branch, whose width depends on the number of classes otherwise than upstream's.

        Some versions build it of 3x3 convolutions, some of depthwise and 1x1 ones.
        """
        depthwise = 'cv3.0.0.0.conv.weight' in tensors
        last = tensors['cv3.0.2.weight']
        classes, width = last.shape[:2]

        def block(channels: int) -> nn.Module:
            if depthwise:
                return nn.Sequential(DWConv(channels, channels, 3), Conv(channels, width, 1))
            return Conv(channels, width, 3)

        head.cv3 = nn.ModuleList(
            nn.Sequential(block(branch[0].conv.in_channels), block(width), nn.Conv2d(width, classes, 1))
            for branch in head.cv3
        )


TRAINER = Ultralytics()
