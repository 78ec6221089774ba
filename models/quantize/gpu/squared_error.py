"""The squared error of a layer on a GPU by Triton kernels: both sums in one pass over the outputs.

PyTorch's operators would write both outputs as FP32, their difference and its square. Here the outputs are read once,
and only the difference is written, which the backward pass needs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# The arguments of a kernel are values of Triton's own language

import torch
import triton
import triton.language as tl
from torch.autograd.function import BackwardCFunction, FunctionCtx

BLOCK, LOOPS = 4096, 16  # values of a step of a program, and its steps


@triton.jit
def _sums_kernel(student, teacher, difference, sums, number, parts, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    part, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    error, energy = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(LOOPS):
        value = (part * LOOPS + i) * BLOCK + tl.arange(0, BLOCK)
        there, offset = value < number, image * number + value
        t = tl.load(teacher + offset, mask=there, other=0.0).to(tl.float32)
        d = tl.load(student + offset, mask=there, other=0.0).to(tl.float32) - t
        tl.store(difference + offset, d.to(difference.dtype.element_ty), mask=there)
        error += d * d
        energy += t * t
    first = (image * parts + part) * 2
    tl.store(sums + first, tl.sum(error, 0))
    tl.store(sums + first + 1, tl.sum(energy, 0))


@triton.jit
def _scaled_kernel(difference, factors, result, number, BLOCK: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, offset = value < number, image * number + value
    d = tl.load(difference + offset, mask=there, other=0.0).to(tl.float32) * (2.0 * tl.load(factors + image))
    tl.store(result + offset, d.to(result.dtype.element_ty), mask=there)


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        images, number = len(student), student[0].numel()
        parts = triton.cdiv(number, BLOCK * LOOPS)
        difference = torch.empty_like(student)
        sums = torch.empty(images, parts, 2, device=student.device)
        _sums_kernel[parts, images](student, teacher, difference, sums, number, parts, BLOCK=BLOCK, LOOPS=LOOPS)
        ctx.save_for_backward(difference)
        return sums.sum(1)

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        result, number = torch.empty_like(difference), difference[0].numel()
        factors = gradient[:, 0].contiguous()
        _scaled_kernel[triton.cdiv(number, BLOCK), len(result)](difference, factors, result, number, BLOCK=BLOCK)
        return result, None


def _dense(x: torch.Tensor) -> bool:
    """Tell whether the images of `x` are dense and consecutive in memory."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def squared_error(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor | None:
    """Sum (student - teacher)² and teacher² of each image: FP32, FP16 or BF16 [B, ...] on a GPU → FP32 [B, 2].

    Only the first column has a gradient, to the student. None if the kernels do not support the memory layout.
    """
    if student.stride() != teacher.stride() or not _dense(student):
        return None
    return _SquaredError.apply(student, teacher)
