"""Laws of the sensitivity analysis: what it measures and estimates, the damage that it finds, and how it is applied."""

import json

import numpy as np
import onnx
import pytest
import torch
from helpers.zoo import build, calibrated, full, fuse, image, program, same, settings

from models.deploy.formats.onnx import export_onnx
from models.quantize import checkpoint
from models.quantize.analysis.partly_float import ALONE, FLOAT, INT8, TwinForms, measure_units
from models.quantize.analysis.sensitivity import DivergenceEstimate, unit_costs
from models.quantize.blocks import Twin
from models.quantize.calibration.divergence import HeadOutputs
from models.quantize.convert import CHOSEN, find_twins, quantize_model
from models.quantize.kept import Kept, left_out, within_budget
from models.quantize.network import find_units
from models.quantize.quantizers import named_quantizers
from models.quantize.scales import scale_groups
from utils.qat.config.tasks import load_task
from utils.qat.core.command import run_command
from utils.qat.core.errors import QatError
from utils.qat.core.log import unshown
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders, channels_last
from utils.qat.graph.audit import audit
from utils.qat.run.sensitivity_summary import FILE, nothing_lost, options_for, summary_table, worst


@pytest.fixture(scope='module')
def loader(demo):
    return list(Loaders(load_data(demo.data), settings(batch_size=4), 32).scored(square=True))


# ---- units --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('granularity', ['layer', 'block', 'conv'])
def test_every_twin_is_in_one_unit(small, granularity):
    model = small.float_model()
    twins = list(find_twins(model))
    units = find_units(model, twins, granularity)
    assert sorted(path for paths in units.values() for path in paths) == sorted(twins)
    assert all(path == unit or path.startswith(f'{unit}.') for unit, paths in units.items() for path in paths)
    order = [int(unit.split('.')[1]) for unit in units]
    assert order == sorted(order)


@pytest.mark.parametrize('name', full('gelan-c'))
def test_blocks_are_the_parts_of_an_elan_and_of_the_head(name):
    model = fuse(build(name, width_multiple=0.25))
    units = find_units(model, find_twins(model), 'block')
    inside = [u for u in units if u.startswith('model.2')]
    assert [u for u in inside if u.split('.')[1] == '2'] == [
        'model.2.cv1',
        'model.2.cv2.0',
        'model.2.cv2.1',
        'model.2.cv3.0',
        'model.2.cv3.1',
        'model.2.cv4',
    ]
    assert {'model.0', 'model.1', 'model.3', 'model.9', 'model.22.cv2.0.0', 'model.22.cv3.2.1'} <= units.keys()
    assert 'model.3.cv1' not in units, 'a layer without containers is one block'


def test_paths_are_matched_from_their_start_to_a_dot():
    paths = ['model.2', 'model.2.cv1.conv', 'model.22.cv1.conv', 'model.3.cv4.conv']
    assert left_out(paths, ['model.2']) == paths[:2]
    assert left_out(paths, ['model.2', r'.*\.cv4']) == [*paths[:2], paths[3]]
    assert left_out(paths, only=[r'model\.2']) == paths[2:]
    assert left_out(paths, ['.*cv1'], [r'model\.(2|3)']) == ['model.2.cv1.conv', 'model.22.cv1.conv']
    assert left_out(paths) == []
    for wrong, says in (
        ({'exclude': ['model.4']}, '--exclude model.4: matches no'),
        ({'only': ['(']}, r'--only \(: no regular expression'),
        ({'exclude': ['model']}, 'nothing is left'),
    ):
        with pytest.raises(QatError, match=says):
            left_out(paths, **wrong)


def test_costs_are_counted_once(small):
    model = small.quantized_model()
    twins = [path for path, m in model.named_modules() if isinstance(m, Twin)]
    costs = {g: unit_costs(model, find_units(model, twins, g), (64, 64)) for g in ('layer', 'conv')}
    for which in (0, 1):
        sums = [sum(c[which] for unit, c in of.items() if unit) for of in costs.values()]
        assert sums[0] == sums[1] < costs['layer'][''][which]
    conv = model.model[0].conv
    assert costs['conv']['model.0.conv'] == (2 * 32 * 32 * conv.weight.numel(), conv.weight.numel() + conv.bias.numel())


# ---- what is measured ---------------------------------------------------------------------------------------------------


def divergence(model, batches, wanted):
    totals, weights = zip(*(HeadOutputs.of(model(x)).divergence_sums(raw, 16) for x, raw in zip(batches, wanted)))
    return (torch.cat(totals).sum() / torch.cat(weights).sum()).item()


