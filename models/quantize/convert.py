"""Conversion of a float model to a quantized model and back, in place, with a record of the blocks and the reasons."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from models.common import DFL

from models.quantize.blocks import ACTIVATIONS, TWINS, QuantResidual, Twin
from utils.qat.core.errors import QatError

# Upstream's modules whose operations have all been reviewed: every operation that must be INT8 is INT8, by a twin or by
# the quantized convolutions around it.
REVIEWED = {
    'models.common': {
        'Conv',
        'DWConv',
        'AConv',
        'ADown',
        'RepConvN',
        'DFL',
        'Bottleneck',
        'RepNBottleneck',
        'RepNCSP',
        'SP',
        'SPPELAN',
        'ELAN1',
        'RepNCSPELAN4',
        'CBLinear',
        'CBFuse',
        'Concat',
        'Silence',
        'UConv',
        'Proto',
    },
    'models.yolo': {'DetectionModel', 'SegmentationModel', 'Detect', 'DDetect', 'Segment', 'DSegment'},
}


CHOSEN = 'by choice'  # the reason of a block that could be INT8 and stays in float


@dataclass
class Conversion:
    """The record of `quantize_model`.

    Attributes:
        swapped: path of a block → its float class.
        kept_float: path of a block → its reason to stay in float.
        unknown: path → class of a module that this toolkit does not know. Its convolutions are quantized; its other
            operations are not looked at.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    kept_float: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Say in one line how many blocks of each class are quantized and how many stay in float."""
        kinds = list(self.swapped.values())
        counts = ', '.join(f'{kinds.count(k)} {k}' for k in sorted(set(kinds)))
        return f'{len(kinds)} blocks quantized ({counts}); {len(self.kept_float)} stay float'


def float_convs(model: nn.Module) -> dict[str, str]:
    """Find the convolutions that stay in float.

    The last 1x1 convolutions of the head feed DFL, softmax and sigmoid directly, and DFL's own convolution has the
    integers 0..15 as weights: INT8 gains nothing there and costs precision of the boxes.

    Args:
        model: float, with a YOLOv9 head.

    Returns:
        Path → reason.

    Raises:
        QatError: the last layer is no YOLOv9 head.
    """
    head_index = len(model.model) - 1
    kept = {}
    for name, module in model.model[-1].named_modules(prefix=f'model.{head_index}'):
        if isinstance(module, DFL):
            kept[f'{name}.conv'] = 'integral over the box distribution'
        # A branch of the head is a Sequential (Conv, Conv, nn.Conv2d): the bare last one is an output.
        elif isinstance(module, nn.Sequential) and type(module[-1]) is nn.Conv2d:
            kept[f'{name}.{len(module) - 1}'] = 'output of the head'
    if not kept:
        raise QatError(f'the last layer ({type(model.model[-1]).__name__}) is no YOLOv9 detection head')
    return kept


def unknown_modules(model: nn.Module) -> dict[str, str]:
    """Find modules with a convolution inside that are neither PyTorch's nor REVIEWED: path → class."""
    return {
        path: type(m).__name__
        for path, m in model.named_modules()
        if not type(m).__module__.startswith('torch.')
        and type(m).__name__ not in REVIEWED.get(type(m).__module__, ())
        and any(isinstance(inner, nn.Conv2d) for inner in m.modules())
    }


def twins_of(activations: Collection[str] = ()) -> dict[type, Any]:
    """Return the twins of a target: upstream class → twin. activations: see targets.target.Target."""
    return TWINS | {cls: twin for cls, twin in ACTIVATIONS.items() if cls.__name__ in activations}


def find_twins(model: nn.Module, activations: Collection[str] = ()) -> dict[str, str]:
    """Find the blocks of a fused float model that `quantize_model` swaps.

    Args:
        model: float, fused.
        activations: see targets.target.Target.

    Returns:
        Path → class, in the order of the network.
    """
    kept, twins = float_convs(model), twins_of(activations)
    return {
        path: type(m).__name__
        for path, m in model.named_modules(remove_duplicate=False)  # upstream's blocks share one SiLU
        if type(m) in twins and twins[type(m)].suits(m) and path not in kept
    }


def quantize_model(
    model: nn.Module, add_policy: str = 'both', keep_float: Sequence[str] = (), activations: Collection[str] = ()
) -> Conversion:
    """Swap the blocks of a model for their quantized twins, in place.

    Blocks inside blocks are swapped too: a RepNCSPELAN4 keeps its class, its convolutions and bottlenecks change
    theirs.

    Args:
        model: float, fused.
        add_policy: see blocks.QuantResidual.
        keep_float: paths of blocks (of `find_twins`) that are not swapped.
        activations: see targets.target.Target.

    Returns:
        The record.

    Raises:
        QatError: see `float_convs`.
    """
    done = Conversion(
        kept_float={**float_convs(model), **dict.fromkeys(keep_float, CHOSEN)}, unknown=unknown_modules(model)
    )

    twins = twins_of(activations)

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent.named_children()):
            path = f'{prefix}{name}'
            visit(child, f'{path}.')
            twin = twins.get(type(child))
            if twin and twin.suits(child) and path not in done.kept_float:
                parent._modules[name] = new = twin.from_float(child)
                if isinstance(new, QuantResidual):
                    new.add_policy = add_policy
                done.swapped[path] = twin.float_class.__name__
            elif isinstance(child, (nn.ConvTranspose2d, nn.Conv1d, nn.Linear)):
                done.kept_float[path] = f'no INT8 twin of {type(child).__name__}'

    visit(model, '')
    return done


def dequantize_model(model: nn.Module) -> nn.Module:
    """Undo `quantize_model` in place, and return the model: every twin becomes its upstream block again."""
    for name, child in list(model.named_children()):
        dequantize_model(child)
        if isinstance(child, Twin):
            model._modules[name] = child.to_float()
    return model


def is_quantized(model: nn.Module) -> bool:
    """Tell whether any block of `model` is a quantized twin."""
    return any(isinstance(m, Twin) for m in model.modules())
