"""Laws of fine-tuning: it learns, repeats bit for bit, moves only weights, and stops at NaN or infinity."""

import contextlib
import itertools
import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from conftest import REPO
from helpers.faults import sampled
from helpers.zoo import build, image, output, recipe, same, settings, state, tensors

from models.quantize.finetuning.loop import finetune, learning_rate_share, supervised_layers
from models.quantize.finetuning.training_step import (
    MAX_NORM,
    TINY,
    NotFinite,
    TrainingStep,
    box_divergence,
    head_emits_raw_maps,
    relative_error,
)
from models.quantize.network import head_of
from models.quantize.plan import resolve
from models.quantize.quantizers import FixedScales, named_quantizers, quantizers_off
from models.quantize.run.stages import adaptation
from utils.qat.config.tasks import load_task
from utils.qat.core.errors import QatError
from utils.qat.data.dataset import load_data, load_hyp
from utils.qat.data.loaders import Loaders

CPU = torch.device('cpu')
label_loss = load_task('detect').label_loss
LOADER = [image(96, 2, seed) for seed in range(4)]


def run(small, loader=LOADER, **changes):
    """Fine-tune a calibrated model; returns (student, [Epoch, ...])."""
    student = small.quantized_model()
    return student, list(
        finetune(student, small.float_model(), loader, recipe(**{'epochs': 2, 'iters': 4, 'lr': 1e-4, **changes}))
    )


def test_the_loss_falls_and_the_student_comes_closer(demo):
    student, epochs = run(demo, epochs=3)
    assert [e.number for e in epochs] == [1, 2, 3] and [e.steps for e in epochs] == [4, 4, 4]
    assert epochs[2].loss < epochs[1].loss < epochs[0].loss < 1 and all(e.seconds > 0 for e in epochs)

    def distance(model):
        ours, theirs = output(model.eval(), LOADER[0]), output(demo.float_model(), LOADER[0])
        return sum(((a - b).norm() / b.norm()).item() for a, b in zip(ours[1:], theirs[1:], strict=True))  # raw maps

    assert distance(student) < distance(demo.quantized_model())


def test_same_start_same_end(small):
    (first, epochs), (second, again) = run(small), run(small)
    assert same(state(first), state(second)) and [e.loss for e in epochs] == [e.loss for e in again]


def test_only_weights_move(small):
    before, after = state(small.quantized_model()), state(run(small, epochs=1)[0])
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    fixed = {k for k in before if k.endswith(('._amax', '._zero_point')) or '.dfl.' in k}
    assert before.keys() == after.keys() and fixed and not moved & fixed
    assert {k.rsplit('.', 1)[1] for k in moved} == {'weight', 'bias'}
    assert moved == before.keys() - fixed, 'every convolution learns, the float ends of the head too'


@pytest.mark.parametrize('amp', ['off', 'bf16'])
def test_the_teacher_stays_as_it_is(small, amp):
    teacher = small.float_model()
    before = state(teacher)
    flags = [p.requires_grad for p in teacher.parameters()]
    list(finetune(small.quantized_model(), teacher, LOADER, recipe(epochs=1, iters=2, amp=amp)))
    assert same(state(teacher), before) and [p.requires_grad for p in teacher.parameters()] == flags
    assert not any(p.grad is not None for p in teacher.parameters())
    assert not any(m._forward_hooks for m in teacher.modules())


def test_nothing_is_left_on_the_student(small):
    student, _ = run(small, epochs=1, iters=1)
    assert not any(m._forward_hooks for m in student.modules()) and not any(
        p.grad is not None for p in student.parameters()
    )
    with torch.no_grad():
        decoded, raw = student.eval()(LOADER[0])
    assert decoded.shape[1] == 14 and len(raw) == 3


def test_the_caller_sees_every_epoch_before_the_next_begins(small):
    student = small.quantized_model()
    seen = [state(student)]
    for _ in finetune(student, small.float_model(), LOADER, recipe(epochs=2, iters=1)):
        seen.append(state(student))
    assert len(seen) == 3 and not same(seen[0], seen[1]) and not same(seen[1], seen[2])


