"""Laws of options of the fine-tuning: a loss on the labels, scales that learn, and masks of one bit per value."""

import io
import math
from dataclasses import replace

import pytest
import torch
from conftest import REPO
from faults import sampled
from zoo import image, same, settings, state, tensors

from models.quantize.finetuning.learned_scales import LearnedScales, _Quantize, rounded_scales
from models.quantize.finetuning.loop import Epoch, finetune, supervised_layers
from models.quantize.finetuning.losses import LabelLoss, relative_error
from models.quantize.finetuning.training_step import (
    LOG2,
    SCALES_LR,
    GraphedStep,
    NotFinite,
    TrainingStep,
    head_emits_raw_maps,
)
from models.quantize.quantizers import QMAX, QMIN, FixedScales, Quantizer, named_quantizers
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data, load_hyp
from utils.qat.data.loaders import training_images

LOADER = [image(64, 2, seed) for seed in range(3)]
EACH_AMP = pytest.mark.parametrize('amp', sampled(['off', 'bf16'], 2))
CPU = torch.device('cpu')


def run(small, loader=LOADER, **changes):
    """Fine-tune a calibrated model; returns (student, last Epoch)."""
    student = small.quantized_model()
    options = settings(**{'epochs': 1, 'iters': 3, 'lr': 1e-4, **changes})
    return student, list(finetune(student, small.float_model(), loader, options))[-1]


def new_step(small, amp='off', **options):
    student = small.quantized_model()
    return TrainingStep(
        student, small.float_model(), supervised_layers(student, 1), relative_error, 1e-4, amp, **options
    )


# ---- the labels ---------------------------------------------------------------------------------------------------------


def labelled(small, task_loss=1.0):
    """Batches with labels, as `quantize` loads them."""
    return list(
        training_images(load_data(small.data), settings(task_loss=task_loss), 32, CPU, load_hyp(REPO / 'demo/hyp.yaml'))
    )


def raw_maps(model, images):
    """The raw maps that the head gives in training mode; the model stays in that mode."""
    head_emits_raw_maps(model)
    return model(images)


def test_the_loader_gives_the_labels_of_its_images(small):
    batches, images_alone = labelled(small), labelled(small, 0.0)
    assert len(batches) == 3
    for (images, labels), alone in zip(batches, images_alone, strict=True):
        assert (
            torch.equal(images, alone) and images.shape == (4, 3, 128, 128) and 0 <= images.min() and images.max() <= 1
        )
        assert labels.shape[1] == 6 and len(labels) > 4 and set(labels[:, 0].tolist()) <= {0, 1, 2, 3}
        assert labels[:, 2:].min() >= 0 and labels[:, 2:].max() <= 1


def test_the_loss_on_the_labels_knows_right_from_wrong(demo):
    """The loss is per image: a doubled batch has the same loss. The right labels have a lower loss."""
    model = demo.float_model()
    loss = LabelLoss(model)
    images, labels = labelled(demo)[0]
    maps = raw_maps(model, images)
    value = loss(maps, labels).item()
    second = labels + torch.tensor([len(images), 0, 0, 0, 0, 0])
    assert loss([m.repeat(2, 1, 1, 1) for m in maps], torch.cat((labels, second))).item() == pytest.approx(
        value, rel=1e-3
    )
    assert LabelLoss(model, 3.0)(maps, labels).item() == pytest.approx(3 * value)
    wrong = torch.cat(((labels[:, :1] + 1) % len(images), labels[:, 1:]), 1)
    assert loss(maps, wrong).item() > 1.5 * value
    assert 0 < loss(maps, labels[:0]).item() < math.inf, 'images without an object'


@EACH_AMP
def test_the_labels_add_to_the_loss(small, amp):
    batches = labelled(small)
    step = new_step(small, amp, label_loss=LabelLoss(small.quantized_model()))
    terms = step._compare(*batches[0])
    assert list(terms) == [*step.layers, 'labels'] and terms['labels'].dtype == torch.float32
    total = step(*batches[0]).item()
    assert total == pytest.approx(sum(terms[i].item() for i in step.layers) / len(step.layers) + terms['labels'].item())


def test_the_labels_are_learnt(small):
    batches = labelled(small)

    def on_labels(task_loss):
        model, _ = run(
            small, batches if task_loss else [images for images, _ in batches], epochs=2, task_loss=task_loss
        )
        with torch.no_grad():
            return sum(LabelLoss(model)(raw_maps(model, images), labels).item() for images, labels in batches)

    assert on_labels(1.0) < on_labels(0.0)


