"""Laws of several processes: two calibrate and score as one does, learn the same weights, and fail together."""

import json
import math
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import REPO
from helpers import classifiers
from helpers.faults import sampled
from helpers.fresh import fresh
from helpers.zoo import command, image, load_float, load_quantized, same, settings, state

from models.quantize.calibration.calibrate import Histogram
from models.quantize.finetuning.loop import supervised_layers
from models.quantize.finetuning.training_step import TrainingStep
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig
from utils.qat.core.errors import QatError
from utils.qat.core.machine import select_device
from utils.qat.data.dataset import load_data
from utils.qat.data.loaders import Loaders
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.run.sensitivity_summary import FILE

CPU = torch.device('cpu')
BATCH = 5  # of 12 images: three batches, the last one smaller
HYP = REPO / 'demo' / 'hyp.yaml'


def torchrun(*arguments, code=0):
    """Run `torchrun --nproc_per_node 2 ARGUMENTS...`; returns its output. Fails unless it exits with `code`."""
    return fresh('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2, *arguments, code=code)


def two_forks(*arguments, **how):
    """Run `python ARGUMENTS...` in two forks with torchrun's environment variables; returns their output."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    with ThreadPoolExecutor(2) as pool:
        ranks = [{**shared, 'RANK': rank, 'LOCAL_RANK': rank} for rank in '01']
        return ''.join(pool.map(lambda env: fresh(*arguments, env=env, **how), ranks))


def nearly(figures):
    """Equal but for the last bits of sums over batches (SQNR, divergence), which two processes add in another order."""
    if isinstance(figures, dict):
        return {key: nearly(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [nearly(value) for value in figures]
    return pytest.approx(figures, rel=1e-12) if isinstance(figures, float) else figures


def quantize(small, folder, *more):
    given = '--weights', small.single, '--data', small.data, '--hyp', HYP, '--project', folder
    quick = f'--imgsz 128 --batch-size {BATCH} --device cpu --workers 0 --calib-method mse'
    return 'qat.py', 'quantize', *given, *quick.split(), *more


def reports(folder, file='report.json'):
    """The reports of the runs `alone` and `pair`."""
    return [json.loads((folder / name / file).read_text()) for name in ('alone', 'pair')]


# ---- the command --------------------------------------------------------------------------------------------------------

each_way = pytest.mark.parametrize('started', sampled([two_forks, torchrun], 2), ids=lambda f: f.__name__)


@each_way
def test_quantize_calibrates_and_scores_as_one_process_does(small, tmp_path, started):
    command(*quantize(small, tmp_path, '--no-eval-origin', '--name', 'alone', '--epochs', 0))
    said = started(*quantize(small, tmp_path, '--no-eval-origin', '--name', 'pair', '--epochs', 1))
    first, second = reports(tmp_path)
    assert first['ptq'] == nearly(second['ptq']) and first['ptq']['ap'] > 0.01
    assert second['device'].endswith('first of 2 processes') and len(second['epochs']) == 1 and second['best']
    models = (load_quantized(tmp_path / r['settings']['name'] / r['ptq']['file'])[0] for r in (first, second))
    assert same(*map(state, models)), 'weights and ranges, bit for bit'

    assert said.count('calibrated on 12 images') == said.count('epoch 1        AP') == 1 and 'arning' not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ['alone', 'pair']
    names = 'weights report.json report.md ap.png classes.png log.txt .lock'
    assert {p.name for p in (tmp_path / 'pair').iterdir()} == {*names.split()}
    made_by = 'torchrun --nproc_per_node 2 qat.py quantize --'
    assert made_by in (tmp_path / 'pair/report.md').read_text()
    models = [Path(stage['file']).name for stage in (second['ptq'], *second['epochs'])]
    written = {p.name for p in (tmp_path / 'pair/weights').iterdir()}
    assert written == {*models, 'best.pt', 'qat_best_single.pt'} and len(written) == 4


@each_way
def test_a_classifier_is_calibrated_and_scored_as_in_one_process(tmp_path, started):
    data = classifiers.write_images(tmp_path / 'data', train=6, val=3)
    net = classifiers.save(classifiers.learnt(classifiers.build('resnet18'), data), tmp_path / 'net.pt')
    quick = f'--imgsz {classifiers.SIZE} --batch-size {BATCH} --calib-images 15 --iters 2 --workers 0 --device cpu'
    words = 'qat.py', 'quantize', '--weights', net, '--data', data, '--project', tmp_path, *quick.split()
    words = *words, '--calib-method', 'mse', '--task-loss', 0.1
    command(*words, '--name', 'alone', '--epochs', 0)
    said = started(*words, '--name', 'pair', '--epochs', 1)
    first, second = reports(tmp_path)
    assert first['ptq'] == nearly(second['ptq']) and first['ptq']['top1'] > 0.4 and len(second['epochs']) == 1
    assert said.count('epoch 1        top-1') == 1 and 'arning' not in said
    assert (tmp_path / 'pair' / 'weights' / 'qat_best_net.pt').is_file()


FULL = 'import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (900_000,) * 2)'


@pytest.mark.faults
def test_two_processes_are_resumed_as_two(small, tmp_path):
    said = two_forks(*quantize(small, tmp_path, '--no-eval-origin', '--epochs', 1), first=FULL, code=2)
    again = f'go on with: torchrun --nproc_per_node 2 qat.py quantize --resume {tmp_path}/exp'
    [line] = [line for line in said.splitlines() if 'resume.pt: File too large' in line]
    assert line.endswith(again)
    two_forks(*again.split()[again.split().index('qat.py') :])
    assert (tmp_path / 'exp/weights/qat_best_single.pt').is_file()


@pytest.mark.faults
def test_two_processes_learn_the_functions_that_one_learns_in_batches_of_twice_the_size(small, tmp_path):
    recipe = '--activation relu --activation-epochs 1 --iters 1 --epochs 0 --no-eval-origin'.split()
    command(*quantize(small, tmp_path, *recipe, '--name', 'alone', '--batch-size', 2 * BATCH))
    two_forks(*quantize(small, tmp_path, *recipe, '--name', 'pair'))
    alone, pair = (report['adapted'] for report in reports(tmp_path))
    assert alone['loss'] == pytest.approx(pair['loss'], rel=1e-4)
    # Adam's first step is the rate times the sign of each gradient, and the sum of a gradient near 0 has either sign.
    ours, theirs = (
        torch.cat([t.flatten() for t in load_float(tmp_path / name / part['file']).state_dict().values()])
        for name, part in (('alone', alone), ('pair', pair))
    )
    torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-3)


@pytest.mark.faults
def test_sensitive_finds_what_one_process_finds(demo, tmp_path):
    words = 'sensitive', *quantize(demo, tmp_path, '--granularity', 'layer')[2:]
    command('qat.py', *words, '--name', 'alone')
    said = torchrun('qat.py', *words, '--name', 'pair')
    first, second = reports(tmp_path, FILE)
    assert said.count('summary ') == 1 and first['int8']['ap'] == second['int8']['ap'] > 0.2
    for a, b in zip(first['units'], second['units'], strict=True):
        assert a['unit'] == b['unit'] and a['ranges'] == b['ranges']
        assert a['estimated'] == pytest.approx(b['estimated'], rel=1e-6)
        assert (a['measured'] is None) == (b['measured'] is None)
        if a['measured']:
            assert a['measured']['only']['divergence'] == pytest.approx(b['measured']['only']['divergence'], rel=1e-6)
            assert a['measured']['without']['ap'] == b['measured']['without']['ap']


def test_a_mistake_of_all_is_one_line(small, tmp_path):
    said = torchrun(*quantize(small, tmp_path, '--weights', 'none.pt'), code=1)
    [line] = [line for line in said.splitlines() if ': error: ' in line]
    assert line == 'qat.py: error: --weights none.pt: no such file'
    assert 'exitcode  : 2 ' in said and not list(tmp_path.iterdir())


ALONE = """
import sys
sys.path.insert(0, '.')
import torch
from utils.qat.core import distributed
from utils.qat.core.errors import QatError
from utils.qat.core.command import run_command

def main(argv):
    distributed.join(torch.device('cpu'))
    if not distributed.is_first():
        raise QatError('this disk is full')
    distributed.merged([0])

sys.exit(run_command(main))
"""


@pytest.mark.faults
def test_who_fails_alone_speaks_and_nobody_waits(tmp_path):
    (tmp_path / 'alone.py').write_text(ALONE)
    said = torchrun(tmp_path / 'alone.py', code=1)
    lines = [line for line in said.splitlines() if ': error: ' in line]
    assert lines[0] == 'alone.py (process 1 of 2): error: this disk is full'
    assert all('another process' in line for line in lines[1:])


# ---- what two processes compute -----------------------------------------------------------------------------------------

WORKER = """
import sys
sys.path.insert(0, '.')
import torch
from models.quantize import checkpoint
from models.quantize.calibration.calibrate import Histogram, merge_histograms
from models.quantize.finetuning.loop import Learning, finetune, supervised_layers
from models.quantize.finetuning.training_step import NotFinite, TrainingStep
from utils.qat.core import distributed
from utils.qat.core.machine import select_device
from utils.qat.backends.pytorch import TorchModel
from utils.qat.config.qat import EvalConfig, QuantizeConfig
from utils.qat.data.dataset import load_data, load_hyp
from utils.qat.evaluation.evaluate import evaluate
from utils.qat.data.loaders import Loaders

job = torch.load(sys.argv[1], weights_only=False)
cpu = select_device('cpu')
distributed.join(cpu)
me = distributed.rank()
data = load_data(job['data'])

def student():
    return checkpoint.CheckpointFile(job['quantized']).load_quantized()[0]

def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}

