"""Build the modules of a checkpoint from the records of its pickle, without running code of the file.

A module is made without its constructor, and its attributes are data: tensors, plain values, and submodules. No attribute
can be called, and no name hides a method of the class. So the model runs only code of PyTorch, of this tree and of this
toolkit.
"""

import ast
import importlib.util
import inspect
import sys
import types
from collections import OrderedDict
from functools import cache, lru_cache
from pathlib import Path

import torch
from typing_extensions import override

import models
from utils.qat.untrusted.model_yaml import WHOLE_MODELS
from utils.qat.untrusted.plain_values import TRUST, Values, is_empty
from utils.qat.untrusted.torch_archive import Archive, Call, Name, Refused, without_collector

TWINS = 'models.quantize.blocks', 'models.quantize.class_blocks', 'models.quantize.quantizers'  # of this toolkit
OURS = *TWINS, 'models.quantize.activations'  # all files of this toolkit with classes that a checkpoint may name
LAYERS = """
    CELU ELU GELU GLU Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softplus Tanh
    BatchNorm1d BatchNorm2d SyncBatchNorm GroupNorm LayerNorm Conv1d Conv2d ConvTranspose2d Linear Dropout Dropout2d
    AdaptiveAvgPool2d AdaptiveMaxPool2d AvgPool2d MaxPool2d Upsample UpsamplingBilinear2d UpsamplingNearest2d
    ReflectionPad2d ReplicationPad2d ZeroPad2d PixelShuffle PixelUnshuffle Fold Unfold Flatten Unflatten
    Identity Module ModuleDict ModuleList Sequential""".split()
TORCH = {f'{getattr(torch.nn, name).__module__}.{name}' for name in LAYERS}  # layers of YOLOv9's networks
TORCHVISION = {  # module → its classifiers, and the layers that only they have
    'torchvision.models.convnext': {'CNBlock', 'ConvNeXt', 'LayerNorm2d'},
    'torchvision.models.efficientnet': {'EfficientNet', 'FusedMBConv', 'MBConv'},
    'torchvision.models.mobilenetv2': {'InvertedResidual', 'MobileNetV2'},
    'torchvision.models.mobilenetv3': {'InvertedResidual', 'MobileNetV3'},
    'torchvision.models.regnet': {'AnyStage', 'BottleneckTransform', 'RegNet', 'ResBottleneckBlock', 'SimpleStemIN'},
    'torchvision.models.resnet': {'BasicBlock', 'Bottleneck', 'ResNet'},
    'torchvision.ops.misc': {'Conv2dNormActivation', 'Permute', 'SqueezeExcitation'},
    'torchvision.ops.stochastic_depth': {'StochasticDepth'},
}
# Attributes of classifiers that only training needs. They are code (a class, the image transforms) and are left out
UNUSED = '_norm_layer', 'transforms'
GETATTR = 'builtins.getattr', '__builtin__.getattr'  # how a method is pickled


def build(archive: Archive) -> object:
    """Build the object in an archive, with its modules.

    Raises Refused if the pickle is damaged, or asks for more than a checkpoint needs.
    """
    with without_collector():
        return _Modules(archive.members).value(archive.content)


class _Modules(Values):
    """A builder of plain values that builds modules too."""

    @override
    def other(self, record: Call) -> torch.nn.Module:
        cls: type = _layer_class(record.function)
        if not record.new or record.arguments or record.items or type(record.state) is not dict:
            raise Refused(
                f'its pickle calls {record.function.text}, which was not done: modules of a checkpoint are made without their '
                f'constructors; {TRUST}'
            )
        _require_names(cls, tuple(record.state))
        module: torch.nn.Module = object.__new__(cls)
        state = {name: self._attribute(module, name, item, record) for name, item in record.state.items()}
        for name, kind in (('_parameters', torch.Tensor), ('_buffers', torch.Tensor), ('_modules', torch.nn.Module)):
            _require_parts(state.get(name), name, kind)
        own = next(vars(c) for c in cls.__mro__ if '__setstate__' in vars(c) and c.__module__.startswith('torch.'))
        own['__setstate__'](module, state)  # PyTorch's own adds what older versions did not store
        return module

    def _attribute(self, module: torch.nn.Module, name: str, item: object, record: Call) -> object:
        """Build the value of an attribute from its record `item`; `record` is the module's. Refuse code."""
        kind = type(item)
        if name in UNUSED:
            return None
        # Upstream sets `forward` in a fused layer, and `detect` in a head with masks
        if name == 'forward' or (name == 'detect' and kind is Call):
            return _method(module, item, record)
        if name == 'type' and kind is not str:  # upstream stores the name of the class as `type`, which hides type()
            raise Refused(f'its pickle replaces type() of {type(module).__name__}; {TRUST}')
        if kind is bool or item is None:
            return item
        if 'hook' in name:
            if item != {} and not is_empty(item):
                raise Refused(f'a {type(module).__name__} has hooks ({name}), which are code; {TRUST}')
            return OrderedDict()
        value = self.value(item)
        if name != '_modules' and kind not in (int, float, str):
            _require_data(value, f'{type(module).__name__}.{name}')
        return value


