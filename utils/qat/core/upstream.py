"""Types for the networks of upstream and of torchvision, which have none: the attributes that the toolkit reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    """A layer of upstream's; only a head has the last four."""

    i: int  # its index
    f: int | list[int]  # the layers that it reads; -1 = the one before
    nl: int  # number of its maps
    shape: object  # of its last input
    cv2: nn.ModuleList  # branches of the boxes
    cv3: Any  # of the classes, a ModuleList


class Network(nn.Module):
    """A network that a checkpoint has. Only annotations name this class: no network is made of it."""

    model: Any  # its layers, a Sequential that ends with the head; torchvision's networks lack it, and the next three
    save: list[int]  # the layers whose outputs later layers read
    yaml: dict[str, Any]  # its description
    fuse: Callable[[], 'Network']  # method that folds the batch norms
    names: dict[int, str]  # of the classes
    stride: torch.Tensor  # pixels, of each output of the head
    quant: dict[str, Any]  # what yolov9_qat.py knows of it