@pytest.mark.parametrize('epochs, iters, steps', [(2, 3, 3), (1, 100, 4)])
def test_an_epoch_is_at_most_iters_and_at_most_the_loader(small, epochs, iters, steps):
    """So says the progress too, which wraps the batches."""
    calls = []

    def progress(batches, epoch, steps):
        calls.append((epoch, steps))
        return batches

    options = recipe(epochs=epochs, iters=iters)
    done = list(finetune(small.quantized_model(), small.float_model(), LOADER, options, progress))
    assert [(e.number, e.steps) for e in done] == calls == [(number, steps) for number in range(1, epochs + 1)]


# ---- what is not finite -------------------------------------------------------------------------------------------------


def test_the_layer_at_fault_is_named(small):
    student = small.quantized_model()
    index = 5
    list(student.model[index].parameters())[-1].data.fill_(math.inf)  # a bias: INT8 would clamp a weight
    with pytest.raises(QatError, match=rf'not finite from layer model\.{index} on \(epoch 1\)'):
        list(finetune(student, small.float_model(), LOADER, recipe(epochs=1, iters=1)))


def test_a_gradient_that_is_not_finite_is_not_followed(small):
    """The backward pass overflows once: the loss is finite, but the step would set every weight to NaN."""
    student = small.quantized_model()
    before = state(student)
    student.model[3].cv1.conv.weight.requires_grad_(True).register_hook(lambda grad: grad * math.inf)
    with pytest.raises(QatError, match=r'gradient of model\.3\.cv1\.conv\.weight is not finite \(epoch 1\)'):
        list(finetune(student, small.float_model(), LOADER, recipe(epochs=1, iters=1)))
    assert same(state(student), before)


def test_after_a_fault_no_step_is_taken_until_someone_looks(small):
    """Between two looks of the host, the GPU keeps the first fault and leaves `skip` set."""
    step = new_step(small)
    step(LOADER[0])
    loss, terms = torch.tensor(1.0), torch.ones(len(step.layers))
    assert not step._clip_and_judge(loss, terms)
    terms[3] = math.nan
    assert step._clip_and_judge(loss, terms)
    assert step._clip_and_judge(loss, torch.ones(len(step.layers))), 'a good batch does not heal it'
    with pytest.raises(NotFinite, match=rf'from layer model\.{step.layers[3]} on'):
        step.check()


# ---- precision and speed ------------------------------------------------------------------------------------------------


def new_step(small, amp='off', **options):
    student = small.quantized_model()
    return TrainingStep(student, small.float_model(), supervised_layers(student, 1), 1e-4, amp, **options)


def test_the_gradient_is_clipped_as_pytorch_does_it(small):
    step = new_step(small)
    step(LOADER[0])
    for factor in (1e-3, 1e6):
        for p in step.student.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
        expected = [p.grad.clone() for p in step.student.parameters() if p.grad is not None]
        total = torch.stack([g.norm() for g in expected]).norm()
        assert (total > MAX_NORM) == (factor > 1)
        step._clip_and_judge(torch.tensor(1.0), torch.ones(len(step.layers)))
        got = [p.grad for p in step.student.parameters() if p.grad is not None]
        share = (MAX_NORM / (total + 1e-6)).clamp(max=1)  # a norm by other code: its last bits may be others
        assert all(torch.allclose(a, g * share, rtol=1e-5, atol=0) for a, g in zip(got, expected, strict=True))


