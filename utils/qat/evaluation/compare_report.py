"""Comparisons of models with a reference → tables, compare.json, report.md and its pictures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.qat.config.deploy import CompareConfig
from utils.qat.config.settings import Sides, closing
from utils.qat.config.tables import BACKENDS, CHECKPOINTS, backends_for
from utils.qat.config.tasks import Task
from utils.qat.core.files import distinct_names, sha256, write_document, write_json, write_picture
from utils.qat.core.machine import machine_table, versions
from utils.qat.core.text import escaped, image, literal, markdown_table
from utils.qat.evaluation.compare import Comparison
from utils.qat.evaluation.score_tables import PALE, bar_places
from utils.qat.evaluation.side_by_side import Example, example_table, plot_example


def verdict(task: Task, comparisons: Sequence[Comparison], names: Sequence[str]) -> list[str]:
    """Format what a comparison comes to as Markdown: a clause for each model, then the scores of all."""
    how, (first, *others) = task.comparing(), names
    clauses = [f'- {escaped(f"{name} against {first}: {how.in_a_clause(c)}.")}' for name, c in zip(others, comparisons)]
    return [part for part in ('\n'.join(clauses), how.scores_table(comparisons, names)) if part]


def model_names(config: CompareConfig) -> list[str]:
    """Name the models of a comparison by their files, and also by their backends if --backend has one for each."""
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
    task: Task,
    comparisons: Sequence[Comparison],
    examples: Sequence[Example],
    size: Sides,
    machine: dict[str, object],
    following: str,
    notes: Sequence[str],
) -> str:
    """Write compare.json, report.md, ranks.png and a picture of each example into `folder`, and return the `verdict`."""
    names = model_names(config)
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
    for earlier in folder.glob('example_*.png'):  # with --exist-ok
        earlier.unlink()
    shown = []
    for number, example in enumerate(examples, 1):
        file = folder / f'example_{number:02}.png'
        plot_example(file, example, names)
        table = example_table(example, names)
        shown += [f'{escaped(Path(example.path).name)}, scores:', table, image('side by side', file.name)]
    conclusion = verdict(task, comparisons, names)
    write_document(
        folder / 'report.md',
        f'{", ".join(names[1:])} compared with {names[0]}',
        [
            f'{comparisons[0]["images"]} images of {size[0]} x {size[1]} pixels.',
            *map(escaped, notes),
            *conclusion,
            '## Rank by rank',
            *task.comparing().details(comparisons, names),
            *(['## Examples', *shown] if shown else []),
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
    return '\n\n'.join(conclusion)


def plot_ranks(path: Path, comparisons: dict[str, Comparison]) -> None:
    """Draw the differences of models from the first at each rank: score errors, and how often the models disagree.

    For detectors the full colour of a bar is the share without a match at any rank. The rest swapped ranks with a nearly
    equal score.
    """
    detectors = all('boxes' in c for c in comparisons.values())
    what = 'detection' if detectors else 'class'
    figure = Figure(figsize=(11, 3.8), layout='constrained')
    left, right = figure.subplots(1, 2)
    for i, (name, comparison) in enumerate(comparisons.items()):
        ranks, top = comparison['ranks'], comparison['top']
        positions, width = bar_places([r['rank'] for r in ranks], i, len(comparisons))
        label = literal(name)
        if detectors:
            label += f': {comparison["matched"] or 0:.1%} of the top {top} have their match at any rank'
        left.bar(positions, [r['score_error'] or 0 for r in ranks], width, color=f'C{i}', label=label)
        right.bar(
            positions, [r['disagreement'] or 0 for r in ranks], width, color=f'C{i}', alpha=PALE if detectors else 1
        )
        if detectors:
            right.bar(positions, [r['unmatched'] or 0 for r in ranks], width, color=f'C{i}')
    left.set_ylabel('mean difference of score')
    right.set(ylim=(0, 1), ylabel=f'share of images with another {what}' if not detectors else 'share')
    if detectors:
        right.set_title('pale: another detection at this rank; full: no match at any rank', fontsize=9)
    for axes in (left, right):
        axes.set_xlabel(f'rank of the {what}')
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis='y', alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(loc='outside upper center', ncols=1 if detectors else 4, fontsize=8)
    write_picture(figure, path)
