"""The processes of one `torchrun` on one machine: who they are, and what they exchange.

The environment says who a process is; everything else is kept by torch.distributed. A process that torchrun did not start is
the first of one, and all exchanges give it back what it has. Values of the host travel through gloo, tensors of GPUs through NCCL.
"""

import contextlib
import datetime
import os
from itertools import chain, zip_longest

from utils.qat.core.errors import QatError

# How long one process waits for another: the first may have the labels of a large data set to read. If one dies nobody waits:
# torchrun ends the others.
TIMEOUT = datetime.timedelta(hours=1)


def launched():
    """Whether torchrun started this process."""
    return all(name in os.environ for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))


def rank():
    """Number of this process, in 0..world_size() - 1."""
    return int(os.environ['RANK']) if launched() else 0


def world_size():
    """How many processes there are."""
    return int(os.environ['WORLD_SIZE']) if launched() else 1


def is_first():
    """Whether this process is the one that writes files and talks."""
    return rank() == 0


def on_first(function):
    """`function` on the first process; on the others, one that does nothing."""
    return function if is_first() else lambda *_, **__: None


def join(device):
    """Let the processes exchange from now on; `device` (a torch.device) is what this one computes on."""
    if launched():
        import torch.distributed as dist

        dist.init_process_group('cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo', timeout=TIMEOUT)


def leave():
    """The end of what `join` began. Not after an error: it takes all processes."""
    import torch.distributed as dist

    if launched() and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def _of_all():
    """Context of an exchange on the host: what a process meets if another has died is one line."""
    import torch

    try:
        with torch.inference_mode(False):  # PyTorch 2.4 cannot receive in it
            yield
    except RuntimeError as e:  # gloo has no class for it
        raise QatError(
            f'another process of torchrun failed, see what it said, or was silent for {TIMEOUT} '
            f'({" ".join(str(e).split())[:200]})'
        ) from e


def from_first(thing=None):
    """What the first process calls with (picklable), on every process; the others wait until it is there."""
    if world_size() == 1:
        return thing
    import torch.distributed as dist

    things = [thing]
    with _of_all():
        dist.broadcast_object_list(things)
    return things[0]


def merged(batches):
    """Results of this process, one for each of its batches (picklable) → on the first process, those of all batches in the
    order that they have in one process alone; on the others, an empty list. See loaders.Shard."""
    if world_size() == 1:
        return batches
    import torch.distributed as dist

    shards = [None] * world_size() if is_first() else None
    with _of_all():
        dist.gather_object(batches, shards)
    nothing = object()
    return [x for x in chain(*zip_longest(*shards or (), fillvalue=nothing)) if x is not nothing]


def all_reduce(tensor, operation='SUM'):
    """Add `tensor` (or MAX: its elements, none NaN) up over the processes, in place; returns it. Does not wait for a GPU."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor


def take_from_first(tensors):
    """Overwrite `tensors` (contiguous) with those of the first process."""
    if world_size() > 1:
        import torch.distributed as dist

        for tensor in tensors:
            dist.broadcast(tensor, 0)


@contextlib.contextmanager
def first_goes_ahead():
    """Context: the first process does what is inside, then the others do, who find the files that it wrote."""
    if not is_first():
        from_first()
    yield
    if is_first():
        from_first()
