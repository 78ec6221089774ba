"""Convert a float model to a quantized model, in place, and record which blocks stay in float and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.nn as nn
from models.common import DFL, CBFuse
from torchvision.models.convnext import CNBlock, ConvNeXt
from torchvision.ops.misc import SqueezeExcitation

from models.quantize.blocks import (
    ACTIVATIONS,
    TWINS,
    QuantConv2d,
    QuantFusedReLU6,
    QuantResidual,
    QuantRoundedCBFuse,
    Twin,
    is_quantized,
)
from models.quantize.pickled_modules import TORCHVISION
from models.quantize.quantizers import ImageQuantizer, LogitQuantizer, OutputQuantizer, named_quantizers
from models.quantize.scales import never_negative
from utils.qat.backends.pytorch import task_of
from utils.qat.config.tables import DEFAULT_TARGET, load_target
from utils.qat.core.errors import QatError
from utils.qat.core.upstream import Network
from utils.qat.vendors.vendor import Target

# Upstream's modules whose operations have all been reviewed: every operation that must be INT8 is INT8, by a twin or by
# the quantized convolutions around it.
REVIEWED = {
    'models.common': set(
        'Conv DWConv AConv ADown RepConvN DFL Bottleneck RepNBottleneck RepNCSP SP SPPELAN ELAN1 RepNCSPELAN4 '
        'CBLinear CBFuse Concat Silence UConv Proto Classify'.split()
    ),
    'models.yolo': set('DetectionModel SegmentationModel ClassificationModel Detect DDetect Segment DSegment'.split()),
    **TORCHVISION,
}

TENSORRT = load_target(DEFAULT_TARGET)
CHOSEN = 'by choice'  # the reason of a block that could be INT8 and stays in float
BRANCHES = {'cv2': 'box', 'cv3': 'class', 'cv4': 'mask'}  # upstream's name of a list of branches in a head → its output


@dataclass
class Conversion:
    """The record of `quantize_model`."""

    kept_float: dict[str, str]  # path of a block → its reason to stay in float
    unknown: dict[str, str]  # path → class of a module that is not known: only its convolutions are quantized
    swapped: dict[str, str] = field(default_factory=dict)  # path of a block → its float class

    def summary(self) -> str:
        """Say in one line how many blocks of each class are quantized and how many stay in float."""
        kinds = list(self.swapped.values())
        counts = ', '.join(f'{kinds.count(k)} {k}' for k in sorted(set(kinds)))
        return f'{len(kinds)} blocks quantized ({counts}); {len(self.kept_float)} in float'


def float_blocks(model: Network, target: Target = TENSORRT) -> dict[str, str]:
    """Find the blocks that stay in float: path → reason. Raises QatError for a detector without a YOLOv9 head."""
    if target.integers and task_of(model).name != 'detect':
        raise QatError(f'{target.name}: takes detectors, and the model is {task_of(model).title}; litert takes it')
    inside = float_inside_blocks(model, target)
    return {**inside, **_float_in_head(model, target)} if task_of(model).boxes else inside


def float_inside_blocks(model: Network, target: Target = TENSORRT) -> dict[str, str]:
    """Find the parts of torchvision's blocks that stay in float: path → reason.

    Squeeze-and-excitation computes one factor per channel on 1x1 maps: INT8 gains nothing there, and an error in the
    factor changes a whole map. In ConvNeXt the sum that the depthwise convolutions read is float, because LayerNorm
    reads it too.
    """
    reasons = {
        SqueezeExcitation: 'squeeze-and-excitation',
        CNBlock: 'reads the float sum',
        ConvNeXt: 'LayerNorm reads it',
    }
    gate = '', 'avgpool', 'fc1', 'fc2', *(('activation', 'scale_activation') if target.activations else ())
    # The stem and the reductions have no Q behind them, and an engine that fuses nothing wants one
    outside = ('features.0.0', 'features.2.1', 'features.4.1', 'features.6.1') if target.activations else ()
    inside = {SqueezeExcitation: gate, CNBlock: ('block.0',), ConvNeXt: ('avgpool', *outside)}
    return {
        f'{path}.{name}'.strip('.'): reasons[type(m)]
        for path, m in model.named_modules()
        for name in inside.get(type(m), ())
    }


def _float_in_head(model: Network, target: Target) -> dict[str, str]:
    """Find the convolutions of a YOLOv9 head that stay in float: path → reason.

    The last 1x1 convolutions feed DFL, softmax and sigmoid directly, and DFL's own has the integers 0..15 as weights:
    INT8 costs precision of the boxes there. Whether it gains anything depends on the engine.
    """
    kept, outputs = {}, 0
    for name, module in model.model[-1].named_modules(prefix=f'model.{len(model.model) - 1}'):
        if isinstance(module, DFL):
            kept[f'{name}.conv'] = 'integral over the box distribution'
        # A branch of the head is a Sequential (Conv, Conv, nn.Conv2d): the bare last one is an output.
        elif isinstance(module, nn.Sequential) and type(module[-1]) is nn.Conv2d:
            outputs += 1
            if BRANCHES.get(name.split('.')[2]) not in target.int8_outputs:
                kept[f'{name}.{len(module) - 1}'] = 'output of the head'
    if not outputs:
        raise QatError(f'the last layer ({type(model.model[-1]).__name__}) is no YOLOv9 detection head')
    return kept


def unknown_modules(model: Network) -> dict[str, str]:
    """Find modules with a convolution inside that are neither PyTorch's nor REVIEWED: path → class."""
    return {
        path: type(m).__name__
        for path, m in model.named_modules()
        if not type(m).__module__.startswith('torch.')
        and type(m).__name__ not in REVIEWED.get(type(m).__module__, ())
        and any(isinstance(inner, nn.Conv2d) for inner in m.modules())
    }


