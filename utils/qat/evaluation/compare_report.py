"""Comparisons of models with one of them → tables, compare.json, report.md and its pictures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.qat.config.compare import CompareConfig
from utils.qat.config.defaults import closing
from utils.qat.config.settings import Sides
from utils.qat.core.files import sha256, write_json
from utils.qat.core.machine import machine_table, versions
from utils.qat.core.markdown import document, escaped, image, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, in_words, plus_minus
from utils.qat.evaluation.figures import columns, differences, figures
from utils.qat.evaluation.plots import plot_ranks
from utils.qat.evaluation.side_by_side import Example, example_table, plot_examples


def comparison_tables(comparison: dict[str, Any], names: Sequence[str], scores: bool = True) -> str:
    """Write a comparison of two detectors as Markdown tables: all predictions, the top detections, AP.

    Args:
        comparison: plain values of a Comparison.
        names: names of the reference and of the other model.
        scores: with AP, if there are labels.
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
    if scores and comparison['reference']:
        tables += [
            scores_table([comparison], names),
            f'the second less the first: {in_words(comparison["against_reference"])}',
        ]
    iou = f', IoU of their masks {number(comparison["matched_mask"])}' if comparison['matched_mask'] is not None else ''
    tables.append(
        f'matched regardless of rank: {number(comparison["matched"], ".2%")} of the top {comparison["top"]} detections of '
        f'either model; mean difference {number(comparison["matched_score"])} of score, '
        f'{number(comparison["matched_box"])} px of box{iou}\n(nearly equal scores change places by rounding alone, and '
        'count as disagreement at both ranks)'
    )
    return '\n\n'.join(tables)


def class_comparison_tables(comparison: dict[str, Any], names: Sequence[str], scores: bool = True) -> str:
    """Write a comparison of two classifiers as Markdown tables: all scores, the highest scores, accuracy.

    Args:
        comparison: plain values of a ClassComparison.
        names: names of the reference and of the other classifier.
        scores: with accuracies, if there are labels.
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
    if scores and comparison['reference']:
        tables.append(scores_table([comparison], names))
    return '\n\n'.join(tables)


def scores_table(comparisons: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Write the scores of several models, and the differences of each from the first in points; '' without labels.

    Args:
        comparisons: plain values of a Comparison, or of a ClassComparison, with the first model for each other one.
        names: names of all models.
    """
    first = comparisons[0]['reference']
    if not first:
        return ''
    models = [first, *(c['other'] for c in comparisons)]
    if 'top1' in first:
        rows: list[tuple[str, ...]] = [(n, f'{m["top1"]:.4f}', f'{m["top5"]:.4f}') for n, m in zip(names, models)]
        for name, m in zip(names[1:], models[1:]):
            points = (f'{100 * (m[key] - first[key]):+.2f}' for key in ('top1', 'top5'))
            rows.append((f'{name} - {names[0]}, points', *points))
        return markdown_table(('model', 'top-1', 'top-5'), rows)
    titles, masks = columns(*models)
    rows = [(name, *figures(m, masks)) for name, m in zip(names, models)]
    for name, m, comparison in zip(names[1:], models[1:], comparisons):
        chance = plus_minus(comparison['against_reference'])
        rows.append((f'{name} - {names[0]}, points', *differences(m, first, masks, chance)))
    return f'{markdown_table(("model", *titles), rows)}\n\n({EXPLAINED})'


def verdict(comparison: dict[str, Any], names: Sequence[str]) -> str:
    """Say in one sentence how far a model is from the first.

    Args:
        comparison: plain values of a Comparison or a ClassComparison.
        names: names of the first model and of the other.
    """
    said = []
    if comparison.get('against_reference'):
        said.append(in_words(comparison['against_reference']))
    if comparison.get('matched') is not None:
        said.append(
            f'{comparison["matched"]:.1%} of the top {comparison["top"]} detections have their match in the other at any rank'
        )
    if 'boxes' not in comparison:
        said.append(f'the best class is the same in {1 - comparison["ranks"][0]["disagreement"]:.1%} of the images')
    return f'{names[1]} against {names[0]}: {"; ".join(said) or "neither detects anything"}.'


def all_tables(
    comparisons: Sequence[dict[str, Any]], names: Sequence[str], examples: Sequence[Example] = ()
) -> list[str]:
    """Write comparisons with one model as Markdown: verdicts, scores, each comparison in detail, examples.

    Args:
        comparisons: see `scores_table`.
        names: names of all models.
        examples: images with their detections or classes.
    """
    verdicts = [f'- {escaped(verdict(c, (names[0], name)))}' for name, c in zip(names[1:], comparisons)]
    tables = ['\n'.join(verdicts), scores_table(comparisons, names)]
    for name, comparison in zip(names[1:], comparisons):
        detail = comparison_tables if 'boxes' in comparison else class_comparison_tables
        tables += [f'## {escaped(name)} against {escaped(names[0])}', detail(comparison, (names[0], name), False)]
    if examples:
        tables.append('## Examples')
    for example in examples:
        tables += [f'{escaped(Path(example.path).name)}, scores:', example_table(example, names)]
    return [table for table in tables if table]


def distinct(files: Sequence[Path]) -> list[str]:
    """Return the name of each file, or its path where two share a name, or its place in the list where two are one file."""
    names = [f.name if [g.name for g in files].count(f.name) == 1 else str(f) for f in files]
    return [name if names.count(name) == 1 else f'{name} ({i})' for i, name in enumerate(names, 1)]


def write_comparison(
    folder: Path,
    config: CompareConfig,
    comparisons: Sequence[dict[str, Any]],
    examples: Sequence[Example],
    size: Sides,
    machine: dict[str, Any],
    following: str,
) -> str:
    """Write compare.json, report.md, ranks.png and examples.png.

    Args:
        folder: existing folder for the files.
        config: settings of the command.
        comparisons: plain values of a Comparison, or of a ClassComparison, with the first model for each other one.
        examples: images with their detections or classes.
        size: height and width of the images in pixels.
        machine: see machine.machine.
        following: the next command for the user.

    Returns:
        The tables, as Markdown.
    """
    names = distinct(config.models)
    files = {str(file): sha256(file) for file in config.models}
    write_json(
        folder / 'compare.json',
        {
            'settings': asdict(config),
            'versions': versions(),
            'machine': machine,
            'files': files,
            'images': comparisons[0]['images'],
            'comparisons': [{'model': str(file), **c} for file, c in zip(config.others, comparisons)],
            'examples': [example.plain() for example in examples],
        },
    )
    pictures = []
    ranked = {name: c for name, c in zip(names[1:], comparisons) if c['ranks']}
    if ranked:  # none if no model detects anything
        plot_ranks(folder / 'ranks.png', ranked)
        pictures.append(image('differences by rank', 'ranks.png'))
    if examples:
        plot_examples(folder / 'examples.png', examples, names)
        pictures.append(image('best detections side by side', 'examples.png'))
    tables = all_tables(comparisons, names, examples)
    document(
        folder / 'report.md',
        f'{", ".join(names[1:])} compared with {names[0]}',
        [
            f'{comparisons[0]["images"]} images of {size[0]} x {size[1]} pixels.',
            *tables,
            *pictures,
            '## Files',
            markdown_table(('file', 'SHA-256'), files.items(), right=False),
            '## Machine',
            machine_table(machine),
            *closing(
                {k: v for k, v in asdict(config).items() if k not in ('reference', 'others')},
                CompareConfig,
                versions(),
                following,
            ),
        ],
    )
    return '\n\n'.join(all_tables(comparisons, names))
