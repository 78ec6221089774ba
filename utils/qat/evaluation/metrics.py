"""The scores of a model: for each task one class, which has their names and titles, reads and writes them, and says which one chooses.

Everything that shows or compares scores takes these classes; only a file of JSON has their plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from utils.qat.untrusted.json_schema import COUNT, INDEX, NONE, NUMBER, SHARE

if TYPE_CHECKING:
    import numpy as np

    from utils.qat.evaluation.interval import Change

NOTHING = 0.001  # AP or top-1 of a model that does not know the objects
FINDS_NOTHING = 'finds nothing here: check classes, image size, preprocessing'
UNWRITTEN = 'ms_per_image', 'resampled', 'scores'  # the times differ from run to run, the others are large


@dataclass(kw_only=True)
class Metrics:
    """Scores of a model on images with labels, in 0..1."""

    columns: ClassVar[dict[str, str]]  # field of a score → its title. The first one chooses models
    counted: ClassVar[str]  # the number of a class that tables show
    kinds: ClassVar[Mapping[str, object]]  # of `to_json`, see json_schema

    images: int
    per_class: list[dict[str, Any]] = field(default_factory=list)  # class, name, number and scores of each class
    mask: dict[str, Any] | None = None  # the same scores of masks, and `coco` as below; None without masks
    coco: dict[str, float] | None = None  # pycocotools' figures; None if the data is not COCO
    ms_per_image: dict[str, float] = field(default_factory=dict)  # of each step
    # of the first score on resamples of the images, see interval.py; None if not asked for
    resampled: np.ndarray | None = None

    @classmethod
    def choosing(cls) -> tuple[str, str]:
        """Return name and title of the score that chooses models: AP or top-1."""
        return next(iter(cls.columns.items()))

    @property
    def merit(self) -> float:
        """The score that chooses models; with masks the mean of boxes and masks."""
        name, _ = self.choosing()
        return (getattr(self, name) + self.mask[name]) / 2 if self.mask else getattr(self, name)

    def against(self, before: Metrics) -> Change:
        """Compare with another model, on the same resamples: both must have them; see interval.difference."""
        from utils.qat.evaluation.interval import difference

        assert self.resampled is not None and before.resampled is not None
        return difference(before.resampled, self.resampled)

    def to_json(self) -> dict[str, Any]:
        """Return the scores as plain values, the first ones first."""
        names = dict.fromkeys((*self.columns, *vars(self)))
        return {k: getattr(self, k) for k in names if k not in UNWRITTEN and getattr(self, k) is not None}


@dataclass(kw_only=True)
class DetectionMetrics(Metrics):
    """Scores of boxes, and of masks. AP is the mean over IoU 0.50:0.95. Precision and recall are at the best F1."""

    columns: ClassVar[dict[str, str]] = {'ap': 'AP', 'ap50': 'AP50', 'precision': 'P', 'recall': 'R'}
    counted = 'instances'
    figures: ClassVar[dict[str, object]] = dict.fromkeys(columns, SHARE)
    of_class: ClassVar[dict[str, object]] = {**figures, 'chance?': SHARE}  # half the width of the interval of its AP
    of_coco: ClassVar[dict[str, object]] = dict.fromkeys(('ap', 'ap50', 'ap75'), NUMBER)
    kinds: ClassVar[Mapping[str, object]] = {
        **figures,
        'images': COUNT,
        'instances': COUNT,
        'mask?': {**figures, 'coco?': of_coco},
        'coco?': of_coco,
        'per_class': [{'class': INDEX, 'name': str, 'instances': INDEX, **of_class, 'mask?': (NONE, of_class)}],
    }

    ap: float
    ap50: float
    precision: float
    recall: float
    instances: int


@dataclass(kw_only=True)
class ClassMetrics(Metrics):
    """Scores of a classifier, and its distance from another one (classes.distance) if it was compared."""

    columns: ClassVar[dict[str, str]] = {
        'top1': 'top-1',
        'top5': 'top-5',
        'mean_class': 'mean of classes',
        'agreement': 'agreement',
    }
    counted = 'images'
    kinds: ClassVar[Mapping[str, object]] = {
        **dict.fromkeys(('top1', 'top5', 'mean_class'), SHARE),
        'images': COUNT,
        'agreement?': SHARE,
        'divergence?': NUMBER,
        'per_class': [{'class': INDEX, 'name': str, 'images': COUNT, 'top1': SHARE, 'top5': SHARE, 'chance?': SHARE}],
    }

    top1: float  # share of the images whose class has the highest score
    top5: float  # whose class has one of the five highest scores
    mean_class: float  # mean over the classes of their top-1
    agreement: float | None = None
    divergence: float | None = None
    scores: Any = None  # tensor FP32 [images, C], by the names of the images' files


METRICS = DetectionMetrics, ClassMetrics


def from_json(values: Mapping[str, Any] | None) -> Metrics | None:
    """Read what `to_json` returned, among other values; None if there are no scores."""
    for kind in METRICS:
        if values and kind.choosing()[0] in values:
            return kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})
    return None


def finds_nothing(metrics: Metrics | None) -> str:
    """Return the advice for a model to which these images mean nothing, so that no difference from it does; else ''."""
    return FINDS_NOTHING * bool(metrics and metrics.merit < NOTHING)