def test_bf16_learns_and_leaves_fp32(demo):
    """The loss of `small` falls by less than its rounding moves it."""
    student, epochs = run(demo, epochs=3, amp='bf16')
    assert epochs[2].loss < epochs[1].loss < epochs[0].loss
    reference = run(demo, epochs=3)[1]
    assert epochs[2].loss != reference[2].loss and epochs[2].loss == pytest.approx(reference[2].loss, rel=0.5)
    assert {v.dtype for v in state(student).values() if v.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize('amp', sampled(['off', 'bf16'], 2, 1))
def test_what_is_not_finite_leaves_the_weights_of_the_last_good_step(small, amp):
    bad = torch.full_like(LOADER[0], math.nan)
    student = small.quantized_model()
    options = recipe(epochs=1, iters=4, amp=amp)
    says = r'not finite from layer model\.0 on \(epoch 1\).*finished epochs are kept.*--lr'
    with pytest.raises(QatError, match=says):
        list(finetune(student, small.float_model(), [*LOADER[:2], bad, LOADER[3]], options))
    assert not any(m._forward_hooks for m in student.modules())
    expected = small.quantized_model()
    step = TrainingStep(expected, small.float_model(), supervised_layers(expected, 1), options.rate, amp)
    for number, images in enumerate(LOADER[:2]):
        step.set_rate(learning_rate_share(number, 4))
        step(images)
    assert same(state(student), state(expected)) and not same(state(student), state(small.quantized_model()))


def test_the_loss_keeps_what_autograd_would():
    """The gradient of the squared error equals the formula's; half precision only rounds it."""
    student, teacher = torch.randn(2, 4, 10, 100, generator=torch.Generator().manual_seed(0)).unbind()
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        s = student.to(dtype).requires_grad_()
        loss = relative_error([s], [teacher])
        (gradients[dtype],) = torch.autograd.grad(loss, s)
        error, energy = ((x * x).flatten(1).sum(1) for x in (s.float() - teacher, teacher))
        (formula,) = torch.autograd.grad((error / energy + TINY).sqrt().mean(), s)
        assert gradients[dtype].dtype == dtype
        # other code may add in another order
        rtol = 1e-5 if dtype == torch.float32 else 0.01
        assert torch.allclose(gradients[dtype].float(), formula.float(), rtol=rtol)


@pytest.mark.parametrize(
    'amp, compile, says',
    [
        ('fp16', False, '--amp fp16: only on a GPU, and the device is cpu; leave out --amp'),
        (None, True, '--compile: .*device is cpu; leave out --compile'),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(small, amp, compile, says):
    with pytest.raises(QatError, match=says):
        resolved(small, 'cpu', amp=amp, compile=compile)


def resolved(small, device, **changes):
    """The settings as `quantize` resolves them for the small model."""
    asked = settings(**{'amp': None, 'target': 'openvino', 'activation': 'keep', **changes})
    return resolve(asked, small.float_model(), device)


@pytest.mark.parametrize('device, amp, graph', [('cpu', 'off', False), ('cuda', 'fp16', True)])
def test_the_defaults_are_those_of_the_device(small, device, amp, graph):
    for given in (None, 'bf16'):
        plan = resolved(small, device, amp=given)
        assert (plan.amp, plan.compile) == (given or amp, graph)
        assert plan.decided == (*('amp',) * (not given), 'compile', 'lr', 'task_loss'), 'what was not typed'
    assert not resolved(small, device, compile=False).compile
    with pytest.raises(FrozenInstanceError):
        plan.amp = 'off'


@pytest.mark.parametrize(
    'changes, rate, labels',
    [
        ({}, 1e-5, 0.0),
        ({'activation': 'polynomial'}, 1e-5, 0.0),
        ({'activation': 'relu'}, 3e-4, 1.0),
        ({'activation': 'relu', 'lr': 1e-4, 'task_loss': 0.0}, 1e-4, 0.0),
    ],
)
def test_the_recipe_follows_from_the_activation(small, changes, rate, labels):
    plan = resolved(small, 'cpu', **changes)
    assert (plan.lr, plan.task_loss) == (rate, labels)
    how = adaptation(plan)
    assert (how.epochs, how.rate, how.label_weight, how.boxes) == (20, 1e-3, 0.0, plan.activation == 'relu')


# ---- what is supervised -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('stride', [1, 2, 3, 7, 1000])
def test_supervision_stride(stride):
    model = build('demo')
    weighted = [i for i, layer in enumerate(model.model) if list(layer.parameters())]
    chosen = supervised_layers(model, stride)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(weighted) and chosen[-1] == len(model.model) - 1
    assert len(chosen) == math.ceil((len(weighted) - 1) / stride) + 1
    places = [weighted.index(i) for i in chosen[:-1]]
    assert all(b - a == stride for a, b in itertools.pairwise(places)) and places[-1] == len(weighted) - 2


def test_fewer_layers_are_another_loss(small):
    assert run(small, epochs=1, iters=1)[1][0].loss != run(small, epochs=1, iters=1, supervision_stride=3)[1][0].loss


def test_relative_error_by_hand():
    first = relative_error([torch.tensor([[3.0, 3.0]])], [torch.tensor([[3.0, 4.0]])])
    targets = [torch.tensor([[2.0], [3.0]]), torch.tensor([[0.0], [4.0]])]  # two tensors of two images
    second = relative_error([torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [2.0]])], targets)
    assert first.item() == pytest.approx(1 / 5) and second.item() == pytest.approx(((2 / 4) ** 0.5 + 2 / 5) / 2)
    assert relative_error(targets, targets) == pytest.approx(TINY**0.5), 'what keeps its gradient finite'


def test_an_image_far_beyond_the_ranges_counts_as_one():
    """Its error has a bound; in a squared error over the batch, it would outweigh all other images."""
    teacher, error = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(0))
    student = (teacher + 0.1 * error).requires_grad_()
    large = torch.tensor([1000.0] + [1] * 7)[:, None]  # the first image; what is clipped leaves a tenth of it
    relative_error([student * large], [teacher * large]).backward()
    norms = student.grad.norm(dim=1)
    assert norms.max() < 1.5 * norms.min()