gathered = distributed.merged([0, None, 2] if me == 0 else [None, 'b'])
result, teacher = {'gathered': gathered}, checkpoint.CheckpointFile(job['single']).load_float()
model = student()
step = TrainingStep(model, teacher, supervised_layers(model, 1), job['lr'])
result['loss'], result['step'] = step(job['batches'][me]), state(model)
try:
    step(job['bad'][me])
except NotFinite as e:
    result['said'] = str(e)
result['after'] = state(model)

histograms = [Histogram() for _ in job['values'][me]]
for histogram, seen in zip(histograms, job['values'][me]):
    for x in seen:
        histogram.collect(x)
merge_histograms(histograms)
result['histograms'] = [(h.counts, h.exponent, h.largest, h.ends) for h in histograms]

options = EvalConfig(job['single'], job['data'], batch_size=job['batch'], imgsz=128, workers=0)
result['metrics'] = evaluate(TorchModel(student()), Loaders(data, options, 32, shard=(me, 2)).scored(), data.names, cpu,
                             predictions_file=job['folder'] / 'pair.json').to_json()

model = student()
if me:
    model.model[0].conv.bias.data += 1  # they need not agree before
config = QuantizeConfig(job['single'], job['data'], hyp=job['hyp'], batch_size=job['batch'], imgsz=128, workers=0)
images = Loaders(data, config, 32, cpu, (me, 2)).training(load_hyp(job['hyp']))
result['losses'] = [epoch.loss for epoch in finetune(model, teacher, images, Learning(2, 200, 1e-4))]
result['finetuned'] = state(model)
torch.save(result, job['folder'] / f'{me}.pt')
distributed.leave()
"""

BATCHES = [image(96, 2, seed) for seed in (1, 2)]
FIRST, SECOND = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) for seed, n in ((0, 1000), (1, 700)))
VALUES = [  # of each process, of each histogram, the tensors that it sees
    [[FIRST], [torch.ones(3)], [torch.arange(9.0), torch.full((2,), 300.0)], [torch.ones(2)], [torch.ones(2)]],
    [[SECOND * 40], [], [torch.full((5,), 1e-3)], [torch.tensor([1, math.nan])], [torch.tensor([math.inf])]],
]


@pytest.fixture(scope='module')
def pair(small, tmp_path_factory):
    """The results of two processes, and the folder of the job."""
    folder = tmp_path_factory.mktemp('pair')
    (folder / 'worker.py').write_text(WORKER)
    job = {'folder': folder, 'hyp': HYP, 'batch': BATCH, 'lr': 1e-4, 'batches': BATCHES, 'values': VALUES}
    job['bad'] = [BATCHES[0], torch.full_like(BATCHES[0], math.nan)]
    torch.save({**vars(small), **job}, folder / 'job.pt')
    said = two_forks(folder / 'worker.py', folder / 'job.pt')
    assert 'arning' not in said
    return torch.load(folder / '0.pt', weights_only=False), torch.load(folder / '1.pt', weights_only=False), folder


def test_a_step_follows_the_mean_gradient(small, pair):
    first, second, _ = pair
    student = small.quantized_model()
    step = TrainingStep(student, small.float_model(), supervised_layers(student, 1), 1e-4)
    losses, gradients = [], []
    for images in BATCHES:
        _, terms = step.compare(images)
        losses.append(sum(terms.values()) / len(terms))
        gradients.append(torch.autograd.grad(losses[-1], list(step.parameters.values()), allow_unused=True))
    for p, a, b in zip(step.parameters.values(), *gradients):
        p.grad = None if a is None else (a + b) / 2
    step._clip_and_judge(torch.ones(()), torch.ones(len(step.layers)))
    step.optimizer.step()
    expected, before = state(student), state(small.quantized_model())
    assert not same(before, expected)
    for k, value in expected.items():
        # Adam's first step is lr times the sign, nearly: of tiny gradients it shows the last bit
        assert torch.allclose(first['step'][k], value, rtol=1e-5, atol=1e-5), k
        if not torch.equal(before[k], value):
            moved, should = (v.flatten() - before[k].flatten() for v in (first['step'][k], value))
            assert torch.nn.functional.cosine_similarity(moved, should, 0) > 0.999, k
    assert first['loss'].item() == pytest.approx(sum(losses).item() / 2, rel=1e-5) and losses[0] != losses[1]
    assert first['loss'] == second['loss']


def test_both_hold_the_same_weights(pair):
    first, second, _ = pair
    for key in ('step', 'finetuned'):
        assert same(first[key], second[key]), key
    assert first['losses'] == second['losses'] and len(first['losses']) == 2
    assert not same(first['finetuned'], first['step'])


def test_what_is_not_finite_anywhere_stops_both(pair):
    first, second, _ = pair
    assert first['said'] == second['said'] == 'the loss is not finite from layer model.0 on'
    assert same(first['after'], first['step']) and same(second['after'], second['step'])


def test_results_come_in_the_order_of_one_process(pair):
    """Nothing is a result too."""
    assert pair[0]['gathered'] == [0, None, None, 'b', 2] and pair[1]['gathered'] == []


def test_histograms_merge_to_that_of_all_values(pair):
    first, second, _ = pair
    assert all(same(list(a), list(b)) for a, b in zip(first['histograms'], second['histograms']))
    for number, found in enumerate(first['histograms'][:3]):
        alone = Histogram()
        for x in (*VALUES[1][number], *VALUES[0][number]):
            alone.collect(x)
        assert same(list(found), [alone.counts, alone.exponent, alone.largest, alone.ends]), number
    assert all(not largest.isfinite() for _, _, largest, _ in first['histograms'][3:])


def test_figures_and_detections_are_those_of_one_process(small, pair):
    first, second, folder = pair
    data, model = load_data(small.data), TorchModel(small.quantized_model())
    config = EvalConfig(small.single, small.data, batch_size=BATCH, imgsz=128, workers=0)
    loader, alone = Loaders(data, config, 32).scored(), folder / 'alone.json'
    metrics = evaluate(model, loader, data.names, CPU, predictions_file=alone)
    assert first['metrics'] == second['metrics'] == metrics.to_json()
    assert alone.read_text() == (folder / 'pair.json').read_text()


# ---- shares -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('world', [2, 3, 5])
def test_shards_are_the_batches_of_one_process(small, world):
    data, config = load_data(small.data), settings(batch_size=BATCH, calib_images=12)
    evaluation = EvalConfig(small.single, small.data, batch_size=BATCH, imgsz=128, workers=0)
    for make in (
        lambda shard: Loaders(data, config, 32, CPU, shard).calibration(),
        lambda shard: Loaders(data, evaluation, 32, shard=shard).scored(),
    ):

        def images_of(shard, make=make):
            return [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in make(shard)]

        whole = images_of((0, 1))
        assert [len(images) for images in whole] == [5, 5, 2]
        for rank in range(world):
            mine = images_of((rank, world))
            assert same(mine, whole[rank::world]) and len(make((rank, world))) == len(mine)


# ---- who is who ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'world, gpus, text, says',
    [
        (1, 2, '1', 'cuda:1'),
        (1, 2, '', 'cuda:0'),
        (2, 4, '', 'cuda:1'),
        (2, 4, '0', r'--device 0: the 2 processes.*leave --device out'),
        (2, 4, 'mps', r'--device mps: the 2 processes'),
        (3, 2, '', r'--nproc_per_node 3: this machine has 2 GPUs.*--device cpu'),
        (2, 0, '', 'cpu'),
        (2, 4, 'cpu', 'cpu'),
        (1, 0, '', 'cpu'),
    ],
)
def test_device_of_a_process(monkeypatch, world, gpus, text, says):
    """A GPU is the current device from then on: synchronize(), streams and Triton take that one."""
    started = {'RANK': world - 1, 'LOCAL_RANK': world - 1, 'WORLD_SIZE': world}
    for name, value in {**started, 'MASTER_ADDR': 'localhost', 'MASTER_PORT': 29500}.items():
        monkeypatch.setenv(name, str(value))
    current = []
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: gpus)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, 'set_device', current.append)
    if re.fullmatch(r'cpu|cuda:\d', says):
        device = torch.device(says)
        assert select_device(text) == device and current == [device] * (device != CPU)
    else:
        with pytest.raises(QatError, match=says):
            select_device(text)