@lru_cache(1024)
def _require_names(cls: type, names: tuple[object, ...]) -> None:
    """Refuse names that are no identifiers, and attributes that hide a method or a property of `cls`.

    Two attributes may hide one, `forward` and `type`: `_attribute` checks these.
    """
    for name in names:
        if type(name) is not str or not name.isidentifier() or name.startswith('__') or name == '_compiled_call_impl':
            raise Refused(f'an attribute of {cls.__name__} has a name that none of ours has; {TRUST}')
        attribute = inspect.getattr_static(cls, name, None)
        if (callable(attribute) or hasattr(type(attribute), '__get__')) and name not in ('forward', 'type'):
            raise Refused(f'its pickle replaces {name}() of {cls.__name__}; {TRUST}')


def _require_parts(parts: object, name: str, kind: type) -> None:
    """Refuse `_parameters`, `_buffers` or `_modules` that do not map names to objects of `kind` or None."""
    if not isinstance(parts, dict) or not all(
        type(key) is str and '.' not in key and (part is None or isinstance(part, kind)) for key, part in parts.items()
    ):
        raise Refused(f'a module whose {name} are damaged')


def _require_data(value: object, where: str) -> None:
    """Refuse modules outside of `_modules`: code that expects plain data could call them."""
    if isinstance(value, torch.nn.Module):
        raise Refused(f'{where} is a module, where only data belong; {TRUST}')
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _require_data(part, where)


def _method(module: torch.nn.Module, call: object, owner: Call) -> object:
    """Build a method. Its pickle is getattr(the layer itself or a class of layers, the name of a forward pass)."""
    if (
        type(call) is not Call
        or call.function.text not in GETATTR
        or len(call.arguments) != 2
        or call.new
        or call.items
        or call.state is not None
    ):
        raise Refused(f'its pickle gives a {type(module).__name__} a method that is not its own; {TRUST}')
    of, name = call.arguments
    cls = type(module) if of is owner else _layer_class(of) if type(of) is Name else None
    method = (
        inspect.getattr_static(cls, name, None) if cls and type(name) is str and name.startswith('forward') else None
    )
    if not inspect.isfunction(method):
        raise Refused(f'its pickle takes an attribute of an object, which was not done; {TRUST}')
    return types.MethodType(method, module) if of is owner else method


def _layer_class(name: Name) -> type[torch.nn.Module]:
    """Find the class of modules that a pickle names: PyTorch's on the list, this tree's, or this toolkit's."""
    if name.text in TORCH:
        return getattr(torch.nn, name.text.rpartition('.')[2])
    module, _, cls = name.text.rpartition('.')
    if cls in TORCHVISION.get(module, ()):
        return getattr(importlib.import_module(module), cls)
    if (
        not module.startswith('models.')
        or (module.startswith(('models.quantize', 'models.deploy')) and module not in OURS)
        or cls in WHOLE_MODELS
    ):
        raise Refused(
            f'its pickle asks for {name.text[:80]}, and a checkpoint needs only tensors, plain values and layers of PyTorch, of torchvision or '
            f'of this tree (models/), so nothing of it was run; {TRUST}, and if that is a layer of your own, define it in models/'
        )
    defined = _defined(module, cls)
    if defined is None:
        raise Refused(
            f'it has layers {name.text[:80]}, which this YOLOv9 tree lacks; use the one it was trained with, or a full clone of '
            'WongKinYiu/yolov9'
        )
    if not (isinstance(defined, type) and issubclass(defined, torch.nn.Module)):
        raise Refused(f'its pickle asks for {name.text[:80]}, which is no layer, so nothing of it was run; {TRUST}')
    return defined


@cache
def _defined(module: str, cls: str) -> object:
    """Find the class `cls` if a file under models/ defines it. A file is imported only if it defines the class."""
    if module in sys.modules:
        return getattr(sys.modules[module], cls, None)
    file = Path(*models.__path__[:1], *module.split('.')[1:]).with_suffix('.py')
    if not all(part.isidentifier() for part in module.split('.')) or not file.is_file():
        return None
    if not any(isinstance(node, ast.ClassDef) and node.name == cls for node in ast.parse(file.read_bytes()).body):
        return None
    return getattr(importlib.import_module(module), cls, None)