@pytest.mark.parametrize('amp', ['off', 'bf16'])
def test_the_loss_is_the_mean_over_the_layers(small, amp):
    step = new_step(small, amp)
    compare, seen = step.compare, []
    step.compare = lambda images: seen.append(compare(images)) or seen[-1]
    loss = step(LOADER[0]).item()
    [(_, terms)] = seen
    assert list(terms) == step.layers and all(term > 0 for term in terms.values())
    assert loss == pytest.approx(sum(t.item() for t in terms.values()) / len(terms))


def test_a_student_without_quantizers_has_nothing_to_learn(small):
    student = small.quantized_model()
    with quantizers_off(student):
        [epoch] = finetune(student, small.float_model(), LOADER, recipe(epochs=1, iters=1))
    assert epoch.loss == pytest.approx(TINY**0.5)


@pytest.mark.parametrize('share', [False, True])
def test_fixed_scales_change_nothing(small, share):
    """Values are equal bit for bit. So are gradients, unless a shared tensor adds them in another order."""
    model = small.quantized_model()
    weight = model.model[0].conv.weight.requires_grad_()
    results = []
    for context in (contextlib.nullcontext(), FixedScales(model, share)):
        with context:
            outputs = tensors(model(LOADER[0]))
        results.append((outputs, torch.autograd.grad(sum(o.square().sum() for o in outputs), weight)[0]))
    (plain, gradient), (fixed, other) = results
    assert same(plain, fixed) and torch.allclose(gradient, other, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())
    assert share or torch.equal(gradient, other)
    assert not any('_fixed' in q.__dict__ for _, q in named_quantizers(model)), 'nothing of it is left for a checkpoint'


# ---- the boxes, with other activation functions -------------------------------------------------------------------------


def softmax(logits):
    powers = np.exp(logits - logits.max(0))
    return powers / powers.sum(0)


@pytest.mark.parametrize('task', ['detector', 'segmentation'])
def test_the_divergence_of_the_boxes_is_weighted_by_the_teachers_score(task):
    """Place by place in NumPy: the mean over four sides of the KL divergence, and the best sigmoid of the teacher's classes."""
    bins, classes, sides, draw = 5, 3, 4, torch.Generator().manual_seed(0)
    ours, theirs = ([torch.randn(2, 4 * bins + classes, n, n, generator=draw) for n in (4, 2)] for _ in 'ab')
    total = weights = 0.0
    for mine, wanted in zip(ours, theirs):
        for place in itertools.product(range(2), *map(range, mine.shape[2:])):
            q, p = (m[place[0], :, place[1], place[2]].double().numpy() for m in (mine, wanted))
            score = (1 / (1 + np.exp(-p[4 * bins :]))).max()
            q, p = ([softmax(side) for side in x[: 4 * bins].reshape(4, bins)] for x in (q, p))
            total += score * sum((b * np.log(b / a)).sum() for a, b in zip(q, p)) / sides
            weights += score
    raw = [
        (maps, torch.zeros(2, 8, 20), torch.zeros(2, 8, 16, 16)) if task == 'segmentation' else maps
        for maps in (ours, theirs)
    ]
    assert box_divergence(*raw, bins).item() == pytest.approx(total / weights, rel=1e-5)
    assert box_divergence(raw[1], raw[1], bins).item() == pytest.approx(0, abs=1e-6)
    nothing = [torch.full_like(m, -200.0) for m in theirs]
    assert box_divergence(ours, nothing, bins).item() == 0, 'the teacher sees no object at all'


