"""Fake quantization on a GPU by Triton kernels, which move fewer bytes than PyTorch's operator.

For the backward pass, PyTorch's operator keeps one byte per value: whether it was inside the range. These kernels keep
one bit. After SiLU they keep nothing: autograd has the input of SiLU anyway, and the gradient kernel of SiLU recomputes
the SiLU and the range from it. The outputs are equal to PyTorch's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# The arguments of a kernel are values of Triton's own language
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch.autograd.function import BackwardCFunction

BLOCK = 4096  # values per program
LARGEST = 2**31 - BLOCK  # values of a tensor: indices are INT32
Rows = tuple[int, int, tuple[int, ...]]  # see `_rows`


@triton.jit
def _steps(values, inverse):
    """Round values / scale half to even, clamped to ±600, which is outside of INT8 with any zero point. NaN becomes -600."""
    shift = 12582912.0  # 1.5 * 2^23: FP32 numbers of this size are integers
    return (tl.minimum(tl.maximum(values * inverse, -600.0), 600.0) + shift) - shift


@triton.jit
def _indices(number, columns, step, BLOCK: tl.constexpr):
    """Index the values of a program: mask bytes, values, offsets in rows `step` apart, and which values exist."""
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    first = byte * 8
    eight = tl.arange(0, 8)[None, :]
    offset = first // columns * step + first % columns
    return byte, first[:, None] + eight, tl.multiple_of(offset, 8)[:, None] + eight, (first < number)[:, None]


@triton.jit
def _round_kernel(
    x, y, bits, number, columns, step, scale, inverse, low, high, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    byte, value, offset, there = _indices(number, columns, step, BLOCK)
    q = _steps(tl.load(x + offset, mask=there, other=0.0).to(tl.float32), inverse)
    tl.store(y + value, (tl.minimum(tl.maximum(q, low), high) * scale).to(y.dtype.element_ty), mask=there)
    if KEEP:
        inside = ((q >= low) & (q <= high)).to(tl.int32) << tl.arange(0, 8)[None, :]
        tl.store(bits + byte, tl.sum(inside, 1).to(tl.uint8), mask=byte * 8 < number)


@triton.jit
def _masked_kernel(gradient, bits, result, number, BLOCK: tl.constexpr):
    byte, value, _, there = _indices(number, number, 0, BLOCK)
    kept = tl.load(bits + byte, mask=byte * 8 < number, other=0).to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]
    g = tl.load(gradient + value, mask=there, other=0.0)
    tl.store(result + value, tl.where((kept & 1) != 0, g, 0.0), mask=there)


@triton.jit
def _silu_kernel(x, gradient, result, number, inverse, low, high, BLOCK: tl.constexpr):
    _, value, _, there = _indices(number, number, 0, BLOCK)
    before = tl.load(x + value, mask=there, other=0.0)
    v = before.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-v))
    q = _steps((v * sigmoid).to(before.dtype).to(tl.float32), inverse)
    g = tl.load(gradient + value, mask=there, other=0.0).to(tl.float32)
    g = tl.where((q >= low) & (q <= high), g * sigmoid * (1.0 + v * (1.0 - sigmoid)), 0.0)
    tl.store(result + value, g.to(result.dtype.element_ty), mask=there)


@lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> Rows | None:
    """Describe a tensor as rows of dense values, in memory order.

    Returns the number of values in a row, the distance of two rows, and the strides of a dense tensor with the same order; None if
    the tensor has no such rows, or if a row does not fill whole bytes of a mask.
    """
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: strides[d])
    columns, rows, step, dense = 1, 1, 0, [1] * len(shape)
    for d in order:
        dense[d] = columns * rows
        if rows == 1 and strides[d] == columns:
            columns *= shape[d]
        else:
            step = step or strides[d]
            if strides[d] != step * rows:
                return None
            rows *= shape[d]
    if columns % 8 or step % 8 or not 0 < columns * rows < LARGEST:
        return None
    return columns, step, tuple(dense)


def _grid(number: int) -> tuple[int]:
    return (triton.cdiv(number, BLOCK),)


@lru_cache(maxsize=4096)
def _inverse(scale: float) -> float:
    """Compute 1 / scale in FP32, as PyTorch's operator does."""
    return torch.tensor(scale).reciprocal().item()