def twins_of(model: Network, target: Target) -> dict[type, type[Twin]]:
    """Return the twins for a model and a target: class → twin."""
    twins = TWINS
    if not task_of(model).boxes:
        from models.quantize import class_blocks  # here, because only classifiers have these blocks

        twins = twins | class_blocks.TWINS
    twins = twins | ACTIVATIONS if target.activations else twins
    return twins | {nn.ReLU6: QuantFusedReLU6, CBFuse: QuantRoundedCBFuse} if target.integers else twins


def quantize_ends(model: Network) -> None:
    """Quantize the outputs of a quantized detector's head too, in place, and make the integers of images those of their pixels."""
    first = next(m for m in model.modules() if isinstance(m, QuantConv2d))
    first.input_quantizer = ImageQuantizer()
    head = model.model[-1]
    for branches, kind in ((head.cv2, OutputQuantizer), (head.cv3, LogitQuantizer)):
        for branch in branches:
            branch.append(kind())


def find_twins(model: Network, target: Target = TENSORRT) -> dict[str, str]:
    """Find the blocks of a fused float model that `quantize_model` swaps: path → class, in the order of the network.

    Raises QatError, see `float_blocks`, or if the model is quantized.
    """
    if is_quantized(model):
        raise QatError('the model is quantized already; take the float model')
    kept, twins = float_blocks(model, target), twins_of(model, target)
    return {
        path: type(m).__name__
        for path, m in model.named_modules(remove_duplicate=False)  # upstream's blocks share one activation function
        if type(m) in twins and twins[type(m)].suits(m) and path not in kept
    }


def quantize_model(
    model: Network,
    keep_float: Sequence[str] = (),
    target: Target = TENSORRT,
) -> Conversion:
    """Swap the blocks of a fused float model for their quantized twins, in place; blocks inside blocks too.

    `keep_float` has paths of `find_twins`. Raises QatError, see `float_blocks`.
    """
    done = Conversion(
        kept_float={**float_blocks(model, target), **dict.fromkeys(keep_float, CHOSEN)}, unknown=unknown_modules(model)
    )

    twins = twins_of(model, target)

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in list(parent.named_children()):
            path = f'{prefix}{name}'
            visit(child, f'{path}.')
            twin = twins.get(type(child))
            if twin and twin.suits(child) and path not in done.kept_float:
                new = twin.from_float(child)
                setattr(parent, name, new)
                if isinstance(new, QuantResidual):
                    wanted = target.add_policies.get(new.add_policy, new.add_policy)
                    if wanted != new.add_policy:
                        new.set_add_policy(wanted)
                done.swapped[path] = twin.float_class.__name__
            elif not twin and isinstance(child, (nn.ConvTranspose2d, nn.Conv1d, nn.Linear)):
                done.kept_float[path] = f'no INT8 twin of {type(child).__name__}'

    visit(model, '')
    if target.integers:
        quantize_ends(model)
    if target.zero_points != 'none':
        shifting = named_quantizers(model) if target.zero_points == 'any' else never_negative(model)
        for _, quantizer in shifting:
            quantizer.shifts = quantizer._axis is None
    return done
