"""Operators that make their result without values, and without PyTorch's code for it.

That code, of the device `meta`, imports SymPy and the compiler, which takes seconds. Whatever is not computed here is left
to it: unusual arguments, and arguments that PyTorch refuses.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F


def _slid(x: torch.Tensor, channels: int, *windows: Any) -> torch.Tensor:
    """Make the result of a sliding window, without values.

    Args:
        x: [B, C, H, W].
        channels: of the result.
        *windows: kernel, stride, padding and dilation: of height and width.
    """
    sides = [(side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in zip(x.shape[2:], *windows)]
    if min(sides) < 1:
        raise RuntimeError('a window is larger than the map')
    return x.new_empty(len(x), channels, *sides)


def _convolved(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> torch.Tensor:
    """Make the result of torch.conv2d, without values."""
    pairs = all(isinstance(given, tuple) for given in (stride, padding, dilation))  # as nn.Conv2d gives them
    if not pairs or x.dim() != 4 or x.shape[1] != weight.shape[1] * groups:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _slid(x, len(weight), weight.shape[2:], stride, padding, dilation)


def _pooled(whole: Any, x: Any, ceil: bool, *windows: Any) -> torch.Tensor:
    """Make the result of a pooling, without values.

    Args:
        whole: the pooling itself, for arguments that are not computed here.
        x: its input.
        ceil: windows may end outside, or more is wanted than the result.
        *windows: as in `_slid`, one number for height and width.
    """
    if x.dim() != 4 or ceil or not all(isinstance(given, int) for given in windows):
        return whole()
    return _slid(x, x.shape[1], *([given] * 2 for given in windows))


def _max_pooled(x: Any, kernel: Any, return_indices: bool = False, **given: Any) -> Any:
    whole = partial(F.max_pool2d, x, kernel, return_indices=return_indices, **given)
    return _pooled(
        whole, x, given['ceil_mode'] or return_indices, kernel, given['stride'], given['padding'], given['dilation']
    )


def _avg_pooled(x: Any, kernel: Any, stride: Any = None, padding: Any = 0, ceil: bool = False, *others: Any) -> Any:
    whole = partial(F.avg_pool2d, x, kernel, stride, padding, ceil, *others)
    return _pooled(whole, x, ceil, kernel, stride, padding, 1)


def _resized(x: Any, size: Any = None, scale_factor: Any = None, **others: Any) -> torch.Tensor:
    """Make the result of F.interpolate, without values."""
    if x.dim() == 4 and isinstance(scale_factor, (int, float)):
        return x.new_empty(*x.shape[:2], *(int(side * scale_factor) for side in x.shape[2:]))
    if x.dim() == 4 and isinstance(size, tuple) and len(size) == 2:
        return x.new_empty(*x.shape[:2], *size)
    return F.interpolate(x, size, scale_factor, **others)


def _added(x: Any, y: Any) -> torch.Tensor:
    """Make the result of x + y, without values; y is a map or a number."""
    return x if getattr(y, 'shape', x.shape) == x.shape else torch.add(x, y)


def _stacked(maps: Sequence[torch.Tensor], *places: Any, **others: Any) -> torch.Tensor:
    """Make the result of torch.stack, without values."""
    if places or others or any(x.shape != maps[0].shape for x in maps):
        return torch.stack(list(maps), *places, **others)
    return maps[0].new_empty(len(maps), *maps[0].shape)


def _summed(x: torch.Tensor, dim: Any = None, **others: Any) -> torch.Tensor:
    """Make the result of torch.sum, without values."""
    return x.new_empty(x.shape[1:]) if (dim, others) == (0, {}) else torch.sum(x, dim, **others)


def _joined(maps: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Make the result of torch.cat, without values."""
    shapes = [list(x.shape) for x in maps]
    sizes = [shape.pop(dim) for shape in shapes]
    if any(shape != shapes[0] for shape in shapes):
        return torch.cat(list(maps), dim)
    shapes[0].insert(dim % (1 + len(shapes[0])), sum(sizes))
    return maps[0].new_empty(shapes[0])


def _unchanged(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the input of an operation whose result has the same shape."""
    return x


WEIGHTLESS: dict[Any, Any] = {
    torch.conv2d: _convolved,
    F.interpolate: _resized,
    F.avg_pool2d: _avg_pooled,
    F.max_pool2d: _max_pooled,
    torch.Tensor.add: _added,
    torch.cat: _joined,
    torch.stack: _stacked,
    torch.sum: _summed,
    **dict.fromkeys((F.batch_norm, F.silu, F.relu), _unchanged),
}
