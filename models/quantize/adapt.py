"""Float model → float model: it learns to compute what it did with other activation functions."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from models.quantize.activations import exchanges
from models.quantize.finetuning.loop import Epoch, Learning, finetune
from utils.qat.core.log import unshown
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Images

RATE = 1e-3  # the highest learning rate
EXCHANGED_AT = 0.3  # share of the steps after which only the new functions are left


def adapt(
    student: Network,
    teacher: Network,
    images: Images | Sequence,
    how: Learning,
    progress: Callable[[Iterator, int, int], Iterable] = unshown,
    after: Epoch | None = None,
) -> Iterator[Epoch]:
    """Teach an exchanged float model (see activations.exchanged) in place, and yield after each epoch, see loop.finetune.

    The functions change gradually: all at once the network begins with no detection at all, and ends lower.
    """
    share = next(iter(exchanges(student).values())).share
    yield from finetune(
        student, teacher, images, how, progress, after, lambda done: share.fill_(min(1.0, done / EXCHANGED_AT))
    )
