"""The device of a process: --device → torch.device → its description."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from utils.qat.core.distributed import rank, world_size
from utils.qat.core.errors import QatError

if TYPE_CHECKING:
    import torch

INSTRUCTIONS = {
    'AVX2': 'avx2',
    'AVX-VNNI': 'avx_vnni',
    'AVX-512': 'avx512f',
    'AVX512-VNNI': 'avx512_vnni',
    'AVX512-BF16': 'avx512_bf16',
    'AMX-INT8': 'amx_int8',
    'AMX-BF16': 'amx_bf16',
    'NEON-DOT': 'asimddp',
    'I8MM': 'i8mm',
    'SVE': 'sve',
}  # name → flag of Linux
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def select_device(text: str) -> torch.device:
    """Select the device of --device; a GPU becomes the current device of streams and kernels.

    `text` has upstream's form: 'cpu', '0', 'cuda:0', 'mps'; '' is the first GPU, or the CPU if there is none. Under
    torchrun each process takes the GPU with its own number.
    """
    import torch  # here, because `-h` must not load it

    device = _device_of(text)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    return device


def _device_of(text: str) -> torch.device:
    """Find the device of --device for this process; see select_device."""
    import torch

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
    return torch.device('cuda', rank())


def _one_device(text: str) -> torch.device:
    """Select the device of a process without torchrun."""
    import torch

    text = str(text).strip().lower().replace('cuda:', '')
    if text in ('cpu', '') and (text == 'cpu' or not torch.cuda.is_available()):
        _keep_freed_memory()
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


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of a freed tensor for the next one; other C libraries are not changed.

    By default it returns every large tensor to the system, which clears each page of the next one: a fifth of the time of a
    forward pass of 10 images at 640 px.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**31 - 1)


def describe(device: torch.device) -> str:
    """Describe a device in words; under torchrun, the device of the first process."""
    import torch

    name = f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device).upper()
    return name + (f' in the first of {world_size()} processes' if world_size() > 1 else '')


def instruction_flags() -> list[str]:
    """Return the flags of INSTRUCTIONS that Linux lists for this CPU; empty if the system does not tell."""
    try:
        text = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return []
    flags = set(next((line for line in text.splitlines() if line.startswith(('flags', 'Features'))), '').split())
    return [flag for flag in INSTRUCTIONS.values() if flag in flags]


def instruction_sets() -> list[str]:
    """Name the instructions of this CPU that speed up INT8 and BF16; empty if the system does not tell."""
    flags = instruction_flags()
    return [name for name, flag in INSTRUCTIONS.items() if flag in flags]
