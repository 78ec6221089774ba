"""Masks that autograd keeps for the backward pass take one bit per value instead of one byte.

Fake-quantizers keep a mask of all their inputs. In bytes this is a quarter of the memory that the convolutions around
them keep in half precision.
"""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

# Eight bytes 0 or 1, read as one INT64, times this number have their bits side by side in the highest byte: no two
# products meet in another place
GATHER = 0x0102040810204080


class PackedMasks(saved_tensors_hooks):
    """Context of a forward pass that packs the boolean tensors kept for the backward pass. Values do not change.

    A tensor with gaps in memory, or one that does not start and end at a multiple of 8 bytes, is kept as it is.

    Args:
        device: of the forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        # INT64 [256]: the eight bytes of each packed byte
        self.bytes = bits.to(torch.uint8).view(torch.int64).flatten().to(device)

    @staticmethod
    def _pack(tensor: torch.Tensor) -> Any:
        dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
        if tensor.dtype != torch.bool or not dense or tensor.numel() % 8 or tensor.storage_offset() % 8:
            return tensor
        values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.int64)
        return (values * GATHER).view(torch.uint8)[7::8].contiguous(), tensor.shape, tensor.stride()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        bits, shape, stride = packed
        return self.bytes.index_select(0, bits.int()).view(torch.bool).as_strided(shape, stride)
