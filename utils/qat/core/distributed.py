"""The processes of one `torchrun` on one machine: their numbers, and the values that they exchange.

The environment gives the number of a process; torch.distributed has everything else. A process that torchrun did
not start is the first of one, and each exchange returns its own value. Values of the host travel through gloo,
tensors of GPUs through NCCL.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from utils.qat.core.errors import QatError

if TYPE_CHECKING:
    import torch


# Time that one process waits for another: the first may have to read the labels of a large data set. If a process
# dies, nobody waits: torchrun ends the others.
TIMEOUT = datetime.timedelta(hours=1)


def launched() -> bool:
    """Tell whether torchrun started this process."""
    return all(name in os.environ for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))


def rank() -> int:
    """Return the number of this process, in 0..world_size() - 1."""
    return int(os.environ['RANK']) if launched() else 0


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ['WORLD_SIZE']) if launched() else 1


def is_first() -> bool:
    """Tell whether this process is the first: it alone writes files and prints."""
    return rank() == 0


def on_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` on the first process, and a function that does nothing on the others."""
    return function if is_first() else lambda *_, **__: None


def join(device: torch.device) -> None:
    """Start the exchange between the processes.

    Args:
        device: the device that this process computes on.
    """
    import torch.distributed as dist

    if launched() and not dist.is_initialized():
        dist.init_process_group('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo', timeout=TIMEOUT)


def leave() -> None:
    """End the exchange that `join` started.

    Not after an error: it waits for all processes.
    """
    import torch.distributed as dist

    if launched() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _of_all() -> Iterator[None]:
    """Turn an error of an exchange on the host into one line: another process has died or does not answer."""
    import torch

    try:
        with torch.inference_mode(False):  # PyTorch 2.4 cannot receive in it
            yield
    except RuntimeError as e:  # gloo has no class for it
        raise QatError(
            f'another process of torchrun failed, see what it said, or was silent for {TIMEOUT} '
            f'({" ".join(str(e).split())[:200]})'
        ) from e


def from_first(thing: Any = None) -> Any:
    """Return the first process's value on every process; the others wait for it.

    Args:
        thing: on the first process, the value (picklable); ignored on the others.

    Raises:
        QatError: another process failed, or did not answer within TIMEOUT.
    """
    if world_size() == 1:
        return thing
    import torch.distributed as dist

    things = [thing]
    with _of_all():
        dist.broadcast_object_list(things)
    return things[0]


def merged(batches: list) -> list:
    """Merge the results that the processes have for their batches (see loaders.Shard).

    Args:
        batches: results of this process, one for each of its batches (picklable).

    Returns:
        On the first process the results of all batches, in the order of one process alone; on the others an empty list.

    Raises:
        QatError: another process failed, or did not answer within TIMEOUT.
    """
    if world_size() == 1:
        return batches
    import torch.distributed as dist

    shards: list[Any] | None = [None] * world_size() if is_first() else None
    with _of_all():
        dist.gather_object(batches, shards)
    nothing = object()
    return [x for x in chain(*zip_longest(*shards or (), fillvalue=nothing)) if x is not nothing]


def all_reduce(tensor: torch.Tensor, operation: str = 'SUM') -> torch.Tensor:
    """Reduce a tensor over the processes, in place, without waiting for a GPU.

    Args:
        tensor: of one shape in all processes; for MAX, without NaN.
        operation: a name of torch.distributed.ReduceOp: 'SUM' or 'MAX'.

    Returns:
        `tensor`.
    """
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor


def take_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with the first process's, in place.

    Args:
        tensors: contiguous, and the same number and shapes in all processes.
    """
    if world_size() > 1:
        import torch.distributed as dist

        for tensor in tensors:
            dist.broadcast(tensor, 0)


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Run the block on the first process, then on the others, which find the files that the first has written."""
    if not is_first():
        from_first()
    yield
    if is_first():
        from_first()
