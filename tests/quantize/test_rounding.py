"""Our own rounding, on a GPU by Triton kernels, is that of PyTorch's operator, with the same gradients, wherever a tensor lies in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.quantize.quantizers import _Rounded

SCALE, ZERO_POINT = 0.0123291015625, -105  # a scale is an FP16 number
SHAPES = [(2, 16, 6, 6), (1, 32, 5, 7), (3, 8, 4, 4), (2, 40, 3, 5), (1, 8, 1, 1)]


def operations():
    """The operations between the network's values and a quantizer, by name."""
    return {
        'nothing': lambda x: x * 1,
        'SiLU': torch.nn.functional.silu,
        'half of the channels': lambda x: torch.nn.functional.silu(x).chunk(2, 1)[1],
        'every other row': lambda x: x[:, :, ::2],
    }


def results(x, operation, quantize):
    """The rounded values and the gradient of x; the quantizer is not the only one that reads them."""
    x = x.detach().clone().requires_grad_()
    values = operation(x)
    rounded = quantize(values)
    if rounded is None:
        return None
    weights = torch.linspace(-1, 1, rounded.numel(), device=x.device).view(rounded.shape)
    ((rounded.float() * weights).sum() + 0.3 * values.float().sum()).backward()
    return rounded.detach(), x.grad


def check(rounded, device, types):
    torch.manual_seed(0)
    compared = 0
    for dtype in types:
        for layout in (torch.contiguous_format, torch.channels_last):
            for shape in SHAPES:
                x = (1.5 * torch.randn(shape, device=device)).to(dtype).contiguous(memory_format=layout)
                for name, operation in operations().items():
                    plain = results(
                        x, operation, lambda v: torch.fake_quantize_per_tensor_affine(v, SCALE, ZERO_POINT, -128, 127)
                    )
                    ours = results(x, operation, lambda v: rounded(v, SCALE, ZERO_POINT))
                    if ours is None:  # rows that are no whole bytes of a mask
                        assert name in ('half of the channels', 'every other row')
                        continue
                    assert torch.equal(ours[0], plain[0]), (dtype, layout, shape, name)
                    error = (ours[1].float() - plain[1].float()).abs().max().item()
                    # The gradients of SiLU are added before it in one case, and behind it in the other
                    assert error <= {torch.float32: 1e-6}.get(dtype, 1e-2), (dtype, layout, shape, name, error)
                    compared += 1
    assert compared > 20 * len(types)


def test_a_cpu_rounds_as_the_operator():
    check(_Rounded.apply, 'cpu', [torch.float32])


def test_kernels_are_equal_to_the_operator():
    """By Triton's interpreter. Its conversion to BF16 cuts the last bits off, so BF16 is for the GPU."""
    pytest.importorskip('triton')
    code = """
from models.quantize.gpu.rounding import rounded
from test_rounding import check, torch
check(rounded, 'cpu', [torch.float32, torch.float16])
"""
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    subprocess.run(  # Triton reads the variable at its import
        [sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': path, 'TRITON_INTERPRET': '1'}, check=True
    )


@pytest.mark.gpu
def test_kernels_are_equal_to_the_operator_on_a_gpu():
    from models.quantize.gpu.rounding import rounded

    check(rounded, 'cuda', [torch.float32, torch.float16, torch.bfloat16])
