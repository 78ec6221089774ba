"""A comparison of two models → tables, compare.json, report.md and its picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.qat.config.compare import CompareConfig
from utils.qat.config.defaults import closing
from utils.qat.config.settings import Sides
from utils.qat.core.files import sha256, write_json
from utils.qat.core.markdown import document, image, markdown_table
from utils.qat.core.versions import versions
from utils.qat.evaluation.chance import RESAMPLES, in_words
from utils.qat.evaluation.figures import columns, figures
from utils.qat.evaluation.plots import plot_ranks


def comparison_tables(comparison: dict[str, Any], names: Sequence[str]) -> str:
    """Write a comparison of two detectors as Markdown tables: all predictions, the top detections, AP.

    Args:
        comparison: plain values of a Comparison.
        names: names of the reference and of the other model.
    """

    def number(value: float | None, form: str = '.3g') -> str:
        return '-' if value is None else format(value, form)

    tolerance = f'within rtol {comparison["rtol"]:g}, atol {comparison["atol"]:g}'
    elements = [  # empty if a model has NMS inside
        (text, number(e['max']), number(e['mean']), number(e['within'], '.2%'))
        for text, e in (
            ('boxes (px)', comparison['boxes']),
            ('scores', comparison['scores']),
            ('mask coefficients', comparison['coefficients']),
            ('prototypes', comparison['prototypes']),
        )
        if e
    ]
    ranks: list[tuple[Any, ...]] = [
        (
            r['rank'],
            r['images'],
            number(r['score'], '.4f'),
            number(r['score_error']),
            number(r['box_error']),
            number(r['disagreement'], '.1%'),
        )
        for r in comparison['ranks']
    ]
    ranks.append((f'top {comparison["top"]}', *['-'] * 4, number(comparison['disagreement'], '.1%')))
    tables = [markdown_table(('all predictions', 'max difference', 'mean difference', tolerance), elements)] * bool(
        elements
    )
    tables.append(
        markdown_table(('rank', 'images', 'score', 'score difference', 'box difference (px)', 'disagreement'), ranks)
    )
    if comparison['reference']:
        titles, masks = columns(comparison['reference'])
        rows = [(name, *figures(comparison[k], masks)) for name, k in zip(names, ('reference', 'other'))]
        tables.append(markdown_table(('model', *titles), rows))
        tables.append(
            f'the second less the first: {in_words(comparison["against_reference"])} (± holds 95 % of what other images of this '
            f'kind would give, by {RESAMPLES} resamples of these)'
        )
    iou = f', IoU of their masks {number(comparison["matched_mask"])}' if comparison['matched_mask'] is not None else ''
    tables.append(
        f'matched regardless of rank: {number(comparison["matched"], ".2%")} of the top {comparison["top"]} detections of '
        f'either model; mean difference {number(comparison["matched_score"])} of score, '
        f'{number(comparison["matched_box"])} px of box{iou}\n(nearly equal scores change places by rounding alone, and '
        'count as disagreement at both ranks)'
    )
    return '\n\n'.join(tables)


def class_comparison_tables(comparison: dict[str, Any], names: Sequence[str]) -> str:
    """Write a comparison of two classifiers as Markdown tables: all scores, the highest scores, accuracy.

    Args:
        comparison: plain values of a ClassComparison.
        names: names of the reference and of the other classifier.
    """
    e = comparison['scores']
    ranks = [
        (r['rank'], f'{r["score"]:.4f}', f'{r["score_error"]:.3g}', f'{r["disagreement"]:.1%}')
        for r in comparison['ranks']
    ]
    ranks.append((f'top {comparison["top"]}', '-', '-', f'{comparison["disagreement"]:.1%}'))
    tolerance = f'within rtol {comparison["rtol"]:g}, atol {comparison["atol"]:g}'
    tables = [
        markdown_table(
            ('all scores', 'max difference', 'mean difference', tolerance),
            [('scores', f'{e["max"]:.3g}', f'{e["mean"]:.3g}', f'{e["within"]:.2%}')],
        ),
        markdown_table(('rank', 'score', 'score difference', 'disagreement'), ranks),
    ]
    if comparison['reference']:
        rows = [
            (name, *(f'{comparison[k][top]:.4f}' for top in ('top1', 'top5')))
            for name, k in zip(names, ('reference', 'other'))
        ]
        tables.append(markdown_table(('model', 'top-1', 'top-5'), rows))
    return '\n\n'.join(tables)


def write_comparison(
    folder: Path, config: CompareConfig, comparison: dict[str, Any], tables: str, size: Sides, following: str
) -> None:
    """Write compare.json, report.md and ranks.png.

    Args:
        folder: existing folder for the files.
        config: settings of the command.
        comparison: plain values of a Comparison or a ClassComparison.
        tables: the comparison as Markdown tables.
        size: height and width of the images in pixels.
        following: the next command for the user.
    """
    files = {str(file): sha256(file) for file in (config.reference, config.other)}
    write_json(
        folder / 'compare.json', {'settings': asdict(config), 'versions': versions(), 'files': files, **comparison}
    )
    pictures = []
    if comparison['ranks']:  # none if neither model detects anything
        plot_ranks(folder / 'ranks.png', comparison)
        pictures.append(image('differences by rank', 'ranks.png'))
    document(
        folder / 'report.md',
        f'{config.other.name} compared with {config.reference.name}',
        [
            f'{comparison["images"]} images of {size[0]} x {size[1]} pixels.',
            tables,
            *pictures,
            '## Files',
            markdown_table(('file', 'SHA-256'), files.items(), right=False),
            *closing(
                {k: v for k, v in asdict(config).items() if k not in ('reference', 'other')},
                CompareConfig,
                versions(),
                following,
            ),
        ],
    )
