"""The interface of a trainer: a program, other than upstream's, that writes checkpoints of YOLOv9.

Only tensors and plain values of such a file are built. The tensors become the weights of upstream's network that has their
names and shapes, a gelan model of models/detect/ in this tree.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import models
from models import yolo
from models.quantize.reparameterize import Weightless, network_layers, tensor_shapes
from utils.qat.core.errors import QatError
from utils.qat.core.upstream import Layer, Network
from utils.qat.untrusted.model_yaml import require_network
from utils.qat.untrusted.names import require_colours
from utils.qat.untrusted.torch_archive import Archive
from utils.qat.untrusted.yaml_file import read_yaml

NETWORKS = 'gelan-?.yaml'


@dataclass
class Weights:
    """The weights in a checkpoint."""

    tensors: Mapping[str, torch.Tensor]  # by their names in upstream's state dict
    names: object = None  # of the classes; None = the file has none
    called: str = ''  # the file's own name of its network


class Trainer(ABC):
    """A training that writes checkpoints."""

    title: str  # in messages
    head: str  # class of upstream's head that has its weights

    @abstractmethod
    def wrote(self, archive: Archive) -> bool:
        """Tell whether a file is of this trainer, by its names and keys."""

    @abstractmethod
    def weights(self, archive: Archive) -> Weights:
        """Read the weights of a file of this trainer. Raises Refused if it has no detector, or is damaged."""

    def fit_head(self, head: Layer, tensors: Mapping[str, torch.Tensor]) -> None:
        """Change the parts of upstream's head that this trainer builds otherwise, in place.

        tensors: of the head, by their names in its state dict.
        """

    def model(self, archive: Archive, source: str) -> Network:
        """Build upstream's network with the weights of a file, in FP32. source: the option and the file, for messages.

        Raises Refused as `weights` does, or QatError if the tree has no network of these weights.
        """
        weights = self.weights(archive)
        require_colours(next((w.shape[1] for w in weights.tensors.values() if w.dim() == 4), 3), source)
        model = yolo.DetectionModel(self._network(weights, source))
        self.fit_head(model.model[-1], _tensors_of(model.model[-1], weights.tensors))
        yolo.initialize_weights(model)  # settings of the batch norms
        model.load_state_dict(weights.tensors)
        model.nc = model.yaml['nc']  # upstream's train.py sets it, val.py reads it
        if weights.names is not None:
            model.names = weights.names
        return model

    def _network(self, weights: Weights, source: str) -> dict[str, object]:
        """Find the network of this tree that has such weights: the content of its YAML, with this trainer's head."""
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        files = sorted(Path(next(iter(models.__path__)), 'detect').glob(NETWORKS))
        for file in files:
            content = read_yaml(file, 'upstream')
            require_network(content, f'upstream {file}')
            *body, (inputs, *_) = content['head']
            last = f'model.{len(content["backbone"]) + len(body)}.cv3.0.2.weight'
            if last not in shapes:
                continue
            content |= {'nc': shapes[last][0], 'head': [*body, [inputs, 1, self.head, ['nc']]]}
            layers, _ = network_layers(content, str(file))
            with Weightless():
                self.fit_head(layers[-1], _tensors_of(layers[-1], weights.tensors))
            if tensor_shapes(layers) == shapes:
                return content
        called = f'its network{weights.called and f", {weights.called},"}'
        if not files:
            raise QatError(
                f'{source}: by {self.title}, and {called} is not built, because this YOLOv9 tree has no models/detect/{NETWORKS}; '
                'use a full clone of WongKinYiu/yolov9'
            )
        raise QatError(
            f'{source}: by {self.title}, and {called} is another than YOLOv9 {", ".join(f.stem[-1] for f in files)}'
        )


def _tensors_of(layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Choose the tensors of one layer, by their names in it."""
    prefix = f'model.{layer.i}.'
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