def test_labels_that_cannot_be_learnt_are_named(small):
    step = new_step(small, label_loss=lambda maps, labels: maps[0].sum() * math.inf)
    with pytest.raises(NotFinite, match='the loss is not finite on the labels'):
        step(LOADER[0], None)


@pytest.mark.parametrize(
    'changes, says',
    [
        ({'task_loss': 1.0, 'compile': True}, r'--task-loss 1\.0: not with --compile.*leave one of the two out'),
        ({'task_loss': -1.0}, r'--task-loss -1\.0: must be 0 \(labels do not count\) or more'),
        ({'task_loss': math.nan}, '--task-loss nan'),
    ],
)
def test_what_cannot_be_is_refused(changes, says):
    with pytest.raises(QatError, match=says):
        replace(settings(), **changes)


# ---- scales that learn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('zero_point', [0, -128, -117, 127])
def test_the_gradient_of_a_scale(dtype, zero_point):
    """It equals autograd's for clamp(round(x / scale)) * scale to 1/252 of a step per value; round passes gradients.

    Values and gradients of the inputs equal PyTorch's operator in FP32, also at the ends of the range.
    """
    x = torch.randn(4, 3, 25, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.flatten()[:8] = torch.tensor([127, 127.5, 127.6, -128, -128.5, -128.6, 1e6, -1e6]) / 128
    quantizer = Quantizer()
    quantizer.set_amax(torch.tensor(127 / 128))
    quantizer._zero_point += zero_point
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (_Quantize.apply, by_hand, lambda x, *_: quantizer(x.float()).to(dtype)):
        inputs, scale = x.clone().requires_grad_(), quantizer.scale.requires_grad_()
        y = function(inputs, scale, zero_point)
        results.append((y, *torch.autograd.grad((y.float() * weights).sum(), (inputs, scale), allow_unused=True)))
    (y, to_x, to_scale), (_, _, expected), (native_y, native_x, _) = results
    assert same([y, to_x], [native_y, native_x])
    assert to_scale.dtype == torch.float32 and to_scale.shape == () and expected.abs() > 100
    assert to_scale.item() == pytest.approx(
        expected.item(),
        rel=0.005 * (dtype == torch.bfloat16),
        abs=weights.norm().item() / 252 + 0.01 * (dtype == torch.bfloat16) * x.numel() ** 0.5,
    )


def by_hand(x, scale, zero_point):
    steps, ends = x.float() / scale, (QMIN - zero_point, QMAX - zero_point)
    steps = steps + (steps.round() - steps).detach()
    return torch.where((steps < ends[0]) | (steps > ends[1]), steps.detach().clamp(*ends), steps) * scale


def test_a_byte_per_value_is_kept_for_a_scale():
    """A scale that does not learn needs as much."""
    kept = []
    x, quantizer = torch.randn(1000, requires_grad=True), Quantizer()
    quantizer.set_amax(torch.tensor(1.0))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        _Quantize.apply(x, quantizer.scale.requires_grad_(), 0)
    assert kept == [1000]


def test_a_scale_that_learns_is_the_number_that_is_stored():
    log2 = torch.linspace(-20, 18, 999, requires_grad=True)
    scales = rounded_scales(log2)
    quantizer = Quantizer(0)
    quantizer.set_amax(scales * QMAX)
    assert torch.equal(quantizer.scale, scales.detach()) and torch.equal(scales.half().float(), scales)
    (gradient,) = torch.autograd.grad(scales.sum(), log2)
    assert torch.allclose(gradient, log2.detach().exp2() * math.log(2))


@pytest.mark.parametrize('share', [False, True])
def test_scales_that_could_learn_change_nothing_yet(small, share):
    model = small.quantized_model()
    for i, (_, quantizer) in enumerate(q for q in named_quantizers(model) if q[1]._axis is None):
        quantizer._zero_point -= i % 128
    weight = model.model[0].conv.weight.requires_grad_()
    results = []
    for context in (FixedScales(model, share), LearnedScales(model, share)):
        with context:
            outputs = tensors(model(LOADER[0]))
        results.append((outputs, torch.autograd.grad(sum(o.square().sum() for o in outputs), weight)[0]))
    assert same(*results)
    before = state(model)
    context.write()
    assert same(state(model), before)


@EACH_AMP
def test_scales_of_activations_learn(small, amp):
    """They move by a fraction of their value, stay FP16 numbers, and stay shared."""
    before = state(small.quantized_model())
    student, _ = run(small, amp=amp, learn_scales=True)
    after = state(student)
    moved = {k for k in after if k.endswith('._amax') and not torch.equal(before[k], after[k])}
    assert before.keys() == after.keys() and moved and all('weight_quantizer' not in k for k in moved)
    assert len(moved) > 0.8 * sum(k.endswith('._amax') and 'weight_quantizer' not in k for k in after)
    assert all((after[k] / before[k]).log2().abs() < 3 * SCALES_LR + 1e-3 for k in moved)
    scales = torch.stack([after[k] / QMAX for k in moved])
    assert torch.equal(scales.half().float(), scales)
    assert [n for n, _ in named_quantizers(student)] == [n for n, _ in named_quantizers(small.quantized_model())]


@EACH_AMP
def test_scales_that_are_wrong_find_back(demo, amp):
    """Scales start four times too large or too small. With fixed weights, the loss falls."""
    for away in (2.0, -2.0):
        step = new_step(demo, amp, learn_scales=True)
        step.scales.log2.data += away
        for group, highest in zip(step.optimizer.param_groups, (0.0, 0.1)):
            group['highest'] = highest
        step.set_rate(1.0)
        losses = [step(LOADER[0]).item() for _ in range(6)]
        assert losses[-1] < 0.85 * losses[0]


def test_what_is_saved_is_what_the_loss_was_of(small):
    step = new_step(small, learn_scales=True)
    for images in LOADER[:2]:
        step(images)
    judge = TrainingStep(step.student, small.float_model(), step.layers, relative_error, 1e-4)
    assert not torch.equal(step.scales.log2, LearnedScales(small.quantized_model()).log2)
    assert same(step._compare(LOADER[0]), judge._compare(LOADER[0]))


def test_the_learning_rates_keep_their_ratio(small):
    step = new_step(small, learn_scales=True)
    step.set_rate(0.25)
    assert [g['lr'] for g in step.optimizer.param_groups] == [0.25e-4, 0.25 * SCALES_LR]


def test_a_gradient_of_scales_that_is_not_finite_is_named(small):
    step = new_step(small, learn_scales=True)
    before = state(step.student)
    step.scales.log2.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NotFinite, match=f'the gradient of {LOG2} is not finite'):
        step(LOADER[0])
    assert same(state(step.student), before)


