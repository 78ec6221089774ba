"""Laws of exchanged activation functions: which are exchanged, how near the polynomial is, and what files and runs know of them."""

import json
import re
from copy import deepcopy
from itertools import islice

import onnx
import pytest
import torch
import torch.nn as nn
from helpers import classifiers
from helpers.labelled import copied
from helpers.zoo import (
    FLIPS,
    calibrated,
    command,
    image,
    interrupt,
    load_any,
    load_float,
    output,
    same,
    settings,
    share_of_float,
)
from torchvision.ops.misc import SqueezeExcitation

from models.deploy.formats.onnx import export_onnx
from models.quantize import checkpoint
from models.quantize.activations import (
    POLYNOMIAL,
    REPLACED,
    PolynomialSiLU,
    activation_for,
    exchangeable,
    exchanged,
    exchanges,
    finish_exchange,
    restore,
)
from models.quantize.adapt import adapt, expected_loss
from models.quantize.calibration.divergence import HeadOutputs
from models.quantize.convert import quantize_model
from models.quantize.finetuning.loop import Learning
from models.quantize.kept import kept_of
from models.quantize.run.run import Run, open_inputs, open_work
from models.quantize.run.scorer import change_by, score_float
from models.quantize.scales import never_negative
from test_resume import alike
from utils.qat.backends.detections import prepared
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.tables import TARGETS, load_target
from utils.qat.core.errors import QatError
from utils.qat.core.run_folder import DELIVERED
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import EpochBatches, Loaders, TrainingImages
from utils.qat.evaluation.interval import points_lost
from utils.qat.graph.audit import audit
from utils.qat.run.sensitivity_summary import FILE, worst
from utils.qat.run.state import ADAPTED, FLOAT, STATE
from utils.qat.vendors.graphs import graph_of
from utils.qat.vendors.load import open_file

ACTIVATIONS = tuple(REPLACED)
IMAGES = [image(64, 4, seed) for seed in range(3)]


def exchanged_model(small, activation, **changes):
    """The small network with other activation functions, nothing learnt."""
    model = small.float_model()
    paths = kept_of(model, settings(activation=activation, **changes), '')[1].exchanged
    return finish_exchange(exchanged(model, activation, paths))


def test_the_gates_of_squeeze_and_excitation_stay():
    model = classifiers.build('efficientnet_b0')
    gates = [path for path, m in model.named_modules() if isinstance(m, SqueezeExcitation)]
    found = exchangeable(model, 'relu')
    assert gates and found and not [path for path in found if path.startswith(tuple(gates))]


@pytest.mark.parametrize('name', TARGETS)
def test_without_activation_only_yolov9_for_openvino_gets_the_polynomial(small, name):
    model = small.float_model()
    assert not exchangeable(exchanged_model(small, 'relu'), 'polynomial')
    for network, expected in (
        (model, 'polynomial' if name == 'openvino' else 'keep'),
        (exchanged_model(small, 'relu'), 'keep'),
        (exchanged_model(small, 'polynomial'), 'keep'),
        (classifiers.build('efficientnet_b0'), 'keep'),  # has SiLU, but was not measured
    ):
        assert activation_for(network, settings(target=name)) == expected
    assert activation_for(model, settings(target=name, activation='keep')) == 'keep'


def test_a_run_for_openvino_delivers_the_polynomial_unless_silu_is_to_stay(small, tmp_path):
    for name, count, words in (('default', 0, []), ('silu', 1, ['--activation', 'keep'])):
        options = '--target', 'openvino', '--epochs', 0, '--calib-images', 4, '--no-eval-origin', '--no-eval-ptq'
        given = '--weights', small.single, '--data', small.data, '--project', tmp_path, '--name', name
        command('qat.py', 'quantize', *given, *options, *ON_CPU, *words)
        model = load_any(tmp_path / name / DELIVERED)[0]
        assert bool(exchangeable(model, 'polynomial')) == count
        made_by = (tmp_path / name / 'report.md').read_text()
        assert ('--activation' in made_by) == count, 'only what was typed is repeated'


