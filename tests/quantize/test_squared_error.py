"""The kernels of a layer's squared error give the sums and the gradient of PyTorch's operators."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.quantize.finetuning.losses import _energy, _SquaredError

SHAPES = [
    (2, 16, 20, 20),
    (3, 7, 5, 9),
    (1, 70_000),
    (2, 8, 100, 100),
]  # the last two: more than one program for an image


def plain(student, teacher):
    return torch.stack((_SquaredError.apply(student, teacher), _energy(teacher.float())), 1)


def results(function, student, teacher):
    """The sums, and the student's gradient if the error of each image has another weight."""
    student = student.detach().requires_grad_()
    sums = function(student, teacher)
    (sums[:, 0] * torch.arange(1, 1 + len(sums), device=sums.device)).sum().backward()
    return sums.detach(), student.grad


def check(squared_error, device, types):
    torch.manual_seed(0)
    for dtype in types:
        for shape in SHAPES:
            for layout in (torch.contiguous_format, torch.channels_last)[: 1 + (len(shape) == 4)]:
                pair = [torch.randn(shape).to(device, dtype).contiguous(memory_format=layout) for _ in range(2)]
                sums, gradient = results(squared_error, *pair)
                wanted, of_operators = results(plain, *pair)
                assert torch.allclose(sums, wanted, rtol=1e-5), (dtype, shape, layout)
                assert torch.equal(gradient, of_operators) and gradient.stride() == of_operators.stride()
    whole = torch.randn(2, 8, 6, 6).to(device)
    assert squared_error(whole[:, :4], whole[:, 4:]) is None, 'images with gaps are for the operators'
    assert squared_error(whole, whole.contiguous(memory_format=torch.channels_last)) is None, 'other order'


def test_kernels_are_equal_to_the_operators():
    """By Triton's interpreter, which has no BF16."""
    pytest.importorskip('triton')
    code = """
from models.quantize.gpu.squared_error import squared_error
from test_squared_error import check, torch
check(squared_error, 'cpu', [torch.float32, torch.float16])
"""
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    subprocess.run(  # Triton reads the variable at its import
        [sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': path, 'TRITON_INTERPRET': '1'}, check=True
    )


@pytest.mark.gpu
def test_kernels_are_equal_to_the_operators_on_a_gpu():
    from models.quantize.gpu.squared_error import squared_error

    check(squared_error, 'cuda', [torch.float32, torch.float16, torch.bfloat16])