def _ends(zero_point: int) -> tuple[float, float]:
    """Return the ends of the range in steps. As floats, because Triton compiles a kernel anew for some integers."""
    return -128.0 - zero_point, 127.0 - zero_point


def _round(x: torch.Tensor, scale: float, zero_point: int, rows: Rows, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `x`: the result, dense, and the bits of its mask if `keep`."""
    columns, step, dense = rows
    y = torch.empty_strided(x.shape, dense, dtype=x.dtype, device=x.device)
    bits = torch.empty(x.numel() // 8 if keep else 0, dtype=torch.uint8, device=x.device)
    _round_kernel[_grid(x.numel())](
        x, y, bits, x.numel(), columns, step, scale, _inverse(scale), *_ends(zero_point), KEEP=keep, BLOCK=BLOCK
    )
    return y, bits


def _laid_out(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return `gradient` with the given strides."""
    if gradient.stride() == strides:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class _Context(BackwardCFunction):
    """The context of a rounding: the forward pass keeps these numbers in it for the backward pass."""

    strides: tuple[int, ...]
    range: tuple[float, float, float]  # 1 / scale, and the ends


class _Rounded(torch.autograd.Function):
    """Round `x`; the gradient passes where x is inside the range."""

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, scale: float, zero_point: int, rows: Rows) -> torch.Tensor:
        y, bits = _round(x, scale, zero_point, rows, keep=True)
        ctx.save_for_backward(bits)
        ctx.strides = rows[2]
        return y

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (bits,) = ctx.saved_tensors
        gradient = _laid_out(gradient, ctx.strides)
        result = torch.empty_like(gradient)
        _masked_kernel[_grid(gradient.numel())](gradient, bits, result, gradient.numel(), BLOCK=BLOCK)
        return result, None, None, None


class _RoundedSiLU(torch.autograd.Function):
    """Round `after`, which is SiLU(`before`); the gradient goes to `before`."""

    @staticmethod
    def forward(
        ctx: _Context, before: torch.Tensor, after: torch.Tensor, scale: float, zero_point: int, rows: Rows
    ) -> torch.Tensor:
        ctx.save_for_backward(before)
        ctx.range, ctx.strides = (_inverse(scale), *_ends(zero_point)), rows[2]
        return _round(after, scale, zero_point, rows, keep=False)[0]

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (before,) = ctx.saved_tensors
        gradient = _laid_out(gradient, ctx.strides)
        result = torch.empty_like(gradient)
        _silu_kernel[_grid(gradient.numel())](before, gradient, result, gradient.numel(), *ctx.range, BLOCK=BLOCK)
        return result, None, None, None, None


def rounded(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor | None:
    """Quantize and dequantize FP32, FP16 or BF16 on a GPU to INT8, as torch.fake_quantize_per_tensor_affine does.

    `scale` is an FP32 number. The result is dense, in the precision of `x`; None if the kernels do not support the memory
    layout of `x`.
    """
    rows = _rows(x.shape, x.stride())
    if not rows:
        return None
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _round(x, scale, zero_point, rows, keep=False)[0]
    if type(x.grad_fn).__name__ == 'SiluBackward0' and x.stride() == rows[2]:
        before = getattr(x.grad_fn, '_saved_self')  # noqa: B009  # this node has it
        if before.stride() == x.stride():
            return _RoundedSiLU.apply(before, x.detach(), scale, zero_point, rows)
    return _Rounded.apply(x, scale, zero_point, rows)


def works_on(device: torch.device) -> bool:
    """Tell whether the kernels compile on this machine and compute there as PyTorch's operator does."""
    x = torch.linspace(-2, 2, 4096, device=device)
    wanted = torch.fake_quantize_per_tensor_affine(x, 0.01, 3, -128, 127)
    result = rounded(x, torch.tensor(0.01).item(), 3)
    return result is not None and torch.equal(result, wanted)
