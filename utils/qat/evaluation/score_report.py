"""Metrics of one model → metrics.json, report.md and its picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from utils.qat.config.defaults import closing
from utils.qat.config.qat import EvalConfig
from utils.qat.core.device import describe
from utils.qat.core.files import write_json
from utils.qat.core.machine import machine, machine_table, versions
from utils.qat.core.markdown import document, escaped, image, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, difference, in_words, plus_minus
from utils.qat.evaluation.evaluate import Metrics
from utils.qat.evaluation.figures import class_table, columns, differences, figures
from utils.qat.evaluation.plots import plot_classes


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
    following: str,
    baseline: Metrics | None = None,
) -> None:
    """Write metrics.json, report.md and classes.png.

    Args:
        folder: existing folder for the files.
        config: settings of the command.
        metrics: metrics of the model.
        device: where the model ran.
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
            escaped(f'{metrics.images} images with {metrics.instances} objects. Computed on {describe(device)}.'),
            *tables(config, metrics, baseline),
            *pictures,
            '## Times',
            markdown_table(('step', 'ms per image'), metrics.ms_per_image.items()),
            '## Machine',
            machine_table(found),
            *closing(asdict(config), type(config), versions(), following),
        ],
    )
