"""Metrics of one model → metrics.json, report.md and its picture."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.qat.config.defaults import closing
from utils.qat.config.qat import EvalConfig
from utils.qat.core.files import write_json
from utils.qat.core.machine import versions
from utils.qat.core.markdown import document, escaped, image, markdown_table
from utils.qat.evaluation.evaluate import Metrics
from utils.qat.evaluation.figures import class_table
from utils.qat.evaluation.plots import plot_classes


def coco_table(metrics: Metrics) -> str:
    """Write pycocotools' figures of boxes and, if there are any, of masks as a Markdown table."""
    parts: dict[str, Any] = {'boxes': metrics.coco, **({'masks': metrics.mask['coco']} if metrics.mask else {})}
    return markdown_table(
        ('pycocotools', *(key.upper() for key in parts['boxes'])),
        [(part, *(f'{v:.4f}' for v in found.values())) for part, found in parts.items()],
    )


def tables(metrics: Metrics) -> list[str]:
    """Write all metrics as Markdown tables."""
    return [class_table(metrics.plain()), *([coco_table(metrics)] if metrics.coco else [])]


def write_scores(folder: Path, config: EvalConfig, metrics: Metrics, device: str, following: str) -> None:
    """Write metrics.json, report.md and classes.png.

    Args:
        folder: existing folder for the files.
        config: settings of the command.
        metrics: metrics of the model.
        device: the device in words.
        following: the next command for the user.
    """
    write_json(
        folder / 'metrics.json',
        {
            'settings': asdict(config),
            'versions': versions(),
            'device': device,
            **metrics.plain(),
            'times': {'ms_per_image': metrics.ms_per_image},
        },
    )
    pictures = []
    if metrics.per_class:  # empty if no detection is correct
        plot_classes(folder / 'classes.png', {config.weights.name: metrics.plain()})
        pictures.append(image('AP of each class', 'classes.png'))
    document(
        folder / 'report.md',
        f'{config.weights.name} on {config.data.name}',
        [
            escaped(f'{metrics.images} images with {metrics.instances} objects. Computed on {device}.'),
            *tables(metrics),
            *pictures,
            '## Times',
            markdown_table(('step', 'ms per image'), metrics.ms_per_image.items()),
            *closing(asdict(config), type(config), versions(), following),
        ],
    )
