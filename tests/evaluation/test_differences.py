"""Laws of the rows of differences: each is the difference of the rows above it, in points."""

import json

import pytest
from zoo import command as run
from zoo import holds, program, rows_of

from utils.qat.core.command import run_command
from utils.qat.evaluation.figures import differences, figures

SIZE = 64


def test_differences_are_in_points():
    before = {'ap': 0.5, 'ap50': 0.75, 'precision': 1.0, 'mask': {'ap': 0.25}}
    after = {'ap': 0.4975, 'ap50': 0.76, 'precision': 1.0, 'recall': 0.5, 'mask': {'ap': 0.5}}
    assert differences(after, before) == ['-0.25', '+1.00', '+0.00', '-']
    assert differences(after, before, True, ' ± 0.10')[0::4] == ['-0.25 ± 0.10', '+25.00']
    assert differences(None, before) == ['-'] * 4 and len(figures(before, True)) == len(differences(after, None, True))


def test_eval_compares_with_the_baseline(small, tmp_path):
    common = '--data', small.data, '--imgsz', SIZE, '--device', 'cpu', '--workers', 0, '--project', tmp_path
    run('qat.py', 'eval', '--weights', small.quantized, '--baseline', small.single, *common, '--name', 'both')
    run('qat.py', 'eval', '--weights', small.quantized, *common, '--name', 'alone')
    both, alone = (json.loads((tmp_path / name / 'metrics.json').read_text()) for name in ('both', 'alone'))
    assert both['ap'] == alone['ap'] and 'baseline' not in alone
    assert both['against_baseline']['difference'] == pytest.approx(both['ap'] - both['baseline']['ap'])
    rows = rows_of((tmp_path / 'both/report.md').read_text(), 'model')
    less = f'{small.quantized.name} - {small.single.name}, points'
    assert list(rows) == ['model', small.single.name, small.quantized.name, less]
    assert holds(*list(rows.values())[1:]) and '±' in rows[less][0]
    assert rows[small.single.name][0] == f'{both["baseline"]["ap"]:.4f}'


def test_a_baseline_must_exist(small, tmp_path, capsys):
    given = '--weights', small.quantized, '--baseline', tmp_path / 'none.pt', '--data', small.data, '--device', 'cpu'
    assert run_command(program('qat.py').main, ['eval', *map(str, given)]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and '--baseline' in said and 'no such file' in said
