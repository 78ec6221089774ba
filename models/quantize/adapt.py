"""Float model → float model: it learns to compute what it did with other activation functions."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from models.quantize.activations import exchanges
from models.quantize.finetuning.loop import Epoch, Learning, finetune
from utils.qat.core.log import unshown
from utils.qat.core.upstream import Network
from utils.qat.data.loaders import Images

RATE = 1e-3  # the highest learning rate
EXCHANGED_AT = 0.3  # share of the steps after which only the new functions are left
# a function costs a detector so many points of AP, least and most, before fine-tuning on labels: function → number of classes → points; measured
# in docs/activations.md and edge.md. The number of images, 200 to 24,860 of one data set, changed AP by less than the confidence interval
LOST = {
    'relu': {31: (0.0, 0.6), 80: (5.7, 6.5)},
    'relu6': {3: (0.5, 0.9), 31: (0.5, 2.3), 80: (13.8, 16.7)},
}
FEWEST = {'images': 160, 'steps': 2000}  # the measurements had at least so many


def most_lost(activation: str, classes: int) -> float:
    """Return the most points of AP that a function costs data with as many classes, or more; infinite if none was measured."""
    return next((high for known, (_, high) in LOST[activation].items() if classes <= known), float('inf'))


def expected_loss(activation: str, classes: int, images: int, steps: int) -> str:
    """Say what a function will cost a model of so many classes, that learns it from so many images in so many steps."""
    least = max((low for known, (low, _) in LOST[activation].items() if known <= classes), default=0)
    most = most_lost(activation, classes)
    points = f'{least:g} to {most:g} points of AP' if most < float('inf') else f'{least:g} points of AP or more'
    few = [f'{n} {what}' for what, n in (('images', images), ('steps', steps)) if n < FEWEST[what]]
    fewer = f', or more, because {" and ".join(few)} are fewer than were measured' * bool(few)
    return f'with {classes} classes and {images} images expect to lose {points}{fewer}, before labels win some back in --epochs'


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