def test_learning_scales_goes_on_from_every_epoch(small):
    config = settings(epochs=3, iters=1, lr=1e-3, amp='bf16', learn_scales=True)
    student, finished = small.quantized_model(), []
    for epoch in finetune(student, small.float_model(), LOADER, config):
        finished.append((epoch, state(student)))
    for last, at_that_time in finished[:2]:
        stored = io.BytesIO()
        torch.save(vars(last), stored)
        stored.seek(0)
        after, other = Epoch(**torch.load(stored, weights_only=True)), small.quantized_model()
        epochs = finetune(other, small.float_model(), LOADER, config, after=after)
        assert next(epochs) is after and same(state(other), at_that_time)
        rest = list(epochs)
        assert [e.loss for e in rest] == [e.loss for e, _ in finished[last.number :]]
        assert same(state(other), finished[-1][1]) and same(rest[-1].state, finished[-1][0].state)


@pytest.mark.gpu
@pytest.mark.parametrize('amp', ['off', 'bf16', 'fp16'])
def test_scales_learn_in_a_graph(small, amp):
    """The result equals single launches, and no step waits for the device."""
    batches = [b.cuda() for b in [*LOADER, *LOADER]]
    torch.backends.cudnn.deterministic = True
    states = []
    for graphed in (False, True):
        student = small.quantized_model().cuda()
        step = TrainingStep(
            student,
            small.float_model().cuda(),
            supervised_layers(student, 1),
            relative_error,
            1e-5,
            amp,
            graphed,
            learn_scales=True,
        )
        run_step = GraphedStep(step) if graphed else step
        for number, images in enumerate(batches):
            torch.cuda.set_sync_debug_mode('error' if number > 4 else 'default')
            run_step(images)
        torch.cuda.set_sync_debug_mode('default')
        step.check()
        states.append(state(student))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(states[0].values(), states[1].values()))