def test_measured_is_what_the_whole_model_does(demo, loader):
    """A measurement that starts in the middle of the network gives the same; the divergence is divergence.py's."""
    model, reference = demo.quantized_model(), demo.float_model()
    for m in model.modules():  # biases that a correction moved
        if isinstance(m, torch.nn.Conv2d) and m.bias is not None:
            m.bias.data += 0.01
    forms = TwinForms(model, reference)
    forms.learn_alone({})
    units = find_units(reference, list(forms.twins), 'layer')
    some = {unit: units[unit] for unit in ('model.0', 'model.14', 'model.34')}
    found = measure_units(forms, some, loader, load_data(demo.data).names, True, unshown)
    images = [channels_last(batch[0].float() / 255) for batch in loader]
    with torch.no_grad():
        wanted = [HeadOutputs.of(forms.model(x)) for x in images]
        plain = [x.contiguous() for x in images]  # one layout in all layers, because layouts decide the order of sums
        assert same([forms.model(x)[1] for x in plain], [reference(x)[1] for x in plain]), 'it is left in float'
    assert found['float']['divergence'] == pytest.approx(0, abs=1e-9) and found['int8']['divergence'] == pytest.approx(
        divergence(model, images, wanted), rel=1e-9
    )
    assert found['int8']['ap'] != found['float']['ap'] > 0.5
    for unit, twins in some.items():
        forms.set_form(FLOAT)
        forms.set_form(ALONE, twins)
        assert found[unit, 'only']['divergence'] == pytest.approx(divergence(forms.model, images, wanted), rel=1e-9)
        forms.set_form(INT8)
        forms.set_form(FLOAT, twins)
        assert found[unit, 'without']['divergence'] == pytest.approx(divergence(forms.model, images, wanted), rel=1e-9)
        assert 0 < found[unit, 'only']['divergence'] < found['int8']['divergence'] and 'ap' in found[unit, 'without']


def test_estimates_rank_as_measuring_does(demo, loader):
    from scipy.stats import spearmanr

    reference = demo.float_model()
    forms = TwinForms(demo.quantized_model(), reference)
    units = find_units(reference, list(forms.twins), 'block')
    estimate = DivergenceEstimate(forms, units, False, 0)
    for number, (images, *_) in enumerate(loader):
        estimate.add(images.float() / 255, number)
    estimated, _ = estimate.result()
    forms.learn_alone({})
    some = dict(list(units.items())[::4])
    measured = measure_units(forms, some, loader, {}, False, unshown)
    pairs = [(estimated[u][0], measured[u, 'only']['divergence']) for u in some]
    assert spearmanr(*zip(*pairs)).statistic > 0.9
    ratios = np.array([e / m for e, m in pairs])
    assert 0.5 < np.median(ratios) < 2


def test_the_shift_that_is_estimated_is_that_of_the_mean(demo, loader):
    reference = demo.float_model()
    forms = TwinForms(demo.quantized_model(), reference)
    units = find_units(reference, list(forms.twins), 'layer')
    estimate = DivergenceEstimate(forms, units, True, 0)
    images = loader[0][0].float() / 255
    estimate.add(images, 0)
    _, shifts = estimate.result()
    forms.set_form(INT8, ['model.0.conv'])
    with torch.no_grad():
        moved = forms.model.model[0].conv(images) - reference.model[0].conv(images)
    assert torch.allclose(shifts['model.0.conv'], moved.mean((0, 2, 3)).double(), rtol=1e-3, atol=1e-7)


# ---- what is left in float ----------------------------------------------------------------------------------------------

KEPT = ['model.2.cv2.0', 'model.3', 'model.6.cv5']


@pytest.fixture(scope='module')
def partly(small):
    """A calibrated model with some units in float, and their paths."""
    model = small.float_model()
    kept = left_out(list(find_twins(model)), KEPT)
    done = calibrated(model, [image(96, 2, seed) for seed in range(2)], keep_float=kept)
    return model, kept, done


def test_what_is_kept_is_upstreams_own(small, partly):
    model, kept, done = partly
    reference = small.float_model()
    assert (
        kept
        and {path for path, why in done.kept_float.items() if why == CHOSEN} == set(kept)
        and not set(kept) & set(done.swapped)
    )
    for path in kept:
        assert type(model.get_submodule(path)) is type(reference.get_submodule(path))
    assert set(done.swapped) | set(kept) == set(find_twins(reference))


