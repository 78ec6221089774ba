"""Metrics of one model → metrics.json, report.md and its picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.qat.config.qat import EvalConfig
from utils.qat.config.settings import closing
from utils.qat.core.files import distinct_names, write_document, write_json
from utils.qat.core.machine import describe, machine, machine_table, versions
from utils.qat.core.text import escaped, image, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, boxes_and_masks, difference, in_points, in_words, plus_minus
from utils.qat.evaluation.classes import ClassMetrics, distance
from utils.qat.evaluation.detection_scores import Metrics
from utils.qat.evaluation.plots import plot_classes
from utils.qat.evaluation.score_tables import class_table, merit_title, models_table, score_cells, score_titles


class Score(NamedTuple):
    """A file and its metrics."""

    file: Path
    seen: str  # preparation of the images, in words
    metrics: Metrics


def several_table(scores: Sequence[Score]) -> str:
    """Format the metrics of several files on the same images as a Markdown table, with differences from the first."""
    first = scores[0].metrics
    titles, masks = score_titles(*(score.metrics.plain() for score in scores))
    rows = []
    for name, score in zip(distinct_names([score.file for score in scores]), scores):
        less_first = ['-'] * (1 + masks)
        if score.metrics is not first:
            less_first = list(map(in_points, boxes_and_masks(difference(first.resampled, score.metrics.resampled))))
        seen = score.seen.removeprefix('as ')
        rows.append((name, seen, *score_cells(score.metrics.plain(), masks), *less_first))
    points = (f'{merit_title(first.plain())} - first, points', 'mask AP - first, points')[: 1 + masks]
    return markdown_table(('file', 'images', *titles, *points), rows)


def coco_table(metrics: Metrics) -> str:
    """Format pycocotools' figures of boxes and, if there are any, of masks as a Markdown table."""
    parts: dict[str, Any] = {'boxes': metrics.coco, **({'masks': metrics.mask['coco']} if metrics.mask else {})}
    return markdown_table(
        ('pycocotools', *(key.upper() for key in parts['boxes'])),
        [(part, *(f'{v:.4f}' for v in found.values())) for part, found in parts.items()],
    )


def with_distance(metrics: Any, baseline: Any) -> dict[str, Any]:
    """Return plain metrics; for a classifier with classes.distance from a baseline on the same images, if there is one."""
    if not isinstance(metrics, ClassMetrics) or not isinstance(baseline, ClassMetrics):
        return metrics.plain()
    return {**metrics.plain(), **distance(metrics.scores, baseline.scores)}


def tables(config: EvalConfig, metrics: Metrics, baseline: Metrics | None) -> list[str]:
    """Format all metrics as Markdown tables; with a baseline both need resamples."""
    compared, plain = [], metrics.plain()
    if baseline and config.baseline:
        against, plain = difference(baseline.resampled, metrics.resampled), with_distance(metrics, baseline)
        names, models = distinct_names([config.baseline, config.weights]), (baseline.plain(), plain)
        words = in_words(against, merit_title(plain))
        compared = [models_table(names, models, [plus_minus(against)]), f'{words} ({EXPLAINED})']
    return [*compared, class_table(plain), *([coco_table(metrics)] if metrics.coco else [])]


def write_scores(
    folder: Path,
    config: EvalConfig,
    metrics: Metrics,
    device: torch.device,
    seen: str,
    following: str,
    baseline: Metrics | None,
) -> None:
    """Write metrics.json, report.md and classes.png into `folder`; `seen`: preparation of the images, in words."""
    here, against = machine(device), {}
    if baseline:
        against = {
            'baseline': baseline.plain(),
            'against_baseline': difference(baseline.resampled, metrics.resampled),
        }
    write_json(
        folder / 'metrics.json',
        {
            'settings': asdict(config),
            'versions': versions(),
            'device': describe(device),
            'seen': seen,
            'machine': here,
            **with_distance(metrics, baseline),
            **against,
            'times': {'ms_per_image': metrics.ms_per_image},
        },
    )
    objects = f', with {metrics.instances} objects' if hasattr(metrics, 'instances') else ''
    pictures = []
    if metrics.per_class:  # empty if no detection is correct
        models = {config.baseline: baseline, config.weights: metrics} if config.baseline else {config.weights: metrics}
        names = distinct_names(list(models))
        plot_classes(folder / 'classes.png', {name: m.plain() for name, m in zip(names, models.values()) if m})
        pictures.append(image(f'{merit_title(metrics.plain())} of each class', 'classes.png'))
    write_document(
        folder / 'report.md',
        f'{config.weights.name} on {config.data.name}',
        [
            escaped(f'{metrics.images} images {seen}{objects}. Computed on {describe(device)}.'),
            *tables(config, metrics, baseline),
            *pictures,
            '## Times',
            markdown_table(('step', 'ms per image'), metrics.ms_per_image.items()),
            '## Machine',
            machine_table(here),
            *closing(asdict(config), type(config), versions(), following),
        ],
    )
