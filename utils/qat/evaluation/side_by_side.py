"""Show the best detections or classes of several models for a few images side by side: lines, a table and a picture.

A line has a detection of the first model, the reference, with its counterpart in each other model; or a detection that only
another model has. For a classifier a line has a class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from utils.metrics import box_iou

from utils.qat.config.tasks import Labelled, Task
from utils.qat.core.files import write_picture
from utils.qat.core.text import escaped, literal, markdown_table, number
from utils.qat.evaluation.compare_detections import SAME_DETECTION, SAME_OBJECT

LABEL = 0.04  # side of a rank in a picture / side of the picture
SAME, MOVED, CLASS, LOST, NEW = 'same', 'moved', 'other class', 'lost', 'new'
COLOURS = {SAME: '#2ca02c', MOVED: '#1f77b4', CLASS: '#9467bd', LOST: '#d62728', NEW: '#ff7f0e'}
MEANING = {
    SAME: f'the same class, IoU at least {SAME_DETECTION}',
    MOVED: f'the same class, IoU at least {SAME_OBJECT}',
    CLASS: f'another class, IoU at least {SAME_OBJECT}',
    LOST: 'only the first model has it',
    NEW: 'the first model does not have it',
}
MEANING_OF_CLASSES = {SAME: 'the same rank', MOVED: 'another rank', NEW: 'not among the best of the first model'}


@dataclass
class Found:
    """A detection, or a class of a classifier, by one model."""

    rank: int  # from 1
    name: str  # of its class
    score: float
    box: list[float] | None = None  # x1, y1, x2, y2 in pixels of the model's input; None for a class


@dataclass
class Line:
    """A detection of the reference with its counterparts, or a detection that only one other model has."""

    reference: Found | None
    others: list[Found | None]
    marks: list[str]  # of each other model: SAME, MOVED, CLASS, LOST or NEW; '' if the line does not concern it


@dataclass
class Example:
    """An image, and the detections or classes of the models."""

    image: np.ndarray = field(repr=False)  # uint8 RGB [H, W, 3], as the models see it
    path: str
    lines: list[Line]

    def plain(self) -> dict[str, object]:
        """Convert to plain values, without the image."""
        return {'image': self.path, 'lines': [asdict(line) for line in self.lines]}

    @property
    def difference(self) -> float:
        """The sum of the differences of scores between the reference and the others; a missing detection has the score 0."""
        total = 0.0
        for line in self.lines:
            first = line.reference.score if line.reference else 0.0
            for match, mark in zip(line.others, line.marks):
                other = match.score if match else 0.0
                total += abs(first) + abs(other) if mark == CLASS else abs(first - other) if mark else 0.0
        return total


def _new_line(detection: Found, which: int, others: int) -> Line:
    """Make the line for a detection or class that only one of the other models has: number `which` of `others`, from 0."""
    detections: list[Found | None] = [None] * others
    marks = [''] * others
    detections[which], marks[which] = detection, NEW
    return Line(None, detections, marks)


def detection_lines(results: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Line]:
    """Match the `top` detections, of FP32 [n, 6], of several models in one image, the reference first.

    The counterpart of a reference detection is the free detection of the same class with the largest IoU among all of the
    other model, else one of another class; better detections choose first. Those of the other model's `top` that are no
    counterpart are new.
    """

    def made(rows: torch.Tensor, i: int) -> Found:
        *box, score, kind = rows[i].tolist()
        return Found(i + 1, names.get(int(kind), str(int(kind))), score, box)

    first, others = results[0], results[1:]
    lines = [Line(made(first, i), [], []) for i in range(min(top, len(first)))]
    extra = []
    for model, rows in enumerate(others):
        pairs, unknown = _counterparts(first, rows)
        for i, line in enumerate(lines):
            j, mark = pairs.get(i, (None, LOST))
            line.others.append(None if j is None else made(rows, j))
            line.marks.append(mark)
        extra += [_new_line(made(rows, j), model, len(others)) for j in unknown if j < top]
    return lines + extra


def _counterparts(first: torch.Tensor, rows: torch.Tensor) -> tuple[dict[int, tuple[int, str]], list[int]]:
    """Pair the detections of two models: index in `first` → (index in `rows`, mark), and the indices in `rows` without a pair."""
    pairs: dict[int, tuple[int, str]] = {}
    taken: set[int] = set()
    iou, same = box_iou(first[:, :4], rows[:, :4]).numpy(), (first[:, None, 5] == rows[:, 5]).numpy()
    for alike, of_same_class in ((same, True), (~same, False)):
        free = np.where(alike & (iou >= SAME_OBJECT), iou, 0)
        free[:, [*taken]] = 0
        for i in range(len(first)):
            if i not in pairs and free[i].any():
                j = int(free[i].argmax())
                pairs[i] = j, (SAME if free[i, j] >= SAME_DETECTION else MOVED) if of_same_class else CLASS
                free[:, j] = 0
                taken.add(j)
    return pairs, [j for j in range(len(rows)) if j not in taken]


def class_lines(scores: Sequence[torch.Tensor], names: Mapping[int, str], top: int) -> list[Line]:
    """Match the `top` classes, by scores [C], of several classifiers for one image, the reference first.

    A class is moved if it has another rank in the other classifier, and new if it is not among the `top` of the
    reference.
    """
    orders = [one.argsort(descending=True, stable=True).tolist() for one in scores]
    ranks = [{c: rank for rank, c in enumerate(order, 1)} for order in orders]

    def made(model: int, c: int) -> Found:
        return Found(ranks[model][c], names.get(c, str(c)), float(scores[model][c]))

    lines = []
    for c in orders[0][:top]:
        marks = [SAME if ranks[m][c] == ranks[0][c] else MOVED for m in range(1, len(scores))]
        lines.append(Line(made(0, c), [made(m, c) for m in range(1, len(scores))], marks))
    for m in range(1, len(scores)):
        for c in orders[m][:top]:
            if ranks[0][c] > top:
                lines.append(_new_line(made(m, c), m - 1, len(scores) - 1))
    return lines


class Examples:
    """Examples from a series of images, those that differ most; `kept` has those so far, the largest difference first."""

    def __init__(self, number: int, task: Task, data: Labelled, top: int) -> None:
        """Start without examples: keep `number` of the images that will come, and the `top` detections of each."""
        self.number, self.task, self.names, self.top = number, task, data.names, top
        self.mean, self.std = (torch.tensor(three).view(3, 1, 1) for three in (data.mean, data.std))
        self.kept: list[Example] = []

    def look(self, image: torch.Tensor, path: str, results: Sequence[torch.Tensor]) -> None:
        """Take the next image: FP32 [3, H, W]; its path; detections [n, 6], or scores [C], of each model."""
        if not self.number:
            return
        lines = self.task.lines(results, self.names, self.top)
        pixels = ((image * self.std + self.mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        if lines:
            examples = [*self.kept, Example(pixels, path, lines)]
            self.kept = sorted(examples, key=lambda example: -example.difference)[: self.number]


def example_table(example: Example, models: Sequence[str]) -> str:
    """Format an example as a Markdown table; the reference is the first of the models."""

    def score(detection: Found | None) -> str:
        return number(detection.score if detection else None)

    rows = []
    for line in example.lines:
        whole = line.reference or next(filter(None, line.others))
        row: list[object] = [line.reference.rank if line.reference else '-', escaped(whole.name), score(line.reference)]
        for match, mark in zip(line.others, line.marks):
            change = '-'
            if match and line.reference:
                change = f'{round(match.score - line.reference.score, 4) + 0.0:+.4f}'  # + 0.0: no -0.0000
            said = f'{mark}: {match.name}' if match and mark == CLASS else mark
            if match and line.reference and match.rank != line.reference.rank:
                said += f', rank {match.rank}'
            row += [score(match), change, escaped(said or '-')]
        rows.append(row)
    titles = ['rank', 'class', models[0], *(title for model in models[1:] for title in (model, 'difference', 'mark'))]
    return markdown_table(titles, rows)


def plot_example(path: Path, example: Example, models: Sequence[str]) -> None:
    """Draw an example with at least one detection or class: the reference on the left, the other models on the right, lists of scores below.

    The numbers are ranks. Colours mark the differences from the reference; in its own picture they mark the difference of the
    first model that differs.
    """
    most = max(len(_of_model(example, m)) for m in range(len(models)))
    side, line = 4.6, 0.2
    text = line * most + 0.3
    height = side + text + 0.9
    figure = Figure(figsize=(side * len(models), height))
    above, below = figure.subplots(2, len(models), height_ratios=[side, text], squeeze=False)
    figure.subplots_adjust(0.01, 0.45 / height, 0.99, 1 - 0.35 / height, wspace=0.03, hspace=0.02)
    for column, (model, axes, scores) in enumerate(zip(models, above, below)):
        axes.imshow(example.image)
        axes.set_axis_off()
        scores.set_axis_off()
        name = f'{model}: {Path(example.path).name}' if column == 0 else model
        axes.set_title(literal(name), fontsize=10)
        labels: list[tuple[float, float]] = []
        for i, (detection, mark) in enumerate(_of_model(example, column)):
            tone, strong = COLOURS[mark], mark != SAME
            if detection.box:
                _draw_box(axes, detection, mark, labels)
            scores.text(
                0.02,
                1 - (i + 0.7) * line / text,
                literal(f'{detection.rank:>3}  {detection.score:.3f}  {detection.name}' + f'   ({mark})' * strong),
                fontsize=10,
                family='monospace',
                color=tone if strong else '0.15',
                va='center',
                transform=scores.transAxes,
            )
    boxes = any(line.reference and line.reference.box for line in example.lines)
    meaning = MEANING if boxes else MEANING_OF_CLASSES
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[mark]) for mark in meaning]
    figure.legend(
        handles, [f'{mark}: {text}' for mark, text in meaning.items()], loc='lower center', ncols=3, fontsize=7
    )
    write_picture(figure, path)


def _draw_box(axes: Axes, detection: Found, mark: str, labels: list[tuple[float, float]]) -> None:
    """Draw a box and its rank, beside other labels at the same corner and inside the picture, and add its place to `labels`."""
    x1, y1, x2, y2 = detection.box or [0.0] * 4
    strong = mark != SAME
    line, style = 2.2 if strong else 1.2, '--' if mark == LOST else '-'
    edge = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=COLOURS[mark], linewidth=line, linestyle=style)
    axes.add_patch(edge)
    width = axes.get_xlim()[1]
    size = LABEL * max(width, axes.get_ylim()[0])
    x = min(x1, width - size)
    # towards the middle: what leaves the picture is hidden by the next one
    step = size / 4 if x < width / 2 else -size / 4
    while any(abs(x - other_x) < size and abs(y1 - other_y) < size for other_x, other_y in labels):
        x += step
    labels.append((x, y1))
    box = {'facecolor': COLOURS[mark], 'edgecolor': 'none', 'pad': 1}
    axes.text(x, y1, str(detection.rank), fontsize=7, color='white', va='bottom' if y1 > 20 else 'top', bbox=box)


def _of_model(example: Example, model: int) -> list[tuple[Found, str]]:
    """List the detections of a model (0 = the reference) in an example with their marks, by rank.

    A mark of the reference is the first that is not SAME. For another model, counterparts beyond its `top` count as well.
    """
    pairs = []
    for line in example.lines:
        if model == 0 and line.reference:
            pairs.append((line.reference, next((mark for mark in line.marks if mark not in ('', SAME)), SAME)))
        elif model and (other := line.others[model - 1]):
            pairs.append((other, line.marks[model - 1]))
    return sorted(pairs, key=lambda pair: pair[0].rank)
