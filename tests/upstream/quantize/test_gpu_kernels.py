"""Our own rounding and squared error have the values and the gradients of PyTorch's operators."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.kernels import check_rounding

from models.quantize.quantizers import _Rounded


def test_a_cpu_rounds_as_the_operator():
    check_rounding(_Rounded.apply, 'cpu', [torch.float32])


def test_kernels_are_equal_to_the_operators():
    """By Triton's interpreter. Its conversion to BF16 cuts the last bits off, so BF16 is for the GPU."""
    pytest.importorskip('triton')
    code = "from helpers.kernels import *; check_kernels('cpu', [torch.float32, torch.float16])"
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'TRITON_INTERPRET': '1'}  # read at Triton's import
    subprocess.run([sys.executable, '-c', code], env=env, check=True)
