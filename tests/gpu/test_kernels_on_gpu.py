"""The Triton kernels on a GPU; tests/upstream/quantize/test_gpu_kernels.py runs them in Triton's interpreter."""

import pytest
import torch
from helpers.kernels import check_kernels


@pytest.mark.gpu
def test_kernels_are_equal_to_the_operators_on_a_gpu():
    check_kernels('cuda', [torch.float32, torch.float16, torch.bfloat16])
