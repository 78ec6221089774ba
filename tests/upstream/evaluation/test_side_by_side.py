"""Several models against the first, and their best detections or classes side by side, worked out by hand."""

import json

import numpy as np
import pytest
import torch
from helpers.labelled import words
from helpers.zoo import command as run

from utils.qat.config.tasks import Labelled, load_task
from utils.qat.evaluation import side_by_side
from utils.qat.evaluation.side_by_side import (
    Example,
    Examples,
    class_lines,
    detection_lines,
    example_table,
    plot_example,
)

NAMES = {0: 'cat', 1: 'dog'}


def rows(*found):
    """Detections (x, class, score): boxes of 10 x 10 pixels at x, best first."""
    return torch.tensor([[x, 0, x + 10, 10, score, c] for x, c, score in found]).float().reshape(-1, 6)


FIRST = rows((0, 0, 0.9), (20, 0, 0.8), (40, 1, 0.7), (60, 1, 0.6))
CASES = {  # detections of the other model → marks of the lines, and its rank and score in each
    'equal': (FIRST, ['same'] * 4, [(1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6)]),
    'none': (rows(), ['lost'] * 4, [None] * 4),
    'order': (FIRST[[1, 0, 2, 3]], ['same'] * 4, [(2, 0.9), (1, 0.8), (3, 0.7), (4, 0.6)]),
    'moved': (rows((2, 0, 0.9)), ['moved', 'lost', 'lost', 'lost'], [(1, 0.9), None, None, None]),
    'class': (rows((0, 1, 0.5)), ['other class', 'lost', 'lost', 'lost'], [(1, 0.5), None, None, None]),
    'new': (rows((80, 0, 0.3)), ['lost'] * 4 + ['new'], [None] * 4 + [(1, 0.3)]),
    # one box is the counterpart of one detection only
    'twice': (rows((0, 0, 0.9), (0, 0, 0.2)), ['same', 'lost', 'lost', 'lost', 'new'], [(1, 0.9)] + [None] * 3 + [(2, 0.2)]),
}  # fmt: skip


@pytest.mark.parametrize('other, marks, found', CASES.values(), ids=CASES)
def test_lines_of_detections(other, marks, found):
    lines = detection_lines([FIRST, other], NAMES, top=4)
    assert [line.marks for line in lines] == [[mark] for mark in marks]
    assert [line.others[0] and (line.others[0].rank, pytest.approx(line.others[0].score)) for line in lines] == found
    assert [line.reference and line.reference.name for line in lines][:4] == ['cat', 'cat', 'dog', 'dog']


def test_ranks_at_one_corner_do_not_hide_each_other(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(side_by_side, 'write_picture', lambda figure, path: drawn.update(figure=figure))
    lines = detection_lines([rows(*[(0, 0, score) for score in (0.9, 0.8, 0.7)])] * 2, NAMES, top=3)
    plot_example(tmp_path / 'a.png', Example(np.zeros((100, 100, 3), np.uint8), 'a.jpg', lines), ['a', 'b'])
    pictures = [axes for axes in drawn['figure'].axes if axes.images]
    assert len(pictures) == 2
    for axes in pictures:
        left = sorted(text.get_position()[0] for text in axes.texts)
        assert len(left) == 3 and np.diff(left).min() >= side_by_side.LABEL * 99


def test_a_counterpart_beyond_the_best_is_found_and_a_new_one_beyond_them_is_not_shown():
    lines = detection_lines([FIRST, FIRST[[3, 2, 1, 0]]], NAMES, top=2)
    assert [(line.reference.rank, line.others[0].rank) for line in lines] == [(1, 4), (2, 3)]
    assert len(detection_lines([FIRST[:1], rows((0, 0, 0.9), (80, 0, 0.3))], NAMES, top=1)) == 1


def test_lines_of_classes():
    lines = class_lines([torch.tensor([0.1, 0.5, 0.4]), torch.tensor([0.6, 0.3, 0.1])], {0: 'a', 1: 'b', 2: 'c'}, 2)
    told = [(line.reference and line.reference.name, line.others[0].rank, line.marks) for line in lines]
    assert told == [('b', 2, ['moved']), ('c', 3, ['moved']), (None, 1, ['new'])]


def test_examples_are_those_that_differ_most_and_as_the_image_was():
    data = Labelled(None, NAMES, (0.5,) * 3, (0.25,) * 3)
    examples = Examples(2, load_task('detect'), data, 4)
    others = FIRST, CASES['moved'][0], CASES['none'][0], FIRST  # differences 0, 2.1, 3.0, 0
    for i, other in enumerate(others):
        examples.look(torch.full((3, 2, 2), float(i) - 2), f'{i}.jpg', [FIRST, other])
    assert [e.path for e in examples.kept] == ['2.jpg', '1.jpg']
    assert [e.difference for e in examples.kept] == pytest.approx([3.0, 2.1])
    assert [np.unique(e.image).tolist() for e in examples.kept] == [[128], [64]]
    assert '| 1 ' in example_table(examples.kept[0], ['a', 'b'])
    other_class = Example(np.zeros((1, 1, 3), np.uint8), '', detection_lines([FIRST[:1], CASES['class'][0]], NAMES, 1))
    assert other_class.difference == pytest.approx(0.9 + 0.5)
    none = Examples(0, load_task('detect'), data, 4)
    none.look(torch.zeros(3, 2, 2), '0.jpg', [FIRST, FIRST])
    assert not none.kept


def test_several_models_are_compared_as_pairs_are(small, exports, tmp_path):
    """A float detector against its INT8 checkpoint and the export of this one."""
    exported = exports / 'int8.onnx'
    common = words(
        '--data {s.data} --device cpu --workers 0 --project {f} --images 5 --imgsz 64 --show 2', s=small, f=tmp_path
    )
    given = {'all': [small.quantized, exported], 'one': [small.quantized], 'two': [exported]}
    reports = {}
    for name, others in given.items():
        run('compare_outputs.py', small.single, *others, *common, '--name', name)
        reports[name] = json.loads((tmp_path / name / 'compare.json').read_text())
    comparisons, text = reports['all']['comparisons'], (tmp_path / 'all/report.md').read_text()
    assert [c['model'] for c in comparisons] == list(map(str, given['all']))
    assert reports['one']['comparisons'] + reports['two']['comparisons'] == comparisons
    for comparison in comparisons:
        against = comparison['against_reference']
        assert against['difference'] == pytest.approx(comparison['ap_difference'], abs=1e-9)
        said = f'{100 * against["difference"]:+.2f} ± {100 * against["chance"]:.2f}'
        assert said.replace('-0.00', '+0.00') in text
    examples = reports['all']['examples']
    assert len(examples) == 2 and all(len(line['others']) == 2 for e in examples for line in e['lines'])
    assert (
        '(example_01.png)' in text
        and '(example_02.png)' in text
        and f'| {small.quantized.name} - {small.single.name}, points ' in text
    )
    assert (tmp_path / 'all/example_02.png').read_bytes().startswith(b'\x89PNG')
