"""Find the groups of tensors that share one scale, by a dry run of the model.

TensorRT moves a Q backward and a DQ forward across operations that only move or select values (Concat, MaxPool, split,
nearest resize, reshape). If the scales on the two sides differ, it must requantize, which costs a kernel and precision.
So all tensors joined by such operations form one group with one scale, and so do tensors that share a quantizer (the
addends of a residual Add). For TensorRT a wide sum in a Concat shares it with its addends, so that the convolution behind reads
these in its place, see utils/qat/vendors/tensorrt/sums.py. Sources: NVIDIA-AI-IOT/yolo_deepstream,
yolov7_qat/doc/Guidance_of_QAT_performance_optimization.md, and NVIDIA/Model-Optimizer, `get_concat_eliminated_tensors`.

The run records every operation on every tensor, so names do not matter. Another such run finds the tensors that are never
negative, for engines that take these as unsigned integers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from models.quantize.network import removed_after, run_on_blank_image
from models.quantize.quantizers import Quantizer, named_quantizers, quantizers_off
from utils.qat.core.upstream import Network
from utils.qat.graph.moves import IN_PYTORCH

# Functions whose results are never negative, and functions that keep them so, besides moves
CUT_AT_ZERO = {F.relu, F.relu6, F.hardsigmoid, F.sigmoid, torch.relu, torch.sigmoid}
KEEP_THE_SIGN = {F.adaptive_avg_pool2d, F.avg_pool2d, F.dropout}
TWO_KEEP_THE_SIGN = {torch.Tensor.mul, torch.Tensor.add}  # of two tensors


class _Groups:
    """Union-find over objects, by identity. It keeps the objects alive, so that no identity is used twice."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.alive: list[object] = []

    def find(self, item: object) -> int:
        """Find the root of an object's group, as an identity."""
        key = id(item)
        if key not in self.parent:
            self.parent[key] = key
            self.alive.append(item)
        while self.parent[key] != key:
            self.parent[key] = key = self.parent[self.parent[key]]
        return key

    def join(self, items: Iterable) -> None:
        roots = [self.find(i) for i in items]
        for root in roots[1:]:
            self.parent[root] = roots[0]