@pytest.mark.parametrize('amp', sampled(['off', 'bf16'], 2))
def test_the_boxes_add_to_the_loss(small, amp):
    step = new_step(small, amp, box_bins=16)
    _, terms = step.compare(LOADER[0])
    assert list(terms) == [*step.layers, 'boxes'] and terms['boxes'].dtype == torch.float32 and terms['boxes'] > 0
    total = step(LOADER[0]).item()
    assert total == pytest.approx(sum(terms[i].item() for i in step.layers) / len(step.layers) + terms['boxes'].item())
    assert step.parameters['model.0.conv.weight'].grad is not None


def test_the_boxes_count_only_with_relu(small):
    def first_loss(activation):
        return run(small, epochs=1, iters=1, activation=activation, task_loss=0.0)[1][0].loss

    assert first_loss('relu') > first_loss('polynomial') == first_loss('keep')


def test_a_head_that_is_not_known_learns_layer_by_layer(small):
    """Its outputs may be anything, so no box is read in them."""
    student, teacher = small.quantized_model(), small.float_model()
    for model in (student, teacher):
        head = head_of(model)
        head.__class__ = type('UsersHead', (type(head),), {})
    how = recipe(epochs=1, iters=1, lr=1e-4, activation='relu', task_loss=0.0)
    [epoch] = finetune(student, teacher, LOADER, how)
    assert epoch.loss == run(small, epochs=1, iters=1)[1][0].loss


# ---- the labels ---------------------------------------------------------------------------------------------------------


def labelled(small, task_loss=1.0):
    """Batches with labels, as `quantize` loads them."""
    return list(
        Loaders(load_data(small.data), settings(task_loss=task_loss), 32, CPU).training(
            load_hyp(REPO / 'demo/hyp.yaml'), task_loss > 0
        )
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
    loss = label_loss(model, 1.0)
    images, labels = labelled(demo)[0]
    maps = raw_maps(model, images)
    value = loss(maps, labels).item()
    second = labels + torch.tensor([len(images), 0, 0, 0, 0, 0])
    assert loss([m.repeat(2, 1, 1, 1) for m in maps], torch.cat((labels, second))).item() == pytest.approx(
        value, rel=1e-3
    )
    assert label_loss(model, 3.0)(maps, labels).item() == pytest.approx(3 * value)
    wrong = torch.cat(((labels[:, :1] + 1) % len(images), labels[:, 1:]), 1)
    assert loss(maps, wrong).item() > 1.5 * value
    assert 0 < loss(maps, labels[:0]).item() < math.inf, 'images without an object'


@pytest.mark.parametrize('amp', sampled(['off', 'bf16'], 2))
def test_the_labels_add_to_the_loss(small, amp):
    batches = labelled(small)
    step = new_step(small, amp, label_loss=label_loss(small.quantized_model(), 1.0))
    images, labels = batches[0]
    outputs, terms = step.compare(images)
    on_labels, *gradients = step.label_gradients(outputs, labels)
    assert on_labels.dtype == torch.float32 and len(gradients) == 3, 'one for each map'
    layers = sum(terms[i] for i in step.layers) / len(step.layers)
    whole = layers + label_loss(small.quantized_model(), 1.0)(outputs, labels)
    weight = step.parameters['model.0.conv.weight']
    (expected,) = torch.autograd.grad(whole, weight, retain_graph=True)
    assert step.update(outputs, terms, [on_labels, *gradients]).item() == pytest.approx(whole.item())
    assert torch.cosine_similarity(weight.grad.flatten(), expected.flatten(), 0) > 0.999, 'but for its clipped length'


def test_labels_that_cannot_be_learnt_are_named(small):
    step = new_step(small, label_loss=lambda maps, labels: maps[0].sum() * math.inf)
    with pytest.raises(NotFinite, match='the loss is not finite on the labels'):
        step(LOADER[0], None)
