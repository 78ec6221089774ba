"""Metrics of one model → metrics.json, report.md and its picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils.qat.config.defaults import closing
from utils.qat.config.qat import EvalConfig
from utils.qat.core.device import describe
from utils.qat.core.files import write_json
from utils.qat.core.machine import machine, machine_table, versions
from utils.qat.core.markdown import document, escaped, image, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, difference, in_words, parts, plus_minus, points
from utils.qat.evaluation.evaluate import Metrics
from utils.qat.evaluation.figures import class_table, columns, differences, figures
from utils.qat.evaluation.plots import plot_classes


class Score(NamedTuple):
    """A file and its metrics."""

    file: Path
    seen: str  # how it saw the images, in words
    metrics: Metrics


def several_table(scores: Sequence[Score]) -> str:
    """Write the metrics of several files on the same images as a Markdown table, with differences to the first."""
    first = scores[0].metrics
    titles, masks = columns(*(score.metrics.plain() for score in scores))

    def less_first(score: Score) -> list[str]:
        if score.metrics is first:
            return ['-'] * (1 + masks)
        found = parts(difference(first.resampled, score.metrics.resampled))
        return [points(part) for part in found]

    rows = [
        (score.file.name, score.seen.removeprefix('as '), *figures(score.metrics.plain(), masks), *less_first(score))
        for score in scores
    ]
    differences = ('AP - first, points', 'mask AP - first, points')[: 1 + masks]
    return markdown_table(('file', 'images', *titles, *differences), rows)


def coco_table(metrics: Metrics) -> str:
    """Write pycocotools' figures of boxes and, if there are any, of masks as a Markdown table."""
    parts: dict[str, Any] = {'boxes': metrics.coco, **({'masks': metrics.mask['coco']} if metrics.mask else {})}
    return markdown_table(
        ('pycocotools', *(key.upper() for key in parts['boxes'])),
        [(part, *(f'{v:.4f}' for v in found.values())) for part, found in parts.items()],
    )


def against_baseline(metrics: Metrics, baseline: Metrics) -> dict[str, Any]:
    """Compute the difference of AP to a baseline on the same images, with chance; see chance.difference."""
    return difference(baseline.resampled, metrics.resampled)


def tables(config: EvalConfig, metrics: Metrics, baseline: Metrics | None = None) -> list[str]:
    """Write all metrics as Markdown tables.

    Args:
        config: names the files.
        metrics: metrics of the model.
        baseline: metrics of config.baseline, with resamples in both.
    """
    compared = []
    if baseline and config.baseline:
        before, after, against = baseline.plain(), metrics.plain(), against_baseline(metrics, baseline)
        titles, masks = columns(before, after)
        rows = [
            (config.baseline.name, *figures(before, masks)),
            (config.weights.name, *figures(after, masks)),
            ('difference, points', *differences(after, before, masks, plus_minus(against))),
        ]
        compared = [markdown_table(('model', *titles), rows), f'{in_words(against)} ({EXPLAINED})']
    return [*compared, class_table(metrics.plain()), *([coco_table(metrics)] if metrics.coco else [])]


def write_scores(
    folder: Path,
    config: EvalConfig,
    metrics: Metrics,
    device: torch.device,
    seen: str,
    following: str,
    baseline: Metrics | None = None,
) -> None:
    """Write metrics.json, report.md and classes.png.

    Args:
        folder: existing folder for the files.
        config: settings of the command.
        metrics: metrics of the model.
        device: where the model ran.
        seen: how the model saw the images, in words.
        following: the next command for the user.
        baseline: see `tables`.
    """
    found = machine(device)
    write_json(
        folder / 'metrics.json',
        {
            'settings': asdict(config),
            'versions': versions(),
            'device': describe(device),
            'seen': seen,
            'machine': found,
            **metrics.plain(),
            **(
                {'baseline': baseline.plain(), 'against_baseline': against_baseline(metrics, baseline)}
                if baseline
                else {}
            ),
            'times': {'ms_per_image': metrics.ms_per_image},
        },
    )
    pictures = []
    if metrics.per_class:  # empty if no detection is correct
        models = {'baseline': baseline.plain()} if baseline else {}
        models[config.weights.name] = metrics.plain()
        plot_classes(folder / 'classes.png', models)
        pictures.append(image('AP of each class', 'classes.png'))
    document(
        folder / 'report.md',
        f'{config.weights.name} on {config.data.name}',
        [
            escaped(
                f'{metrics.images} images {seen}, with {metrics.instances} objects. Computed on {describe(device)}.'
            ),
            *tables(config, metrics, baseline),
            *pictures,
            '## Times',
            markdown_table(('step', 'ms per image'), metrics.ms_per_image.items()),
            '## Machine',
            machine_table(found),
            *closing(asdict(config), type(config), versions(), following),
        ],
    )
