"""Which tensors share one scale, and why: found by watching the model compute.

TensorRT moves a Q backward and a DQ forward across operations that only move or select values (Concat, MaxPool, split,
nearest resize, reshape). Where the scales on both sides differ it must requantize, which costs a kernel and precision.
So all tensors joined by such operations form one group with one scale; so do tensors that meet at one quantizer (the
addends of a residual Add). Sources: NVIDIA-AI-IOT/yolo_deepstream, yolov7_qat/doc/Guidance_of_QAT_performance_optimization.md,
and NVIDIA/Model-Optimizer, `get_concat_eliminated_tensors`.

Nothing is guessed from names: a dry run records every operation on every tensor, and union-find does the rest.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from models.quantize.quantizers import Quantizer, named_quantizers, quantizers_off

# Operations f with f(Q(x)) = Q(f(x)): they move or select values and compute none.
COMMUTING = {
    torch.cat,
    torch.chunk,
    torch.split,
    torch.reshape,
    torch.flatten,
    torch.permute,
    torch.transpose,
    torch.squeeze,
    torch.unsqueeze,
    torch.max_pool2d,
    F.max_pool2d,
    torch.Tensor.chunk,
    torch.Tensor.split,
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.flatten,
    torch.Tensor.permute,
    torch.Tensor.transpose,
    torch.Tensor.squeeze,
    torch.Tensor.unsqueeze,
    torch.Tensor.contiguous,
    torch.Tensor.__getitem__,
}


class _Groups:
    """Union-find over objects, by identity. Keeps them alive, so that no identity is used twice."""

    def __init__(self):
        self.parent, self.alive = {}, []

    def find(self, item):
        key = id(item)
        if key not in self.parent:
            self.parent[key] = key
            self.alive.append(item)
        while self.parent[key] != key:
            self.parent[key] = key = self.parent[self.parent[key]]
        return key

    def join(self, items):
        roots = [self.find(i) for i in items]
        for root in roots[1:]:
            self.parent[root] = roots[0]


def _tensors(value):
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (list, tuple)) else []


class _Watch(TorchFunctionMode):
    """Joins the inputs and outputs of every commuting operation, and the outputs of equal average poolings of one tensor, which an
    exporter merges into one node."""

    def __init__(self, groups):
        super().__init__()
        self.groups, self.pooled = groups, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        nearest = func is F.interpolate and (args[3] if len(args) > 3 else kwargs.get('mode', 'nearest')) == 'nearest'
        if func in COMMUTING or nearest:
            self.groups.join(_tensors([*args, *kwargs.values()]) + _tensors(result))
        elif func is F.avg_pool2d:
            x, *settings = args
            self.groups.find(x)  # keeps it alive, so that its identity is its own
            first = self.pooled.setdefault((id(x), str((settings, sorted(kwargs.items())))), result)
            self.groups.join([first, result])
        return result


@torch.no_grad()
def scale_groups(model, size=64):
    """Groups of activation quantizers that must share a scale: lists of paths, in the order of the network.

    model: quantized, calibrated or not; it computes one blank image of `size` pixels. Quantizers that share with no
    other form groups of one.
    """
    groups, order = _Groups(), []
    activations = {id(q): (name, q) for name, q in named_quantizers(model) if q._axis is None}

    def met(quantizer, inputs):
        order.append(id(quantizer))
        groups.join([quantizer, inputs[0]])

    hooks = [q.register_forward_pre_hook(met) for _, q in activations.values()]
    parameter = next(model.parameters())
    try:
        with quantizers_off(model), _Watch(groups):
            model.eval()(torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype))
    finally:
        for hook in hooks:
            hook.remove()
    members = {}
    for key in dict.fromkeys(order):  # each once, in the order of the first meeting
        name, quantizer = activations[key]
        members.setdefault(groups.find(quantizer), []).append(name)
    return list(members.values())


def tie_scales(model, size=64):
    """Replace the quantizers of each group by one, in place, so that it is calibrated on the union of what they see.

    Returns the groups (see `scale_groups`).
    """
    found = scale_groups(model, size)
    owners = {}  # quantizer → where it hangs
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if isinstance(child, Quantizer):
                owners.setdefault(id(child), []).append((module, name))
    by_path = dict(named_quantizers(model))
    for group in found:
        shared = by_path[group[0]]
        for path in group[1:]:
            for module, name in owners[id(by_path[path])]:
                module._modules[name] = shared
    return found


def shared_scales(model):
    """Paths of the activation quantizers of `model`, those that are one and the same together: lists, as `scale_groups`
    finds them, but read from a model that is tied already."""
    groups = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Quantizer) and module._axis is None:
            groups.setdefault(id(module), []).append(path)
    return list(groups.values())
