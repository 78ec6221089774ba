"""Compare our own rounding and squared error with PyTorch's operators: values and gradients, wherever a tensor lies in memory."""

import torch
from torch.nn.functional import silu

from models.quantize.finetuning.training_step import _energy, _SquaredError

SCALE, ZERO_POINT = 0.0123291015625, -105  # a scale is an FP16 number
ROUNDED_SHAPES = [(2, 16, 6, 6), (1, 32, 5, 7), (3, 8, 4, 4), (2, 40, 3, 5), (1, 8, 1, 1)]
COMPARED_SHAPES = [
    (2, 16, 20, 20),
    (3, 7, 5, 9),
    (1, 70_000),
    (2, 8, 100, 100),
]  # the last two: several programs an image
OPERATIONS = {  # between the network's values and a quantizer
    'nothing': lambda x: x * 1,
    'SiLU': silu,
    'half of the channels': lambda x: silu(x).chunk(2, 1)[1],
    'every other row': lambda x: x[:, :, ::2],
}
WITH_GAPS = 'half of the channels', 'every other row'  # their rows may be no whole bytes of a mask


def in_layouts(shape, device, dtype):
    """Random tensors of a shape, one in each layout that it can have."""
    for layout in (torch.contiguous_format, torch.channels_last)[: 1 + (len(shape) == 4)]:
        yield torch.randn(shape).to(device, dtype).contiguous(memory_format=layout)


def rounded_and_gradient(x, operation, quantize):
    """The rounded values and the gradient of x; the quantizer is not the only one that reads them."""
    x = x.detach().clone().requires_grad_()
    values = operation(x)
    rounded = quantize(values, SCALE, ZERO_POINT)
    if rounded is None:
        return None
    weights = torch.linspace(-1, 1, rounded.numel(), device=x.device).view(rounded.shape)
    ((rounded.float() * weights).sum() + 0.3 * values.float().sum()).backward()
    return rounded.detach(), x.grad


def check_rounding(rounded, device, types):
    def operator(x, scale, zero_point):
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127)

    torch.manual_seed(0)
    compared = 0
    cases = [(1.5 * x, dtype) for dtype in types for shape in ROUNDED_SHAPES for x in in_layouts(shape, device, dtype)]
    for x, dtype in cases:
        for name, operation in OPERATIONS.items():
            case = dtype, x.shape, x.stride(), name
            ours = rounded_and_gradient(x, operation, rounded)
            if ours is None:
                assert name in WITH_GAPS, case
                continue
            wanted = rounded_and_gradient(x, operation, operator)
            assert torch.equal(ours[0], wanted[0]), case
            error = (ours[1].float() - wanted[1].float()).abs().max().item()
            # The gradients of SiLU are added before it in one case, and behind it in the other
            assert error <= (1e-6 if dtype == torch.float32 else 1e-2), (*case, error)
            compared += 1
    assert compared > 20 * len(types)


def sums_and_gradient(function, student, teacher):
    """The sums, and the student's gradient if the error of each image has another weight."""
    student = student.detach().requires_grad_()
    sums = function(student, teacher)
    (sums[:, 0] * torch.arange(1, 1 + len(sums), device=sums.device)).sum().backward()
    return sums.detach(), student.grad


def check_squared_error(squared_error, device, types):
    def operators(student, teacher):
        return torch.stack((_SquaredError.apply(student, teacher), _energy(teacher.float())), 1)

    torch.manual_seed(0)
    for dtype in types:
        for shape in COMPARED_SHAPES:
            for student, teacher in zip(in_layouts(shape, device, dtype), in_layouts(shape, device, dtype)):
                sums, gradient = sums_and_gradient(squared_error, student, teacher)
                wanted, of_operators = sums_and_gradient(operators, student, teacher)
                assert torch.allclose(sums, wanted, rtol=1e-5), (dtype, shape, student.stride())
                assert torch.equal(gradient, of_operators) and gradient.stride() == of_operators.stride()
    whole = torch.randn(2, 8, 6, 6).to(device)
    assert squared_error(whole[:, :4], whole[:, 4:]) is None, 'images with gaps are for the operators'
    assert squared_error(whole, whole.contiguous(memory_format=torch.channels_last)) is None, 'other order'


def check_kernels(device, types):
    from models.quantize.gpu.rounding import rounded
    from models.quantize.gpu.squared_error import squared_error

    check_rounding(rounded, device, types)
    check_squared_error(squared_error, device, types)
