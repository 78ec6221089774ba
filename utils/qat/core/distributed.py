"""The processes of one `torchrun` on one machine: their numbers, and the values that they exchange.

Without torchrun a process is the first of one, and each exchange returns its own value. Values on the host are exchanged
through gloo, tensors on GPUs through NCCL. An exchange raises QatError if another process has failed or does not answer
within TIMEOUT.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError, reporting

if TYPE_CHECKING:
    import torch


# Time that one process waits for another: the first may have to read the labels of a large data set. If a process
# dies, nobody waits: torchrun ends the others.
TIMEOUT = datetime.timedelta(hours=1)


NUMBERS = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT'
WITHOUT = f'without torchrun: unset {" ".join(NUMBERS)} MASTER_ADDR'


def launched() -> bool:
    """Tell whether torchrun started this process: it sets all of these variables; other programs set only some."""
    numbers = (os.environ.get(name, '') for name in NUMBERS)
    return 'MASTER_ADDR' in os.environ and all(number.isdecimal() for number in numbers)


def require_numbers() -> None:
    """Raise QatError if a variable of torchrun is no number or out of range; upstream reads them too, whoever set them."""
    for name in (*NUMBERS, 'LOCAL_WORLD_SIZE'):
        value = os.environ.get(name, '0')
        if not value.removeprefix('-').isdecimal():
            raise QatError(f'{name}={value}: must be a whole number, which torchrun sets; {WITHOUT}')
    if rank() >= world_size():
        raise QatError(f'RANK={rank()}: must be less than WORLD_SIZE={world_size()}, as torchrun sets it; {WITHOUT}')


def rank() -> int:
    """Return the number of this process, in 0..world_size() - 1."""
    return int(os.environ['RANK']) if launched() else 0


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ['WORLD_SIZE']) if launched() else 1


def is_first() -> bool:
    """Tell whether this process is the first: it alone writes files and prints."""
    return rank() == 0


def on_first(function: Callable[..., object]) -> Callable[..., object]:
    """Return `function` on the first process, and a function that does nothing on the others."""
    return function if is_first() else lambda *_, **__: None


def join(device: torch.device) -> None:
    """Start the exchange between the processes."""
    import torch.distributed as dist

    if launched() and not dist.is_initialized():
        with reporting('the processes of torchrun do not find each other', RuntimeError, ValueError, remedy=WITHOUT):
            dist.init_process_group('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo', timeout=TIMEOUT)


def leave() -> None:
    """End the exchange that `join` started; not after an error, because it waits for all processes."""
    import torch.distributed as dist

    if launched() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _of_all() -> Iterator[None]:
    """Convert an error of an exchange on the host to a QatError: another process has died or does not answer."""
    import torch

    failed = f'another process of torchrun failed, see what it said, or was silent for {TIMEOUT}'
    # gloo has no class for its errors; PyTorch 2.4 cannot receive in inference mode
    with reporting(failed, RuntimeError), torch.inference_mode(False):
        yield


def from_first(thing: object = None) -> Any:
    """Return the first process's value (picklable) on every process; the others wait for it."""
    if world_size() == 1:
        return thing
    import torch.distributed as dist

    things = [thing]
    with _of_all():
        dist.broadcast_object_list(things)
    return things[0]


def merged(batches: list) -> list:
    """Merge the processes' results (picklable) for their batches into the order of one process alone.

    Only the first process gets them; the others get an empty list.
    """
    if world_size() == 1:
        return batches
    import torch.distributed as dist

    shards: list[object] | None = [None] * world_size() if is_first() else None
    with _of_all():
        dist.gather_object(batches, shards)
    nothing = object()
    return [x for x in chain(*zip_longest(*shards or (), fillvalue=nothing)) if x is not nothing]


def all_reduce(tensor: torch.Tensor, operation: str = 'SUM') -> torch.Tensor:
    """Reduce a tensor over the processes, in place, without waiting for a GPU, by 'SUM' or (without NaN) by 'MAX'."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor


def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite contiguous tensors with the first process's, in place."""
    if world_size() > 1:
        import torch.distributed as dist

        for tensor in tensors:
            dist.broadcast(tensor, 0)


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Run the block on the first process, then on the others, so that they find the files of the first."""
    if not is_first():
        from_first()
    yield
    if is_first():
        from_first()