def test_what_is_restored_has_its_old_function(small):
    model = small.float_model()
    paths = exchangeable(model, 'relu')
    other = restore(exchanged(model, 'relu', paths), paths[:2])
    assert list(exchanges(other)) == paths[2:] and exchangeable(other, 'relu')[:2] == paths[:2]
    with pytest.raises(QatError, match='no activation function is left to exchange; keep less'):
        restore(other, paths[2:])


def test_every_silu_is_exchanged_and_the_model_itself_stays(small):
    model = small.float_model()
    before = output(model, IMAGES[0])
    count = len(exchangeable(model, 'relu'))
    assert count == sum(isinstance(m, nn.Conv2d) for m in model.modules()) - 7  # DFL and three outputs of two kinds
    relu, polynomial = (exchanged_model(small, activation) for activation in ('relu', 'polynomial'))
    assert not exchangeable(relu, 'relu') and sum(type(m) is nn.ReLU for m in relu.modules()) == count
    assert [*map(type, map(polynomial.get_submodule, exchangeable(polynomial, 'relu')))] == [PolynomialSiLU] * count
    assert same(before, output(model, IMAGES[0]))


def test_an_exchange_begins_with_the_old_function_and_ends_with_the_new_one(small):
    model = small.float_model()
    student = exchanged(model, 'relu', exchangeable(model, 'relu'))
    share = next(iter(exchanges(student).values())).share
    assert same(output(student, IMAGES[0]), output(model, IMAGES[0]))
    share.fill_(1.0)
    halfway = output(student, IMAGES[0])
    for ours, theirs in zip(halfway, output(finish_exchange(student), IMAGES[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # y + (new - y) rounds


def test_the_polynomial_is_near_to_silu():
    x = torch.linspace(-12, 12, 24001, dtype=torch.float64)
    y = PolynomialSiLU(*POLYNOMIAL)(x)
    error = (y - nn.functional.silu(x)).abs()
    assert error.max() < 0.06 and error[x.abs() < 3].max() < 0.011  # INT8 rounds values up to 6 by up to 0.024
    beyond = x.abs() > POLYNOMIAL[0]
    torch.testing.assert_close(y[beyond], x[beyond].clamp(min=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_a_float_checkpoint_knows_its_activations(small, tmp_path, activation):
    model = exchanged_model(small, activation)
    checkpoint.save_model(tmp_path / 'm.pt', model, {}, '0' * 64)
    assert checkpoint.CheckpointFile(tmp_path / 'm.pt').kind == 'float'
    again = load_float(tmp_path / 'm.pt')
    assert same(output(again, IMAGES[0]), output(model, IMAGES[0]))


@pytest.mark.parametrize('name', TARGETS)
@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_every_target_quantizes_them(small, tmp_path, activation, name):
    target = load_target(name)
    if activation not in target.gains_by:
        pytest.skip(f'{target.title} gains nothing by {activation}')
    model = exchanged_model(small, activation)
    calibrated(model, IMAGES, target)
    checkpoint.save_model(tmp_path / 'q.pt', model, {'target': name, 'imgsz': [64, 64]}, '0' * 64)
    again, quant = load_any(tmp_path / 'q.pt')
    assert quant and same(output(again, IMAGES[0]), output(model, IMAGES[0]))
    # It refuses a file that ONNX Runtime computes otherwise
    export_onnx(again, tmp_path / 'q.onnx', (64, 64), simplify=True, target=target)
    assert not audit(onnx.load(tmp_path / 'q.onnx'), graph_of(name).RULES).findings


def test_behind_relu_everything_is_unsigned_for_openvino(small):
    """Sums of results of ReLU too: else one signed addend would make a whole group signed."""
    model = exchanged_model(small, 'relu')
    quantize_model(model, target=load_target('openvino'))
    signed = {name for name, _ in signed_quantizers(model)}
    assert {name.split('.')[1] for name in signed} == {'0'}, 'only the image, whose values no operator bounds'


def signed_quantizers(model):
    from models.quantize.quantizers import named_quantizers

    never = {name for name, _ in never_negative(model)}
    return [(name, q) for name, q in named_quantizers(model) if q._axis is None and name not in never]


def test_patterns_choose_layers(small):
    model = small.float_model()
    _, functions = kept_of(model, settings(activation='relu', activation_only=['model.0', r'model\.2\.cv1']), '')
    assert functions.exchanged == [p for p in exchangeable(model, 'relu') if p.startswith(('model.0.', 'model.2.cv1.'))]
    with pytest.raises(QatError, match='--activation-only model.99: matches no'):
        kept_of(model, settings(activation='relu', activation_only=['model.99']), '')


class Counted(TrainingImages):
    """Four batches, and a record of the passes."""

    def __init__(self):
        super().__init__(IMAGES, EpochBatches(4, 1, 0), torch.device('cpu'))
        self.seen = []

    def __iter__(self):
        first = self.epoch * self.passes
        self.epoch += 1
        for number in range(first, first + self.passes):
            self.seen.append(number)
            yield from self.loader


def test_the_model_learns_its_new_functions(small):
    teacher = small.float_model()
    student = exchanged(teacher, 'relu', exchangeable(teacher, 'relu'))
    untaught = output(finish_exchange(deepcopy(student)), IMAGES[0])
    images = Counted()
    images.fill(10)
    epochs = list(adapt(student, teacher, images, Learning(3, 10, 1e-3, boxes=True)))
    assert [e.steps for e in epochs] == [10, 10, 10], 'an epoch has --iters steps, however few the images'
    assert images.seen == [*range(12)]
    finish_exchange(student).eval()
    wanted = output(teacher.eval(), IMAGES[0])

    def distance(found):
        return sum(((a - b).norm() / b.norm()).item() for a, b in zip(found[1:], wanted[1:], strict=True))

    assert distance(output(student, IMAGES[0])) < 0.7 * distance(untaught)


@pytest.mark.parametrize(
    'changes, labelled, sizes',
    [
        ({'activation': 'relu'}, True, [5] * 10),
        ({'activation': 'relu', 'task_loss': 0.0}, False, [5] * 10),
        ({'activation': 'polynomial'}, False, [5, 5, 2]),
        ({'activation': 'relu', 'batch_size': 16}, True, [12] * 10),
    ],
)
def test_with_relu_an_epoch_has_iters_steps_on_labels(small, changes, labelled, sizes):
    """In full batches, of images that are neither mirrored nor in mosaics; the model learns its functions before, from those that are."""
    config = {'batch_size': 5, 'weights': small.single, 'data': small.data, 'target': 'openvino', 'iters': 10}
    opened = open_work(open_inputs(settings(**{**config, **changes})))
    steps = list(islice(opened.training, 10))
    assert isinstance(steps[0], tuple) == labelled
    assert [len(step[0] if labelled else step) for step in steps] == sizes
    hyp = opened.training.loader.dataset.dataset.hyp
    if changes['activation'] == 'relu':
        assert (hyp['fliplr'], hyp['mosaic']) == (0, 0)
        learnt = opened.adaptation.loader.dataset.dataset.hyp
        assert learnt['fliplr'] and learnt['mosaic']


def test_without_any_label_a_loss_on_them_is_refused(small, tmp_path):
    data = copied(small.data, tmp_path / 'data')
    for file in (tmp_path / 'data/labels/train').iterdir():
        file.write_text('')
    config = settings(weights=small.single, data=data, target='openvino', activation='relu')
    with pytest.raises(QatError, match='train: none of its .* nothing can be learnt from; --task-loss 0 needs none'):
        open_work(open_inputs(config))


def test_a_budget_for_int8_is_beside_the_model_that_it_quantizes(small, tmp_path):
    inputs = open_inputs(settings(weights=small.single, data=small.data, imgsz=64, device='cpu'))
    run = Run(inputs, open_work(inputs), tmp_path)
    score_float(run, 'val')
    resampled = run.state.resampled['val']
    own, trial = resampled[FLOAT], small.float_model()
    resampled[FLOAT] = own + 0.5
    assert points_lost(change_by(run, trial)) == pytest.approx(50)
    resampled[ADAPTED] = own
    assert points_lost(change_by(run, trial)) == 0


def test_a_model_with_relu_already_is_refused(small, tmp_path):
    checkpoint.save_model(tmp_path / 'relu.pt', exchanged_model(small, 'relu'), {}, '0' * 64)
    options = '--data', small.data, '--project', tmp_path, '--activation', 'relu'
    said = command('qat.py', 'quantize', '--weights', tmp_path / 'relu.pt', *options, code=2)
    assert 'has no SiLU, Hardswish, PolynomialSiLU to exchange for it' in said


ON_CPU = '--imgsz 64 --batch-size 4 --workers 0 --device cpu'.split()


def command_of(verb, small, project, *more):
    given = '--weights', small.single, '--data', small.data, '--project', project, '--activation', 'relu'
    return 'qat.py', verb, *given, *ON_CPU, '--calib-images', 8, *more


def quantize(small, project, adaptation, epochs, *more):
    """The words of a run with ReLU; adaptation, epochs: how many."""
    return command_of(
        'quantize', small, project, '--iters', 3, '--activation-epochs', adaptation, '--epochs', epochs, *more
    )


@pytest.fixture(scope='module')
def run(small, tmp_path_factory):
    """The folder of a run with ReLU, to its end."""
    folder = tmp_path_factory.mktemp('runs')
    said = command(*quantize(small, folder, 2, 1, '--name', 'a'))
    assert 'float with relu' in said and '--activation relu: the model learns it; with 10 classes and ' in said
    assert re.search(r'--activation-epochs \d+ will take about \d+ ', said)
    return folder / 'a'


@pytest.mark.parametrize(
    ('activation', 'classes', 'images', 'steps', 'expected'),
    [
        ('relu', 3, 292, 4000, '0 to 0.6 points of AP,'),
        ('relu', 31, 200, 2000, '0 to 0.6 points of AP,'),
        ('relu', 32, 160, 4000, '0 to 6.5 points'),
        ('relu', 80, 1000, 4000, '5.7 to 6.5 points'),
        ('relu', 81, 1000, 4000, '5.7 points of AP or more'),
        ('relu', 3, 159, 4000, '0.6 points of AP, or more, because 159 images are fewer'),
        ('relu', 3, 159, 200, '0.6 points of AP, or more, because 159 images and 200 steps are fewer'),
        ('relu6', 2, 292, 4000, '0 to 0.9 points of AP,'),
        ('relu6', 31, 5000, 4000, '0.5 to 2.3 points of AP,'),
        ('relu6', 80, 1000, 4000, '13.8 to 16.7 points'),
    ],
)
def test_the_price_is_that_of_data_with_as_many_classes(activation, classes, images, steps, expected):
    said = expected_loss(activation, classes, images, steps)
    assert f'with {classes} classes and {images} images expect to lose' in said and expected in said


def test_it_learns_no_longer_than_the_budget_asks(small, tmp_path):
    said = command(*quantize(small, tmp_path, 5, 0, '--max-drop', 100, '--name', 'a'))
    times = json.loads((tmp_path / 'a' / 'report.json').read_text())['times']
    learnt = [name for name in times if name.startswith('relu epoch')]
    assert learnt == ['relu epoch 1', 'relu epoch 2'], 'the first epoch that ends with the new functions alone'
    assert re.search(r'relu, epoch 1: loss [\d.]+; 4 more take about ', said)
    assert (
        '--max-drop 100: kept, so the last 3 epochs can be left out' in said
        and (tmp_path / 'a' / 'weights' / 'best.pt').is_file()
    )


def test_the_float_row_is_the_unchanged_model(small, run):
    report = json.loads((run / 'report.json').read_text())
    for file, key in ((small.single, 'origin'), (run / report['adapted']['file'], 'adapted')):
        named = '--project', run / 'eval', '--name', key
        command('qat.py', 'eval', '--weights', file, '--data', small.data, *ON_CPU, *named)
        found = json.loads((run / 'eval' / key / 'metrics.json').read_text())
        assert found['ap'] == pytest.approx(report[key]['ap'], abs=1e-6)
    assert not exchangeable(load_any(run / report['ptq']['file'])[0], 'relu')


def test_the_file_computes_what_pytorch_does(run, tmp_path):
    report = json.loads((run / 'report.json').read_text())
    file = tmp_path / 'q.pt'
    file.write_bytes((run / report['ptq']['file']).read_bytes())
    command('export_qat.py', '--weights', file, '--include', 'onnx', 'openvino', '--imgsz', 64)
    models = (load_any(path)[0] for path in (file, run / report['adapted']['file']))
    images = image(64, batch=16)
    wanted, floating = (TorchModel(model)(images) for model in models)
    assert share_of_float(open_file(file.with_suffix('.onnx'))(images), wanted, floating) < FLIPS
    assert '\nno findings' in command('scripts/audit_onnx.py', file.with_suffix('.onnx'), '--strict')


# ---- which functions, by their cost -------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def summary(small, tmp_path_factory):
    """The file of a sensitivity analysis with ReLU."""
    folder = tmp_path_factory.mktemp('sensitive')
    said = command(*command_of('sensitive', small, folder, '--granularity', 'layer'))
    assert 'only it with relu' in said and '--activation relu' in said
    return folder / 'exp' / FILE


def test_the_cost_of_each_exchange_is_ranked(small, summary):
    content = json.loads(summary.read_text())
    units = content['units']
    assert sorted(p for u in units for p in u['twins']) == sorted(exchangeable(small.float_model(), 'relu'))
    assert sum(u['flops'] for u in units) == content['flops'] and all(u['flops'] for u in units)
    assert content['int8']['divergence'] > max(u['distortion'] for u in units) > 0
    batches = list(Loaders(load_data(small.data), settings(imgsz=64), 32).scored(square=True))
    unit = units[1]
    alone = finish_exchange(exchanged(small.float_model(), 'relu', unit['twins']))
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        images = prepared(batch, torch.device('cpu'))[0]
        ours, theirs = (HeadOutputs.of(model(images)) for model in (alone.eval(), small.float_model()))
        sums += torch.stack([x.sum() for x in ours.divergence_sums(theirs, 16)]).detach()
    assert unit['measured']['only']['divergence'] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-3)


@pytest.mark.parametrize('choice', [('--keep-float', 2), ('--max-drop', 100)])
def test_the_costliest_functions_stay(small, summary, tmp_path, choice):
    words = quantize(small, tmp_path, 1, 0, '--sensitive', summary, *choice)
    command(*words)
    report = json.loads((tmp_path / 'exp' / 'report.json').read_text())
    order = worst(json.loads(summary.read_text()))
    stay = [path for unit in order[: choice[1] if choice[0] == '--keep-float' else 0] for path in unit['twins']]
    assert sorted(report['kept_activations']) == sorted(stay) and not report['kept_float']
    if '--keep-float' in choice:
        exchanged_ones = len(exchangeable(small.float_model(), 'relu')) - len(stay)
        assert f'{exchanged_ones} activation functions become relu' in command(*words, '--dry-run')
    model = load_any(tmp_path / 'exp' / report['adapted']['file'])[0]
    assert sorted(exchangeable(model, 'relu')) == sorted(stay)


def test_what_learning_does_not_win_back_stays(small, summary, tmp_path):
    """Twice as many units each time, those of the highest cost first, learnt from the start, until the budget is kept."""
    words = quantize(small, tmp_path, 2, 0, '--sensitive', summary, '--max-drop', 0)
    assert '--resume' in interrupt('relu without 1 unit, epoch 2/2', 1, *words)
    said = command('qat.py', 'quantize', '--resume', tmp_path / 'exp')
    report = json.loads((tmp_path / 'exp' / 'report.json').read_text())
    ranked = sorted(json.loads(summary.read_text())['units'], key=lambda u: -u['distortion'] / u['flops'])
    stay, n = report['kept_activations'], 1
    while n < len(ranked) and len(stay) > sum(len(unit['twins']) for unit in ranked[:n]):
        n *= 2
    assert sorted(stay) == sorted(path for unit in ranked[:n] for path in unit['twins'])
    (file,) = (tmp_path / 'exp' / 'weights').glob('float_relu_*')
    assert sorted(exchangeable(load_any(file)[0], 'relu')) == sorted(stay)
    kept = report['adapted']['against_float']['difference'] >= 0
    assert kept or ('not kept' in said and 2 * n >= len(ranked))


def test_only_functions_that_are_exchanged_may_stay(small, summary, tmp_path):
    """With a single unit none may, whether the budget is kept or not."""
    words = '--activation-only', 'model.0', '--sensitive', summary, '--max-drop', 0
    said = command(*quantize(small, tmp_path, 1, 0, *words))
    assert 'functions that stay' not in said and (tmp_path / 'exp' / 'weights' / 'best.pt').is_file()
    assert json.loads((tmp_path / 'exp' / 'report.json').read_text())['kept_activations'] == []
    again = quantize(small, tmp_path, 1, 0, *words[:4], '--keep-float', 1)
    assert 'has 1 unit not left out' in command(*again, code=2)


def test_a_loss_within_the_interval_keeps_no_function_that_need_not_learn(small, tmp_path):
    recipe = '--target', 'openvino', '--activation', 'polynomial'
    command(*command_of('sensitive', small, tmp_path, *recipe, '--metric', 'distortion'))
    chosen = '--epochs', 0, '--sensitive', tmp_path / 'exp' / FILE, '--max-drop', 0
    said = command(*command_of('quantize', small, tmp_path, *recipe, *chosen))
    assert 'within the confidence interval' in said
    assert not json.loads((tmp_path / 'exp2' / 'report.json').read_text())['kept_activations']


def test_a_summary_of_another_activation_is_refused(small, summary, tmp_path):
    recipe = '--activation', 'keep', '--sensitive', summary, '--keep-float', 1
    said = command(*command_of('quantize', small, tmp_path, *recipe), code=2)
    assert 'made with --activation relu, and this run has keep' in said


# ---- interrupted runs, several processes --------------------------------------------------------------------------------


def test_interrupted_in_the_adaptation_and_gone_on_with_is_the_same_run(small, tmp_path, run):
    assert '--resume' in interrupt('relu, epoch 2/2', 1, *quantize(small, tmp_path, 2, 1))
    said = command('qat.py', 'quantize', '--resume', tmp_path / 'exp')
    assert '--activation-epochs 1 will take about' in said, 'one is done'
    assert alike(tmp_path / 'exp', run)


def test_without_fine_tuning_a_run_that_went_on_delivers_its_model(small, tmp_path):
    folder, best = tmp_path / 'exp', tmp_path / 'exp' / DELIVERED
    said = interrupt('relu, epoch 2/2', 1, *quantize(small, tmp_path, 2, 0))
    assert f'--resume {folder}' in said and (folder / STATE).is_file() and not best.exists()
    command('qat.py', 'quantize', '--resume', folder)
    report = json.loads((folder / 'report.json').read_text())
    assert best.read_bytes() == (folder / report['ptq']['file']).read_bytes() and not (folder / STATE).exists()


def test_a_run_that_learns_nothing_goes_on_after_the_exchange_too(small, tmp_path):
    options = '--weights', small.single, '--data', small.data, '--project', tmp_path, '--calib-images', 8
    words = 'qat.py', 'quantize', *options, *ON_CPU, '--target', 'openvino', '--epochs', 0
    assert '--resume' in interrupt('comparing', 1, *words)
    command('qat.py', 'quantize', '--resume', tmp_path / 'exp')
    assert json.loads((tmp_path / 'exp' / 'report.json').read_text())['ptq']


def test_before_a_state_is_there_an_interrupt_names_no_resume(small, tmp_path):
    assert '--resume' not in interrupt('relu, epoch 1/10', 1, *quantize(small, tmp_path, 10, 0))
