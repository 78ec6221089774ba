"""Masks that autograd keeps for the backward pass, at one bit per value instead of a byte.

Fake-quantizers keep one for every value they see: a quarter as much as the convolutions around them keep in half precision.
"""

import torch
from torch.autograd.graph import saved_tensors_hooks

# Eight bytes 0 or 1, as one INT64, times this: their bits side by side in the highest byte; no two products meet elsewhere
GATHER = 0x0102040810204080


class PackedMasks(saved_tensors_hooks):
    """Context of a forward pass on `device`: boolean tensors kept for the backward pass are packed. Values do not change.

    Those with gaps in memory, or that do not start and end at a multiple of 8 bytes, are kept as they are.
    """

    def __init__(self, device):
        super().__init__(self._pack, self._unpack)
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        self.bytes = bits.to(torch.uint8).view(torch.int64).flatten().to(device)  # the eight of each packed one

    @staticmethod
    def _pack(tensor):
        dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
        if tensor.dtype != torch.bool or not dense or tensor.numel() % 8 or tensor.storage_offset() % 8:
            return tensor
        values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.int64)
        return (values * GATHER).view(torch.uint8)[7::8].contiguous(), tensor.shape, tensor.stride()

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        bits, shape, stride = packed
        return self.bytes.index_select(0, bits.int()).view(torch.bool).as_strided(shape, stride)
