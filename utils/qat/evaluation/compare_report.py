"""Comparisons of models with one of them → tables, compare.json, report.md and its pictures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.qat.config.backends import BACKENDS, CHECKPOINTS, backends_for
from utils.qat.config.compare import CompareConfig
from utils.qat.config.defaults import closing
from utils.qat.config.settings import Sides
from utils.qat.core.files import distinct_names, sha256, write_json
from utils.qat.core.machine import machine_table, versions
from utils.qat.core.markdown import document, escaped, image, markdown_table
from utils.qat.evaluation.chance import EXPLAINED, in_words, plus_minus
from utils.qat.evaluation.figures import models_table
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
            number(r['unmatched'], '.1%'),
        )
        for r in comparison['ranks']
    ]
    matched = comparison['matched']
    unmatched = None if matched is None else 1 - matched
    ranks.append(
        (f'top {comparison["top"]}', *['-'] * 4, *(number(v, '.1%') for v in (comparison['disagreement'], unmatched)))
    )
    tables = [markdown_table(('all predictions', 'max difference', 'mean difference', tolerance), elements)] * bool(
        elements
    )
    tables.append(
        markdown_table(
            ('rank', 'images', 'score', 'score difference', 'box difference (px)', 'disagreement', 'without a match'),
            ranks,
        )
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
    """Write the scores of several models, and the differences of each from the first in points.

    Of detectors without labels: ''.

    Args:
        comparisons: plain values of a Comparison, or of a ClassComparison, with the first model for each other one.
        names: names of all models.
    """
    if 'boxes' not in comparisons[0]:
        return _class_scores_table(comparisons, names)
    first = comparisons[0]['reference']
    if not first:
        return ''
    models = [first, *(c['other'] for c in comparisons)]
    chances = [plus_minus(c['against_reference']) for c in comparisons]
    return f'{models_table(names, models, chances)}\n\n({EXPLAINED})'


def _class_scores_table(comparisons: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Write accuracies of classifiers, if there are labels, and how far each is from the first: see `scores_table`."""
    first, settings = comparisons[0]['reference'], comparisons[0]
    keys = ('top1', 'top5') if first else ()
    rows: list[tuple[str, ...]] = [(names[0], *(f'{first[key]:.4f}' for key in keys), *['-'] * 4)]
    for name, c in zip(names[1:], comparisons):
        e, same = c['scores'], 1 - c['ranks'][0]['disagreement']
        distance = f'{e["within"]:.2%}', f'{e["mean"]:.3g}', f'{same:.1%}', f'{c["disagreement"]:.1%}'
        rows.append((name, *(f'{c["other"][key]:.4f}' for key in keys), *distance))
    for name, c in zip(names[1:], comparisons if first else ()):
        points = (f'{100 * (c["other"][key] - first[key]):+.2f}' for key in keys)
        rows.append((f'{name} - {names[0]}, points', *points, *['-'] * 4))
    within = f'scores within rtol {settings["rtol"]:g}, atol {settings["atol"]:g}'
    titles = within, 'mean difference', 'same best class', f'other class at a rank of the top {settings["top"]}'
    return markdown_table(('model', *(['top-1', 'top-5'] if first else []), *titles), rows)


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


def names_of(config: CompareConfig) -> list[str]:
    """Name the models of a comparison: by their files, and where --backend names a backend for each, by that too."""
    files = list(dict.fromkeys(config.models))
    if len(files) == len(config.models) or len(config.backend or ()) != len(config.models):
        return distinct_names(config.models)
    known = dict(zip(files, distinct_names(files)))
    titles = [BACKENDS[b].title for b in backends_for(config.models, config.backend) if b]
    return [
        known[file] if file.suffix.lower() in CHECKPOINTS else f'{known[file]} in {title}'
        for file, title in zip(config.models, titles)
    ]


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
    names = names_of(config)
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
        pictures.append(
            image(f'best {"detections" if "boxes" in comparisons[0] else "classes"} side by side', 'examples.png')
        )
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