def test_the_others_keep_their_groups(small, partly):
    """A group loses only its float members: it is not split, and it keeps its range."""
    whole = small.float_model()
    quantize_model(whole)
    before = [
        [p for p in group if not any(p == f'{k}.{n}' for k in partly[1] for n in ('input_quantizer', 'add_quantizer'))]
        for group in scale_groups(whole)
    ]
    model = small.float_model()
    quantize_model(model, keep_float=partly[1])
    assert sorted(map(sorted, scale_groups(model))) == sorted(sorted(g) for g in before if g)
    assert all(hasattr(q, '_amax') for _, q in named_quantizers(partly[0]))


@pytest.mark.parametrize('trt', [10, 11])
def test_the_file_and_the_audit_know_the_choice(partly, tmp_path, trt):
    model, kept, _ = partly
    path = tmp_path / 'model.onnx'
    export_onnx(model, path, (96, 96), opset=19, half=trt == 11, kept_float=kept)
    graph = onnx.load(path)
    found = audit(graph)
    assert not found.findings
    chosen = [c.name for c in found.convs if c.reason == 'by choice']
    assert len(chosen) == sum(isinstance(model.get_submodule(p), torch.nn.Conv2d) for p in kept)
    del graph.metadata_props[:]
    assert {f.kind for f in audit(graph).findings} >= {'float conv', 'mixed'}, 'without the choice they are findings'


# ---- choosing by a summary ----------------------------------------------------------------------------------------------


@pytest.fixture
def summary(analysed):
    return json.loads((analysed / FILE).read_text())


def test_orders():
    units = [
        {'unit': 'a', 'distortion': 1.0, 'flops': 1},
        {'unit': 'b', 'distortion': 3.0, 'flops': 10},
        {'unit': 'c', 'distortion': 2.0, 'flops': 1},
    ]
    assert [u['unit'] for u in worst({'units': units})] == ['b', 'c', 'a']
    assert [u['unit'] for u in Kept([], {'units': units}).by_distortion_per_flop()] == ['c', 'a', 'b']


def losing(points):
    """The change of AP of a model that loses so many points beyond chance."""
    return {'difference': -points / 100, 'chance': 0.0}


@pytest.mark.parametrize('needed', [0, 1, 2, 3, 5, 8, 18])
def test_the_smallest_number_that_keeps_the_budget(summary, needed):
    assert len(summary['units']) > 20
    attempts = []

    def make(blocks):
        n = sum(set(u['twins']) <= set(blocks.paths) for u in summary['units'])
        attempts.append(n)
        return n

    def score(n):
        return losing(0.1 if n >= needed else 0.5)

    blocks, result = within_budget(Kept([], summary), 0.2, 100, make, score)
    assert result == needed and set(blocks.paths) == {
        p for u in Kept([], summary).by_distortion_per_flop()[:needed] for p in u['twins']
    }
    assert len(attempts) == len(set(attempts)) <= 12


def test_a_budget_that_cannot_be_kept_is_said(summary):
    with pytest.raises(QatError, match='--max-drop 0.2: not kept .* lose 0.40 points'):
        within_budget(Kept([], summary), 0.2, 100, lambda blocks: 0.5 if blocks.paths else 0.4, losing)


# ---- a damaged model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def damaged(demo, tmp_path_factory):
    """The demo with channels of a convolution 200 times as large; the next divides by 200, so in float it detects as before."""
    ckpt = torch.load(demo.single, weights_only=False)
    model = ckpt['model'].float()
    block = model.model[14]  # RepNCSPELAN4: the first channels of cv1 are read by cv4 alone
    with torch.no_grad():
        for parameter in (block.cv1.bn.weight, block.cv1.bn.bias):
            parameter[:2] *= 200
        block.cv4.conv.weight[:, :2] /= 200
    path = tmp_path_factory.mktemp('damaged') / 'damaged.pt'
    torch.save({'model': model.half(), 'ema': None}, path)
    return path


def run(*argv, code=0):
    assert run_command(program('qat.py').main, [str(a) for a in argv]) == code


QUICK = '--imgsz 128 --device cpu --workers 0 --batch-size 4 --calib-images 8 --calib-method mse --exist-ok'.split()


def common(demo, weights, folder):
    return '--weights', weights, '--data', demo.data, '--project', folder, *QUICK


def test_a_short_table_has_the_measured_units_first():
    """A measured unit may come out below one that was only estimated, and a row of dashes says nothing."""
    found = {way: {'divergence': 0.1} for way in ('only', 'without')}
    common = {'kind': 'Conv2d', 'flops': 1, 'estimated': {'only': 0.2}}
    units = [
        {**common, 'unit': 'a', 'distortion': 0.1, 'measured': found},
        {**common, 'unit': 'b', 'distortion': 0.2, 'measured': None},
    ]
    summary = {'units': units, 'flops': 2, 'int8': {'ap': 0.5}, 'settings': {'activation': 'keep'}}
    first, whole = (summary_table(summary, load_task('detect'), limit) for limit in (1, None))
    assert '| a ' in first and '| b ' not in first and whole.index('| b ') < whole.index('| a ')


