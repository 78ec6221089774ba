"""Reparameterization: convert a dual-branch model to a single-branch model with the same main outputs.

YOLOv9 trains with an auxiliary branch that inference does not need: layers on which the main inputs of the head do not
depend. These layers are dropped, the others are renumbered, and the main branch of the Dual head becomes a single head.
Nothing depends on the model's size, so custom widths and numbers of classes work too.

The result is checked against a network of its YAML, on the device `meta`, without memory for its weights: a YAML of a few
lines can ask for layers of terabytes. So its parameters must match a checkpoint's before it is built with memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from models.common import AConv, Conv, RepConvN, Silence
from models.yolo import parse_model
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from models import yolo
from utils.qat.core.errors import QatError, reporting
from utils.qat.core.log import LOGGER
from utils.qat.core.upstream import Layer, Network
from utils.qat.untrusted.model_yaml import require_network

LAYERS = 8000  # modules at all depths, at most; upstream's largest model has 1800
WEIGHTS = 10**9  # values, at most; upstream's largest model has 70 million
SIDE = 256  # pixels; upstream runs a new model on such an image
VALUES = 2**26  # in all maps of this image, at most
# Dual head → its single twin, and submodules of the main branch → their new names. Upstream computes the first half of
# a Dual head's inputs with cv2/cv3 (auxiliary) and the second half with cv4/cv5/dfl2 (main). A Triple head (yolov9-cf)
# has two auxiliary branches; val_triple.py evaluates the last third, with cv6/cv7/dfl3.
HEADS = {
    'TripleDetect': ('Detect', {'cv6': 'cv2', 'cv7': 'cv3', 'dfl3': 'dfl'}),
    'TripleDDetect': ('DDetect', {'cv6': 'cv2', 'cv7': 'cv3', 'dfl3': 'dfl'}),
    'DualDetect': ('Detect', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl'}),
    'DualDDetect': ('DDetect', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl'}),
    'DualDSegment': ('DSegment', {'cv4': 'cv2', 'cv5': 'cv3', 'dfl2': 'dfl', 'cv7': 'cv4', 'proto2': 'proto'}),
}
OTHER = "is not that of its model; use a checkpoint of upstream's training"
DIFFERENCE = 1e-3  # of the outputs before and after, at most; it is 0 but for the order of sums


class Weightless(TorchFunctionMode):
    """Context in which tensors for weights take no memory; the few numbers that layers compute still do."""

    made = torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        return func(*args, **{**(kwargs or {}), **({'device': 'meta'} if func in self.made else {})})


def network_layers(content: Any, source: str, weights: bool = False) -> tuple[Any, list[int]]:
    """Build the layers of a YAML, with memory for their weights only if told, and list those that later layers read.

    Raises QatError if `source` does not describe a network by numbers alone (see require_network), its layers do not fit together,
    or there are too many of them or of their weights.
    """
    require_network(content, source)
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > LAYERS:
            raise QatError(f'{source}: has more than {LAYERS} layers')

    activations = {kind: kind.default_act for kind in (Conv, RepConvN)}  # parse_model sets the YAML's activation there
    try:
        for kind, activation in activations.items():
            kind.default_act = deepcopy(activation)
        hook = register_module_module_registration_hook(counted)  # which ends with the block
        with hook, _building(source), nullcontext() if weights else Weightless():
            layers, read = parse_model(deepcopy(content), ch=[content.get('ch') or 3])
    finally:
        for kind, activation in activations.items():
            kind.default_act = activation
    if sum(p.numel() for p in layers.parameters()) > WEIGHTS:
        raise QatError(f'{source}: has more than {WEIGHTS / 1e6:.0f} million weights')
    return layers, read


def _building(source: str) -> AbstractContextManager[None]:
    """Turn an error of upstream's layers into a QatError: those that do not fit together raise errors of any kind."""
    return reporting(f'{source}: upstream cannot build it', Exception)


