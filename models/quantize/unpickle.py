"""The pickle in a checkpoint → its objects, and nothing else: `torch.load(file, pickle_module=unpickle, weights_only=False)`.

A pickle is a program: it names callables and calls them, so that loading one can do whatever its writer wished. What upstream
pickles is a whole module, which `weights_only=True` refuses. It needs little of that power: layers, which are made without a call of
their constructor and then get their attributes; tensors; plain values. This unpickler has that little and refuses the rest before
it happens. (Constructors too: that of a model runs `eval` on the strings of its YAML.)
"""
import argparse
import importlib
import pathlib
import pickle
from collections import OrderedDict

import numpy as np
import torch

LAYERS = 'models.', 'torch.nn.'  # where layers may be defined; nothing else is imported


class Refused(pickle.UnpicklingError):
    """The pickle asks for more than a checkpoint needs."""


def _latin1(text, encoding):
    """What protocol 2 calls to make bytes: a NumPy number has some."""
    return text.encode('latin1')


def _forward(layer, name):
    """What a method is pickled as: fused layers of upstream carry `forward_fuse` as their `forward`, and heads with masks the forward of
    the class without. layer: a module, or a class of modules."""
    of_layer = isinstance(layer, torch.nn.Module) or isinstance(layer, type) and issubclass(layer, torch.nn.Module)
    if not (of_layer and isinstance(name, str) and name.startswith('forward')):
        raise Refused(f'its pickle takes {name} of a {type(layer).__name__}, which was not done; take it from where you trust it')
    return getattr(layer, name)


CALLED = {  # name in the pickle → what is called
    'collections.OrderedDict': OrderedDict, 'builtins.set': set, '__builtin__.set': set, '_codecs.encode': _latin1,
    'builtins.getattr': _forward, '__builtin__.getattr': _forward,
    'torch.Size': torch.Size, 'torch.device': torch.device, 'numpy.dtype': np.dtype,
    **{f'{module}.{name}': path for module in ('pathlib', 'pathlib._local')  # in Python 3.13
       for name, path in (('PosixPath', pathlib.PurePosixPath), ('WindowsPath', pathlib.PureWindowsPath))},
    **{f'torch._utils.{f.__name__}': f for f in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_parameter,
                                                 torch._utils._rebuild_parameter_with_state)},
    **{f'numpy.{core}.multiarray.{f.__name__}': f for f in (np.float64().__reduce__()[0], np.empty(0).__reduce__()[0])
       for core in ('core', '_core')}}  # before NumPy 2 and since
NAMED = {'numpy.ndarray': np.ndarray, 'argparse.Namespace': argparse.Namespace}  # arguments of these, or made like layers


class Unpickler(pickle._Unpickler):  # the one in Python: that in C does not let calls be looked at
    """Raises Refused before anything is imported or called that has no place in a checkpoint."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module, name):
        path = f'{module}.{name}'
        known = CALLED.get(path) or NAMED.get(path)
        if known:
            return known
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if '.' in name or not module.startswith(LAYERS):
            raise Refused(f'its pickle asks for {path}, and a checkpoint needs only tensors, plain values and layers of PyTorch or of '
                          'this tree (models/), so nothing of it was run; take it from where you trust it, and if that is a layer '
                          'of your own, define it in models/')
        found = getattr(_import(module), name, None)
        if found is None:
            raise Refused(f'it has layers {path}, which this YOLOv9 tree lacks; use the one it was trained with, or a full clone of '
                          'WongKinYiu/yolov9')
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
            raise Refused(f'its pickle asks for {path}, which is no layer, so nothing of it was run; take it from where you trust it')
        return found

    def load_reduce(self):
        arguments = self.stack.pop()
        function = self.stack.pop()
        if not any(function is known for known in CALLED.values()):
            raise Refused(f"its pickle calls {getattr(function, '__qualname__', type(function).__name__)}, which was not done: layers of a "
                          'checkpoint are made without their constructors; take it from where you trust it')
        self.append(function(*arguments))

    dispatch[pickle.REDUCE[0]] = load_reduce

    def _instantiate(self, cls, arguments):
        raise Refused('its pickle is of a kind that torch.save does not write (protocol 0 or 1)')


def _import(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        return None  # then the layer is lacking as well