@pytest.mark.parametrize(
    'difference, half_width, budget',
    [(-0.01, 0.002, 0.2), (-0.001, 0.0005, 0.05), (-0.0001, 0, 0.0), (-0.01, 0.02, None), (0.01, 0.002, None)],
)
def test_the_recommended_budget_is_below_what_is_lost(difference, half_width, budget):
    """And there is none for a loss within the confidence interval."""
    lost = {'against_float': {'difference': difference, 'chance': half_width}}
    summary = {'int8': lost, 'settings': {'activation': 'keep', 'target': 'tensorrt'}}
    assert options_for(summary) == ([] if budget is None else ['--sensitive', FILE, '--max-drop', budget])
    assert bool(nothing_lost(summary)) == (budget is None)
    assert options_for({**summary, 'int8': {}})[-2:] == ['--keep-float', 1], 'without AP'
    integers = {**summary, 'settings': {**summary['settings'], 'target': 'edge'}}
    assert options_for(integers) == [] and 'None can stay' in nothing_lost(integers)


@pytest.fixture(scope='module')
def analysed(demo, damaged):
    """The folder with the analysis of the damaged model."""
    folder = damaged.parent / 'runs'
    run('sensitive', *common(demo, damaged, folder), '--granularity', 'layer', '--num-image', 0)
    return folder / 'exp'


def test_the_damaged_block_is_the_worst(analysed):
    summary = json.loads((analysed / FILE).read_text())
    first, second, *_ = worst(summary)
    assert first['unit'] == 'model.14' and first['distortion'] > 3 * second['distortion']
    gains = {
        u['unit']: u['measured']['without']['ap'] - summary['int8']['ap'] for u in summary['units'] if u['measured']
    }
    assert max(gains, key=gains.get) == 'model.14' and len(gains) == 10
    estimated = {u['unit']: u['estimated']['only'] for u in summary['units']}
    assert max(estimated, key=estimated.get) == 'model.14'


def test_what_an_analysis_leaves(analysed):
    summary = json.loads((analysed / FILE).read_text())
    assert {p.name for p in analysed.iterdir()} == {FILE, 'sensitivity.md', 'sensitivity.png', 'log.txt', '.lock'}
    table = (analysed / 'sensitivity.md').read_text()
    for unit in summary['units']:
        assert f'| {unit["unit"]} ' in table
        assert {'kind', 'flops', 'parameters', 'estimated', 'ranges'} <= unit.keys() and unit['ranges']
    assert sum(u['flops'] for u in summary['units']) < summary['flops']
    log = (analysed / 'log.txt').read_text()
    assert log.count('model.14 ') == 1, 'the ten worst are shown'
    assert f'--sensitive {analysed / FILE} --max-drop 0.2' in log


def test_the_budget_is_kept_where_int8_does_not_keep_it(demo, damaged, analysed, tmp_path):
    options = common(demo, damaged, tmp_path)
    run('quantize', *options, '--epochs', 0, '--name', 'all')
    run('quantize', *options, '--epochs', 0, '--name', 'budget', '--sensitive', analysed / FILE, '--max-drop', 1)
    reports = {name: json.loads((tmp_path / name / 'report.json').read_text()) for name in ('all', 'budget')}
    lost = {name: 100 * (r['origin']['ap'] - r['ptq']['ap']) for name, r in reports.items()}
    assert lost['budget'] <= 1 < lost['all']
    kept = reports['budget']['kept_float']
    assert reports['all']['kept_float'] == [] and any(path.startswith('model.14.') for path in kept)
    [file] = (tmp_path / 'budget' / 'weights').glob('ptq*.pt')
    model, quant = checkpoint.CheckpointFile(file).load_quantized()
    assert quant['recipe']['kept_float'] == kept
    assert not any(isinstance(model.get_submodule(path), Twin) for path in kept)
    assert 'of the FLOPs stay INT8' in (tmp_path / 'budget' / 'log.txt').read_text()


def test_the_worst_units_stay_in_float(demo, damaged, analysed, tmp_path):
    choice = '--sensitive', analysed / FILE, '--keep-float', 1, '--exclude', 'model.0'
    run('quantize', *common(demo, damaged, tmp_path), *'--epochs 0 --no-eval-origin --no-eval-ptq'.split(), *choice)
    kept = json.loads((tmp_path / 'exp' / 'report.json').read_text())['kept_float']
    assert {path.split('.')[1] for path in kept} <= {'0', '14'} and len(kept) > 5
