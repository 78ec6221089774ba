"""Shapes without values are those of PyTorch's operators, and finding them loads no compiler."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from zoo import config_file

from models.quantize.weightless import Weightless

X, Y, W = torch.rand(2, 6, 17, 12), torch.rand(2, 6, 17, 12), torch.rand(8, 3, 3, 2)
CALLS = {
    'convolution': lambda x, y, w: F.conv2d(x, w, None, (2, 1), (1, 0), (1, 2), 2),
    'same padding': lambda x, y, w: F.conv2d(x, w, padding='same', dilation=(2, 2), groups=2),
    'other channels': lambda x, y, w: F.conv2d(x, w, None, (1, 1), (0, 0), (1, 1), 1),
    'large window': lambda x, y, w: F.conv2d(x[:, :, :2], w, None, (1, 1), (0, 0), (1, 1), 2),
    'average': lambda x, y, w: F.avg_pool2d(x, 2, 1, 0, False, True),
    'average by default': lambda x, y, w: F.avg_pool2d(x, 3),
    'average, ends outside': lambda x, y, w: F.avg_pool2d(x, 3, 2, 1, True),
    'largest': lambda x, y, w: F.max_pool2d(x, 5, 2, 2),
    'largest, by a module': lambda x, y, w: torch.nn.MaxPool2d(2)(x),
    'largest, with places': lambda x, y, w: F.max_pool2d(x, 2, 2, return_indices=True)[1],
    'twice as large': lambda x, y, w: F.interpolate(x, scale_factor=2, mode='nearest'),
    'as large as': lambda x, y, w: F.interpolate(x, size=(5, 7)),
    'by a module': lambda x, y, w: torch.nn.Upsample(None, 1.5, 'nearest')(x),
    'sum': lambda x, y, w: x + y + 0,
    'sum of a list': lambda x, y, w: torch.sum(torch.stack([x, y]), dim=0),
    'sum over places': lambda x, y, w: torch.sum(x, dim=(2, 3), keepdim=True),
    'sum with a channel': lambda x, y, w: x + y[:, :1],
    'sum of others': lambda x, y, w: x + y[:, :, :5],
    'side by side': lambda x, y, w: torch.cat((x, y), 1),
    'along the last': lambda x, y, w: torch.cat([x, y[..., :3]], dim=-1),
    'not side by side': lambda x, y, w: torch.cat([x, y[..., :3]], 1),
    'normalized': lambda x, y, w: F.silu(F.batch_norm(x, torch.zeros(6), torch.ones(6)), inplace=True),
}


def outcome(call, *tensors):
    try:
        return tuple(call(*tensors).shape)
    except RuntimeError:
        return 'refused'


@pytest.mark.parametrize('name', CALLS)
def test_shapes_are_those_of_the_operators(name):
    wanted = outcome(CALLS[name], X.clone(), Y, W)
    assert wanted == 'refused' or len(wanted) == 4
    with Weightless():
        assert outcome(CALLS[name], *(t.to('meta') for t in (X, Y, W))) == wanted


def test_shapes_and_steps_load_no_compiler():
    """Neither PyTorch's compiler nor SymPy, whose imports take seconds, longer than all shapes and a step."""
    code = """
import sys, torch, yaml
from models.quantize.weightless import parameter_shapes
from models.quantize.finetuning.training_step import Adam
from utils.qat.core.log import quiet_upstream
before = set(sys.modules)  # an old PyTorch imports SymPy by itself
with quiet_upstream():
    assert parameter_shapes(yaml.safe_load(open(sys.argv[1])), sys.argv[1])
weight = torch.ones(3, requires_grad=True)
adam = Adam([weight], lr=0.1)
weight.sum().backward()
adam.step()
adam.zero_grad()
adam.load_state_dict(adam.state_dict())
assert abs(weight - 0.9).max() < 1e-6, weight
assert not {'torch._dynamo', 'sympy'} & (sys.modules.keys() - before)
"""
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, '-c', code, config_file('demo')], env=environment, check=True)