def tensor_shapes(layers: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's parameters and buffers by their names in its state dict."""
    return {f'model.{name}': tuple(tensor.shape) for name, tensor in layers.state_dict().items()}


def parameter_shapes(content: object, source: str) -> dict[str, tuple[int, ...]]:
    """Compute `tensor_shapes` the network of a YAML. Raises QatError as `network_layers` does."""
    return tensor_shapes(network_layers(content, source)[0])


@torch.no_grad()
def require_small_maps(content: Any, source: str) -> None:
    """Check that a network whose weights fit into memory can run on one image, before upstream runs it.

    Raises QatError as `network_layers` does, or if the outputs of its layers are too large.
    """
    layers, read = network_layers(content, source, weights=True)
    x: Any = torch.zeros(0, content.get('ch') or 3, SIDE, SIDE)  # a batch of none has shapes and no values
    values = 0
    maps: list[object] = []  # outputs of the layers so far; None for an output that no later layer reads
    with _building(source):
        for layer in layers.eval()[:-1]:
            if layer.f != -1:
                x = maps[layer.f] if isinstance(layer.f, int) else [x if f == -1 else maps[f] for f in layer.f]
            x = layer(x)
            values += sum(math.prod(t.shape[1:]) for t in (x if isinstance(x, (list, tuple)) else [x]))
            if values > VALUES:
                raise QatError(
                    f'{source}: needs maps of more than {VALUES / 1e6:.0f} million values for an image of {SIDE} x {SIDE} pixels'
                )
            maps.append(x if layer.i in read else None)


def _sources(layer: Layer) -> list[int]:
    """List the indices of the layers that `layer` reads; -1 is the image."""
    froms = [layer.f] if isinstance(layer.f, int) else layer.f
    return [layer.i - 1 if f == -1 else f for f in froms]


def _main_inputs(head: Layer) -> list[int]:
    """List the layers that the main branch of such a head reads: the last `nl` maps, and the last prototype map."""
    f = head.f if isinstance(head.f, list) else [head.f]
    if type(head).__name__ == 'DualDSegment':
        return f[:-2][-head.nl :] + f[-1:]
    return f[-head.nl :]


def _reached(model: Network, inputs: Sequence[int]) -> list[int]:
    """List the indices of the layers that the layers `inputs` need, in order."""
    needed: set[int] = set()
    waiting = list(inputs)
    while waiting:
        i = waiting.pop()
        if i >= 0 and i not in needed:
            needed.add(i)
            waiting += _sources(model.model[i])
    kept = sorted(needed)
    # A leading Silence names the image for layers further down. If only the next layer reads it, it is not needed.
    readers = [i for i in kept if 0 in _sources(model.model[i])]
    if kept and kept[0] == 0 and isinstance(model.model[0], Silence) and readers == [1]:
        kept = kept[1:]
    return kept


def _single_yaml(model: Network, kept: Sequence[int], inputs: Sequence[int], head: str) -> dict[str, object]:
    """Write the YAML of the single model: the layers `kept`, renumbered, and `head` on the layers `inputs`."""
    rows = model.yaml['backbone'] + model.yaml['head']
    new_index = {-1: -1, **{old: new for new, old in enumerate(kept)}}

    def renumber(old: int, reader: int) -> int:  # an index as the YAML has it: -1 is the layer before
        new = new_index.get(old, -1)  # a dropped Silence is the image, which is "before" the first layer
        return -1 if new == reader - 1 else new

    layers = []
    for i, old in enumerate(kept):
        f = [renumber(s, i) for s in _sources(model.model[old])]
        layers.append([f[0] if isinstance(model.model[old].f, int) else f, *deepcopy(rows[old][1:])])
    layers.append([[new_index[i] for i in inputs], 1, head, deepcopy(rows[-1][3])])
    in_backbone = sum(old < len(model.yaml['backbone']) for old in kept)
    return {**deepcopy(model.yaml), 'backbone': layers[:in_backbone], 'head': layers[in_backbone:]}


def reparameterize(model: Network) -> Network:
    """Make a single-branch model that computes the main outputs of `model`, which is on the CPU and becomes FP32.

    The new model is in FP32, in eval mode. Raises QatError if the head has no auxiliary branch, or no single twin in this upstream tree; if the YAML in the checkpoint does
    not fit. Layers are taken as they are, pruned or fused too: `main_branch` compares their outputs.
    """
    old_head = model.model[-1]
    if type(old_head).__name__ not in HEADS:
        raise QatError(
            f'the head is {type(old_head).__name__}: only {", ".join(HEADS)} have an auxiliary branch to remove'
        )
    head, renames = HEADS[type(old_head).__name__]
    if not hasattr(yolo, head):
        raise QatError(f'this upstream tree has no {head}; use a full clone of WongKinYiu/yolov9')
    source = 'the YAML inside the checkpoint'
    content: Any = getattr(model, 'yaml', None)
    require_network(content, source)
    if not isinstance(model, yolo.DetectionModel) or len(content['backbone'] + content['head']) != len(model.model):
        raise QatError(f'{source}: {OTHER}')
    inputs = _main_inputs(old_head)
    kept = _reached(model, inputs)

    content = _single_yaml(model, kept, inputs, head)
    described, read = network_layers(content, source)
    new_head = described[-1]
    parts = {new: getattr(old_head, old) for old, new in renames.items()}
    layers, parts = deepcopy(([model.float().model[i] for i in kept], parts))  # at once: they share activations
    for layer, of_yaml in zip(layers, described):
        if type(layer) is not type(of_yaml):
            raise QatError(f'{source}: layer {layer.i}, {type(of_yaml).__name__} or {type(layer).__name__}, {OTHER}')
    for renumbered, of_yaml in zip(layers, described):
        renumbered.i, renumbered.f = of_yaml.i, of_yaml.f
    wanted = tensor_shapes(described)
    for name in ('nc', 'reg_max', 'no', 'nm', 'npr'):
        if hasattr(old_head, name):
            setattr(new_head, name, getattr(old_head, name))
    for name, part in parts.items():
        setattr(new_head, name, part)
    new_head.stride, new_head.inplace = old_head.stride.clone(), old_head.inplace
    whole = nn.Sequential(*layers, new_head)
    shapes = tensor_shapes(whole)
    wrong = sorted(set(wanted) ^ set(shapes)) or [k for k in wanted if wanted[k] != shapes[k]]
    if wrong:
        fused = '.conv.weight', '.conv.bias'
        surplus = sorted(k for k in set(shapes) - set(wanted) if not k.endswith(fused))
        if surplus:
            raise QatError(
                f'{len(surplus)} tensors are no part of {source}, the first is {surplus[0]}: the model was changed after it was built; take that '
                'back (pruning masks: torch.nn.utils.prune.remove), and save it again'
            )
        LOGGER.info(
            f'{len(wrong)} tensors are not as {source} has them, the first is {wrong[0]}: pruned, or fused before it was saved. They are '
            'taken as they are in the file'
        )
    single = deepcopy(model, {id(model.model): whole})  # all else is the model's
    single.yaml, single.save = content, read
    vars(single).pop('yaml_file', None)  # of the network with two branches
    return single.eval()


def main_branch(model: Network, source: str) -> tuple[Network, float]:
    """Reparameterize a model, and check the result. source: of the model, for messages.

    Returns the new model, rounded to FP16, as checkpoints are, and in FP32 again; and the `largest_difference` before the
    rounding. Raises QatError as `reparameterize` does, or if the outputs differ.
    """
    single = reparameterize(model)
    difference = largest_difference(model, single)
    if difference > DIFFERENCE:
        raise QatError(
            f'{source}: the converted model differs from the main branch by {difference:.2g}; please report it'
        )
    return single.half().float(), difference


@torch.no_grad()
def fold_pools(model: Network) -> int:
    """Let the convolution of each AConv compute the average pooling before it, in place: 3 x 3 becomes 4 x 4. Returns their number.

    Outputs at the border of a map change, because the pooling has no padding. The YAML of the model changes with it.
    """
    rows = model.yaml['backbone'] + model.yaml['head']
    folded = [layer for layer in model.model if type(layer) is AConv]
    for layer in folded:
        block, old = layer.cv1, layer.cv1.conv
        block.conv = nn.Conv2d(old.in_channels, old.out_channels, 4, 2, 1, bias=old.bias is not None).to(old.weight)
        each, mean = old.weight.flatten(0, 1)[:, None], old.weight.new_full((1, 1, 2, 2), 0.25)
        block.conv.weight.copy_(F.conv2d(each, mean, padding=1).view_as(block.conv.weight))
        if old.bias is not None:
            block.conv.bias.copy_(old.bias)
        block.i, block.f, block.type = layer.i, layer.f, 'models.common.Conv'
        block.np = sum(p.numel() for p in block.parameters())
        model.model[layer.i] = block
        rows[layer.i][2:] = 'Conv', [rows[layer.i][3][0], 4, 2, 1]
    return len(folded)


@torch.no_grad()
def largest_difference(dual: Network, single: Network) -> float:
    """Compute the largest absolute difference between the main outputs of `dual` and those of `single`, on noise of 64 x 64 pixels."""
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    converted, original = (m.eval()(image)[0] for m in (single, dual))
    return (converted - (original[-1] if isinstance(original, (list, tuple)) else original)).abs().max().item()
