"""Finding the shapes of a network, and a step of training, load no compiler."""

import os
import subprocess
import sys

from helpers.zoo import config_file


def test_shapes_and_steps_load_no_compiler():
    """Neither PyTorch's compiler nor SymPy, whose imports take seconds, longer than all shapes and a step."""
    code = """
import sys, torch, yaml
from models.quantize.reparameterize import parameter_shapes
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