def _tensors(value: object) -> list[torch.Tensor]:
    """List the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _moves(func: object, args: tuple, kwargs: Mapping[str, object]) -> bool:
    """Tell whether a function only moves values."""
    nearest = func is F.interpolate and (args[3] if len(args) > 3 else kwargs.get('mode', 'nearest')) == 'nearest'
    return nearest or getattr(func, '__name__', '') in IN_PYTORCH


class _Watch(TorchFunctionMode):
    """Context that joins the inputs and outputs of every commuting operation.

    It also joins the outputs of equal average poolings of one tensor, because an exporter merges these into one node; and each sum that
    only a Concat reads with its addends, if these share a scale and have `widths` channels or more.
    """

    def __init__(self, groups: _Groups, widths: float) -> None:
        super().__init__()
        self.groups, self.widths = groups, widths
        self.pooled: dict[tuple[int, str], object] = {}
        self.sums: list[list[torch.Tensor]] = []  # each sum with its addends, unless something but a Concat has read it

    def join_sums(self) -> None:
        """Join each sum with its addends, after the run."""
        for tensors in self.sums:
            self.groups.join(tensors)

    def _meet_sum(self, result: torch.Tensor, addends: Sequence[torch.Tensor]) -> None:
        """Take note of a wide sum of tensors that share a scale."""
        if result.ndim == 4 and result.shape[1] >= self.widths and len({self.groups.find(x) for x in addends}) == 1:
            self.sums.append([result, *addends])

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.cat:
            self.sums = [tensors for tensors in self.sums if all(tensors[0] is not x for x in args)]
        if func is torch.Tensor.add and isinstance(result, torch.Tensor):
            self._meet_sum(result, args)
        if _moves(func, args, kwargs):
            self.groups.join(_tensors([*args, *kwargs.values()]) + _tensors(result))
        elif func is F.avg_pool2d:
            x, *settings = args
            self.groups.find(x)  # keeps it alive, so that no other tensor gets its identity
            first = self.pooled.setdefault((id(x), str((settings, sorted(kwargs.items())))), result)
            self.groups.join([first, result])
        return result


class _Signs(TorchFunctionMode):
    """Context that collects the tensors that are never negative, whatever the image."""

    def __init__(self) -> None:
        super().__init__()
        self.never_negative: dict[int, torch.Tensor] = {}  # by identity, and kept alive

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Mapping[str, float] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors([*args, *kwargs.values()])
        cut = func in CUT_AT_ZERO or (func is F.hardtanh and kwargs.get('min_val', -1) >= 0)  # which is nn.ReLU6
        keeps = _moves(func, args, kwargs) or func in KEEP_THE_SIGN or (func in TWO_KEEP_THE_SIGN and len(given) == 2)
        if cut or (keeps and given and all(id(x) in self.never_negative for x in given)):
            self.never_negative.update((id(x), x) for x in _tensors(result))
        return result


def _dry_run(model: Network, watch: TorchFunctionMode, met: Callable[[Quantizer, torch.Tensor], None]) -> None:
    """Run a quantized model in float on a blank image, and show `met` each activation quantizer with its input."""
    hooks = [
        q.register_forward_pre_hook(lambda quantizer, inputs: met(quantizer, inputs[0]))
        for _, q in named_quantizers(model)
        if q._axis is None
    ]
    with removed_after(hooks), quantizers_off(model), watch:
        run_on_blank_image(model)


@torch.no_grad()
def never_negative(model: Network) -> list[tuple[str, Quantizer]]:
    """Find the activation quantizers, by path, whose inputs are never negative, such as behind a ReLU, by a dry run."""
    signs, never = _Signs(), dict[Quantizer, bool]()

    def met(quantizer: Quantizer, x: torch.Tensor) -> None:
        never[quantizer] = never.get(quantizer, True) and id(x) in signs.never_negative

    _dry_run(model, signs, met)
    return [(name, q) for name, q in named_quantizers(model) if never.get(q)]


@torch.no_grad()
def scale_groups(model: Network, sums: float = math.inf) -> list[list[str]]:
    """Find the groups of activation quantizers (paths) that must share a scale, by a dry run on one blank image.

    They are in the order of the network. A quantizer that shares with no other is a group of one. sums: the channels from which on a
    sum in a Concat shares a scale with its addends, see Target.
    """
    groups = _Groups()
    order: list[int] = []
    activations = {id(q): (name, q) for name, q in named_quantizers(model) if q._axis is None}

    def met(quantizer: Quantizer, x: torch.Tensor) -> None:
        order.append(id(quantizer))
        groups.join([quantizer, x] if quantizer.tied else [quantizer])

    watch = _Watch(groups, sums)
    _dry_run(model, watch, met)
    watch.join_sums()
    members: dict[int, list[str]] = {}
    for key in dict.fromkeys(order):  # each quantizer once, in the order of its first call
        name, quantizer = activations[key]
        members.setdefault(groups.find(quantizer), []).append(name)
    return list(members.values())


def tie_scales(model: Network, sums: float = math.inf) -> list[list[str]]:
    """Replace the quantizers of each of `scale_groups` by one, in place: it is calibrated on the inputs of all of them."""
    groups = scale_groups(model, sums)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}  # quantizer → its modules, and its name in each
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                owners.setdefault(id(child), []).append((module, name))
    by_path = dict(named_quantizers(model))
    for group in groups:
        shared = by_path[group[0]]
        shared.shifts = all(by_path[path].shifts for path in group)
        for path in group[1:]:
            for module, name in owners[id(by_path[path])]:
                module._modules[name] = shared
    return groups


def shared_scales(model: Network) -> list[list[str]]:
    """Read the groups of activation quantizers (paths) that are one and the same object; see `scale_groups`."""
    groups: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Quantizer) and module._axis is None:
            groups.setdefault(id(module), []).append(path)
    return list(groups.values())
