"""--device → torch.device, and a device in words."""

import os

from utils.qat.core.distributed import rank, world_size
from utils.qat.core.errors import QatError


def select_device(text):
    """--device as upstream takes it ('', 'cpu', '0', 'cuda:0', 'mps') → torch.device. '' is the first GPU, else the CPU.

    Several processes of a torchrun have a GPU each, the one of their number.
    """
    import torch  # here, so that `-h` does not pay for it

    world, found = world_size(), torch.cuda.device_count()
    if world != int(os.environ.get('LOCAL_WORLD_SIZE', world)):
        raise QatError('torchrun --nnodes: this runs on one machine; leave it out')
    if world > 1 and text not in ('', 'cpu'):
        raise QatError(
            f'--device {text}: the {world} processes of torchrun take GPU 0 to {world - 1}, one each; leave --device '
            "out (CUDA_VISIBLE_DEVICES chooses the GPUs), or use 'cpu'"
        )
    if world == 1 or text == 'cpu' or not torch.cuda.is_available():
        return _one_device(text)
    if found < world:
        raise QatError(
            f'torchrun --nproc_per_node {world}: this machine has {found} GPU{"s" * (found != 1)} that PyTorch can use, '
            f'and each process needs its own; start {found}, or use --device cpu'
        )
    torch.cuda.set_device(rank())  # for what asks for no device: synchronize(), streams
    return torch.device('cuda', rank())


def _one_device(text):
    """The device of a process that is alone."""
    import torch

    text = str(text).strip().lower().replace('cuda:', '')
    if text in ('cpu', '') and (text == 'cpu' or not torch.cuda.is_available()):
        return torch.device('cpu')
    if text == 'mps':
        if not torch.backends.mps.is_available():
            raise QatError('--device mps: not available here; use --device cpu')
        return torch.device('mps')
    index = text or '0'
    if not index.isdigit():
        raise QatError(f"--device {text}: use one GPU number (such as 0) or 'cpu'")
    if int(index) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        others = {0: '', 1: ' or 0'}.get(found, f' or 0..{found - 1}')
        raise QatError(
            f'--device {text}: this machine has {found or "no"} GPU{"s" * (found != 1)} that PyTorch can use; '
            f'use --device cpu{others}'
        )
    return torch.device('cuda', int(index))


def describe(device):
    """What is computed on, in words: a torch.device, of a torchrun the first process's."""
    import torch

    name = f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device).upper()
    return name + (f' in the first of {world_size()} processes' if world_size() > 1 else '')
